"""Fusion: copies are eliminated and matmuls fused, and no value changes but by the order of sums."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import simulate
from nkw.errors import OutOfBounds
from simulate.replay import ReplayOptions
from simulate.world import process_replays
from tests.replay.matmuls import calls, tiled_product, whole_numbers

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

BF16 = ml_dtypes.bfloat16


def launch(kernel, *arguments, mode=simulate.Mode.replay, target="trn2", **options):
    world = simulate.World(target, replay=ReplayOptions(**options), replays=process_replays())
    return world.launch(kernel, [(tuple(arguments), {})], mode=mode).outputs[0]


def both_ways(kernel, *arguments, **options):
    """Return the outputs and the arguments after an eager and after a rewritten launch, on copies."""
    outputs_and_arguments = []
    for mode in (simulate.Mode.eager, simulate.Mode.replay, simulate.Mode.replay):
        copies = [argument.copy() if isinstance(argument, np.ndarray) else argument for argument in arguments]
        output = launch(kernel, *copies, mode=mode, **options)
        outputs = list(output) if isinstance(output, tuple) else [output]
        outputs_and_arguments.append(outputs + [array for array in copies if isinstance(array, np.ndarray)])
    return outputs_and_arguments[0], outputs_and_arguments[2]


def agree(kernel, *arguments) -> None:
    eager, replayed = both_ways(kernel, *arguments)
    for wanted, got in zip(eager, replayed):
        assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()


def stored(out, tile, rows=slice(None), columns=slice(None)):
    nisa.dma_copy(dst=out[rows, columns], src=tile)


@pytest.mark.parametrize(
    ("depth", "rows", "columns"), [(127, 128, 129), (128, 129, 512), (300, 257, 513), (1, 1, 1)]
)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_tiled_matmul_becomes_one_call(cache, depth, rows, columns, dtype) -> None:
    a, b = whole_numbers(1, depth, rows, dtype=dtype), whole_numbers(2, depth, columns, dtype=BF16)
    agree(tiled_product, a, b if dtype == BF16 else b.astype(np.float32))
    tiles = -(-depth // 128) * -(-rows // 128) * -(-columns // 512)
    assert cache.report.matmuls_fused == tiles - 1


def test_sums_taken_in_another_order_stay_within_the_bound(cache) -> None:
    generator = np.random.default_rng(3)
    a, b = generator.standard_normal((2, 384, 384), np.float32)
    eager, replayed = both_ways(tiled_product, a, b)
    terms, unit = 384, 2.0**-24
    bound = 2 * terms * unit / (1 - terms * unit) * (np.abs(a).T.astype(np.float64) @ np.abs(b))
    assert cache.report.matmuls_fused > 0
    assert (np.abs(replayed[0].astype(np.float64) - eager[0]) <= bound).all()


def pieced_product(operands, b, width):
    """Sum operands[i].T @ b[i]; each operand is computed first, in a tile of its own."""
    count, depth, rows = operands.shape
    columns = b.shape[2]
    out = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    lefts = [nl.ndarray((depth, rows), dtype=nl.float32) for _ in range(count)]
    for index, left in enumerate(lefts):
        nisa.tensor_scalar(
            dst=left, data=nl.load(operands[index]), op0=nl.multiply, operand0=float(index + 1)
        )
    for start in range(0, columns, width):
        end = min(columns, start + width)
        total = nl.ndarray((rows, end - start), dtype=nl.float32, buffer=nl.psum)
        for index, left in enumerate(lefts):
            moving = nl.load(b[index, :, start:end])
            nisa.nc_matmul(dst=total, stationary=left, moving=moving, accumulate=index > 0)
        result = nl.ndarray(total.shape, dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=total)
        stored(out, result, columns=slice(start, end))
    return out


@pytest.mark.parametrize(("columns", "joined"), [(7, 0), (8, 2), (9, 2)])
def test_separate_operands_are_concatenated_above_a_size(cache, columns, joined) -> None:
    agree(pieced_product, whole_numbers(1, 3, 128, 5), whole_numbers(2, 3, 128, columns), columns)
    assert cache.report.matmuls_fused == joined


def test_separate_operands_are_concatenated_once_for_all_adjacent_columns(cache) -> None:
    inputs = whole_numbers(1, 3, 128, 9), whole_numbers(2, 3, 128, 25)
    agree(pieced_product, *inputs, 12)
    assert cache.report.matmuls_fused == 8  # of three parts times three blocks of columns, the last ragged


def product_then_square(a_by_k, b, width):
    """Compute (a.T @ b) ** 2, multiplied by blocks of columns and squared at once."""
    rows, columns = a_by_k.shape[1], b.shape[1]
    out = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    wide = nl.ndarray((rows, columns), dtype=nl.float32)
    left, right = nl.load(a_by_k), nl.load(b)
    for start in range(0, columns, width):
        end = min(columns, start + width)
        total = nl.ndarray((rows, end - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=left, moving=right[:, start:end])
        nisa.tensor_copy(dst=wide[:, start:end], src=total)
    squares = nl.ndarray((rows, columns), dtype=nl.float32)
    nisa.tensor_tensor(dst=squares, data1=wide, data2=wide, op=nl.multiply)
    stored(out, squares)
    return out


@pytest.mark.parametrize("rows", [1, 5, 128])
def test_adjacent_results_need_no_copy(cache, rows) -> None:
    agree(product_then_square, whole_numbers(1, 64, rows), whole_numbers(2, 64, 300), 128)
    (program,) = cache.programs
    called = [function.__name__ for segment in program.fused._ranks[0].segments for function, _ in segment]
    assert called == ["matmul", "multiply"]


def interleaved_product(x, w, rows_first):
    """Compute w.T @ x, or its transpose: partition p holds the neighbouring rows p * count … of both."""
    columns, count = w.shape[1], w.shape[0] // 128
    vector = nl.load(x.reshape((128, count)))
    matrix = nl.load(w.reshape((128, count, columns)))
    shape = (columns, 1) if rows_first else (1, columns)
    total = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    for row in range(count):
        operands = matrix[:, row, :], vector[:, row : row + 1]
        stationary, moving = operands if rows_first else operands[::-1]
        nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, accumulate=row > 0)
    out = nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm)
    result = nl.ndarray(shape, dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=total)
    stored(out, result)
    return out


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(("count", "dtype"), [(1, np.float32), (2, np.float32), (5, np.float32), (3, BF16)])
def test_interleaved_parts_of_a_sum_are_one_matmul(cache, count, dtype, rows_first) -> None:
    x, w = whole_numbers(1, 128 * count, 1, dtype=dtype), whole_numbers(2, 128 * count, 127, dtype=dtype)
    agree(interleaved_product, x, w, rows_first)
    assert cache.report.matmuls_fused == count - 1
    assert calls(cache).count("matmul") == 1 and "add" not in calls(cache)


def spread_product(x, w, chunks):
    """Compute chunks of x @ w, one a partition: the stationary operand of a chunk is zero in other columns."""
    depth, columns = w.shape
    count, size = depth // 128, columns // chunks
    vector = nl.load(x.reshape((128, count)))
    matrix = nl.load(w.reshape((128, count, columns)))
    total = nl.ndarray((chunks, size), dtype=nl.float32, buffer=nl.psum)
    for row in range(count):
        for chunk in range(chunks):
            spread = nl.ndarray((128, chunks), dtype=nl.float32)
            nisa.memset(dst=spread, value=0.0)
            nisa.tensor_copy(dst=spread[:, chunk : chunk + 1], src=vector[:, row : row + 1])
            nisa.nc_matmul(
                dst=total,
                stationary=spread,
                moving=matrix[:, row, chunk * size : (chunk + 1) * size],
                accumulate=row + chunk > 0,
            )
    out = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    result = nl.ndarray(total.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=total)
    stored(out, result)
    return out


@pytest.mark.parametrize(("count", "chunks"), [(1, 3), (3, 2), (3, 4), (2, 7)])
def test_a_sum_of_parts_of_several_matrices_is_one_matmul_for_each(cache, count, chunks) -> None:
    agree(
        spread_product,
        whole_numbers(1, 128 * count, 1),
        whole_numbers(2, 128 * count, 9 * chunks + 1),
        chunks,
    )
    assert cache.report.matmuls_fused == (count - 1) * chunks and calls(cache).count("add") == chunks - 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_interleaved_rows_of_a_result_are_one_matmul(cache, count) -> None:
    def rows_of_a_product(x, w):
        columns = w.shape[1]
        vector, matrix = nl.load(x), nl.load(w)
        result = nl.ndarray((127, count), dtype=nl.float32)
        total = nl.ndarray((127, count), dtype=nl.float32, buffer=nl.psum)
        for index in range(count):
            nisa.nc_matmul(
                dst=total[:, index : index + 1], stationary=matrix[:, index:columns:count], moving=vector
            )
        nisa.tensor_copy(dst=result, src=total)
        out = nl.ndarray((127, count), dtype=nl.float32, buffer=nl.shared_hbm)
        stored(out, result)
        return out

    agree(rows_of_a_product, whole_numbers(1, 64, 1), whole_numbers(2, 64, 127 * count))
    assert calls(cache).count("matmul") == 1


@pytest.mark.parametrize("per_row", [True, False])
def test_indices_read_at_run_time(cache, per_row) -> None:
    def moves(table, rows, out):
        tile = nl.ndarray((2, 3), dtype=table.dtype)
        index = nl.load(rows)
        offset = {"vector_offset": index} if per_row else {"scalar_offset": index[0:1]}
        nisa.dma_copy(dst=tile, src=table.ap([[3, 2], [1, 3]], **offset))
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out.ap([[3, 2], [1, 3]], **offset), src=tile)
        return out

    agree(moves, whole_numbers(1, 8, 3), np.array([[5], [2]], np.int32), whole_numbers(2, 8, 3))
    assert cache.report.unlowered == 0


@pytest.mark.parametrize(("index", "outside"), [(-1, True), (0, False), (7, False), (8, True)])
@pytest.mark.parametrize("per_row", [True, False])
def test_run_time_indices_stay_inside_in_replays(cache, per_row, index, outside) -> None:
    def moves(table, rows, out):
        count = 2 if per_row else 1
        tile = nl.ndarray((count, 3), dtype=table.dtype)
        loaded = nl.load(rows)
        offset = {"vector_offset": loaded} if per_row else {"scalar_offset": loaded}
        nisa.dma_copy(dst=tile, src=table.ap([[3, count], [1, 3]], **offset))
        nisa.dma_copy(dst=out.ap([[3, count], [1, 3]], **offset), src=tile)
        return out

    table, rows, out = (
        whole_numbers(1, 8, 3),
        np.full((2 if per_row else 1, 1), 1, np.int32),
        np.zeros((8, 3), np.float32),
    )
    for _ in range(2):
        launch(moves, table, rows, out)
    rows[-1] = index
    if outside:
        with pytest.raises(OutOfBounds, match=f"index {index} is out of bounds for axis 0 with size 8"):
            launch(moves, table, rows, out)
    else:
        wanted = np.zeros((8, 3), np.float32)
        wanted[[1, *rows[:, 0]]] = table[[1, *rows[:, 0]]]
        assert np.array_equal(launch(moves, table, rows, out), wanted)
    assert cache.report.rewritten == 1


def test_an_input_that_is_overwritten_is_read_before(cache) -> None:
    def shifts(x):
        first, second = nl.load(x[0:64]), nl.load(x[64:128])
        nisa.dma_copy(dst=x[64:128], src=first)
        nisa.dma_copy(dst=x[0:64], src=second)
        return x

    agree(shifts, whole_numbers(1, 128, 7))
    assert cache.report.rewritten == 1


def test_a_tile_that_is_written_again_keeps_its_earlier_readers(cache) -> None:
    def reuses(x, y):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile, other = nl.load(x), nl.ndarray(x.shape, dtype=x.dtype)
        nisa.tensor_copy(dst=other, src=tile)
        nisa.dma_copy(dst=tile, src=y)
        nisa.tensor_tensor(dst=tile[:, 1:], data1=tile[:, 1:], data2=other[:, :-1], op=nl.subtract)
        stored(out, tile)
        return out

    agree(reuses, whole_numbers(1, 128, 9), whole_numbers(2, 128, 9))


def test_a_copy_through_hbm_is_eliminated(cache) -> None:
    def through(x):
        inside = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        stored(inside, nl.load(x))
        tile = nl.load(inside)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        stored(out, tile)
        return out

    agree(through, whole_numbers(1, 128, 9))
    assert cache.report.calls == 1


def test_every_rounding_stays(cache) -> None:
    def rounds(x):
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        narrow, back = nl.ndarray(x.shape, dtype=nl.bfloat16), nl.ndarray(x.shape, dtype=nl.float32)
        tile = nl.load(x)
        nisa.tensor_scalar(dst=narrow, data=tile, op0=nl.multiply, operand0=1.001)
        nisa.tensor_copy(dst=back, src=narrow)
        nisa.tensor_tensor(dst=narrow, data1=back, data2=tile, op=nl.add)
        nisa.tensor_copy(dst=back, src=narrow)
        stored(out, back)
        return out

    agree(rounds, np.random.default_rng(0).standard_normal((128, 33), np.float32))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint16, np.float16, BF16, ml_dtypes.float8_e5m2])
def test_casts_of_every_kind(cache, dtype) -> None:
    def casts(x):
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        back = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile, wide = nl.load(x), nl.ndarray(x.shape, dtype=nl.float32)
        nisa.tensor_copy(dst=wide, src=tile)
        stored(out, wide)
        nisa.tensor_scalar(dst=wide, data=wide, op0=nl.multiply, operand0=0.37)
        nisa.tensor_copy(dst=tile, src=wide)
        stored(back, tile)
        return out, back

    agree(casts, (np.random.default_rng(0).standard_normal((128, 9)) * 50).astype(dtype))


def test_a_matmul_that_cannot_be_traced_accumulates(cache) -> None:
    def multiplies(x, y):
        operands, scales = [], []
        for data in (x, y):
            packed = nl.ndarray((64, data.shape[1] // 4), dtype=nl.float8_e4m3fn_x4)
            scale = nl.ndarray(packed.shape, dtype=nl.uint8)
            nisa.quantize_mx(dst=packed, src=nl.load(data), dst_scale=scale)
            operands.append(packed)
            scales.append(scale)
        out = nl.ndarray((x.shape[1] // 4, y.shape[1] // 4), dtype=nl.float32, buffer=nl.shared_hbm)
        total = nl.ndarray(out.shape, dtype=nl.float32, buffer=nl.psum)
        for step in range(3):
            nisa.nc_matmul_mx(total, *operands, *scales, accumulate=step > 0)
        result = nl.ndarray(out.shape, dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=total)
        stored(out, result)
        return out

    x, y = whole_numbers(1, 64, 16, dtype=BF16), whole_numbers(2, 64, 32, dtype=BF16)
    eager, replayed = both_ways(multiplies, x, y, target="trn3")
    assert np.array_equal(eager[0], replayed[0])
    assert cache.report.rewritten == 1


def test_a_result_of_several_writes(cache) -> None:
    def write_thirds(x):
        out = nl.ndarray((x.shape[0], 3 * x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
        tile, n = nl.load(x), x.shape[1]
        whole_row = nl.ndarray((x.shape[0], 3 * n), dtype=x.dtype)
        for index, factor in enumerate((1.0, 2.0, 3.0)):
            nisa.tensor_scalar(
                dst=whole_row[:, index * n : (index + 1) * n], data=tile, op0=nl.multiply, operand0=factor
            )
        doubled = nl.ndarray(whole_row.shape, dtype=x.dtype)
        nisa.tensor_tensor(dst=doubled, data1=whole_row, data2=whole_row, op=nl.add)
        stored(out, doubled)
        return out

    agree(write_thirds, whole_numbers(1, 128, 5))


def test_arguments_that_share_memory_are_replayed_as_recorded() -> None:
    def moves(x, y):
        first = nl.load(x)
        nisa.tensor_scalar(dst=first, data=first, op0=nl.add, operand0=1.0)
        nisa.dma_copy(dst=y, src=first)
        again = nl.load(x)
        nisa.dma_copy(dst=y, src=again)
        return y

    for overlap in (0, 2):
        whole_array = np.arange(32, dtype=np.float32).reshape(8, 4)
        for mode in (simulate.Mode.replay, simulate.Mode.replay, simulate.Mode.eager):
            array = whole_array.copy()
            result = launch(moves, array[0:4], array[4 - overlap : 8 - overlap], mode=mode)
        expected = whole_array.copy()
        if overlap:
            expected[2:6] = whole_array[0:4] + 1
            expected[2:6] = expected[0:4].copy()
        else:
            expected[4:8] = whole_array[0:4]
        assert np.array_equal(array, expected)
        assert np.array_equal(result, expected[4 - overlap : 8 - overlap])


def test_a_rewritten_program_keeps_no_bytes_of_tiles(cache) -> None:
    a, b = whole_numbers(1, 256, 128), whole_numbers(2, 256, 128)
    for exact in (False, False, True, False, False):
        result = launch(tiled_product, a, b, exact=exact)
        assert np.array_equal(result, a.T @ b)
    (program,) = cache.programs
    tiles = {id(s): s for s, _, _ in program._tiles._placements}
    assert len(tiles) >= 6 and all(storage.array.size == 1 for storage in tiles.values())


@pytest.mark.parametrize("exact_between", [False, True])
def test_tiles_with_run_time_addresses_keep_memory_of_their_own(cache, exact_between) -> None:
    def picks(x, rows):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile, index = nl.load(x), nl.load(rows)
        inside = nl.ndarray(x.shape, dtype=x.dtype)
        nisa.tensor_copy(dst=inside, src=tile.ap([[4, 8], [1, 4]], scalar_offset=index, indirect_dim=1))
        nisa.dma_copy(dst=out, src=inside)
        return out

    for step, value in enumerate((0, 0, 0, 0)):
        x = whole_numbers(step, 8, 4)
        inputs = x, np.array([[value]], np.int32)
        assert np.array_equal(launch(picks, *inputs, exact=exact_between and step == 2), x)


def test_state_between_instructions_is_followed(cache) -> None:
    def sums(x):
        out = nl.ndarray((x.shape[0], 2), dtype=nl.float32, buffer=nl.shared_hbm)
        tile, squares = nl.load(x), nl.ndarray(x.shape, dtype=nl.float32)
        total = nl.ndarray((x.shape[0], 2), dtype=nl.float32)
        for column, command in enumerate((nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce)):
            nisa.activation(
                dst=squares,
                op=nl.square,
                data=tile,
                reduce_op=nl.add,
                reduce_res=total[:, column : column + 1],
                reduce_cmd=command,
            )
        stored(out, total)
        return out

    for rows in (127, 128, 3):
        agree(sums, whole_numbers(1, rows, 9))


def random_kernel(seed: int):
    """Return a kernel of drawn instructions over tiles and HBM tensors, which reads nothing before it is written."""

    def kernel(x, y, w):
        draw = np.random.default_rng(seed)
        n = x.shape[1]
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        scratch = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.private_hbm)
        tiles = [nl.load(x), nl.load(y), nl.ndarray(x.shape, dtype=nl.float32)]
        nisa.memset(dst=tiles[2], value=1.0)
        stored(out, tiles[0])
        stored(scratch, tiles[1])
        for _ in range(24):
            a, b = (tiles[i] for i in draw.integers(0, 3, 2))
            start = int(draw.integers(0, n - 1))
            end = int(draw.integers(start + 1, n + 1))
            where = slice(start, end)
            choice = draw.integers(0, 9)
            if choice == 0:
                nisa.tensor_copy(dst=a[:, where], src=b[:, where])
            elif choice == 1:
                nisa.tensor_tensor(dst=a[:, where], data1=a[:, where], data2=b[:, where], op=nl.subtract)
            elif choice == 2:
                nisa.tensor_scalar(dst=a[:, where], data=b[:, where], op0=nl.minimum, operand0=2.0)
            elif choice == 3:
                hbm = (x, y, scratch, out)[draw.integers(0, 4)]
                nisa.dma_copy(dst=a[:, where], src=hbm[:, where])
            elif choice == 4:
                hbm = (x, scratch, out)[draw.integers(0, 3)]
                nisa.dma_copy(dst=hbm[:, where], src=a[:, where])
            elif choice == 5:
                bank = nl.ndarray((n, x.shape[0]), dtype=nl.float32, buffer=nl.psum)
                nisa.nc_transpose(dst=bank, data=a)
                turned = nl.ndarray((n, x.shape[0]), dtype=nl.float32)
                nisa.tensor_copy(dst=turned, src=bank)
                back = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.psum)
                nisa.nc_transpose(dst=back, data=turned)
                nisa.tensor_copy(dst=b, src=back)
            elif choice == 6:
                total = nl.ndarray((x.shape[0], n), dtype=nl.float32, buffer=nl.psum)
                weights = nl.load(w)
                low = nl.ndarray(x.shape, dtype=nl.float32)
                nisa.tensor_scalar(
                    dst=low, data=a, op0=nl.minimum, operand0=2.0, op1=nl.maximum, operand1=-2.0
                )
                bank = nl.ndarray((n, x.shape[0]), dtype=nl.float32, buffer=nl.psum)
                nisa.nc_transpose(dst=bank, data=low)
                turned = nl.ndarray((n, x.shape[0]), dtype=nl.float32)
                nisa.tensor_copy(dst=turned, src=bank)
                for k in range(2):
                    half = slice(k * (n // 2), (k + 1) * (n // 2))
                    nisa.nc_matmul(dst=total, stationary=turned[half], moving=weights[half], accumulate=k > 0)
                nisa.tensor_copy(dst=b, src=total)
            elif choice == 7:
                column = nl.ndarray((x.shape[0], 1), dtype=nl.float32)
                nisa.tensor_reduce(dst=column, op=nl.maximum, data=a[:, where], axis=1)
                nisa.tensor_scalar(dst=b[:, where], data=a[:, where], op0=nl.subtract, operand0=column)
            else:
                narrow = nl.ndarray(x.shape, dtype=nl.bfloat16)
                nisa.tensor_copy(dst=narrow, src=a)
                nisa.tensor_copy(dst=b[:, where], src=narrow[:, where])
        nisa.tensor_tensor(dst=tiles[0], data1=tiles[0], data2=tiles[1], op=nl.add)
        nisa.tensor_tensor(dst=tiles[0], data1=tiles[0], data2=tiles[2], op=nl.add)
        stored(out, tiles[0])
        return out, scratch_of(scratch)

    return kernel


def scratch_of(scratch):
    """Copy an internal tensor, which a kernel may return."""
    copy = nl.ndarray(scratch.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=copy, src=scratch)
    return copy


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_give_eagers_bytes(cache, seed) -> None:
    """All numbers are whole and small, so that every order of summation is exact."""
    rows = (128, 127, 33)[seed % 3]
    arguments = (
        whole_numbers(seed, rows, 64),
        whole_numbers(seed + 1, rows, 64),
        whole_numbers(seed + 2, 64, 64, largest=1),
    )
    kernel = random_kernel(seed)
    agree(kernel, *arguments)
    assert cache.report.rewritten == 1
    launch(kernel, *[argument.copy() for argument in arguments], exact=True, verify=True)
    assert cache.report.verified == 1
