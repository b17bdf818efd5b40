"""Draws on the host: the tokens of the kernel's reference, row by row, however rows are put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.engine.draw import draw
from model.sampling import RowSampling
from nki_kernels import sample_reference


def options(random: np.random.Generator, size: int) -> RowSampling:
    """Return a row of any parameters; half of them with whole-number logits have ties."""
    adjusts, penalised = random.random(2) < 0.4
    bias = random.choice([0, 0, 1.5, -np.inf], size).astype(np.float32)
    bias[int(random.integers(size))] = 0  # one token is left
    return RowSampling(
        float(random.random(dtype=np.float32)),
        float(random.choice([0, 1e-9, 0.3, 1, 2.5])),
        int(random.choice([0, 1, 3, size - 1, size, size + 1])),
        float(random.choice([1e-6, 0.3, 0.9, 1])),
        float(random.choice([0, 0.05, 1])),
        bias if adjusts else None,
        (random.random(size) < 0.3).astype(np.float32) if penalised else None,
        random.integers(0, 3, size).astype(np.float32) if penalised else None,
        float(random.choice([0.8, 1, 1.3])),
        float(random.choice([-0.5, 0, 0.7])),
        float(random.choice([0, 0.2])),
    )


def reference(logits: np.ndarray, row: RowSampling) -> int:
    """Return the token of one row, computed with the kernel's arguments in their dtype."""
    size = len(logits)

    def column(value: float) -> np.ndarray:
        return np.full((1, 1), value, np.float32)

    arrays: dict[str, Any] = {} if row.bias is None else {"bias": row.bias[None]}
    if row.output_counts is not None and row.prompt_counts is not None:
        arrays |= {"prompt_counts": row.prompt_counts[None], "output_counts": row.output_counts[None]}
    chosen, *_ = sample_reference(
        logits[None],
        *(
            column(scalar)
            for scalar in (row.uniform, row.temperature, row.top_k or size, row.top_p, row.min_p)
        ),
        candidates=size,
        repetition=column(row.repetition),
        presence=column(row.presence),
        frequency=column(row.frequency),
        **arrays,
    )
    return int(chosen[0, 0])


def cases(size: int, rows: int) -> tuple[np.ndarray, list[RowSampling]]:
    random = np.random.default_rng(size)
    logits = random.standard_normal((rows, size)).astype(np.float32) * 4
    logits[::3] = np.round(logits[::3])
    logits[1::7, ::2] = -np.inf
    logits[2::7, : size // 2] = np.nan
    return logits, [options(random, size) for _ in range(rows)]


@pytest.mark.parametrize("size", [2, 127, 128, 129, 4096])
def test_rows_together_draw_what_the_reference_draws_from_each(size: int) -> None:
    logits, rows = cases(size, 200)
    drawn = draw(logits, rows)
    assert drawn.tolist() == [reference(row_logits, row) for row_logits, row in zip(logits, rows)]
    if size > 2:
        assert len(set(drawn.tolist())) > 20


def test_a_row_draws_alone_what_it_draws_among_others() -> None:
    logits, rows = cases(300, 100)
    together = draw(logits, rows)
    order = np.random.default_rng(5).permutation(100)
    assert np.array_equal(draw(logits[order], [rows[index] for index in order]), together[order])
    assert [
        int(draw(row_logits[None], [row])[0]) for row_logits, row in zip(logits, rows)
    ] == together.tolist()
