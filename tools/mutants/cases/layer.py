"""Cases of a decoder layer's decode step in one launch, on one rank and divided over ranks.

The rows between its attention block and its MLP stay in SBUF in some cases and go through HBM in others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

from tests.kernels.accuracy import normal
from tools.mutants.cases.case import BF16, EPS, Case, by_name, weights


def _layer(
    target: str, sequences: int, hidden: int, inner: int, dtype: Any, ranks: int = 1, biased: bool = False
) -> Case:
    """Return a step of a layer; each rank has two query heads, the one key/value head and its part of the MLP."""
    q, kv, positions = 2 * 16 * ranks, 16, 130
    caches = (
        normal(8, sequences, 1, 16, positions, dtype=dtype),
        normal(9, sequences, 1, positions, 16, dtype=dtype),
    )
    row_positions = np.arange(3, 3 + sequences, dtype=np.int32)[:, None] % positions
    x, norm, mlp_norm = (
        normal(seed, rows, hidden, dtype=dtype) for seed, rows in ((10, sequences), (12, 1), (2, 1))
    )
    projections = [weights(seed, hidden, width, dtype) for seed, width in ((11, q), (14, kv), (15, kv))]
    gate, up = (weights(seed, hidden, inner, dtype) for seed in (16, 18))
    output, down = weights(13, q, hidden, dtype), weights(17, inner, hidden, dtype)

    def shard(rank: int, num_ranks: int, group: Any = None) -> dict[str, Any]:
        heads = slice(q // num_ranks * rank, q // num_ranks * (rank + 1))
        columns = slice(inner // num_ranks * rank, inner // num_ranks * (rank + 1))
        return {
            "w_qkv": np.concatenate([projections[0][:, heads], *projections[1:]], axis=1),
            "q_size": q // num_ranks,
            "k_cache": caches[0].copy(),
            "v_cache": caches[1].copy(),
            "w_o": output[heads].copy(),
            "w_gate": gate[:, columns].copy(),
            "w_up": up[:, columns].copy(),
            "w_down": down[columns].copy(),
            "replica_group": group,
        }

    reference_arguments = {
        "x": x,
        "norm_weight": norm,
        "eps": EPS,
        "kv_size": kv,
        "positions": row_positions,
        "scale": 0.25,
        "mlp_norm_weight": mlp_norm,
        "num_kv_heads": 1,
        **shard(0, 1),
    }
    if biased:
        reference_arguments["activation"] = "gelu_tanh"
        for seed, name, width in ((19, "b_gate", inner), (20, "b_up", inner), (21, "b_down", hidden)):
            reference_arguments[name] = normal(seed, 1, width, dtype=dtype)
    group = ReplicaGroup([list(range(ranks))])
    shards = [shard(rank, ranks, group) for rank in range(ranks)] if ranks > 1 else []
    return by_name("decoder_layer_decode", target, reference_arguments, shards)


def layer() -> list[Case]:
    """Return every case."""
    return [
        _layer("trn2", 3, 130, 72, np.float32),
        _layer("trn1", 5, 64, 130, BF16),
        _layer("trn2", 2, 40, 36, np.float32, ranks=2),
        _layer("trn3", 129, 24, 40, np.float32),
        _layer("trn2", 8, 48, 36, np.float32, biased=True),
    ]
