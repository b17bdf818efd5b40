"""embedding, rmsnorm and rope: kernels that work row by row."""

from __future__ import annotations

import ml_dtypes
import nki.language as nl
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from simulate.errors import OutOfBounds
from tests.kernels.accuracy import ODD_SIZES, TARGETS, check, compare, compare_all, find_faults, normal, run

BF16 = ml_dtypes.bfloat16
EPS = 1e-5


def row_numbers(seed: int, rows: int, limit: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, limit, (rows, 1)).astype(np.int32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_embedding_is_exact(target: str, dtype: type) -> None:
    table, ids = normal(1, 50, 72, dtype=dtype), row_numbers(2, 9, 50)
    x = run(kernels.embedding, (ids, table), target)
    assert x.dtype == np.float32
    assert np.array_equal(x, kernels.embedding_reference(ids, table))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_embedding_rounds_to_the_dtype_asked_for(target: str, dtype: type) -> None:
    table, ids = normal(1, 50, 72, dtype=dtype), row_numbers(2, 129, 50)
    x = run(kernels.embedding, (ids, table, nl.bfloat16), target)
    assert x.dtype == BF16
    assert np.array_equal(x, table[ids[:, 0]].astype(BF16))
    assert np.array_equal(x, kernels.embedding_reference(ids, table, nl.bfloat16))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "out"), [(np.float32, nl.float32), (BF16, nl.bfloat16)])
def test_embedding_scales_and_adds_the_rows_of_positions(target: str, dtype: type, out: object) -> None:
    given = normal(1, 50, 72, dtype=dtype), out, 5.3
    ids, positions = row_numbers(2, 129, 50), row_numbers(3, 129, 20)
    check(kernels.embedding, kernels.embedding_reference, (ids, *given), target)
    added = (positions, normal(4, 20, 72, dtype=dtype))
    check(kernels.embedding, kernels.embedding_reference, (ids, *given, *added), target)


@pytest.mark.parametrize(
    ("target", "ranks", "tokens"),
    [("trn1", 2, 3), ("trn2", 3, 1), ("trn2", 3, 127), ("trn2", 3, 128), ("trn2", 3, 129), ("trn3", 4, 2)],
)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("changes", [False, True])
def test_embedding_of_a_table_that_ranks_divide(
    target: str, ranks: int, tokens: int, dtype: type, changes: bool
) -> None:
    """Every rank gets the rows that one would take from the whole table; a row that nobody asked for is not read."""
    table, ids = normal(1, 10 * ranks, 72, dtype=dtype), row_numbers(2, tokens, 10 * ranks)
    table[np.setdiff1d(np.arange(10 * ranks), ids)] = np.nan
    group, out = ReplicaGroup([list(range(ranks))]), nl.float32 if dtype is np.float32 else nl.bfloat16
    rest = (5.3, row_numbers(3, tokens, 20), normal(4, 20, 72, dtype=dtype)) if changes else (1.0, None, None)
    arguments = []
    for rank, part in enumerate(np.split(table, ranks)):
        own = ids - 10 * rank
        own[(own < 0) | (own > 10)] = 10
        arguments.append(((own, part.copy(), out, *rest, group), {}))
    outputs: list[np.ndarray] = []
    world = simulate.World(target, ranks=ranks)
    assert find_faults(lambda: outputs.extend(world.launch(kernels.embedding, arguments).outputs)) == []
    for each in outputs:
        compare_all([each], kernels.embedding_reference, (ids, table, out, *rest))


def test_embedding_of_a_row_that_no_rank_holds_is_zeros() -> None:
    table, group = normal(1, 20, 8), ReplicaGroup([[0]])
    x = run(kernels.embedding, (np.int32([[20], [19]]), table, nl.float32, 1.0, None, None, group))
    assert np.array_equal(x, [np.zeros(8), table[19]])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("scale", [1.0, 5.3])
def test_embedding_adds_given_rows(target: str, dtype: type, scale: float) -> None:
    given = normal(1, 50, 72, dtype=dtype), nl.float32 if dtype is np.float32 else nl.bfloat16, scale
    ids, added = row_numbers(2, 129, 50), normal(3, 129, 72, dtype=dtype)
    check(kernels.embedding, kernels.embedding_reference, (ids, *given, None, None, None, added), target)


def test_embedding_refuses_added_rows_of_other_tokens_or_beside_positions() -> None:
    ids, table, added = np.int32([[1], [2]]), normal(1, 4, 8), normal(2, 2, 8)
    run(kernels.embedding, (ids, table, nl.float32, 1.0, None, None, None, added))
    with pytest.raises(AssertionError, match=r"added is \[2, 8\], not \(1, 8\)"):
        run(kernels.embedding, (ids, table, nl.float32, 1.0, None, None, None, added[:1]))
    with pytest.raises(AssertionError, match="added rows and positions do not come together"):
        run(kernels.embedding, (ids, table, nl.float32, 1.0, ids, table, None, added))


def test_embedding_refuses_positions_without_their_table() -> None:
    ids, table = np.int32([[1], [2]]), normal(1, 4, 8)
    run(kernels.embedding, (ids, table, nl.float32, 1.0, ids, table))
    with pytest.raises(AssertionError, match="positions and position_table come together"):
        run(kernels.embedding, (ids, table, nl.float32, 1.0, ids))
    with pytest.raises(AssertionError, match="rows of 8 and of 9"):
        run(kernels.embedding, (ids, table, nl.float32, 1.0, ids, normal(1, 4, 9)))


@pytest.mark.parametrize("tokens", [1, *ODD_SIZES])
def test_embedding_of_any_number_of_tokens(tokens: int) -> None:
    table, ids = normal(1, 300, 12), row_numbers(2, tokens, 300)
    assert np.array_equal(run(kernels.embedding, (ids, table)), table[ids[:, 0]])


def test_embedding_takes_the_last_id_and_refuses_the_next() -> None:
    table = normal(1, 20, 8)
    assert np.array_equal(run(kernels.embedding, (np.int32([[19]]), table)), table[19:])
    with pytest.raises(OutOfBounds, match="index 20 is out of bounds for axis 0 with size 20"):
        run(kernels.embedding, (np.int32([[20]]), table))


def test_embedding_refuses_ids_in_a_row() -> None:
    run(kernels.embedding, (np.int32([[1], [2]]), normal(1, 4, 8)))
    with pytest.raises(AssertionError, match=r"ids are \[T, 1\], not \(1, 2\)"):
        run(kernels.embedding, (np.int32([[1, 2]]), normal(1, 4, 8)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(np.float32, np.float32), (np.float32, BF16), (BF16, BF16)])
def test_rmsnorm_dtypes_on_every_chip(target: str, x_dtype: type, w_dtype: type) -> None:
    arguments = (normal(1, 129, 172, dtype=x_dtype), normal(2, 1, 172, dtype=w_dtype), EPS)
    check(kernels.rmsnorm, kernels.rmsnorm_reference, arguments, target)


@pytest.mark.parametrize("size", [1, *ODD_SIZES])
def test_rmsnorm_of_any_rows_and_width(size: int) -> None:
    check(kernels.rmsnorm, kernels.rmsnorm_reference, (normal(1, size, 24), normal(2, 1, 24), EPS))
    check(kernels.rmsnorm, kernels.rmsnorm_reference, (normal(1, 24, size), normal(2, 1, size), EPS))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 129, 300])
def test_rmsnorm_adds_a_residual(tokens: int, dtype: type, target: str) -> None:
    x, weight, residual = (normal(seed, n, 72, dtype=dtype) for seed, n in ((1, tokens), (2, 1), (3, tokens)))
    check(kernels.rmsnorm, kernels.rmsnorm_reference, (x, weight, EPS, residual, 1.0), target)


@pytest.mark.parametrize(("parts", "copies", "padding"), [(2, 1, 0), (4, 1, 0), (2, 2, 1)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_rmsnorm_of_rows_that_the_ranks_hold_in_parts(
    tokens: int, parts: int, copies: int, padding: int
) -> None:
    """Every rank normalises by the squares of all: the part of what one rank makes of whole rows.

    Each part is on `copies` ranks, and `padding` ranks hold zeros.
    """
    x, weight = normal(1, tokens, 24 * parts), normal(2, 1, 24 * parts)
    ranks = parts * copies + padding
    held = np.zeros((ranks, tokens, 24), np.float32), np.zeros((ranks, 1, 24), np.float32)
    for whole, own in zip((x, weight), held):
        own[: parts * copies] = np.repeat(np.split(whole, parts, axis=1), copies, axis=0)
    options = (EPS, None, 0.0, ReplicaGroup([list(range(ranks))]), copies * parts * 24)
    arguments = [((*own, *options), {}) for own in zip(*held)]
    outputs: list[np.ndarray] = []
    world = simulate.World("trn2", ranks=ranks)
    found = find_faults(lambda: outputs.extend(world.launch(kernels.rmsnorm, arguments).outputs), orders=2)
    assert found == []
    wide = kernels.rmsnorm_reference(x.astype(np.float64), weight.astype(np.float64), EPS)
    plain = kernels.rmsnorm_reference(x, weight, EPS)
    for copy in range(copies):
        compare(np.concatenate(outputs[copy : parts * copies : copies], axis=1), wide, plain)
    assert not np.any(outputs[parts * copies :])


def test_rmsnorm_counts_as_many_elements_as_a_group_holds() -> None:
    x, weight, group = normal(1, 3, 16), normal(2, 1, 16), ReplicaGroup([[0]])
    with pytest.raises(AssertionError, match="17 elements of rows of 16, but no group"):
        run(kernels.rmsnorm, (x, weight, EPS, None, 0.0, None, 17))
    for count in (None, 0):
        with pytest.raises(AssertionError, match=f"row_elements of a group is 1 or more, not {count}"):
            run(kernels.rmsnorm, (x, weight, EPS, None, 0.0, group, count))
    exact = kernels.rmsnorm_reference(x.astype(np.float64), weight.astype(np.float64), EPS)
    for ranks in (None, group):
        own = run(kernels.rmsnorm, (x, weight, EPS, None, 0.0, ranks, 16))
        compare(own, exact, kernels.rmsnorm_reference(x, weight, EPS))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("tokens", "width"), [(3, 72), (16, 172), (17, 72), (129, 72)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rmsnorm_scales_the_sum_with_the_residual(tokens: int, width: int, dtype: type, target: str) -> None:
    x, residual = (normal(seed, tokens, width, dtype=dtype) for seed in (1, 2))
    weight, scale = normal(3, 1, width, dtype=dtype), np.array([[0.7]], dtype)
    arguments = (x, weight, EPS, residual, 0.0, None, None, scale)
    check(kernels.rmsnorm, kernels.rmsnorm_reference, arguments, target)


def test_rmsnorm_refuses_a_scale_without_a_residual_or_of_a_row() -> None:
    x, weight = normal(1, 3, 16), normal(2, 1, 16)
    run(kernels.rmsnorm, (x, weight, EPS, x, 0.0, None, None, normal(3, 1, 1)))
    with pytest.raises(AssertionError, match="scale is given without a residual"):
        run(kernels.rmsnorm, (x, weight, EPS, None, 0.0, None, None, normal(3, 1, 1)))
    with pytest.raises(AssertionError, match=r"scale is \[1, 1\], not \(1, 16\)"):
        run(kernels.rmsnorm, (x, weight, EPS, x, 0.0, None, None, weight))


def test_rmsnorm_refuses_a_residual_of_another_shape() -> None:
    with pytest.raises(AssertionError, match=r"residual is \(3, 16\), as x is, not \(4, 16\)"):
        run(kernels.rmsnorm, (normal(1, 3, 16), normal(2, 1, 16), EPS, normal(3, 4, 16)))


def test_rmsnorm_of_a_zero_row_is_zero() -> None:
    x = normal(1, 3, 16)
    x[1] = 0
    assert not run(kernels.rmsnorm, (x, normal(2, 1, 16), EPS))[1].any()


def test_rmsnorm_of_a_row_is_independent_of_the_others() -> None:
    x, weight = normal(1, 130, 40), normal(2, 1, 40)
    order = np.random.default_rng(3).permutation(130)
    assert np.array_equal(
        run(kernels.rmsnorm, (x, weight, EPS))[order], run(kernels.rmsnorm, (x[order], weight, EPS))
    )


def test_rmsnorm_refuses_a_weight_of_another_width() -> None:
    with pytest.raises(AssertionError, match=r"weight is \[1, 16\] for rows of 16, not \(1, 17\)"):
        run(kernels.rmsnorm, (normal(1, 3, 16), normal(2, 1, 17), EPS))


def test_rmsnorm_takes_its_widest_row_and_refuses_the_next() -> None:
    widest = (normal(1, 2, 8192), normal(2, 1, 8192), EPS, normal(3, 2, 8192))
    check(kernels.rmsnorm, kernels.rmsnorm_reference, widest)
    with pytest.raises(AssertionError, match="rmsnorm takes rows of at most 8192, not 8193"):
        run(kernels.rmsnorm, (normal(1, 2, 8193), normal(2, 1, 8193), EPS))


def rotary_tables(positions: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] / 10000 ** (np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_rope_dtypes_on_every_chip(target: str, dtype: type) -> None:
    arguments = (normal(1, 129, 6 * 24, dtype=dtype), row_numbers(2, 129, 60), *rotary_tables(60, 12), 6)
    check(kernels.rope, kernels.rope_reference, arguments, target)


@pytest.mark.parametrize("tokens", [1, *ODD_SIZES])
def test_rope_of_any_number_of_tokens(tokens: int) -> None:
    positions = np.arange(tokens, dtype=np.int32)[:, None]
    arguments = (normal(1, tokens, 3 * 8), positions, *rotary_tables(200, 4), 3)
    check(kernels.rope, kernels.rope_reference, arguments)


def test_rope_at_position_0_changes_nothing() -> None:
    x = normal(1, 5, 4 * 16)
    assert np.array_equal(run(kernels.rope, (x, np.zeros((5, 1), np.int32), *rotary_tables(9, 8), 4)), x)


def test_references_agree_with_other_forms_of_the_formulas() -> None:
    """rope turns the complex number made of a head's halves; rmsnorm scales rows to the length sqrt(width)."""
    x, positions = normal(1, 7, 3 * 8).astype(np.float64), row_numbers(2, 7, 30)
    cos, sin = (table.astype(np.float64) for table in rotary_tables(30, 4))
    heads = x.reshape(7, 3, 8)
    turned = (heads[..., :4] + 1j * heads[..., 4:]) * (cos + 1j * sin)[positions]
    truth = np.concatenate([turned.real, turned.imag], axis=2).reshape(x.shape)
    reference = kernels.rope_reference(x, positions, cos, sin, 3)
    compare(reference.astype(np.float32), truth, truth.astype(np.float32))
    truth = x / np.linalg.norm(x, axis=1, keepdims=True) * np.sqrt(24)
    reference = kernels.rmsnorm_reference(x, np.ones((1, 24)), 0.0)
    compare(reference.astype(np.float32), truth, truth.astype(np.float32))


def test_rope_takes_its_widest_row_and_refuses_the_next() -> None:
    check(
        kernels.rope,
        kernels.rope_reference,
        (normal(1, 128, 8192), row_numbers(2, 128, 9), *rotary_tables(9, 64), 64),
    )
    with pytest.raises(AssertionError, match="rope takes rows of at most 8192, not 8194"):
        run(kernels.rope, (normal(1, 2, 8194), row_numbers(2, 2, 9), *rotary_tables(9, 1), 4097))


def test_rope_refuses_heads_that_do_not_fit_the_tables() -> None:
    cos, sin = rotary_tables(9, 8)
    with pytest.raises(AssertionError, match="4 heads with tables of width 8 need x of 64, not 48"):
        run(kernels.rope, (normal(1, 2, 48), np.zeros((2, 1), np.int32), cos, sin, 4))
    with pytest.raises(AssertionError, match=r"cos is \(9, 8\), sin is \(8, 8\)"):
        run(kernels.rope, (normal(1, 2, 64), np.zeros((2, 1), np.int32), cos, sin[1:], 4))
    with pytest.raises(AssertionError, match=r"positions are \[2, 1\], not \(1, 2\)"):
        run(kernels.rope, (normal(1, 2, 64), np.zeros((1, 2), np.int32), cos, sin, 4))
