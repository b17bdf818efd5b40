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
from model.layers.shard import slice_vocabulary
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


def count_candidates(wanted: int, vocabulary: int, ranks: int) -> int:
    """Return how many likeliest tokens a launch of lm_head or `sample` keeps if `wanted` are needed.

    That is `wanted` rounded up to a multiple of eight, at least eight. It may be fewer than `wanted`: a rank cannot
    keep more tokens than its part of the vocabulary has, and all ranks together at most 8,192.
    """
    most = min(vocabulary // ranks, _GATHERED // ranks) // _EIGHT * _EIGHT
    return max(_EIGHT, min(-(-wanted // _EIGHT) * _EIGHT, most))


def choose_draws(row: RowSampling, vocabulary: int, ranks: int) -> DrawVariant | None:
    """Return the first variant in DRAWS that can draw a row with these parameters; None if the host has to draw.

    The host draws rows that need more candidates than every variant has, rows with both changed logits and
    log-probabilities, and rows with `by_logits`.
    """
    needed = 1 if row.temperature == 0 else row.top_k or vocabulary
    needed = max(needed, row.logprobs or 0)
    needs_full_vocabulary = row.adjusts or row.logprobs is not None
    if (row.adjusts and row.logprobs is not None) or row.by_logits is not None:
        return None
    return next(
        (
            draws
            for draws in DRAWS
            if needed <= count_candidates(draws.candidates, vocabulary, ranks)
            and draws.full_vocabulary >= needs_full_vocabulary
        ),
        None,
    )


def select_device_rows(
    rows: Sequence[RowSampling | None], vocabulary: int, ranks: int
) -> tuple[DrawVariant | None, list[RowSampling | None]]:
    """Return the variant of a step and its rows, in which None replaces each row that the host draws.

    The variant is the first one in DRAWS that can draw all other rows; None if the host draws all rows. Rows that are
    None already stay None.
    """
    row_draws = [None if row is None else choose_draws(row, vocabulary, ranks) for row in rows]
    variant = max((draws for draws in row_draws if draws is not None), key=DRAWS.index, default=None)
    return variant, [None if draws is None else row for row, draws in zip(rows, row_draws)]


def build_sample_arrays(
    rows: Sequence[RowSampling | None], vocabulary: int, full_vocabulary: bool
) -> Mapping[str, np.ndarray]:
    """Return the inputs of the kernel `sample` by name, float32: `NUMBERS` [rows, 1], and `COLUMNS` [rows, vocabulary].

    `COLUMNS` are present with `full_vocabulary` only; a row without such counts or biases has zeros. For a row of None
    the launch takes the likeliest token, which the host ignores.
    """
    filled = [row or RowSampling(0.0) for row in rows]
    filled = [replace(row, top_k=row.top_k or vocabulary) for row in filled]
    arrays = {name: np.array([[getattr(row, name)] for row in filled], np.float32) for name in NUMBERS}
    if full_vocabulary:
        for name in COLUMNS:
            arrays[name] = np.zeros((len(rows), vocabulary), np.float32)
            for index, row in enumerate(filled):
                if (column := getattr(row, name)) is not None:
                    arrays[name][index] = column
    return arrays


def create_sample_launch(
    step: StepShape, draws: DrawVariant, vocabulary: int, first_token: Value, rows: int, repeat: int
) -> Launch:
    """Return the launch of `sample` that draws a token for each of `rows` rows that lm_head returns.

    It reads the logits of a rank's vocabulary if `draws` has `full_vocabulary`, else the candidates of lm_head. The
    array `first_token` has the first token id of a rank's part of the vocabulary. `repeat` is the repeat count.
    """
    keep = count_candidates(draws.candidates, vocabulary, step.ranks)
    arguments: dict[str, Argument] = {name: Value(name, (rows, 1), FLOAT32) for name in LIMITS}
    arguments |= {"candidates": keep}
    if draws.full_vocabulary:
        local_tokens = slice_vocabulary(vocabulary, step.shard)
        columns = (rows, local_tokens.stop - local_tokens.start)
        arguments |= {name: Value(name, columns, FLOAT32) for name in ("logits", *COLUMNS)}
        arguments |= {name: Value(name, (rows, 1), FLOAT32) for name in PENALTIES}
        arguments |= {"vocab_offset": first_token, "replica_group": Axis.tensor, "num_ranks": step.ranks}
    else:
        shape = (rows, keep)
        arguments |= {"logits": Value("values", shape, FLOAT32), "ids": Value("tokens", shape, INT32)}
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
