"""Cases of the kernels `lm_head` and `sample`."""

from __future__ import annotations

from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels
from tests.kernels.accuracy import compare, copied, in_float64, normal
from tools.mutants.cases.case import BF16, EPS, Case, Outputs, two_cores


def _searched(target: str, *arguments: Any, ranks: int = 1, options: tuple[Any, ...] = ()) -> Case:
    """Return a case of lm_head: logits are judged within a tolerance, the largest and their ids exactly.

    Equal logits are ordered by ascending id. options: softcap, norm_bias, norm_offset and scale, or the first of them.
    """
    x, norm, head, eps, top_k, offset = arguments
    reference_arguments = (*arguments, None, 1, *options)
    exact = nki_kernels.lm_head_reference(*(in_float64(a) for a in reference_arguments))[0]
    plain = nki_kernels.lm_head_reference(*reference_arguments)[0]
    keep = -(-top_k // 8) * 8
    columns = np.array_split(np.arange(head.shape[1]), ranks)
    group = (ReplicaGroup([list(range(ranks))]), ranks) if ranks > 1 else (None, 1)
    shards = tuple(
        (
            x,
            norm,
            head[:, rank_columns].copy(),
            eps,
            top_k,
            offset + np.int32(rank_columns[0]),
            *group,
            *options,
        )
        for rank_columns in columns
    )

    def judge(outputs: Outputs) -> None:
        for (logits, _, _), rank_columns in zip(outputs, columns):
            compare(logits, exact[:, rank_columns], plain[:, rank_columns])
        logits = np.concatenate([output[0] for output in outputs], axis=1)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :keep]
        for _, values, ids in outputs:
            assert values.dtype == np.float32 and ids.dtype == np.int32
            assert np.array_equal(values, np.take_along_axis(logits, order, axis=1))
            assert np.array_equal(ids, order + offset[0, 0])

    return Case("lm_head", target, shards, judge)


def _heads() -> list[Case]:
    def draw_logits(
        rows: int, hidden: int, columns: int, top_k: int, first: int = 0, w: Any = np.float32
    ) -> tuple[Any, ...]:
        x, norm = normal(1, rows, hidden), normal(2, 1, hidden, dtype=w)
        head = normal(3, hidden, columns, dtype=w, scale=hidden**-0.5)
        return x, norm, head, EPS, top_k, np.int32([[first]])

    tied = np.random.default_rng(4).integers(0, 3, (1, 16400)).astype(np.float32)
    one, low = np.ones((1, 1), np.float32), np.full((1, 10), -100, np.float32)
    low[0, 4] = 1
    return [
        _searched("trn1", *draw_logits(2, 24, 24, 24)),
        _searched("trn2", *draw_logits(5, 172, 600, 9, 128000, BF16)),
        _searched("trn1", *draw_logits(3, 24, 200, 24, 128000), ranks=2),
        _searched("trn2", *draw_logits(8, 8, 100, 16), ranks=2),
        _searched("trn2", one, one, tied, 0.0, 24, np.int32([[7]])),
        _searched("trn2", one, one, tied[:, :100].copy(), 0.0, 24, np.int32([[7]]), ranks=2),
        _searched("trn1", *draw_logits(9, 8, 16385, 16, 128000)),
        _searched("trn3", *draw_logits(2, 8, 33000, 8, 128000), ranks=2),
        _searched("trn1", *draw_logits(3, 8, 2048, 8)),
        _searched("trn1", *draw_logits(3, 8, 2049, 8)),
        _searched("trn1", *draw_logits(128, 8, 400, 130), ranks=2),
        _searched("trn1", *draw_logits(3, 172, 601, 9, 5), options=(2.0, normal(5, 1, 172), 1.0)),
        _searched("trn2", *draw_logits(1, 40, 64, 9), options=(None, None, 1.0)),
        _searched("trn2", *draw_logits(3, 40, 64, 9), options=(0.5,)),
        _searched("trn2", *draw_logits(3, 40, 64, 9), options=(None, None, 0.0, 0.125)),
        _searched("trn2", *draw_logits(2, 1000, 2300, 9)),
        _searched("trn2", *draw_logits(3, 768, 1200, 8), options=(0.5,)),
        _searched("trn2", one, one, low, 0.0, 8, np.int32([[7]]), ranks=3, options=(0.5,)),
        two_cores(_searched("trn2", *draw_logits(3, 24, 201, 24, 128000))),
        two_cores(_searched("trn3", *draw_logits(3, 24, 1200, 264), ranks=2)),
        _searched(
            "trn2", normal(1, 2, 40, scale=1e-3), *draw_logits(2, 40, 64, 9)[1:]
        ),  # squares of the size of EPS
    ]


def _drawn(
    target: str,
    rows: int,
    columns: int,
    candidates: int,
    adjusted: str = "",
    ranks: int = 1,
    has_candidates: bool = False,
) -> Case:
    """Return a case of sample with all parameters, and with the bias and counts that `adjusted` names.

    If there are enough rows, the first have equal logits and random numbers at the edges between tokens. Then follow
    a row that is masked entirely, a row with three logits only, and a row with tiny weights and the random number 0.
    """
    rng = np.random.default_rng(rows + columns)

    def column(*choices: float) -> np.ndarray:
        return rng.choice(choices, (rows, 1)).astype(np.float32)

    logits, numbers = normal(21, rows, columns, scale=3.0), rng.random((rows, 1)).astype(np.float32)
    limits = [column(0.0, 0.5, 1.5), column(1, 5, 99), column(0.5, 0.9, 1.0), column(0.0, 0.1)]
    if rows > 20:
        logits[:8], logits[8], logits[9, 3:], logits[10] = 0, -np.inf, np.nan, 5 * logits[10]
        numbers[:11, 0] = *np.arange(5) / 4, 0.25, 0.5, 0.75, 0.5, 0.5, 0.0
        for limit, values in zip(limits, (0, 99, 1, 0)):
            limit[:5] = limit[10] = values
        limits[0][1:5] = limits[0][10] = 1
    ids = rng.permuted(np.tile(np.arange(0, 3 * columns, 3, dtype=np.int32), (rows, 1)), axis=1)
    counts = rng.choice((0, 0, 1, 2), (2, rows, columns)).astype(np.float32)
    bias = normal(22, rows, columns) if "bias" in adjusted else None
    prompt, output = (counts[i] if word in adjusted else None for i, word in enumerate(("prompt", "output")))
    penalties = (None,) * 3 if output is None else (column(0.8, 1.3), column(0.0, 0.7), column(0.1, 0.4))
    extra = (ids if has_candidates else None, bias, prompt, output, *penalties)
    offset = None if has_candidates or not adjusted else np.int32([[100001]])
    if has_candidates and not adjusted:
        logits = -np.sort(-logits, axis=1)
    reference_arguments = (logits, numbers, *limits, candidates, *extra, offset)
    plain = nki_kernels.sample_reference(*copied(reference_arguments))
    exact = nki_kernels.sample_reference(*(in_float64(argument) for argument in reference_arguments))
    group, width = (ReplicaGroup([list(range(ranks))]), ranks) if ranks > 1 else (None, 1), columns // ranks
    shards = tuple(
        (
            logits[:, i : i + width].copy(),
            *reference_arguments[1:-1],
            np.int32([[i]]) if ranks > 1 else offset,
            *group,
        )
        for i in range(0, columns, width)
    )

    def judge(outputs: Outputs) -> None:
        for output in outputs:
            for got, truth, same_dtype in zip(output, exact, plain):
                assert got.dtype == same_dtype.dtype
                if got.dtype.kind == "i":
                    assert got.shape == same_dtype.shape and got.tobytes() == same_dtype.tobytes()
                else:
                    masked = np.isinf(same_dtype)
                    assert np.array_equal(np.isinf(got), masked)
                    compare(
                        *(np.where(masked, array.dtype.type(0), array) for array in (got, truth, same_dtype))
                    )

    return Case("sample", target, shards, judge)


def _samples() -> list[Case]:
    return [
        _drawn("trn1", 64, 41, 9),
        _drawn("trn2", 33, 700, 16, "bias prompt output"),
        _drawn("trn3", 6, 600, 16, "output"),
        _drawn("trn1", 64, 8195, 16, "bias"),  # the second chunk of the last piece has no column
        _drawn("trn2", 64, 2000, 24, has_candidates=True),
        _drawn("trn1", 30, 50, 24, "output", has_candidates=True),
        _drawn("trn2", 3, 6001, 24),
        _drawn("trn1", 66, 5000, 16),
        _drawn("trn2", 1, 33000, 16),
        _drawn("trn2", 24, 600, 8, ranks=3),
        _drawn("trn2", 128, 1000, 200),
        two_cores(_drawn("trn2", 3, 70, 16, "bias prompt output", has_candidates=True)),
        two_cores(_drawn("trn3", 4, 60, 8, ranks=2)),
    ]


def head() -> list[Case]:
    """Return cases of logits with the largest of them, and of sampled tokens, on one and on several ranks."""
    return [*_heads(), *_samples()]
