"""Lost results, stale data and void ordering requests, each with the healthy pattern beside it."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nkw.errors import RuleViolation
from tests.check.launched import codes
from tests.faults.data import copied_out

X = np.arange(48, dtype=np.float32).reshape(4, 12)


@pytest.mark.parametrize(
    ("values", "expected"), [("other", ["NKW-UNREAD"]), ("the same", []), ("read between", [])]
)
def test_a_load_over_an_unread_load_is_lost_only_if_it_differs(values, expected) -> None:
    def kernel(x):
        tile = nl.ndarray((4, 4), dtype=nl.float32)
        other = nl.zeros((4, 4), dtype=nl.float32)
        for block in range(3):
            first = 0 if values == "the same" else block * 4
            nisa.dma_copy(dst=tile, src=x[:, first : first + 4])
            if values == "read between":
                nisa.tensor_tensor(dst=other, data1=other, data2=tile, op=nl.add)
        nisa.tensor_tensor(dst=other, data1=other, data2=tile, op=nl.add)
        return copied_out(other)

    assert codes(kernel, X) == expected


@pytest.mark.parametrize(("skips", "expected"), [(False, ["NKW-UNREAD"]), (True, [])])
def test_a_gather_that_may_skip_rows_overwrites_nothing_for_sure(skips, expected) -> None:
    mode = nisa.oob_mode.skip if skips else nisa.oob_mode.error

    def kernel(x, numbers):
        tile = nl.zeros((4, 12), dtype=nl.float32)
        row_numbers = nl.ndarray((4, 2), dtype=nl.int32)
        nisa.dma_copy(dst=row_numbers, src=numbers)
        for column in range(2):
            rows = x.ap(pattern=[[12, 4], [1, 12]], vector_offset=row_numbers[:, column : column + 1])
            nisa.dma_copy(dst=tile, src=rows, oob_mode=mode)
        return copied_out(tile)

    first = np.arange(4, dtype=np.int32)
    assert codes(kernel, X, np.stack([first, first[::-1]], axis=1).copy()) == expected


def test_interleaved_columns_do_not_overwrite_each_other() -> None:
    def kernel(x):
        tile = nl.ndarray((4, 6, 2), dtype=nl.float32)
        for half in range(2):
            nisa.dma_copy(dst=tile[:, :, half], src=x[:, half * 6 : half * 6 + 6])
        return copied_out(tile)

    assert codes(kernel, X) == []


@pytest.mark.parametrize(("read", "expected"), [(4, []), (5, ["NKW-STALE"]), (6, ["NKW-STALE"])])
def test_columns_beyond_the_last_load_are_stale(read, expected) -> None:
    def kernel(x):
        tile = nl.ndarray((4, 6), dtype=nl.float32)
        sums = nl.ndarray((4, 2), dtype=nl.float32)
        for block, columns in ((0, 6), (1, 4)):
            nisa.dma_copy(dst=tile[:, 0:columns], src=x[:, block * 6 : block * 6 + columns])
            block_sum = sums[:, block : block + 1]
            nisa.tensor_reduce(dst=block_sum, op=nl.add, data=tile[:, 0 : (read if block else 6)], axis=1)
        return copied_out(sums)

    assert codes(kernel, X) == expected


@pytest.mark.parametrize("cleared", [True, False])
def test_cleared_columns_and_unused_ones_are_not_stale(cleared) -> None:
    def kernel(x):
        tile = nl.ndarray((4, 6), dtype=nl.float32)
        out = nl.ndarray((4, 10), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        for block, columns in ((0, 6), (1, 4)):
            if cleared:
                nisa.memset(dst=tile, value=0.0)
            nisa.dma_copy(dst=tile[:, 0:columns], src=x[:, block * 6 : block * 6 + columns])
            result = nl.ndarray((4, 6), dtype=nl.float32)
            if cleared:
                nisa.tensor_tensor_scan(
                    dst=result, data0=tile, data1=tile, initial=0.0, op0=nl.add, op1=nl.add
                )
            else:
                nisa.tensor_scalar(
                    dst=result, data=tile, op0=nl.add, operand0=1.0
                )  # all columns, two for nothing
            nisa.dma_copy(dst=out[:, block * 6 : block * 6 + columns], src=result[:, 0:columns])
        return out

    assert codes(kernel, X) == []


@pytest.mark.parametrize(
    ("accumulates", "last_read", "expected"),
    [
        ((False, True, True), 2, []),
        ((None, None, None), 2, []),
        ((False, False, True), 2, ["NKW-PSUM-UNREAD"]),
        ((False, True, True), 1, ["NKW-PSUM-UNREAD"]),
        ((None, None, None), 1, ["NKW-PSUM-REOPENED"]),
    ],
)
def test_every_product_reaches_a_read(accumulates, last_read, expected) -> None:
    def kernel(x):
        tile = nl.load(x)
        sums = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
        result = nl.ndarray((4, 4), dtype=nl.float32)
        for k in range(3):
            block = tile[:, k * 4 : k * 4 + 4]
            nisa.nc_matmul(dst=sums, stationary=block, moving=block, accumulate=accumulates[k])
            if k == last_read:
                nisa.tensor_copy(dst=result, src=sums)
        return copied_out(result)

    assert codes(kernel, X) == expected


@pytest.mark.parametrize(
    ("producer", "expected"),
    [("before", []), ("same iteration", []), ("other iteration", ["NKW-ORDER-LOOP"])],
)
def test_requests_stay_inside_an_iteration(producer, expected) -> None:
    def kernel(x):
        tile = nl.load(x)
        handles = [nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)]

        def body(i):
            if producer == "same iteration":
                handles.append(nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0))
            last = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
            last.depends_on(handles[-1])
            if producer == "other iteration":
                handles.append(last)

        nl.fori_loop(0, 3, body)
        return copied_out(tile)

    assert codes(kernel, X) == expected


def test_an_instruction_cannot_wait_for_itself() -> None:
    def kernel(x):
        tile = nl.load(x)
        added = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        added.depends_on(added)
        return copied_out(tile)

    assert codes(kernel, X) == ["NKW-ORDER-LATER"]


@pytest.mark.parametrize("producer", [None, "double", [1, 2]])
def test_refuses_producers_that_are_no_instructions(producer) -> None:
    def kernel(x):
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0).depends_on(producer)
        return copied_out(tile)

    with pytest.raises(RuleViolation, match="NKW-ORDER-HANDLE"):
        simulate.World("trn2").launch(kernel, [((X,), {})])


@pytest.mark.parametrize("loop", ["fori_loop", "while_loop", "dynamic_range"])
def test_a_block_may_stand_inside_a_device_loop_and_not_around_it(loop) -> None:
    def run(body):
        if loop == "fori_loop":
            nl.fori_loop(0, 2, body)
        elif loop == "while_loop":
            done = nisa.register_alloc(0)
            nl.while_loop(nisa.register_alloc(1), lambda i: [body(i), done][1])
        else:
            for i in nl.dynamic_range(2):
                body(i)

    def kernel(x, around):
        tile = nl.load(x)

        def body(i):
            if around:
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
                return
            with nl.no_reorder():
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)

        if around:
            with nl.no_reorder():
                run(body)
        else:
            run(body)
        return copied_out(tile)

    assert codes(kernel, X, False) == []
    with pytest.raises(RuleViolation, match="NKW-ORDER-BLOCK"):
        simulate.World("trn2").launch(kernel, [((X, True), {})])


@pytest.mark.parametrize(
    ("loop", "outside", "expected"),
    [
        ("affine_range", True, ["NKW-AFFINE-CARRIED"]),
        ("affine_range", False, []),
        ("sequential_range", True, []),
        ("static_range", True, []),
    ],
)
def test_a_tile_from_outside_is_not_filled_in_every_affine_iteration(loop, outside, expected) -> None:
    def kernel(x):
        out = nl.ndarray((4, 12), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        shared = nl.zeros((4, 4), dtype=nl.float32)
        for block in getattr(nl, loop)(3):
            tile = shared if outside else nl.ndarray((4, 4), dtype=nl.float32)
            nisa.dma_copy(dst=tile, src=x[:, block * 4 : block * 4 + 4])
            nisa.dma_copy(dst=out[:, block * 4 : block * 4 + 4], src=tile)
        nisa.tensor_copy(dst=nl.ndarray((4, 4), dtype=nl.float32), src=shared)
        return out

    assert codes(kernel, X) == expected


def test_sums_in_place_and_parts_of_a_tile_are_no_loop_carried_dependence() -> None:
    def kernel(x):
        total = nl.zeros((4, 4), dtype=nl.float32)
        columns_of_blocks = nl.ndarray((4, 12), dtype=nl.float32)
        for block in nl.affine_range(3):
            columns = slice(block * 4, block * 4 + 4)
            nisa.dma_copy(dst=columns_of_blocks[:, columns], src=x[:, columns])
            nisa.tensor_tensor(dst=total, data1=total, data2=columns_of_blocks[:, columns], op=nl.add)
        return copied_out(total)

    assert codes(kernel, X) == []


def test_affine_range_is_a_range_also_outside_of_kernels() -> None:
    assert list(nl.affine_range(2, 8, 3)) == [2, 5]
    assert (len(nl.affine_range(4)), nl.affine_range(4)[-1]) == (4, 3)
