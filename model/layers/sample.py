"""Sampling of the next tokens on the device: the rows that the kernel `sample` can draw, and its launch.

A step is compiled for the few variants in `DRAWS`. It uses the first variant that can draw all its rows; sampling
parameters are inputs. The host draws rows that no variant can draw:

- rows with more candidates than the largest variant has, such as a whole large vocabulary;
- rows with log-probabilities and changed logits, because the kernel's log-probabilities are of the changed logits;
- rows with a rule that depends on the logits (`RowSampling.by_logits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from model.layers.launch import (
    FLOAT32,
    INT32,
    Argument,
    Axis,
    DrawVariant,
    Growth,
    Launch,
    LeastWork,
    StepShape,
    Value,
)
from model.layers.shard import vocabulary_span
from model.sampling import RowSampling

DRAWS = (
    DrawVariant(8),
    DrawVariant(64),
    DrawVariant(64, full_vocabulary=True),
    DrawVariant(256, full_vocabulary=True),
)
"""Variants in order; each can draw all rows that the variants before it can draw.

lm_head finds up to 64 candidates while it loads weights, at little cost. 256 candidates would take three times as long
as the weights, and `sample` as long again. Predicted times on trn2 for 16 rows of 16,032 logits, lm_head included:
0.36, 0.39, 0.46 and 0.72 ms.
"""

COLUMNS = ("bias", "prompt_counts", "output_counts")
"""Parameters of `sample` with an element for each token, [rows, vocabulary]."""

LIMITS = ("uniform", "temperature", "top_k", "top_p", "min_p")
PENALTIES = ("repetition", "presence", "frequency")
NUMBERS = (*LIMITS, *PENALTIES)
"""Parameters of `sample` with one number for each row, [rows, 1]."""

RESULTS = ("drawn", "log_probs", "top_ids", "top_log_probs")

_EIGHT = 8
"""Fewest candidates; the Vector engine finds eight maxima at a time."""

_GATHERED = 8192
"""Most candidates of all ranks that a kernel takes."""


def candidates_held(wanted: int, vocabulary: int, ranks: int) -> int:
    """A multiple of eight that covers the wanted ones; eight, or what kernels take and every rank's part has."""
    most = min(vocabulary // ranks, _GATHERED // ranks) // _EIGHT * _EIGHT
    return max(_EIGHT, min(-(-wanted // _EIGHT) * _EIGHT, most))


def draws_for(row: RowSampling, vocabulary: int, ranks: int) -> DrawVariant | None:
    """The first kind that serves a row; None where the host has to draw."""
    needed = 1 if row.temperature == 0 else row.top_k or vocabulary
    needed = max(needed, row.logprobs or 0)
    needs_full_vocabulary = row.adjusts or row.logprobs is not None
    if (row.adjusts and row.logprobs is not None) or row.by_logits is not None:
        return None
    for draws in DRAWS:
        if (
            needed <= candidates_held(draws.candidates, vocabulary, ranks)
            and draws.full_vocabulary >= needs_full_vocabulary
        ):
            return draws
    return None


def served(
    rows: Sequence[RowSampling | None], vocabulary: int, ranks: int
) -> tuple[DrawVariant | None, list[RowSampling | None]]:
    """The first kind that serves every row that one does, and these rows; None in the place of the others."""
    row_draws = [None if row is None else draws_for(row, vocabulary, ranks) for row in rows]
    last = max((DRAWS.index(draws) for draws in row_draws if draws is not None), default=None)
    left = [None if draws is None else row for row, draws in zip(rows, row_draws)]
    return None if last is None else DRAWS[last], left


def arguments_of(
    rows: Sequence[RowSampling | None], vocabulary: int, full_vocabulary: bool
) -> Mapping[str, np.ndarray]:
    """What rows bring to a launch: [rows, 1] and, for the `full_vocabulary`, [rows, vocabulary], float32.

    Where there is no row, the launch takes the likeliest token for nobody.
    """
    filled = [row or RowSampling(0.0) for row in rows]
    filled = [replace(row, top_k=row.top_k or vocabulary) for row in filled]
    arrays = {name: np.array([[getattr(row, name)] for row in filled], np.float32) for name in NUMBERS}
    if full_vocabulary:
        for name in COLUMNS:
            arrays[name] = np.zeros((len(rows), vocabulary), np.float32)
            for number, row in enumerate(filled):
                column = getattr(row, name)
                if column is not None:
                    arrays[name][number] = column
    return arrays


def sample_launch(step: StepShape, vocabulary: int, first_token: Value, rows: int, repeat: int) -> Launch:
    """The launch for rows whose logits and candidates lm_head has found."""
    draws = step.draws
    assert draws is not None
    keep = candidates_held(draws.candidates, vocabulary, step.ranks)
    arguments: dict[str, Argument] = {name: Value(name, (rows, 1), FLOAT32) for name in LIMITS}
    arguments |= {"candidates": keep}
    if draws.full_vocabulary:
        local_tokens = vocabulary_span(vocabulary, step.shard)
        columns = (rows, local_tokens.stop - local_tokens.start)
        arguments |= {name: Value(name, columns, FLOAT32) for name in ("logits", *COLUMNS)}
        arguments |= {name: Value(name, (rows, 1), FLOAT32) for name in PENALTIES}
        arguments |= {"vocab_offset": first_token, "replica_group": Axis.tensor, "num_ranks": step.ranks}
    else:
        candidates = Value("values", (rows, keep), FLOAT32)
        arguments |= {"logits": candidates, "ids": Value("tokens", (rows, keep), INT32)}
    moved = sum(value.nbytes for value in arguments.values() if isinstance(value, Value))
    results = rows * (8 + 8 * keep)  # ids and log-probabilities of the draw and the candidates
    return Launch(
        "sample",
        arguments,
        RESULTS,
        LeastWork(0.0, moved + results),
        rows,
        growth=Growth.sequences,
        repeat=repeat,
    )
