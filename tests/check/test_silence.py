"""Right kernels that look like wrong ones: detectors of values and of lost results are silent on them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from simulate.check import detect, gathered
from tests.check.launched import codes
from tests.faults.data import copied_out, ramp

INF = float("inf")


def test_an_infinity_that_a_reciprocal_absorbs_is_silent() -> None:
    """1 / (1 + exp(-x)) is right where exp(-x) overflows."""

    def kernel(x):
        tile = nl.load(x)
        nisa.activation(dst=tile, op=nl.exp, data=tile, scale=-1.0)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        nisa.reciprocal(dst=tile, data=tile)
        return copied_out(tile)

    assert codes(kernel, np.float32(10) * (ramp(4, 8) - 15)) == []


@pytest.mark.parametrize("fill", ["memset", "affine_select", "added"])
def test_a_softmax_masked_with_infinities_is_silent(fill: str) -> None:
    def kernel(x, mask):
        tile, scores = nl.load(x), nl.full((4, 8), -INF, dtype=nl.float32)
        if fill == "memset":
            keep = nl.ndarray((4, 8), dtype=nl.uint8)
            nisa.tensor_scalar(dst=keep, data=nl.load(mask), op0=nl.equal, operand0=0.0)
            nisa.tensor_copy_predicated(dst=scores, src=tile, predicate=keep)
        elif fill == "affine_select":
            nisa.affine_select(
                dst=scores,
                pattern=[[-1, 8]],
                channel_multiplier=1,
                on_true_tile=tile,
                on_false_value=-INF,
                cmp_op=nl.greater_equal,
            )
        else:
            nisa.tensor_tensor(dst=scores, data1=tile, data2=nl.load(mask), op=nl.add)
        most, total = nl.ndarray((4, 1), dtype=nl.float32), nl.ndarray((4, 1), dtype=nl.float32)
        nisa.tensor_reduce(dst=most, data=scores, op=nl.maximum, axis=1, negate=True)
        nisa.activation_reduce(
            dst=scores, op=nl.exp, data=scores, bias=most, reduce_op=nl.add, reduce_res=total
        )
        nisa.reciprocal(dst=total, data=total)
        nisa.tensor_scalar(dst=scores, data=scores, op0=nl.multiply, operand0=total)
        return copied_out(scores)

    mask = np.where(np.tri(4, 8), 0, -INF).astype(np.float32)
    reported = codes(kernel, ramp(4, 8), mask)
    assert reported == (["NKW-INPUT-UNUSED"] if fill == "affine_select" else [])


@pytest.mark.parametrize(("value", "expected"), [(np.nan, []), (INF, []), (0.0, ["NKW-NONFINITE"])])
def test_values_of_the_inputs_are_no_births(value: float, expected: list[str]) -> None:
    def kernel(x, y):
        tile = nl.load(x)
        nisa.reciprocal(dst=tile, data=tile)
        nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(y), op=nl.add)
        return copied_out(tile)

    x, y = ramp(4, 8) + 1, ramp(4, 8)
    if value == 0.0:
        x[1, 2] = 0
    else:
        y[1, 2] = value
    assert codes(kernel, x, y) == expected


def test_a_guarded_division_is_silent() -> None:
    """The reciprocal of 0 is replaced by 0 before it reaches an output."""

    def kernel(x):
        tile, inverse = nl.load(x), nl.zeros((4, 8), dtype=nl.float32)
        flags, quotient = nl.ndarray((4, 8), dtype=nl.uint8), nl.ndarray((4, 8), dtype=nl.float32)
        nisa.tensor_scalar(dst=flags, data=tile, op0=nl.not_equal, operand0=0.0)
        nisa.reciprocal(dst=quotient, data=tile)
        nisa.tensor_copy_predicated(dst=inverse, src=quotient, predicate=flags)
        return copied_out(inverse)

    assert codes(kernel, ramp(4, 8)) == []


def test_rows_that_were_never_filled_are_no_births() -> None:
    def kernel(x):
        tile, out = nl.ndarray((8, 4), dtype=nl.float32), nl.ndarray((8, 4), dtype=nl.float32)
        nisa.dma_copy(dst=tile[0:4], src=x)
        nisa.activation(dst=out, op=nl.exp, data=tile)
        nisa.reciprocal(dst=out, data=out)
        return copied_out(out[0:4])

    assert codes(kernel, ramp(4, 4)) == []


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_last_round_of_a_running_maximum_may_prepare_a_next_one(blocks: int) -> None:
    """A flash softmax copies its new maximum to the old one in each round, and clears it for each row block."""

    def kernel(x):
        out = nl.ndarray((8, 1), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        old, new, block_result = (nl.ndarray((4, 1), dtype=nl.float32) for _ in range(3))
        total, scale = nl.ndarray((4, 1), dtype=nl.float32), nl.ndarray((4, 1), dtype=nl.float32)
        width = 12 // blocks
        for rows in range(2):
            nisa.memset(old, value=-3e38)
            nisa.memset(total, value=0.0)
            for block in range(blocks):
                tile = nl.load(x[rows * 4 : rows * 4 + 4, block * width : block * width + width])
                nisa.tensor_reduce(dst=block_result, data=tile, op=nl.maximum, axis=1)
                nisa.tensor_tensor(dst=new, data1=old, data2=block_result, op=nl.maximum)
                nisa.tensor_tensor(dst=scale, data1=old, data2=new, op=nl.subtract)
                nisa.activation(dst=scale, op=nl.exp, data=scale)
                nisa.tensor_tensor(dst=total, data1=total, data2=scale, op=nl.multiply)
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=new)
                nisa.activation_reduce(
                    dst=tile, op=nl.exp, data=tile, reduce_op=nl.add, reduce_res=block_result
                )
                nisa.tensor_tensor(dst=total, data1=total, data2=block_result, op=nl.add)
                nisa.tensor_copy(dst=old, src=new)
            nisa.dma_copy(dst=out[rows * 4 : rows * 4 + 4], src=total)
        return out

    assert codes(kernel, ramp(8, 12)) == []


@pytest.mark.parametrize("patch", ["copy", "zeros", "equal"])
def test_a_store_over_a_copy_a_constant_or_equal_rows_is_silent(patch: str) -> None:
    def kernel(x, row):
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        tile = nl.load(x)
        if patch == "copy":
            nisa.dma_copy(dst=out, src=tile)
        elif patch == "zeros":
            nisa.dma_copy(dst=out, src=nl.zeros((8, 4), dtype=nl.float32))
        doubled = nl.ndarray((8, 4), dtype=nl.float32)
        nisa.tensor_tensor(dst=doubled, data1=tile, data2=tile, op=nl.add)
        if patch == "equal":
            nisa.dma_copy(dst=out[0:6], src=doubled[0:6])
            nisa.dma_copy(dst=out[4:8], src=doubled[4:8])
        else:
            nisa.dma_copy(dst=out[3:4], src=nl.load(row))
        return out, copied_out(doubled)

    assert codes(kernel, ramp(8, 4), ramp(1, 4) + 7) == (["NKW-INPUT-UNUSED"] if patch == "equal" else [])


def test_a_result_in_place_and_a_column_of_the_tile_do_not_collide() -> None:
    def kernel(x):
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=tile[:, 0:1])
        nisa.tensor_reduce(dst=tile[:, 0:1], data=tile, op=nl.add, axis=1)
        nisa.tensor_copy(dst=tile[:, 4:8], src=tile[:, 0:4])
        return copied_out(tile)

    assert codes(kernel, ramp(4, 8)) == []


@pytest.mark.parametrize(("top", "expected"), [(127.4, []), (127.5, ["NKW-INT-SATURATED"]), (-128.5, [])])
def test_saturation_begins_where_rounding_leaves_the_range(top: float, expected: list[str]) -> None:
    """127.5 rounds to 128, and -128.5 to -128: ties go to the even integer."""

    def kernel(x):
        small = nl.ndarray((4, 8), dtype=nl.int8)
        nisa.tensor_copy(dst=small, src=nl.load(x))
        return copied_out(small)

    assert codes(kernel, np.full((4, 8), top, np.float32)) == expected


@pytest.mark.parametrize(("value", "expected"), [(2**30 - 1, []), (2**30, ["NKW-INT-WRAPPED"])])
def test_a_sum_of_integers_wraps_above_31_bits(value: int, expected: list[str]) -> None:
    def kernel(x):
        tile = nl.load(x)
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        return copied_out(tile)

    assert codes(kernel, np.full((4, 8), value, np.int32)) == expected


@pytest.mark.parametrize(("rows", "expected"), [(0, ["NKW-STORE-LOST"]), (1, []), (4, [])])
def test_a_store_to_scratch_of_which_a_part_is_read_is_silent(rows: int, expected: list[str]) -> None:
    """Whole squares are stored in one DMA, and rows of them are read back; the next block stores over the rest."""

    def kernel(x):
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        scratch = nl.ndarray((6, 4), dtype=nl.float32, buffer=nl.private_hbm)
        read_back = nl.zeros((4, 4), dtype=nl.float32)
        for block in range(2):
            tile = nl.load(x)
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=float(block))
            nisa.dma_copy(dst=scratch[2 * block : 2 * block + 4], src=tile)
            if rows or block:
                nisa.dma_copy(dst=read_back[0 : rows or 4], src=scratch[0 : rows or 4])
        nisa.dma_copy(dst=out, src=read_back)
        return out

    reported = codes(kernel, ramp(4, 4))
    assert [code for code in reported if code == "NKW-STORE-LOST"] == expected


@pytest.mark.parametrize("method", ["dma_transpose", "nc_transpose", "nc_stream_shuffle"])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_nan_of_the_input_that_moves_to_another_place_is_no_birth(method: str, row: int) -> None:
    def kernel(x):
        tile = nl.load(x)
        result = nl.ndarray((32, 32), dtype=nl.float32)
        if method == "nc_stream_shuffle":
            nisa.nc_stream_shuffle(dst=result, src=tile, shuffle_mask=[*range(1, 32), 0])
        else:
            getattr(nisa, method)(dst=result, **{"src" if method == "dma_transpose" else "data": tile})
        return copied_out(result)

    x = ramp(32, 32)
    x[row, 5] = np.nan
    assert codes(kernel, x) == []


def test_a_shuffle_of_partitions_in_place_is_silent() -> None:
    def kernel(x):
        tile = nl.load(x)
        nisa.nc_stream_shuffle(dst=tile[32:64], src=tile[0:1], shuffle_mask=[0] * 32)
        nisa.nc_stream_shuffle(dst=tile[0:32], src=tile[0:1], shuffle_mask=[0] * 32)
        return copied_out(tile)

    assert codes(kernel, ramp(64, 4)) == []


@pytest.mark.parametrize("counts", [[1, 2, 4, 8], [1, 0, 4, 8]])
def test_integers_that_become_infinite_are_reported_and_end_no_check(counts: list[int]) -> None:
    """The infinity of 1 / 0 in a tile that came from integers is a finding, and no error of the check."""

    def kernel(x):
        tile = nl.ndarray((4, 1), dtype=nl.float32)
        nisa.tensor_copy(dst=tile, src=nl.load(x))
        nisa.reciprocal(dst=tile, data=tile)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        return copied_out(tile)

    expected = ["NKW-NONFINITE"] if 0 in counts else []
    assert codes(kernel, np.array(counts, np.int32).reshape(4, 1)) == expected


@pytest.mark.parametrize(
    ("unread", "expected"),
    [
        ("constant", []),
        ("number", []),
        ("copy", []),
        ("same source", []),
        ("update", []),
        ("product", ["NKW-RESULT-UNUSED"]),
    ],
)
def test_what_may_stay_unread(unread: str, expected: list[str]) -> None:
    """Variants and last rounds leave constants, single numbers, copies, second loads and updates in place unread."""

    def kernel(x):
        tile, other = nl.load(x), nl.ndarray((4, 8), dtype=nl.float32)
        if unread == "constant":
            nisa.tensor_scalar(dst=other, data=nl.zeros((4, 8), dtype=nl.float32), op0=nl.add, operand0=1.0)
        elif unread == "number":
            number = nl.ndarray((1, 1), dtype=nl.float32)
            nisa.tensor_scalar(dst=number, data=tile[0:1, 0:1], op0=nl.add, operand0=1.0)
        elif unread == "copy":
            nisa.tensor_copy(dst=nl.ndarray((4, 4), dtype=nl.float32), src=tile[:, 0:4])
        elif unread == "same source":
            nisa.dma_copy(dst=other, src=x)
        elif unread == "update":
            total = nl.zeros((4, 8), dtype=nl.float32)
            for _ in range(2):
                nisa.tensor_tensor(dst=other, data1=total, data2=tile, op=nl.subtract)
                nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
                nisa.tensor_tensor(dst=tile, data1=other, data2=tile, op=nl.add)
        else:
            nisa.tensor_tensor(dst=other, data1=tile, data2=tile, op=nl.multiply)
        return copied_out(tile)

    assert codes(kernel, ramp(4, 8)) == expected


def test_the_main_result_beside_a_sum_may_stay_unread() -> None:
    def kernel(x):
        squares, sums = nl.ndarray((4, 8), dtype=nl.float32), nl.ndarray((4, 1), dtype=nl.float32)
        nisa.activation_reduce(dst=squares, op=nl.square, data=nl.load(x), reduce_op=nl.add, reduce_res=sums)
        return copied_out(sums)

    assert codes(kernel, ramp(4, 8)) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_scratch_that_another_rank_reads_is_silent(ranks: int) -> None:
    """A line that stores to scratch memory counts as read where some rank reads what it stored there."""

    def kernel(x, reads):
        scratch = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.private_hbm)
        tile = nl.load(x)
        nisa.dma_copy(dst=scratch, src=tile)
        return copied_out(nl.load(scratch) if reads else tile)

    with gathered() as seen:
        simulate.World("trn2", ranks, 1).launch(
            kernel, [((ramp(4, 8), rank == 1), {}) for rank in range(ranks)]
        )
    ((launch, evidence),) = seen.launches
    assert [finding.code for finding in detect(launch, evidence)] == ["NKW-RESULT-UNUSED"] * (ranks == 1)


@pytest.mark.parametrize(
    ("terms", "expected"), [(31, []), (32, ["NKW-SUM-NARROW"]), (33, ["NKW-SUM-NARROW"])]
)
@pytest.mark.parametrize("is_residual", [False, True])
def test_a_long_sum_in_16_bits_that_nothing_reads_in_between(
    terms: int, expected: list[str], is_residual: bool
) -> None:
    """A residual is read between its additions and stays in 16 bits."""

    def kernel(x):
        total, tile = nl.zeros((4, 8), dtype=nl.bfloat16), nl.load(x)
        for _ in range(terms):
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
            if is_residual:
                nisa.activation(dst=tile, op=nl.copy, data=total, scale=0.5)
        return copied_out(total)

    assert codes(kernel, ramp(4, 8) % 2) == ([] if is_residual else expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_ring_of_the_last_blocks_is_no_stale_data(axis: int) -> None:
    """The tile is filled once; then each round replaces the oldest block, and all four are summed."""

    def kernel(x):
        out = nl.ndarray((3, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        ring = nl.ndarray((4, 4), dtype=nl.float32)
        nisa.dma_copy(dst=ring, src=x[0:4] if axis == 0 else x[0:4].permute((1, 0)))
        for block in range(3):
            sums = nl.ndarray((1, 4) if axis == 0 else (4, 1), dtype=nl.float32)
            if axis == 0:
                nisa.dma_copy(dst=ring[block : block + 1], src=x[4 + block : 5 + block])
                nisa.tensor_partition_reduce(dst=sums, op=nl.add, data=ring)
            else:
                nisa.dma_copy(dst=ring[:, block : block + 1], src=x[4 + block : 5 + block].permute((1, 0)))
                nisa.tensor_reduce(dst=sums, data=ring, op=nl.add, axis=1)
            target = out[block : block + 1]
            nisa.dma_copy(dst=target if axis == 0 else target.permute((1, 0)), src=sums)
        return out

    assert codes(kernel, ramp(7, 4)) == []
