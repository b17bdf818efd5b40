"""embedding, rmsnorm and rope: kernels that work row by row."""

from __future__ import annotations

import nki.language as nl
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import ODD_SIZES, compare, compare_all, find_faults, normal, run
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    exactly,
    limit,
    refuse,
    together,
    vary,
)

EPS = 1e-5
SIZES = [1, *ODD_SIZES]
DTYPE_OF = {F32: nl.float32, BF16: nl.bfloat16}


def row_numbers(seed: int, rows: int, limit: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, limit, (rows, 1)).astype(np.int32)


def embedded(tokens: int = 9, rows: int = 50, width: int = 72, stored: type = F32) -> list[object]:
    return [row_numbers(2, tokens, rows), normal(1, rows, width, dtype=stored)]


def changed(dtype: type, **more: object) -> dict[str, object]:
    """Return settings of a scaled sum in a dtype."""
    return dict(tokens=129, stored=dtype, dtype=DTYPE_OF[dtype], scale=5.3) | more


POSITIONS = dict(positions=row_numbers(3, 129, 20))


class TestEmbedding(KernelTests):
    case = KernelCase(
        kernels.embedding,
        embedded,
        values=[
            *vary(stored=[*DTYPES]),
            *vary(tokens=129, stored=[*DTYPES], dtype=nl.bfloat16),
            *vary(tokens=SIZES, rows=300, width=12),
            dict(rows=20, width=8, tokens=1, ids=np.int32([[19]])),
        ],
        refusals=[
            refuse("index 20 is out of bounds for axis 0 with size 20", dict(rows=20), ids=np.int32([[20]])),
            refuse("ids have to be [T, 1], not (1, 9)", ids=lambda ids: ids.T),
            refuse(
                "added has to be [9, 72], not (8, 72)", dict(added=normal(2, 9, 72)), added=normal(2, 8, 72)
            ),
            refuse(
                "positions and added are both given: pass None for one",
                dict(positions=row_numbers(3, 9, 20), position_table=normal(4, 20, 72)),
                added=normal(2, 9, 72),
            ),
            refuse("one of positions and position_table is None: give both", positions=row_numbers(3, 9, 20)),
            refuse(
                "table has rows of 72, position_table of 73; both need one width",
                dict(positions=row_numbers(3, 9, 20), position_table=normal(4, 20, 72)),
                position_table=normal(4, 20, 73),
            ),
        ],
        tolerance=exactly,
    )


class TestEmbeddingWithChanges(KernelTests):
    """Rows that are scaled, and added to rows of positions or to rows of their own."""

    case = KernelCase(
        kernels.embedding,
        embedded,
        values=[
            settings
            for dtype in DTYPES
            for settings in (
                changed(dtype),
                changed(dtype, **POSITIONS, position_table=normal(4, 20, 72, dtype=dtype)),
                changed(dtype, added=normal(3, 129, 72, dtype=dtype)),
                changed(dtype, added=normal(3, 129, 72, dtype=dtype), scale=1.0),
            )
        ],
    )


@pytest.mark.parametrize(
    ("target", "ranks", "tokens"),
    [("trn1", 2, 3), ("trn2", 3, 1), ("trn2", 3, 127), ("trn2", 3, 128), ("trn2", 3, 129), ("trn3", 4, 2)],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [False, True])
def test_embedding_of_a_table_that_ranks_divide(
    target: str, ranks: int, tokens: int, dtype: type, changes: bool
) -> None:
    """Every rank gets the rows that one would take from the whole table; a row that nobody asked for is not read."""
    ids, table = embedded(tokens, 10 * ranks, stored=dtype)
    table[np.setdiff1d(np.arange(10 * ranks), ids)] = np.nan
    group, out = ReplicaGroup([list(range(ranks))]), DTYPE_OF[dtype]
    scale_and_positions = (
        (5.3, row_numbers(3, tokens, 20), normal(4, 20, 72, dtype=dtype)) if changes else (1.0, None, None)
    )
    arguments = []
    for rank, shard in enumerate(np.split(table, ranks)):
        local_ids = ids - 10 * rank
        local_ids[(local_ids < 0) | (local_ids > 10)] = 10
        arguments.append(((local_ids, shard.copy(), out, *scale_and_positions, group), {}))
    outputs: list[np.ndarray] = []
    world = simulate.World(target, ranks=ranks)
    assert find_faults(lambda: outputs.extend(world.launch(kernels.embedding, arguments).outputs)) == []
    for output in outputs:
        compare_all([output], kernels.embedding_reference, (ids, table, out, *scale_and_positions))


def test_embedding_of_a_row_that_no_rank_holds_is_zeros() -> None:
    table, group = normal(1, 20, 8), ReplicaGroup([[0]])
    x = run(kernels.embedding, (np.int32([[20], [19]]), table, nl.float32, 1.0, None, None, group))
    assert np.array_equal(x, [np.zeros(8), table[19]])


def normed(
    tokens: int = 3,
    width: int = 16,
    dtype: type = F32,
    weights: type | None = None,
    added: bool = False,
    biased: bool = False,
) -> list[object]:
    rows = normal(3, tokens, width, dtype=dtype) if added else None
    bias = normal(4, 1, width, dtype=weights or dtype) if biased else None
    weight = normal(2, 1, width, dtype=weights or dtype)
    return [normal(1, tokens, width, dtype=dtype), weight, EPS, rows, 0.0, None, None, None, bias]


ONE = ReplicaGroup([[0]])


class TestRmsnorm(KernelTests):
    case = KernelCase(
        kernels.rmsnorm,
        normed,
        values=[
            *vary(tokens=129, width=172, dtype=F32, weights=[F32, BF16]),
            dict(tokens=129, width=172, dtype=BF16),
            *vary(tokens=SIZES, width=24),
            *vary(tokens=24, width=SIZES),
            *vary(tokens=[1, 129, 300], width=72, dtype=[*DTYPES], added=True, norm_offset=1.0),
            *(
                dict(tokens=tokens, width=width, dtype=dtype, added=True, scale=np.array([[0.7]], dtype))
                for tokens, width in ((3, 72), (16, 172), (17, 72), (129, 72))
                for dtype in DTYPES
            ),
            *vary(replica_group=[None, ONE], row_elements=16),
            *together(
                "tokens width",
                *((1, 129), (16, 172), (17, 72), (128, 127), (129, 2100)),
                dtype=[*DTYPES],
                biased=True,
            ),
            dict(biased=True, norm_offset=1.0),
            dict(tokens=20, weights=BF16, biased=True),
            dict(x=lambda x: np.where(np.arange(3)[:, None] == 1, F32(0), x)),
        ],
        refusals=[
            refuse(
                "row_elements is 17 for rows of 16 without a replica_group",
                dict(row_elements=16),
                row_elements=17,
            ),
            *(
                refuse(
                    f"row_elements of a group is 1 or more, not {count}",
                    dict(replica_group=ONE, row_elements=1),
                    row_elements=count,
                )
                for count in (None, 0)
            ),
            refuse("scale is given without a residual", scale=normal(3, 1, 1)),
            refuse(
                "scale is [1, 1], not (1, 16)",
                dict(added=True, scale=normal(3, 1, 1)),
                scale=normal(3, 1, 16),
            ),
            refuse("residual is (3, 16), as x is, not (4, 16)", dict(added=True), residual=normal(3, 4, 16)),
            *(
                refuse(
                    "norm_bias is given with a residual or a replica_group",
                    settings,
                    norm_bias=normal(4, 1, 16),
                )
                for settings in (dict(added=True), dict(replica_group=ONE, row_elements=16))
            ),
            refuse("norm_bias has to be [1, 16], not (1, 17)", dict(biased=True), norm_bias=normal(4, 1, 17)),
            refuse("weight is [1, 16] for rows of 16, not (1, 17)", weight=normal(2, 1, 17)),
        ],
        limits=[
            limit("width", 8192, "rmsnorm takes rows of at most 8192, not 8193", **settings)
            for settings in (dict(added=True), dict(tokens=300, biased=True))
        ],
    )


@pytest.mark.parametrize(("blocks", "copies", "padding"), [(2, 1, 0), (4, 1, 0), (2, 2, 1)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_rmsnorm_of_rows_that_the_ranks_hold_in_parts(
    tokens: int, blocks: int, copies: int, padding: int
) -> None:
    """Every rank normalises by the squares of all: the part of what one rank makes of whole rows.

    Each part is on `copies` ranks, and `padding` ranks hold zeros.
    """
    x, weight = normal(1, tokens, 24 * blocks), normal(2, 1, 24 * blocks)
    ranks = blocks * copies + padding
    shards = np.zeros((ranks, tokens, 24), F32), np.zeros((ranks, 1, 24), F32)
    for array, shard in zip((x, weight), shards):
        shard[: blocks * copies] = np.repeat(np.split(array, blocks, axis=1), copies, axis=0)
    options = (EPS, None, 0.0, ReplicaGroup([list(range(ranks))]), copies * blocks * 24)
    arguments = [((*rank_arrays, *options), {}) for rank_arrays in zip(*shards)]
    outputs: list[np.ndarray] = []
    world = simulate.World("trn2", ranks=ranks)
    faults = find_faults(lambda: outputs.extend(world.launch(kernels.rmsnorm, arguments).outputs), orders=2)
    assert faults == []
    wide = kernels.rmsnorm_reference(x.astype(np.float64), weight.astype(np.float64), EPS)
    plain = kernels.rmsnorm_reference(x, weight, EPS)
    for copy in range(copies):
        compare(np.concatenate(outputs[copy : blocks * copies : copies], axis=1), wide, plain)
    assert not np.any(outputs[blocks * copies :])


def test_rmsnorm_of_a_row_is_independent_of_the_others() -> None:
    x, weight, *_ = normed(130, 40)
    order = np.random.default_rng(3).permutation(130)
    one, other = (run(kernels.rmsnorm, (rows, weight, EPS)) for rows in (x, x[order]))
    assert np.array_equal(one[order], other)


def rotary_tables(positions: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] / 10000 ** (np.arange(half) / half)
    return np.cos(angles).astype(F32), np.sin(angles).astype(F32)


def turned(
    tokens: int = 2, heads: int = 4, half: int = 8, dtype: type = F32, rows: int = 60, unturned: int = 0
) -> list[object]:
    x = normal(1, tokens, heads * (2 * half + unturned), dtype=dtype)
    return [x, row_numbers(2, tokens, rows), *rotary_tables(rows, half), heads]


class TestRope(KernelTests):
    case = KernelCase(
        kernels.rope,
        turned,
        values=[
            *vary(tokens=129, heads=6, half=12, dtype=[*DTYPES]),
            *(
                dict(
                    tokens=tokens,
                    heads=3,
                    half=4,
                    rows=200,
                    positions=np.arange(tokens, dtype=np.int32)[:, None],
                )
                for tokens in SIZES
            ),
            dict(tokens=128, heads=64, half=64),
            *vary(tokens=129, heads=3, half=4, unturned=[1, 8], dtype=[*DTYPES]),
        ],
        refusals=[
            refuse("need x of 64 or more in equal heads, not 60", x=normal(1, 2, 60)),
            refuse("need x of 64 or more in equal heads, not 66", x=normal(1, 2, 66)),
            refuse("cos is (60, 8), sin is (59, 8)", sin=lambda sin: sin[1:]),
            refuse("positions are [2, 1], not (1, 2)", positions=lambda positions: positions.T),
        ],
        limits=[limit("heads", 4096, "rope takes rows of at most 8192, not 8194", half=1)],
    )


def test_rope_at_position_0_changes_nothing() -> None:
    x, _, *inputs = turned(5)
    assert np.array_equal(run(kernels.rope, (x, np.zeros((5, 1), np.int32), *inputs)), x)


def test_references_agree_with_other_forms_of_the_formulas() -> None:
    """Compare rope with a turn of a complex number made of a head's halves, rmsnorm with rows of length sqrt(width)."""
    x, positions = normal(1, 7, 3 * 8).astype(np.float64), row_numbers(2, 7, 30)
    cos, sin = (table.astype(np.float64) for table in rotary_tables(30, 4))
    heads = x.reshape(7, 3, 8)
    turns = (heads[..., :4] + 1j * heads[..., 4:]) * (cos + 1j * sin)[positions]
    truth = np.concatenate([turns.real, turns.imag], axis=2).reshape(x.shape)
    reference = kernels.rope_reference(x, positions, cos, sin, 3)
    compare(reference.astype(F32), truth, truth.astype(F32))
    truth = x / np.linalg.norm(x, axis=1, keepdims=True) * np.sqrt(24)
    reference = kernels.rmsnorm_reference(x, np.ones((1, 24)), 0.0)
    compare(reference.astype(F32), truth, truth.astype(F32))
