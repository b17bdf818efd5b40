"""Quantisation schemes of one plan side by side: stored bytes, the decode step, and accuracy where it was measured.

`nkw plan --schemes` prints them. Each scheme is planned on the mesh that the plan chose, with the plan's batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from model.config.quantization import quantise_config
from model.errors import ModelError
from model.formats import SCHEMES
from model.layers.cache_formats import AUTO
from model.plan.cells import format_ms
from model.plan.memory import compute_footprint
from model.plan.plan import Plan, create_predictor
from model.plan.predict import PassTime
from model.plan.sizes import ModelSizes
from nkw.report import Hanging, Part, table

PLAIN = "plain"
"""Name of weights that are not quantised."""
CACHES = (AUTO, "fp8")
"""Cache formats that are compared for each format of weights."""

_ACCURACY = Path(__file__).with_name("accuracy.json")
_sentence = partial(Hanging, indent=0)


@dataclass(frozen=True)
class Accuracy:
    """What weights of a scheme change in a model, measured on texts: the loss in nats, and equal top tokens."""

    loss_change: float
    same_top_token: float


@dataclass(frozen=True)
class SchemeRow:
    """A format of weights and a format of caches with the bytes and the decode step of a rank.

    | field | meaning |
    |---|---|
    | `weights`, `cache` | name in `SCHEMES` or `PLAIN`; name of the cache format |
    | `weight_bytes` | bytes of a rank's weights |
    | `cache_bytes` | cache bytes of a finished sequence on a rank |
    | `step_ns` | predicted decode step of the plan's batch, in program order |
    | `step_ratio` | that time over the time of plain weights and caches |
    | `readers` | kernels that read quantised weights; those of other kernels are widened at load |
    | `accuracy` | of the weights; None where it was not measured |
    """

    weights: str
    cache: str
    weight_bytes: int
    cache_bytes: int
    step_ns: float
    step_ratio: float
    readers: tuple[str, ...]
    accuracy: Accuracy | None


@lru_cache(maxsize=1)
def read_accuracies() -> tuple[str, dict[str, Accuracy]]:
    """Return a sentence on the measured model and texts, and the accuracy of each scheme that was measured."""
    document = json.loads(_ACCURACY.read_text())
    return document["source"], {name: Accuracy(**row) for name, row in document["schemes"].items()}


def compare_schemes(plan: Plan) -> list[SchemeRow]:
    """Return a row for each scheme of weights and format of caches, plain ones first.

    Raises:
        ModelError: The config is quantised already, or the plan has no predicted step.
    """
    config = plan.model.config
    if config.quant_method is not None:
        raise ModelError(
            f"--schemes compares schemes of plain weights, and these are quantised by {config.quant_method}: leave "
            "--schemes or --quantization out"
        )
    if plan.rate.step.predicted is None or plan.placement.instance is None:
        raise ModelError("--schemes compares predicted steps, and this plan has none: leave it out")
    shape, (_, accuracies) = plan.placement.shape, read_accuracies()
    rows: list[SchemeRow] = []
    for weights in (PLAIN, *SCHEMES):
        for cache in CACHES:
            quantised = quantise_config(config, None if weights == PLAIN else weights)
            model = ModelSizes(quantised, cache)
            step_ns = _predict_step(plan, model).time.program_ns
            footprint = compute_footprint(model, plan.dtype, shape.tp, plan.context, shape.ep)
            rows.append(
                SchemeRow(
                    weights,
                    cache,
                    footprint.weight_bytes,
                    footprint.cache_bytes_per_sequence,
                    step_ns,
                    step_ns / (rows[0].step_ns if rows else step_ns),
                    tuple(model.list_quantised_readers()),
                    accuracies.get(weights),
                )
            )
    return rows


def _predict_step(plan: Plan, model: ModelSizes) -> PassTime:
    """Return the time of the plan's decode step for the sizes of another scheme."""
    predictor = create_predictor(model, plan.request, plan.placement, plan.dtype, plan.context)
    assert predictor is not None, "the plan has a predicted step"
    return predictor.predict_step(plan.request.batch)


def format_schemes(plan: Plan, rows: list[SchemeRow]) -> Iterator[Part]:
    """Yield the table of schemes, and sentences on what its columns mean."""
    source, _ = read_accuracies()
    yield _sentence(
        f"schemes: bytes of a rank, for a sequence of {plan.context:,} tokens, and a step of batch "
        f"{plan.request.batch:,}; change of the loss by the weights"
    )
    yield table(
        "weights|cache|weights GB|cache MB|step ms|of plain|loss|same token",
        [
            (
                row.weights,
                row.cache,
                f"{row.weight_bytes / 1e9:.3f}",
                f"{row.cache_bytes / 1e6:.1f}",
                format_ms(row.step_ns),
                f"{row.step_ratio:.2f}",
                "" if row.accuracy is None else f"{row.accuracy.loss_change:+.4f}",
                "" if row.accuracy is None else f"{row.accuracy.same_top_token:.1%}",
            )
            for row in rows
        ],
        left=(0, 1),
    )
    yield _sentence(
        f"Accuracy: {source}. Another model loses more or less. On loading, scales of int4 are not searched; that "
        "was not measured."
    )
    for weights, readers in dict.fromkeys((row.weights, row.readers) for row in rows if row.readers):
        *kernels, last = readers
        names = f"{', '.join(kernels)} and {last} read" if kernels else f"{last} reads"
        yield _sentence(f"{weights}: {names} quantised weights; other kernels get them widened.")


def describe_schemes(rows: list[SchemeRow]) -> list[dict[str, Any]]:
    """Return the rows as JSON objects, with the fields of `SchemeRow`."""
    return [{**asdict(row), "readers": list(row.readers)} for row in rows]
