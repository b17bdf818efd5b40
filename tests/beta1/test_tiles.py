"""Tiles that instructions return: where results go, in what order, and what `+=` means."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import simulate.beta1.isa as nisa
import simulate.beta1.language as nl
from nkw.errors import InvalidArgument, RuleViolation
from tests.beta1.kernels import issued, launched, run, stored, whole_numbers

X = whole_numbers(128, 64)


def test_an_assigned_result_is_written_in_place() -> None:
    def kernel(x):
        tile = nl.ndarray((128, 64), np.float32)
        tile[...] = nl.load(x)
        tile[:, 0:32] = nisa.activation(nl.square, tile[:, 32:64])
        return stored(tile)

    launch = launched(kernel, X)
    assert issued(launch) == ["dma_copy", "activation", "dma_copy"]
    assert np.array_equal(launch.outputs[0], np.hstack([X[:, 32:] ** 2, X[:, 32:]]))


def test_a_result_is_computed_before_the_next_statement_changes_its_operands() -> None:
    def kernel(x):
        tile = nl.load(x)
        before = nisa.tensor_copy(tile)
        tile[...] = 0.0
        return stored(before)

    assert np.array_equal(run(kernel, X), X)


def test_an_instruction_is_recorded_at_its_own_line() -> None:
    def kernel(x):
        tile = nl.load(x)
        squared = nisa.activation(nl.square, tile)
        return stored(squared)

    stream = launched(kernel, X).streams[0]
    first = kernel.__code__.co_firstlineno
    assert [stream.lines[number][1] - first for number in stream.line_ids][:2] == [1, 2]


def test_dtype_decides_the_result_and_the_target_decides_without_it() -> None:
    def kernel(x, dtype):
        tile = nl.ndarray((128, 64), nl.bfloat16)
        tile[...] = nisa.activation(nl.copy, nl.load(x), dtype=dtype)
        return stored(tile)

    fine = (X + 1 / 512).astype(np.float32)
    for dtype in (None, nl.bfloat16, nl.float32):
        assert np.array_equal(run(kernel, fine, dtype), fine.astype(ml_dtypes.bfloat16))
    assert "tensor_copy" in issued(launched(kernel, fine, nl.float32))
    assert "tensor_copy" not in issued(launched(kernel, fine, None))


@pytest.mark.parametrize("start", [nl.ndarray, nl.zeros])
def test_matmuls_added_to_psum_accumulate_inside_the_tensor_engine(start) -> None:
    a, b = whole_numbers(256, 128), whole_numbers(256, 256, seed=1)

    def kernel(a, b):
        total = start((128, 256), np.float32, buffer=nl.psum)
        for k in nl.affine_range(2):
            rows = nl.ds(k * 128, 128)
            total += nisa.nc_matmul(nl.load(a[rows, :]), nl.load(b[rows, :]))
        return stored(total)

    launch = launched(kernel, a, b)
    assert np.array_equal(launch.outputs[0], a.T @ b) and not launch.warnings
    assert issued(launch).count("nc_matmul") == 2 and "tensor_tensor" not in issued(launch)


def test_an_assigned_matmul_overwrites() -> None:
    def kernel(x):
        total = nl.ndarray((2, nl.par_dim(64), 64), np.float32, buffer=nl.psum)
        total[1] = nisa.nc_matmul(nl.load(x), nl.load(x))
        total[1] = nisa.nc_matmul(nl.load(x), nl.load(x))
        return stored(total[1])

    assert np.array_equal(run(kernel, X), X.T @ X)


def test_zeros_in_psum_read_as_zeros_where_no_matmul_came_first() -> None:
    def kernel(x):
        return stored(nl.copy(nl.zeros((128, 64), np.float32, buffer=nl.psum)))

    assert np.array_equal(run(kernel, X), np.zeros_like(X))


def test_added_tiles_are_updated_in_place() -> None:
    def kernel(x):
        tile = nl.load(x)
        alias = tile
        tile += tile
        tile[:, 0:1] += 5.0
        tile[0:128, 1:2] -= tile[:, 2:3]
        return stored(alias)

    expected = 2 * X
    expected[:, 0] += 5
    expected[:, 1] -= expected[:, 2]
    assert np.array_equal(run(kernel, X), expected)


def test_par_dim_makes_a_list_of_tiles() -> None:
    def kernel(x):
        tiles = nl.ndarray((2, 2, nl.par_dim(64), 32), np.float32)
        assert tiles.shape == (2, 2, 64, 32)
        for i in nl.affine_range(2):
            for j in nl.affine_range(2):
                tiles[i, j] = nl.load(x[nl.ds(64 * i, 64), nl.ds(32 * j, 32)])
        out = nl.ndarray((128, 64), np.float32, buffer=nl.shared_hbm)
        nl.store(out[0:64, 0:32], tiles[1, 1])
        nl.store(out[64:128, 0:32], tiles[1][0, :, :])
        nl.store(out[0:64, 32:64], tiles[0, 1, nl.arange(64)[:, None], nl.arange(32)[None, :]])
        nl.store(out[64:128, 32:64], tiles[0, 0])
        return out

    expected = np.block([[X[64:, 32:], X[:64, 32:]], [X[64:, :32], X[:64, :32]]])
    assert np.array_equal(run(kernel, X), expected)


def test_refuses_an_index_expression_on_a_block_dim() -> None:
    def kernel(x, key):
        tiles = nl.zeros((2, nl.par_dim(64), 32), np.float32)
        return stored(tiles[key])

    assert not run(kernel, X, 1).any()
    with pytest.raises(RuleViolation, match="each block is a tile of its own"):
        run(kernel, X, (nl.arange(2)[:, None], 0, 0))


def test_refuses_two_partition_dims() -> None:
    with pytest.raises(InvalidArgument, match="more than one nl"):
        run(lambda x: nl.ndarray((nl.par_dim(2), nl.par_dim(2)), np.float32), X)


def test_refuses_an_assignment_to_hbm_and_takes_a_store() -> None:
    def assigned(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        out[...] = nl.load(x)
        return out

    with pytest.raises(RuleViolation, match="HBM is written by nl"):
        run(assigned, X)
    assert np.array_equal(run(lambda x: stored(nl.load(x)), X), X)


@pytest.mark.parametrize(("width", "fits"), [(31, False), (32, True), (33, False)])
def test_an_assignment_has_as_many_elements_as_its_target(width: int, fits: bool) -> None:
    def kernel(x):
        tile = nl.zeros((128, 32), np.float32)
        source = nl.load(x)
        tile[...] = source[:, 0:width]
        return stored(tile)

    if fits:
        assert np.array_equal(run(kernel, X), X[:, :32])
    else:
        with pytest.raises(RuleViolation, match="as many elements per partition"):
            run(kernel, X)


def test_a_tile_in_psum_is_stored_through_sbuf() -> None:
    launch = launched(lambda x: stored(nisa.nc_transpose(nl.load(x))), X)
    assert np.array_equal(launch.outputs[0], X.T)
    assert issued(launch)[-2:] == ["tensor_copy", "dma_copy"]


def test_loop_reduce_adds_up_over_its_loop_and_needs_a_target() -> None:
    def kernel(x, assigned):
        total = nl.ndarray((32, 64), np.float32)
        for k in nl.affine_range(4):
            block = nl.load(x[nl.ds(32 * k, 32), :])
            if assigned:
                total[...] = nl.loop_reduce(block, np.add, loop_indices=[k])
            else:
                total = nl.loop_reduce(block, np.add, loop_indices=[k])
        return stored(total)

    assert np.array_equal(run(kernel, X, True), X.reshape(4, 32, 64).sum(0))
    with pytest.raises(InvalidArgument, match="is assigned to a tile"):
        run(kernel, X, False)


def test_refuses_a_tile_as_a_condition() -> None:
    with pytest.raises(RuleViolation, match="no condition of Python"):
        run(lambda x: stored(nl.load(x)) if nl.load(x) else None, X)


def test_refuses_the_read_of_a_tile_that_nobody_wrote() -> None:
    with pytest.raises(RuleViolation, match="bytes that were written before"):
        run(lambda x: stored(nl.ndarray((128, 64), np.float32)), X)


@pytest.mark.parametrize("dims", [(2, 2, 2, 8), (2, 2, 2, 2, 4), (2, 2, 2, 2, 2, 2)])
def test_a_tile_may_have_more_dims_than_an_instruction(dims: tuple[int, ...]) -> None:
    def kernel(x):
        tile = nl.ndarray((nl.par_dim(128), *dims), np.float32)
        zeros = nl.zeros((nl.par_dim(128), *dims), np.float32)
        for i in range(2):
            tile[:, i] = nl.load(x[:, nl.ds(32 * i, 32)]).reshape((128, *dims[1:]))
        tile[:, 0, 0, 0, 0] = 7.0
        doubled = nl.add(tile, tile) + zeros
        doubled[:, 1] = nl.copy(tile[:, 1])
        return stored(doubled.reshape((128, 64)))

    expected = X.reshape(128, *dims).copy()
    expected[:, 0, 0, 0, 0] = 7.0
    expected[:, 0] *= 2
    assert np.array_equal(run(kernel, X), expected.reshape(128, 64))


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16])
@pytest.mark.parametrize("dims", [(16, 4), (4, 4, 4), (2, 2, 4, 4)])
def test_one_value_per_partition_stands_beside_any_free_dims(dims: tuple[int, ...], dtype) -> None:
    """float32 columns are operands of tensor_scalar, others of tensor_tensor."""

    def kernel(x):
        tile, column = nl.load(x).reshape((128, *dims)), nl.copy(nl.load(x[:, 0:1]), dtype=dtype)
        return stored(nl.subtract(nl.add(tile, column), nl.multiply(column, tile)).reshape((128, 64)))

    assert np.array_equal(run(kernel, X), X + X[:, :1] - X[:, :1] * X)


def test_free_dims_that_do_not_broadcast_are_refused() -> None:
    def kernel(x):
        return stored(nl.add(nl.load(x).reshape((128, 16, 4)), nl.load(x[:, 0:2])))

    with pytest.raises(RuleViolation, match="NKW-INDEX-BROADCAST"):
        run(kernel, X)


@pytest.mark.parametrize("start", [0, 1, 31, 32, 33, 96, 127])
def test_a_number_is_assigned_from_any_partition_on(start: int) -> None:
    def kernel(x):
        tile = nl.load(x)
        tile[start, 3] = 7.0
        tile[start : min(start + 40, 128), 4:6] = 8.0
        return stored(tile)

    launch = launched(kernel, X)
    expected = X.copy()
    expected[start, 3] = 7
    expected[start : start + 40, 4:6] = 8
    assert np.array_equal(launch.outputs[0], expected)
    assert issued(launch)[1] == "memset"
    assert (issued(launch)[2] == "dma_copy") == bool(start % 32)


def test_a_number_from_any_partition_of_psum_is_refused() -> None:
    def kernel(x):
        tile = nl.ndarray((128, 64), np.float32, buffer=nl.psum)
        tile[1, 0:4] = 7.0
        return x

    with pytest.raises(RuleViolation, match="NKW-PARTITION-START"):
        run(kernel, X)


@pytest.mark.parametrize("banks", [7, 8, 9])
@pytest.mark.parametrize("buffer", [nl.psum, nl.sbuf])
def test_psum_that_overflows_in_program_order_is_a_warning(banks: int, buffer) -> None:
    """The compiler of the dialect reorders affine loops; SBUF that overflows stays refused."""
    columns = 512 if buffer is nl.psum else 6600  # eight of them fit into SBUF, nine do not

    def kernel(x):
        tile = nl.load(x)
        kept = nl.ndarray((banks, nl.par_dim(128), columns), np.float32, buffer=buffer)
        for i in nl.affine_range(banks):
            kept[i, :, 0:64] = nl.copy(tile)
        out = nl.ndarray((banks, 128, 64), np.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(banks):
            nl.store(out[i], kept[i, :, 0:64])
        return out

    if banks == 9 and buffer is nl.sbuf:
        with pytest.raises(RuleViolation, match="NKW-CAPACITY"):
            run(kernel, X)
        return
    launch = launched(kernel, X)
    assert np.array_equal(launch.outputs[0], np.broadcast_to(X, (banks, 128, 64)))
    assert [text.partition(" live tiles")[0] for text in launch.warnings] == (
        ["[NKW-CAPACITY] 9"] if banks == 9 else []
    )
