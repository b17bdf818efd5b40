"""Cases of a decoder layer's decode step: rows between its two parts in SBUF and in HBM, alone and over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

from tests.kernels.accuracy import copied, normal
from tools.mutants.cases.case import BF16, EPS, Case, by_reference, weights


def _layer(
    target: str, sequences: int, hidden: int, inner: int, dtype: Any, ranks: int = 1, biased: bool = False
) -> Case:
    """A step of a layer: each rank has two query heads on the one key/value head, and its part of the MLP."""
    q, kv, positions = 2 * 16 * ranks, 16, 130
    caches = (
        normal(8, sequences, 1, 16, positions, dtype=dtype),
        normal(9, sequences, 1, positions, 16, dtype=dtype),
    )
    places = np.arange(3, 3 + sequences, dtype=np.int32)[:, None] % positions
    x, norm, mlp_norm = (
        normal(seed, rows, hidden, dtype=dtype) for seed, rows in ((10, sequences), (12, 1), (2, 1))
    )
    parts = [weights(seed, hidden, width, dtype) for seed, width in ((11, q), (14, kv), (15, kv))]
    gate, up = (weights(seed, hidden, inner, dtype) for seed in (16, 18))
    output, down = weights(13, q, hidden, dtype), weights(17, inner, hidden, dtype)

    def shard(rank: int, of: int, group: Any) -> tuple[Any, ...]:
        heads = slice(q // of * rank, q // of * (rank + 1))
        own = slice(inner // of * rank, inner // of * (rank + 1))
        w_qkv = np.concatenate([parts[0][:, heads], *parts[1:]], axis=1)
        products = (x, norm, w_qkv, EPS, q // of, kv, *copied(caches), places, 0.25, output[heads].copy())
        mlp = mlp_norm, gate[:, own].copy(), up[:, own].copy(), down[own].copy()
        return *products, *mlp, 1, None, None, None, None, group

    whole = shard(0, 1, None)
    if biased:
        rows = (
            normal(seed, 1, width, dtype=dtype) for seed, width in ((19, inner), (20, inner), (21, hidden))
        )
        whole += (*(None,) * 6, "gelu_tanh", *rows)
    if ranks == 1:
        return by_reference("decoder_layer_decode", target, *whole)
    group = ReplicaGroup([list(range(ranks))])
    shards = tuple(shard(rank, ranks, group) for rank in range(ranks))
    return by_reference("decoder_layer_decode", target, whole=whole, ranks=shards)


def layer() -> list[Case]:
    """Every case."""
    return [
        _layer("trn2", 3, 130, 72, np.float32),
        _layer("trn1", 5, 64, 130, BF16),
        _layer("trn2", 2, 40, 36, np.float32, ranks=2),
        _layer("trn3", 129, 24, 40, np.float32),
        _layer("trn2", 8, 48, 36, np.float32, biased=True),
    ]
