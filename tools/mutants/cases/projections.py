"""Cases of qkv_projection, output_projection and mlp."""

from __future__ import annotations

from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels
from tests.kernels.accuracy import compare, copied, in_float64, normal
from tools.mutants.cases.case import BF16, EPS, Case, Outputs, by_reference, two_cores, weights


def _qkv(
    target: str, tokens: int, hidden: int, q: int, kv: int, x: Any = np.float32, w: Any = np.float32
) -> Case:
    arguments = normal(1, tokens, hidden, dtype=x), normal(2, 1, hidden, dtype=w)
    return by_reference("qkv_projection", target, *arguments, weights(3, hidden, q + 2 * kv, w), EPS, q, kv)


def _qkv_heads(
    target: str,
    tokens: int,
    hidden: int,
    *options: str,
    dtype: Any = np.float32,
    heads: int = 3,
    depth: int = 8,
) -> Case:
    """qkv_projection with some heads and 1 of `depth` elements, and what `options` name of bias, norms and rotation."""
    given: dict[str, Any] = {"head_dim": depth, "norm_offset": 1.0 if "offset" in options else 0.0}
    width = (heads + 2) * depth
    rows = {"bias": width, "q_norm": depth, "k_norm": depth, "norm_bias": hidden}
    for seed, (name, columns) in enumerate(rows.items()):
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
    weight = weights(3, hidden, width, dtype)
    first = (x, None if "no norm" in options else norm, weight, EPS, heads * depth, depth)
    last = None, 1, "v_norm" in options
    return by_reference("qkv_projection", target, *first, *(given[name] for name in names), *last)


def _output(target: str, tokens: int, depth: int, hidden: int, ranks: int = 1, w: Any = np.float32) -> Case:
    o, weight, residual = normal(1, tokens, depth), weights(2, depth, hidden, w), normal(3, tokens, hidden)
    if ranks == 1:
        return by_reference("output_projection", target, o, weight, residual)
    group = ReplicaGroup([list(range(ranks))])
    parts = np.split(np.arange(depth), ranks)
    shards = tuple((o[:, part].copy(), weight[part], residual, group) for part in parts)
    return by_reference("output_projection", target, whole=(o, weight, residual), ranks=shards)


def _mlp(target: str, tokens: int, hidden: int, inner: int, ranks: int = 1, w: Any = np.float32) -> Case:
    x, norm = normal(1, tokens, hidden), normal(2, 1, hidden, dtype=w)
    gate, up, down = (
        weights(3, hidden, inner, w),
        weights(4, hidden, inner, w),
        weights(5, inner, hidden, w),
    )
    whole = (x, norm, gate, up, down, EPS)
    if ranks == 1:
        return by_reference("mlp", target, *whole)
    group = ReplicaGroup([list(range(ranks))])
    parts = np.split(np.arange(inner), ranks)
    shards = tuple((x, norm, gate[:, p].copy(), up[:, p].copy(), down[p], EPS, group) for p in parts)
    return by_reference("mlp", target, whole=whole, ranks=shards)


def _cut(
    kernel: str, target: str, tokens: int, hidden: int, width: int, ranks: int, row_gated: bool = False
) -> Case:
    """A projection whose rows are cut along the sequence over ranks, each with `width` columns or rows of weights."""
    group, own = ReplicaGroup([list(range(ranks))]), np.split(np.arange(tokens), ranks)
    parts = np.split(np.arange(width * ranks), ranks)
    x, norm = normal(1, tokens, hidden), normal(2, 1, hidden)
    down = weights(5, width * ranks, hidden)
    gate, up = weights(3, hidden, width * ranks), weights(4, hidden, width * ranks)
    whole: tuple[Any, ...]
    if kernel == "qkv_projection":
        whole = (x, norm, weights(3, hidden, 40), EPS, 24, 8)
        shards = tuple((x[rows], *whole[1:], *(None,) * 8, 0.0, group, ranks) for rows in own)
    elif kernel == "mlp":
        gates = normal(7, hidden, 1) if row_gated else None
        options = (None, "silu", None, None, None, None, 0.0, True)
        whole = (x, norm, gate, up, down, EPS, *options, 1, gates)
        rest = (EPS, group, *options[1:], ranks, gates)
        shards = tuple(
            (x[rows], norm, gate[:, p].copy(), up[:, p].copy(), down[p], *rest) for rows, p in zip(own, parts)
        )
    else:
        o = normal(6, tokens, width * ranks)
        whole = (o, down, x)
        shards = tuple((o[:, p].copy(), down[p], x[rows], group, None, ranks) for rows, p in zip(own, parts))
    reference = getattr(nki_kernels, f"{kernel}_reference")
    plain, exact = reference(*copied(whole)), reference(*(in_float64(argument) for argument in whole))

    def judge(outputs: Outputs) -> None:
        if kernel == "qkv_projection":
            for output in outputs:
                for got, truth, same_dtype in zip(output, exact, plain):
                    compare(got, truth, same_dtype)
        else:
            compare(np.concatenate([output[0] for output in outputs]), exact, plain)

    return Case(kernel, target, shards, judge)


def _forms() -> list[Case]:
    """The forms of the two that no Llama has, in groups of rows and with a last block that shares the array."""

    def form(
        target: str,
        tokens: int,
        hidden: int,
        inner: int,
        gated: bool,
        function: str,
        ranks: int = 1,
        dtype: Any = BF16,
    ) -> Case:
        x, norm = normal(1, tokens, hidden, dtype=dtype), normal(2, 1, hidden)
        gate, up = weights(3, hidden, inner), weights(4, hidden, inner)
        b_gate, b_up = normal(6, 1, inner), normal(7, 1, inner)
        down, b_down, norm_bias = weights(5, inner, hidden), normal(8, 1, hidden), normal(9, 1, hidden)
        rest = (b_down, norm_bias, 0.5)
        first = (gate, up) if gated else (None, up)
        biases = (b_gate, b_up) if gated else (None, b_up)
        whole = (x, norm, *first, down, EPS, None, function, *biases, *rest)
        if ranks == 1:
            return by_reference("mlp", target, *whole)
        group = ReplicaGroup([list(range(ranks))])
        shards = tuple(
            (x, norm, gate[:, p].copy(), up[:, p].copy(), down[p], EPS, group, function)
            + (b_gate[:, p].copy(), b_up[:, p].copy(), *rest)
            for p in np.split(np.arange(inner), ranks)
        )
        return by_reference("mlp", target, whole=whole, ranks=shards)

    o, weight, residual = normal(1, 300, 72), weights(2, 72, 40), normal(3, 300, 40)
    return [
        form("trn2", 260, 40, 192, True, "gelu"),
        form("trn1", 5, 40, 160, False, "gelu_tanh"),
        form("trn2", 3, 24, 40, True, "gelu_tanh", dtype=np.float32),
        form("trn3", 1100, 24, 72, False, "relu"),
        form("trn2", 520, 24, 320, True, "silu", ranks=2),
        _mlp("trn2", 130, 513, 8),
        _mlp("trn2", 1100, 24, 320),
        _mlp("trn2", 1, 24, 72),
        by_reference("output_projection", "trn2", o, weight, residual, None, normal(4, 1, 40)),
        by_reference("output_projection", "trn2", o, weight, None),
        by_reference("output_projection", "trn1", o[:5].copy(), weight, None, None, normal(4, 1, 40)),
        by_reference(
            "mlp", "trn2", residual, None, *(normal(s, 40, 72) for s in (4, 5)), normal(6, 72, 40), EPS
        ),
        _bare_mlp("trn2", 5, 40, 72, 2),
        _row_gated("trn2", 5, 40, 72),
        _row_gated("trn1", 300, 1100, 40),
        _row_gated("trn2", 130, 600, 40, residual=False),
        _row_gated("trn2", 130, 600, 40, ranks=2),
        by_reference("output_projection", "trn2", o, weight, residual, None, None, 1, normal(5, 300, 72)),
        by_reference("qkv_projection", "trn2", *_gated_heads(5)),
        _output("trn2", 300, 8, 5000, ranks=2),
        _output("trn2", 600, 1300, 2000, w=BF16),
        _mlp("trn1", 130, 8, 16384),
        _output("trn1", 3, 16384, 136),
    ]


def _bare_mlp(target: str, tokens: int, hidden: int, inner: int, ranks: int) -> Case:
    """A plain mlp without a norm and without a residual, over ranks."""
    x, up, down = normal(1, tokens, hidden), weights(4, hidden, inner), weights(5, inner, hidden)
    rest = (None, None, None, None, 0.0, False)
    group = ReplicaGroup([list(range(ranks))])
    shards = tuple(
        (x, None, None, up[:, p].copy(), down[p], EPS, group, "relu", *rest)
        for p in np.split(np.arange(inner), ranks)
    )
    whole = (x, None, None, up, down, EPS, None, "relu", *rest)
    return by_reference("mlp", target, whole=whole, ranks=shards)


def _row_gated(
    target: str, tokens: int, hidden: int, inner: int, residual: bool = True, ranks: int = 1
) -> Case:
    """mlp whose rows have gates."""
    x, norm = normal(1, tokens, hidden), normal(2, 1, hidden)
    gate, up, down = weights(3, hidden, inner), weights(4, hidden, inner), weights(5, inner, hidden)
    rest = ("silu", None, None, None, None, 0.0, residual, 1, weights(6, hidden, 1))
    whole = (x, norm, gate, up, down, EPS, None, *rest)
    if ranks == 1:
        return by_reference("mlp", target, *whole)
    group, parts = ReplicaGroup([list(range(ranks))]), np.split(np.arange(inner), ranks)
    shards = tuple((x, norm, gate[:, p].copy(), up[:, p].copy(), down[p], EPS, group, *rest) for p in parts)
    return by_reference("mlp", target, whole=whole, ranks=shards)


def _gated_heads(tokens: int) -> tuple[Any, ...]:
    """Arguments of qkv_projection for queries, keys, values, and gates as wide as the queries."""
    x, norm = normal(1, tokens, 24), normal(2, 1, 24)
    return (x, norm, weights(3, 24, 16 + 8 + 8 + 16), EPS, 16, 8, *(None,) * 8, 0.0, None, 1, False, 16)


def projections() -> list[Case]:
    """The three kernels around their tiles and banks, on one rank and on two."""
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
        _qkv_heads("trn2", 300, 24, "norm_bias"),
        _qkv_heads("trn3", 130, 520, "bias", "no norm"),
        _qkv_heads("trn2", 5, 24, "no norm"),
        _qkv_heads("trn2", 5, 24, "rope", "q_norm", "k_norm", heads=100, depth=24),
        _qkv_heads("trn2", 5, 24, "rope", "q_norm", "v_norm"),
        _qkv_heads("trn1", 130, 24, "v_norm", heads=20, depth=200),
        _qkv("trn2", 5, 172, 96, 0),
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
        _cut("qkv_projection", "trn2", 1100, 24, 20, ranks=2),
        _cut("mlp", "trn2", 1028, 24, 16, ranks=4, row_gated=True),
        _cut("mlp", "trn2", 381, 24, 16, ranks=3, row_gated=True),
        _cut("qkv_projection", "trn3", 129, 24, 20, ranks=3),
        _cut("qkv_projection", "trn2", 6, 24, 20, ranks=2),
        _cut("mlp", "trn2", 1100, 24, 16, ranks=2),
        _cut("mlp", "trn3", 129, 24, 16, ranks=3),
        _cut("output_projection", "trn2", 264, 24, 16, ranks=2),
        _cut("output_projection", "trn1", 129, 24, 16, ranks=3),
        two_cores(_mlp("trn2", 3, 40, 300)),
        two_cores(_mlp("trn3", 130, 40, 24, ranks=2)),
        two_cores(_output("trn2", 3, 24, 520)),
        two_cores(_qkv("trn2", 3, 24, 48, 8)),
        *_forms(),
    ]
