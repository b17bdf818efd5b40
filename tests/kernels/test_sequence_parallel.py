"""qkv_projection, output_projection and mlp with norms and residuals cut along the sequence over ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import compare_all, find_faults, normal

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
SHAPES = [(2, 2), (2, 254), (2, 256), (2, 258), (2, 1100), (3, 381), (4, 512), (4, 1028)]
"""Ranks, and rows: one of each rank, around a row tile, several pieces and groups, the last of them ragged."""


def weight(seed: int, rows: int, columns: int, dtype: Any) -> np.ndarray:
    return normal(seed, rows, columns, dtype=dtype, scale=rows**-0.5)


def over(ranks: int) -> ReplicaGroup:
    return ReplicaGroup([list(range(ranks))])


def parts(array: np.ndarray, ranks: int, axis: int = 0) -> list[np.ndarray]:
    return [part.copy() for part in np.split(array, ranks, axis)]


def launched(kernel: Any, arguments: list[tuple[Any, ...]], cores: int = 1, seeds: int = 0) -> list[Any]:
    """What every rank gets, without findings."""
    world = simulate.World("trn2", ranks=len(arguments), logical_core_size=cores)
    outputs: list[Any] = []
    run = [(each, {}) for each in arguments]
    assert find_faults(lambda: outputs.extend(world.launch(kernel, run).outputs), seeds=seeds) == []
    return outputs


def output(ranks: int, tokens: int, dtype: Any) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    """The arguments of all ranks, and those of the reference."""
    o, w_o = normal(1, tokens, 24 * ranks, dtype=dtype), weight(2, 24 * ranks, 172, dtype)
    residual, bias = normal(3, tokens, 172, dtype=dtype), normal(4, 1, 172, dtype=dtype)
    shards = zip(parts(o, ranks, 1), parts(w_o, ranks), parts(residual, ranks))
    return [(*shard, over(ranks), bias, ranks) for shard in shards], (o, w_o, residual, None, bias)


def mlp(
    ranks: int, tokens: int, dtype: Any, layer_norm: bool, row_gate: np.ndarray | None = None
) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    x, norm = normal(1, tokens, 72, dtype=dtype), normal(2, 1, 72, dtype=dtype)
    gate, up = weight(3, 72, 40 * ranks, dtype), weight(4, 72, 40 * ranks, dtype)
    down = weight(5, 40 * ranks, 72, dtype)
    rest = ("silu", None, None, None, normal(6, 1, 72, dtype=dtype) if layer_norm else None, 0.0)
    shards = zip(parts(x, ranks), parts(gate, ranks, 1), parts(up, ranks, 1), parts(down, ranks))
    more = (ranks, row_gate)
    given = [(x, norm, gate, up, down, EPS, over(ranks), *rest, True, *more) for x, gate, up, down in shards]
    return given, (x, norm, gate, up, down, EPS, None, *rest, True, 1, row_gate)


def qkv(
    ranks: int, tokens: int, dtype: Any, layer_norm: bool
) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    x, norm = normal(1, tokens, 72, dtype=dtype), normal(2, 1, 72, dtype=dtype)
    angles = np.arange(60)[:, None] / 100 ** (np.arange(4) / 4)
    rest = (
        norm,
        weight(3, 72, 40, dtype),
        EPS,
        24,
        8,
        normal(4, 1, 40, dtype=dtype),
        np.random.default_rng(5).integers(0, 60, (tokens, 1)).astype(np.int32),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        None,
        None,
        None,
        normal(6, 1, 72, dtype=dtype) if layer_norm else None,
        0.0,
    )
    return [(own, *rest, over(ranks), ranks) for own in parts(x, ranks)], (x, *rest)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(("ranks", "tokens"), SHAPES)
def test_the_rows_of_all_ranks_are_those_of_one(ranks: int, tokens: int, dtype: Any) -> None:
    given, whole = output(ranks, tokens, dtype)
    outputs = launched(kernels.output_projection, given)
    compare_all([np.concatenate(outputs)], kernels.output_projection_reference, whole)
    given, whole = mlp(ranks, tokens, dtype, layer_norm=ranks == 3)
    outputs = launched(kernels.mlp, given)
    compare_all([np.concatenate(outputs)], kernels.mlp_reference, whole)
    given, whole = qkv(ranks, tokens, dtype, layer_norm=ranks == 3)
    for each in launched(kernels.qkv_projection, given):
        compare_all(each, kernels.qkv_projection_reference, whole)


@pytest.mark.parametrize(("ranks", "tokens"), SHAPES)
def test_rows_that_ranks_cut_have_their_own_gates(ranks: int, tokens: int) -> None:
    """Of three ranks a row tile has 126 rows."""
    for dtype in (np.float32, BF16):
        given, whole = mlp(ranks, tokens, dtype, False, normal(7, 72, 1, dtype=dtype))
        outputs = launched(kernels.mlp, given)
        compare_all([np.concatenate(outputs)], kernels.mlp_reference, whole)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [6, 258])
def test_schedules_of_two_cores_on_each_of_two_ranks_agree(tokens: int) -> None:
    for name, (given, whole) in (
        ("output_projection", output(2, tokens, np.float32)),
        ("mlp", mlp(2, tokens, np.float32, False)),
        ("mlp", mlp(2, tokens, np.float32, False, normal(7, 72, 1))),
        ("qkv_projection", qkv(2, tokens, np.float32, layer_norm=False)),
    ):
        outputs = launched(getattr(kernels, name), given, cores=2, seeds=64 if tokens == 6 else 8)
        # Queries, keys and values are of all rows on every rank; what the others return is of own rows.
        returned = outputs if name == "qkv_projection" else [[np.concatenate(outputs)]]
        for each in returned:
            compare_all(each, getattr(kernels, f"{name}_reference"), whole)


def test_rows_that_ranks_do_not_divide_are_refused() -> None:
    given, _ = output(2, 4, np.float32)
    o, w_o, residual, *rest = given[0]
    with pytest.raises(AssertionError, match="2 ranks do not divide 3 rows; pad them to a multiple of 2"):
        launched(kernels.output_projection, [(o[:3].copy(), w_o, residual, *rest)] * 2)
    with pytest.raises(AssertionError, match="sequence_ranks is 2 without a replica_group"):
        launched(kernels.output_projection, [(o, w_o, residual, None, None, 2)])
