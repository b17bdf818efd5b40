"""Small inputs on which every line and every branch of the shipped kernels runs, with what they have to return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels
from tests.kernels.accuracy import as_tuple, compare, copied, in_float64, normal, whole_numbers

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
Outputs = Sequence[tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Case:
    """One launch: a kernel, a chip, the arguments of every rank, and a judge of the outputs of every rank.

    The judge raises AssertionError where numbers, shapes or dtypes are wrong. A case without one is dry: planned and
    placed at the largest sizes, where it may only be refused.
    """

    kernel: str
    target: str
    arguments: tuple[tuple[Any, ...], ...]
    judge: Callable[[Outputs], None] | None

    @property
    def ranks(self) -> int:
        """Ranks of the world."""
        return len(self.arguments)


def _alone(
    kernel: str, target: str, *arguments: Any, whole: Any = None, ranks: Any = None, copies: bool = True
) -> Case:
    """A case judged by the kernel's reference; for several ranks `whole` has the arguments of the reference.

    The caches of attention hold copies, so they are compared byte by byte, unless it rotates keys.
    """
    stored = (1, 2) if kernel.startswith("attention") and copies else ()
    reference = getattr(nki_kernels, f"{kernel}_reference")
    given = whole or arguments
    plain = as_tuple(reference(*copied(given)))
    exact = as_tuple(reference(*(in_float64(argument) for argument in given)))

    def judge(outputs: Outputs) -> None:
        for output in outputs:
            assert len(output) == len(plain)
            for number, (got, truth, same_dtype) in enumerate(zip(output, exact, plain)):
                if number in stored or same_dtype.dtype.kind in "iu":
                    assert got.dtype == same_dtype.dtype
                    assert got.shape == same_dtype.shape and got.tobytes() == same_dtype.tobytes()
                else:
                    compare(got, truth, same_dtype)

    return Case(kernel, target, ranks or (arguments,), judge)


def _matmul() -> list[Case]:
    return [
        _alone("matmul", "trn1", normal(1, 129, 20), normal(2, 129, 24), True),
        _alone("matmul", "trn2", normal(1, 130, 200), normal(2, 200, 600)),
        _alone("matmul", "trn3", normal(1, 130, 200), normal(2, 200, 600), False, {"transposes": "tensor"}),
        _alone("matmul", "trn3", normal(1, 130, 200, dtype=BF16), normal(2, 200, 513, dtype=BF16)),
        _alone("matmul", "trn1", normal(1, 520, 136), normal(2, 136, 20, dtype=BF16)),
        _alone("matmul", "trn2", normal(1, 3, 700), normal(2, 700, 2050, dtype=BF16)),
        _alone("matmul", "trn1", normal(1, 129, 1290), normal(2, 1290, 8)),
        _alone("matmul", "trn2", normal(1, 3, 512), normal(2, 512, 2048)),
        _alone("matmul", "trn3", normal(1, 2, 8), normal(2, 8, 2049)),
        _alone("matmul", "trn1", normal(1, 512, 8), normal(2, 8, 8)),
        _alone("matmul", "trn2", normal(1, 513, 8), normal(2, 8, 8)),
    ]


def _rows() -> list[Case]:
    rng = np.random.default_rng(2)
    table, ids = normal(1, 300, 12), rng.integers(0, 300, (130, 1)).astype(np.int32)
    ids[[0, 129]] = [[299], [0]]
    positions = rng.integers(0, 60, (130, 1)).astype(np.int32)
    angles = np.arange(60)[:, None] / 10000 ** (np.arange(4) / 4)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = normal(3, 130, 3 * 8)
    around = [
        case
        for rows in (128, 129)
        for case in (
            _alone("embedding", "trn2", ids[:rows], table),
            _alone("rope", "trn2", turned[:rows], positions[:rows], *tables, 3),
            _alone("rmsnorm", "trn2", normal(4, rows, 24), normal(5, 1, 24), EPS),
        )
    ]
    return [
        *around,
        _alone("embedding", "trn2", ids, table),
        _alone("embedding", "trn1", ids[:3], table.astype(BF16)),
        _alone("rope", "trn2", turned, positions, *tables, 3),
        _alone("rope", "trn1", turned[:5].astype(BF16), positions[:5], *tables, 3),
        _alone("rmsnorm", "trn2", normal(4, 130, 72), normal(5, 1, 72), EPS),
        _alone("rmsnorm", "trn3", normal(4, 130, 72, scale=1e-3), normal(5, 1, 72), EPS),
        _alone("rmsnorm", "trn1", normal(4, 5, 200, dtype=BF16), normal(5, 1, 200, dtype=BF16), EPS),
    ]


def _weights(seed: int, rows: int, columns: int, dtype: Any = np.float32) -> np.ndarray:
    return normal(seed, rows, columns, dtype=dtype, scale=rows**-0.5)


def _qkv(
    target: str, tokens: int, hidden: int, q: int, kv: int, x: Any = np.float32, w: Any = np.float32
) -> Case:
    arguments = normal(1, tokens, hidden, dtype=x), normal(2, 1, hidden, dtype=w)
    return _alone("qkv_projection", target, *arguments, _weights(3, hidden, q + 2 * kv, w), EPS, q, kv)


def _qkv_heads(target: str, tokens: int, hidden: int, *options: str, dtype: Any = np.float32) -> Case:
    """qkv_projection with 3 heads and 1 of 8 elements, and what `options` name of bias, norms and rotation."""
    given: dict[str, Any] = {"head_dim": 8, "norm_offset": 1.0 if "offset" in options else 0.0}
    for seed, (name, columns) in enumerate(
        {"bias": 40, "q_norm": 8, "k_norm": 8, "norm_bias": hidden}.items()
    ):
        given[name] = normal(20 + seed, 1, columns, dtype=dtype) if name in options else None
    angles = np.arange(60)[:, None] / 100 ** (np.arange(3) / 3)
    turn = (
        np.random.default_rng(6).integers(0, 60, (tokens, 1)).astype(np.int32),
        np.cos(angles),
        np.sin(angles),
    )
    for name, each in zip(("positions", "cos", "sin"), turn):
        given[name] = each if name == "positions" else each.astype(np.float32)
        given[name] = given[name] if "rope" in options else None
    names = "bias positions cos sin head_dim q_norm k_norm norm_bias norm_offset".split()
    x, norm = normal(1, tokens, hidden, dtype=dtype), normal(2, 1, hidden, dtype=dtype)
    weight = _weights(3, hidden, 40, dtype)
    first = (x, None if "no norm" in options else norm, weight, EPS, 24, 8)
    return _alone("qkv_projection", target, *first, *(given[name] for name in names))


def _output(target: str, tokens: int, depth: int, hidden: int, ranks: int = 1, w: Any = np.float32) -> Case:
    o, weight, residual = normal(1, tokens, depth), _weights(2, depth, hidden, w), normal(3, tokens, hidden)
    if ranks == 1:
        return _alone("output_projection", target, o, weight, residual)
    group = ReplicaGroup([list(range(ranks))])
    parts = np.split(np.arange(depth), ranks)
    shards = tuple((o[:, part].copy(), weight[part], residual, group) for part in parts)
    return _alone("output_projection", target, whole=(o, weight, residual), ranks=shards)


def _mlp(target: str, tokens: int, hidden: int, inner: int, ranks: int = 1, w: Any = np.float32) -> Case:
    x, norm = normal(1, tokens, hidden), normal(2, 1, hidden, dtype=w)
    gate, up, down = (
        _weights(3, hidden, inner, w),
        _weights(4, hidden, inner, w),
        _weights(5, inner, hidden, w),
    )
    whole = (x, norm, gate, up, down, EPS)
    if ranks == 1:
        return _alone("mlp", target, *whole)
    group = ReplicaGroup([list(range(ranks))])
    parts = np.split(np.arange(inner), ranks)
    shards = tuple((x, norm, gate[:, p].copy(), up[:, p].copy(), down[p], EPS, group) for p in parts)
    return _alone("mlp", target, whole=whole, ranks=shards)


def _forms() -> list[Case]:
    """The forms of the two that no Llama has, in groups of rows and with a last block that shares the array."""

    def form(
        target: str, tokens: int, hidden: int, inner: int, gated: bool, function: str, ranks: int = 1
    ) -> Case:
        x, norm = normal(1, tokens, hidden, dtype=BF16), normal(2, 1, hidden)
        gate, up = _weights(3, hidden, inner), _weights(4, hidden, inner)
        b_gate, b_up = normal(6, 1, inner), normal(7, 1, inner)
        down, b_down, norm_bias = _weights(5, inner, hidden), normal(8, 1, hidden), normal(9, 1, hidden)
        rest = (b_down, norm_bias, 0.5)
        first = (gate, up) if gated else (None, up)
        biases = (b_gate, b_up) if gated else (None, b_up)
        whole = (x, norm, *first, down, EPS, None, function, *biases, *rest)
        if ranks == 1:
            return _alone("mlp", target, *whole)
        group = ReplicaGroup([list(range(ranks))])
        shards = tuple(
            (x, norm, gate[:, p].copy(), up[:, p].copy(), down[p], EPS, group, function)
            + (b_gate[:, p].copy(), b_up[:, p].copy(), *rest)
            for p in np.split(np.arange(inner), ranks)
        )
        return _alone("mlp", target, whole=whole, ranks=shards)

    o, weight, residual = normal(1, 300, 72), _weights(2, 72, 40), normal(3, 300, 40)
    return [
        form("trn2", 260, 40, 192, True, "gelu"),
        form("trn1", 5, 40, 160, False, "gelu_tanh"),
        form("trn3", 1100, 24, 72, False, "relu"),
        form("trn2", 520, 24, 320, True, "silu", ranks=2),
        _mlp("trn2", 130, 513, 8),
        _mlp("trn2", 1100, 24, 320),
        _mlp("trn2", 1, 24, 72),
        _alone("output_projection", "trn2", o, weight, residual, None, normal(4, 1, 40)),
        _output("trn2", 300, 8, 5000, ranks=2),
        _output("trn2", 600, 1300, 2000, w=BF16),
        _mlp("trn1", 130, 8, 16384),
        _output("trn1", 3, 16384, 136),
    ]


def _projections() -> list[Case]:
    return [
        _qkv("trn2", 5, 172, 96, 24, w=BF16),
        _qkv("trn1", 130, 72, 40, 8),
        _qkv("trn3", 5, 40, 24, 8, BF16, BF16),
        _qkv("trn2", 520, 24, 500, 70),
        _qkv("trn1", 512, 8, 16, 8),
        _qkv("trn1", 513, 8, 16, 8),
        _qkv("trn2", 3, 8, 2032, 8),
        _qkv("trn2", 3, 8, 2048, 8),
        _qkv("trn3", 3, 8, 2047, 1),
        _qkv_heads("trn2", 5, 173, "rope", "q_norm", "k_norm", "offset"),
        _qkv_heads("trn3", 130, 1418, "rope", "bias"),
        _qkv_heads("trn2", 130, 172, "rope", "bias", "norm_bias"),
        _qkv_heads("trn1", 130, 300, "rope", "bias", "norm_bias", dtype=BF16),
        _qkv_heads("trn2", 5, 300, "bias", "norm_bias", "k_norm"),
        _qkv_heads("trn3", 130, 520, "bias", "no norm"),
        _qkv_heads("trn2", 5, 24, "no norm"),
        _output("trn2", 130, 72, 172),
        _output("trn1", 5, 72, 40, ranks=2),
        _output("trn1", 520, 24, 530, w=BF16),
        _output("trn3", 130, 48, 40, ranks=2, w=BF16),
        _output("trn2", 512, 8, 16),
        _output("trn2", 513, 8, 16),
        _output("trn1", 3, 8, 2048),
        _output("trn1", 3, 8, 2049),
        _output("trn2", 128, 8, 16, ranks=2),
        _output("trn2", 129, 8, 16, ranks=2),
        _mlp("trn1", 512, 8, 16),
        _mlp("trn1", 513, 8, 16),
        _mlp("trn2", 3, 8, 2048),
        _mlp("trn2", 3, 8, 2049),
        _mlp("trn2", 130, 72, 172, w=BF16),
        _mlp("trn1", 5, 40, 72, ranks=2),
        _mlp("trn2", 3, 24, 2200),
        _mlp("trn3", 520, 24, 530),
    ]


def _reduced(target: str, group: ReplicaGroup) -> Case:
    ranks = sum(map(len, group.groups))
    parts = [whole_numbers(rank, 129, 17, largest=100_000) for rank in range(ranks)]
    sums = {
        rank: np.sum([parts[one] for one in ranks_of], axis=0)
        for ranks_of in group.groups
        for rank in ranks_of
    }

    def judge(outputs: Outputs) -> None:
        for rank, (output,) in enumerate(outputs):
            assert output.dtype == np.float32
            assert np.array_equal(output, sums[rank])

    return Case("all_reduce", target, tuple((part, group) for part in parts), judge)


def _searched(target: str, *arguments: Any, ranks: int = 1, options: tuple[Any, ...] = ()) -> Case:
    """lm_head: logits as near as numpy's, then exactly the largest of these logits, the lowest id first.

    options: softcap, norm_bias and norm_offset, or the first of them.
    """
    x, norm, head, eps, top_k, offset = arguments
    whole = (*arguments, None, 1, *options)
    exact = nki_kernels.lm_head_reference(*(in_float64(a) for a in whole))[0]
    plain = nki_kernels.lm_head_reference(*whole)[0]
    keep = -(-top_k // 8) * 8
    parts = np.split(np.arange(head.shape[1]), ranks)
    group = (ReplicaGroup([list(range(ranks))]), ranks) if ranks > 1 else (None, 1)
    shards = tuple(
        (x, norm, head[:, part].copy(), eps, top_k, offset + np.int32(part[0]), *group, *options)
        for part in parts
    )

    def judge(outputs: Outputs) -> None:
        for (logits, _, _), part in zip(outputs, parts):
            compare(logits, exact[:, part], plain[:, part])
        logits = np.concatenate([output[0] for output in outputs], axis=1)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :keep]
        for _, values, ids in outputs:
            assert values.dtype == np.float32 and ids.dtype == np.int32
            assert np.array_equal(values, np.take_along_axis(logits, order, axis=1))
            assert np.array_equal(ids, order + offset[0, 0])

    return Case("lm_head", target, shards, judge)


def _heads() -> list[Case]:
    def given(
        rows: int, hidden: int, columns: int, top_k: int, first: int = 0, w: Any = np.float32
    ) -> tuple[Any, ...]:
        x, norm = normal(1, rows, hidden), normal(2, 1, hidden, dtype=w)
        head = normal(3, hidden, columns, dtype=w, scale=hidden**-0.5)
        return x, norm, head, EPS, top_k, np.int32([[first]])

    tied = np.random.default_rng(4).integers(0, 3, (1, 16400)).astype(np.float32)
    one = np.ones((1, 1), np.float32)
    return [
        _searched("trn1", *given(2, 24, 24, 24)),
        _searched("trn2", *given(5, 172, 600, 9, 128000, BF16)),
        _searched("trn1", *given(3, 24, 200, 24, 128000), ranks=2),
        _searched("trn2", *given(8, 8, 100, 16), ranks=2),
        _searched("trn2", one, one, tied, 0.0, 24, np.int32([[7]])),
        _searched("trn2", one, one, tied[:, :100].copy(), 0.0, 24, np.int32([[7]]), ranks=2),
        _searched("trn1", *given(9, 8, 16385, 16, 128000)),
        _searched("trn3", *given(2, 8, 33000, 8, 128000), ranks=2),
        _searched("trn1", *given(3, 8, 2048, 8)),
        _searched("trn1", *given(3, 8, 2049, 8)),
        _searched("trn1", *given(128, 8, 400, 130), ranks=2),
        _searched("trn1", *given(3, 172, 601, 9, 5), options=(2.0, normal(5, 1, 172), 1.0)),
        _searched("trn2", *given(3, 40, 64, 9), options=(0.5,)),
        _searched("trn2", *given(2, 1000, 2300, 9)),
        _searched(
            "trn2", normal(1, 2, 40, scale=1e-3), *given(2, 40, 64, 9)[1:]
        ),  # squares of the size of EPS
    ]


def _drawn(
    target: str,
    rows: int,
    columns: int,
    candidates: int,
    adjusted: str = "",
    ranks: int = 1,
    given: bool = False,
) -> Case:
    """sample with parameters of every kind, and as `adjusted` names bias, prompt counts and output counts.

    The first rows have equal logits, where numbers lie on edges; then all are masked, all but three are missing, and
    weights are tiny beside the best, with the number 0.
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
    extra = (ids if given else None, bias, prompt, output, *penalties)
    offset = None if given or not adjusted else np.int32([[100001]])
    if given and not adjusted:
        logits = -np.sort(-logits, axis=1)
    whole = (logits, numbers, *limits, candidates, *extra, offset)
    plain = nki_kernels.sample_reference(*copied(whole))
    exact = nki_kernels.sample_reference(*(in_float64(argument) for argument in whole))
    group, width = (ReplicaGroup([list(range(ranks))]), ranks) if ranks > 1 else (None, 1), columns // ranks
    shards = tuple(
        (logits[:, i : i + width].copy(), *whole[1:-1], np.int32([[i]]) if ranks > 1 else offset, *group)
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
                        *(np.where(masked, each.dtype.type(0), each) for each in (got, truth, same_dtype))
                    )

    return Case("sample", target, shards, judge)


def _samples() -> list[Case]:
    return [
        _drawn("trn1", 64, 41, 9),
        _drawn("trn2", 33, 700, 16, "bias prompt output"),
        _drawn("trn3", 6, 600, 16, "output"),
        _drawn("trn2", 64, 2000, 24, given=True),
        _drawn("trn1", 30, 50, 24, "output", given=True),
        _drawn("trn2", 3, 6001, 24),
        _drawn("trn1", 66, 5000, 16),
        _drawn("trn2", 1, 33000, 16),
        _drawn("trn2", 24, 600, 8, ranks=3),
        _drawn("trn2", 128, 1000, 200),
    ]


def _caches(heads: int, depth: int, positions: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    return normal(8, 1, heads, depth, positions, dtype=dtype), normal(
        9, 1, heads, positions, depth, dtype=dtype
    )


def _prompt(
    tokens: int, heads: int, kv_heads: int, depth: int, dtype: Any = np.float32
) -> tuple[np.ndarray, ...]:
    widths = heads * depth, kv_heads * depth, kv_heads * depth
    return tuple(normal(seed, tokens, width, dtype=dtype) for seed, width in enumerate(widths, 1))


def _attention() -> list[Case]:
    def decode(
        target: str,
        firsts: list[int],
        heads: int,
        kv: int,
        depth: int,
        positions: int,
        dtype: Any,
        cache: Any,
        new: int = 1,
        rotated: int = 0,
    ) -> Case:
        stored = [np.concatenate([each] * len(firsts)) for each in _caches(kv, depth, positions, cache)]
        for sequence, first in enumerate(firsts):
            # What no mask but an infinite or a very low one can hide; of rotated keys the reference has not the bytes.
            stored[0][sequence, :, :, first:] = 50 if rotated else 3e10
            stored[1][sequence, :, first:] = -50 if rotated else np.nan
        places = (np.array(firsts)[:, None] + np.arange(new)).reshape(-1, 1).astype(np.int32)
        tables = [normal(seed, positions, rotated) for seed in (6, 7)] if rotated else [None, None]
        norms = [normal(seed, 1, depth) for seed in (4, 5)] if rotated else [None, None]
        given = *_prompt(len(places), heads, kv, depth, dtype), *stored, places, depth**-0.5, kv
        return _alone("attention_decode", target, *given, *tables, *norms, EPS, copies=not rotated)

    def options(target: str, dtype: Any, block: int, *choices: Any, kv: int = 2, new: int = 2) -> Case:
        """Two sequences of 100 and 128 positions, in pages of `block` if that is not 0; window, cap, sinks."""
        depth, held, count = 16, 256 // (block or 256), 2 * 256 // (block or 256) + 3
        table = np.random.default_rng(3).permutation(count)[: 2 * held].reshape(2, held).astype(np.int32)
        caches = normal(8, 2, kv, depth, 256, dtype=dtype), normal(9, 2, kv, 256, depth, dtype=dtype)
        at = np.concatenate([start + np.arange(new) for start in (100, 128)])
        slots = None
        if block:
            caches = tuple(normal(seed, count, block, kv, depth, dtype=dtype) for seed in (8, 9))
            slots = (table[np.arange(2).repeat(new), at // block] * block + at % block)[:, None].astype(
                np.int32
            )
        given = *_prompt(2 * new, 4, kv, depth, dtype), *caches, at[:, None].astype(np.int32), depth**-0.5, kv
        paged = (slots, table if block else None)
        return _alone("attention_decode", target, *given, *(None,) * 4, EPS, *paged, *choices)

    def block(
        target: str, firsts: list[int], heads: int, kv: int, depth: int, positions: int, dtype: Any
    ) -> Case:
        hidden, sequences = 130, len(firsts)
        widths = heads * depth, kv * depth
        stored = [np.concatenate([each] * sequences) for each in _caches(kv, depth, positions, dtype)]
        tables = [normal(seed, positions, depth // 2) for seed in (6, 7)]
        norms = [normal(seed, 1, depth, dtype=dtype) for seed in (4, 5)]
        weights = (normal(11, hidden, widths[0] + 2 * widths[1]) / hidden**0.5).astype(dtype)
        given = normal(10, sequences, hidden, dtype=dtype), normal(12, 1, hidden, dtype=dtype), weights
        places = np.array(firsts, np.int32)[:, None]
        output = (normal(13, widths[0], hidden) / widths[0] ** 0.5).astype(dtype)
        rest = (*stored, places, depth**-0.5, output, kv, *tables, *norms)
        return _alone("attention_block_decode", target, *given, EPS, *widths, *rest, copies=False)

    def prefill(
        target: str, tokens: int, heads: int, kv: int, depth: int, positions: int, dtype: Any, cache: Any
    ) -> Case:
        given = *_prompt(tokens, heads, kv, depth, dtype), *_caches(kv, depth, positions, cache)
        return _alone("attention_prefill", target, *given, depth**-0.5)

    def climbing(target: str, tokens: int, first: float, step: float) -> Case:
        """Scores that are whole numbers far from 0: exact in float32, and in nothing narrower."""
        q, k, v = (
            np.zeros((tokens, 8), np.float32),
            np.zeros((tokens, 8), np.float32),
            _prompt(tokens, 1, 1, 8)[2],
        )
        q[:, 0], k[:, 0] = 1, first + step * np.arange(tokens)
        return _alone("attention_prefill", target, q, k, v, *_caches(1, 8, tokens), 1.0)

    def last_key(tokens: int) -> tuple[np.ndarray, ...]:
        """Only the last token may see its key, which a mask has to hide from all others."""
        q, k, v = _prompt(tokens, 1, 1, 8)
        k[-1] *= 3e10
        return q, k, v, *_caches(1, 8, tokens)

    def continued(target: str, dtype: Any, *options: Any, tokens: int = 40, depth: int = 8) -> Case:
        """Two sequences of 100 and 128 valid positions, or as many pages; options from `prefix` on."""
        q, k, v = _prompt(2 * tokens, 2, 1, depth, dtype)
        positions = np.concatenate([start + np.arange(tokens) for start in (100, 128)]).astype(np.int32)
        caches = normal(8, 2, 1, depth, 200, dtype=dtype), normal(9, 2, 1, 200, depth, dtype=dtype)
        if options[1] is not None:
            caches = (normal(8, 26, 16, 1, depth, dtype=dtype), normal(9, 26, 16, 1, depth, dtype=dtype))
        given = q, k, v, *caches, depth**-0.5, None, positions[:, None], *options
        return _alone("attention_prefill", target, *given)

    tables = np.random.default_rng(3).permutation(26).reshape(2, 13).astype(np.int32)
    places = np.concatenate([start + np.arange(40) for start in (100, 128)])
    slots = tables[np.arange(2).repeat(40), places // 16] * 16 + places % 16
    paged = slots[:, None].astype(np.int32), tables
    sinks = normal(6, 1, 2)
    long_cache = normal(8, 2, 1, 128, 6300), normal(9, 2, 1, 6300, 128)
    far = np.int32([[6200], [6100]])
    q, k, v = _prompt(1100, 1, 1, 8)
    growing = np.linspace(0, 300, 1100, dtype=np.float32)[:, None]
    steep = (np.abs(q), np.abs(k) * growing, v, *_caches(1, 8, 1100))
    falling = (np.abs(q), np.abs(k) * growing[::-1], v, *_caches(1, 8, 1100))
    return [
        options("trn2", np.float32, 16, None, None, None),
        options("trn2", np.float32, 2, None, None, None),
        options("trn2", BF16, 128, None, None, None),
        options("trn1", BF16, 16, 50, None, normal(6, 1, 4), kv=1),
        options("trn3", np.float32, 0, 70, 5.0, normal(6, 1, 4)),
        block("trn2", [60, 3], 4, 2, 32, 128, np.float32),
        block("trn1", [5, 0, 8], 4, 1, 16, 9, BF16),
        decode("trn2", [60], 6, 3, 48, 128, np.float32, np.float32, rotated=20),
        decode("trn1", [5, 0, 8], 4, 1, 16, 9, BF16, BF16, rotated=8),
        decode("trn1", [100, 257], 6, 2, 16, 300, np.float32, BF16, new=3, rotated=8),
        decode("trn2", [1001], 24, 1, 4, 2304, np.float32, np.float32, new=3),
        decode("trn3", [7, 3, 60] * 6, 80, 40, 130, 128, BF16, BF16),
        _alone("attention_prefill", "trn2", *last_key(20), 8**-0.5),
        climbing("trn2", 20, 100_003.0, 1.0),
        climbing("trn1", 20, 2.0**34, 2.0**20),
        prefill("trn1", 128, 2, 1, 8, 128, np.float32, np.float32),
        prefill("trn1", 512, 1, 1, 8, 512, np.float32, np.float32),
        prefill("trn2", 513, 1, 1, 8, 513, np.float32, np.float32),
        prefill("trn2", 129, 4, 2, 16, 130, np.float32, np.float32),
        prefill("trn1", 20, 2, 2, 48, 24, BF16, BF16),
        prefill("trn3", 600, 2, 1, 8, 768, np.float32, BF16),
        _alone("attention_prefill", "trn2", *steep, 8**-0.5),
        _alone("attention_prefill", "trn1", *falling, 8**-0.5),
        prefill("trn2", 1300, 1, 1, 8, 1300, BF16, BF16),
        _alone(
            "attention_prefill",
            "trn2",
            *_prompt(1280, 1, 1, 8, BF16),
            *_caches(1, 8, 1280, BF16),
            0.3,
            *(None, None, 0, None, None, 1024),
        ),
        prefill("trn1", 20, 2, 1, 130, 24, BF16, BF16),
        continued("trn2", np.float32, 128, None, None, 60),
        continued("trn2", np.float32, 130, None, None, None, 5.0, sinks),
        continued("trn1", BF16, 128, *paged),
        continued("trn2", np.float32, 128, None, None, None, None, None, False),
        _alone("attention_prefill", "trn2", *_prompt(2, 1, 1, 128), *long_cache, 0.1, None, far, 6200),
    ]


def _largest() -> list[Case]:
    """The largest sizes that the kernels promise, on the chip with the least memory."""

    def empty(*shape: int, dtype: Any = BF16) -> np.ndarray:
        return np.empty(shape, dtype)

    def dry(kernel: str, *arguments: Any) -> Case:
        return Case(kernel, "trn1", (arguments,), None)

    place, offset, norm = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32), empty(1, 8192)
    rows = empty(512, 8192, dtype=np.float32)
    deep = empty(129, 16384, dtype=np.float32)
    return [
        dry("matmul", deep, empty(16384, 2600)),
        dry("matmul", empty(512, 4096, dtype=np.float32), empty(4096, 520)),
        dry("matmul", empty(1100, 256, dtype=np.float32), empty(256, 520)),
        dry("matmul", empty(3, 8, dtype=np.float32), empty(8, 4200)),
        dry("rmsnorm", empty(129, 8192, dtype=np.float32), empty(1, 8192, dtype=np.float32), EPS),
        dry(
            "rope",
            empty(129, 8192, dtype=np.float32),
            empty(129, 1, dtype=np.int32),
            *(empty(9, 64) for _ in "cs"),
            64,
        ),
        dry("embedding", empty(129, 1, dtype=np.int32), empty(100, 8192, dtype=np.float32)),
        dry("qkv_projection", rows, norm, empty(8192, 1536), EPS, 1024, 256),
        dry("qkv_projection", rows[:3, :8].copy(), empty(1, 8), empty(8, 6144), EPS, 4096, 1024),
        dry("qkv_projection", empty(1100, 8), empty(1, 8), empty(8, 12), EPS, 4, 4),
        dry("output_projection", deep, empty(16384, 600), empty(129, 600, dtype=np.float32)),
        dry("output_projection", empty(3, 128, dtype=np.float32), empty(128, 8192), rows[:3]),
        dry("output_projection", empty(1100, 8), empty(8, 520), empty(1100, 520)),
        dry("mlp", rows, norm, empty(8192, 24), empty(8192, 24), empty(24, 8192), EPS),
        dry("mlp", empty(3, 8), empty(1, 8), empty(8, 5000), empty(8, 5000), empty(5000, 8), EPS),
        dry(
            "mlp",
            empty(512, 128, dtype=np.float32),
            empty(1, 128),
            empty(128, 16384),
            empty(128, 16384),
            empty(16384, 128),
            EPS,
        ),
        dry("mlp", empty(1100, 8), empty(1, 8), empty(8, 520), empty(8, 520), empty(520, 8), EPS),
        dry(
            "attention_decode",
            *_prompt(1, 128, 8, 128),
            empty(1, 8, 128, 8192),
            empty(1, 8, 8192, 128),
            place,
            0.1,
        ),
        dry(
            "attention_prefill",
            *_prompt(4200, 1, 1, 128),
            empty(1, 1, 128, 4200),
            empty(1, 1, 4200, 128),
            0.1,
        ),
        dry("lm_head", rows[:128, :512].copy(), empty(1, 512), empty(512, 33000), EPS, 64, offset, None),
    ]


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """All cases, the quick ones of every kernel first."""
    groups = [[0, 1]], [[0, 3], [2, 1]]
    return (
        *(_reduced(target, ReplicaGroup(group)) for target, group in zip(("trn1", "trn2"), groups)),
        *_rows(),
        *_matmul(),
        *_projections(),
        *_forms(),
        *_attention(),
        *_heads(),
        *_samples(),
        *_largest(),
    )
