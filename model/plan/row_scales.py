"""Cost of row scales of all columns: a plan's prompt and step beside those with scales of each rank's columns.

`nkw plan --row-scales global` prints both predictions. Ranks then all-reduce the largest magnitudes of rows before the
row-parallel products of attention and MLPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from model.config.quantization import GLOBAL, RANK
from model.plan.cells import format_ms
from model.plan.plan import Plan, create_predictor
from model.plan.sizes import ModelSizes
from nkw.report import Hanging, Part, table

_sentence = partial(Hanging, indent=0)


@dataclass(frozen=True)
class RowScaleCost:
    """Predicted time of a pass in program order, with row scales of each rank's columns and of all columns.

    `name` is "first token", for the pass of one prompt, or "step", for the decode step of the plan's batch.
    """

    name: str
    rank_ns: float
    global_ns: float

    @property
    def added_ns(self) -> float:
        """Time that scales of all columns add."""
        return self.global_ns - self.rank_ns


def compare_row_scales(plan: Plan, rank_model: ModelSizes) -> list[RowScaleCost]:
    """Return the cost of row scales of all columns in the prompt and in the step of a plan.

    Args:
        plan: A plan whose row scales are those of all columns.
        rank_model: The plan's model with row scales of each rank's columns.

    Returns:
        Two costs; none for a plan without predictions, as for an accelerator, or for a model on one rank.
    """
    prompt, step = plan.first_token.predicted, plan.rate.step.predicted
    if prompt is None or step is None or plan.placement.shape.tp == 1:
        return []
    length = plan.stack.pad_cache(plan.context, plan.context)
    predictor = create_predictor(rank_model, plan.request, plan.placement, plan.dtype, length)
    assert predictor is not None, "the plan has predictions"
    padded = plan.stack.pad_prompt(plan.prompt, plan.context)
    rank_prompt, rank_step = predictor.predict_prompts(padded, 1), predictor.predict_step(plan.request.batch)
    return [
        RowScaleCost("first token", rank_prompt.time.program_ns, prompt.time.program_ns),
        RowScaleCost("step", rank_step.time.program_ns, step.time.program_ns),
    ]


def format_row_scales(plan: Plan, costs: list[RowScaleCost]) -> Iterator[Part]:
    """Yield the table of costs, or a sentence why there are none."""
    if plan.placement.instance is not None and plan.placement.shape.tp == 1:
        yield _sentence(f"row scales: one rank has all columns, so {GLOBAL} scales are those of the rank")
        return
    if not costs:
        yield _sentence(f"row scales: {GLOBAL}; no prediction says what they cost")
        return
    yield _sentence(
        f"row scales: {GLOBAL}, of all columns, cost an all-reduce of row maxima before each row-parallel product; "
        f"predicted for a prompt of {plan.prompt:,} tokens and a step of batch {plan.request.batch:,}"
    )
    yield table(
        f"pass|{RANK} ms|{GLOBAL} ms|added ms|added",
        [
            (
                cost.name,
                format_ms(cost.rank_ns),
                format_ms(cost.global_ns),
                format_ms(cost.added_ns),
                f"{cost.added_ns / cost.rank_ns:+.1%}",
            )
            for cost in costs
        ],
    )


def describe_row_scales(costs: list[RowScaleCost]) -> list[dict[str, Any]]:
    """Return the costs as JSON objects, with the fields of `RowScaleCost`."""
    return [asdict(cost) for cost in costs]
