"""Templates of calls with operands of equal layouts, against plans made anew."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nkw.errors import RuleViolation
from simulate.hardware import Hardware, hardware
from simulate.isa import book
from simulate.isa.memo import Memo
from simulate.isa.plan import Plan
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.numerics import as_dtype
from tests.oracle.lockstep import run

CHIP = hardware("trn2")


@pytest.fixture(autouse=True)
def known() -> Memo:
    """Clear the memo of planned calls, so that each test sees its own calls only, and return the memo."""
    _known.calls.clear()
    return _known


_known = Memo()


def tile(
    shape: tuple[int, ...] = (128, 64), buffer: MemoryRegion = MemoryRegion.sbuf, dtype: str = "float32"
) -> NkiTensor:
    element = as_dtype(dtype)
    return NkiTensor(shape, element, Storage(shape, element, buffer, ""))


def planned(instruction: str, /, *args: Any, chip: Hardware = CHIP, **kwargs: Any) -> Plan:
    template, reads, writes = book.bind(book.INSTRUCTIONS[instruction], (chip,), args, kwargs, _known)
    return template.plan.over(reads, writes)


def templates() -> int:
    return sum(call.template is not None for call in _known.calls.values())


def test_equal_calls_share_a_template() -> None:
    counts = []
    for _ in range(3):
        planned("tensor_tensor", tile(), tile(), tile(), op=nl.add)
        counts.append(templates())
    assert counts == [1, 1, 1]


def test_a_template_over_new_tiles_is_the_plan_of_the_planner() -> None:
    for _ in range(2):
        planned(
            "nc_matmul",
            tile((64, 512), MemoryRegion.psum),
            tile(),
            tile((128, 512)),
            accumulate=True,
            name="x",
        )
    dst, stationary, moving = tile((64, 512), MemoryRegion.psum), tile(), tile((128, 512))
    again = planned("nc_matmul", dst, stationary, moving, accumulate=True, name="x")
    assert templates() == 1
    _known.calls.clear()
    anew = planned("nc_matmul", dst, stationary, moving, accumulate=True, name="x")
    for field in (
        "engine",
        "domain",
        "cost",
        "name",
        "accumulate",
        "state",
        "trigger",
        "propagate",
        "registers",
    ):
        assert getattr(again, field) == getattr(anew, field), field
    assert again.reads == anew.reads == (stationary, moving)
    assert again.writes == anew.writes == (dst,)
    values = np.random.default_rng(0).standard_normal((128, 576), np.float32)
    results = [plan.compute(values[:, :64], values[:, 64:])[0] for plan in (again, anew)]
    assert np.array_equal(*results)


def test_a_tile_that_is_read_twice_is_told_from_two_of_one_layout() -> None:
    for _ in range(3):
        one = tile()
        plan = planned("tensor_tensor", one, one, one, op=nl.multiply)
        assert plan.reads == (one, one) and plan.writes == (one,)
        dst, first, second = tile(), tile(), tile()
        plan = planned("tensor_tensor", dst, first, second, op=nl.multiply)
        assert plan.reads == (first, second) and plan.writes == (dst,)
        plan = planned("tensor_tensor", dst, first, dst, op=nl.multiply)
        assert plan.reads == (first, dst) and plan.writes == (dst,)


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ({"accumulate": True}, {"accumulate": 1}),
        ({"accumulate": False}, {"accumulate": 0}),
        ({"accumulate": False}, {"accumulate": 0.0}),
        (
            {"tile_position": (0, 0), "tile_size": (128, 64)},
            {"tile_position": (0, 0), "tile_size": (128, 65)},
        ),
        ({"perf_mode": "none"}, {"perf_mode": "double_row"}),
    ],
)
def test_a_refused_call_is_refused_however_often_one_like_it_passed(accepted, refused) -> None:
    for _ in range(3):
        operands = tile((64, 512), MemoryRegion.psum), tile(), tile((128, 512))
        planned("nc_matmul", *operands, **accepted)
        with pytest.raises(RuleViolation):
            planned("nc_matmul", *operands, **refused)
    assert templates() == 1


@pytest.mark.parametrize("partitions", [127, 128])
def test_a_tile_of_another_layout_is_another_call(partitions: int) -> None:
    full_tile = tile((128, 64))
    for _ in range(3):
        planned("tensor_copy", tile((partitions, 64)), full_tile[0:partitions])
        with pytest.raises(RuleViolation, match=r"NKW-PARTITIONS-AGREE|NKW-PARTITION-START"):
            planned("tensor_copy", tile((partitions, 64)), full_tile[1:partitions])


def test_zero_is_told_from_minus_zero_and_a_number_from_a_truth() -> None:
    signs, words = [], []
    for _ in range(3):
        for value in (0.0, -0.0):
            signs.append(bool(np.signbit(planned("memset", tile((1, 1)), value).compute()[0]).all()))
        for value in (1, True, 1.0):
            words.append(planned("memset", tile((1, 1)), value).compute()[0].item())
    assert signs == [False, True] * 3
    assert words == [1.0] * 9
    assert templates() == 5


def test_a_chip_does_not_take_the_plan_of_another() -> None:
    costs = {}
    for _ in range(3):
        for target in ("trn1", "trn2", "trn3"):
            plan = planned("tensor_tensor", tile(), tile(), tile(), op=nl.add, chip=hardware(target))
            assert costs.setdefault(target, plan.cost) == plan.cost
    assert costs["trn1"] != costs["trn2"]
    assert templates() == 3


def test_values_that_may_change_are_planned_anew() -> None:
    pattern = [[1, 64]]
    for last in (64, 32, 64):
        pattern[0][1] = last
        plan = planned("iota", tile((128, last), dtype="int32"), pattern)
        assert plan.compute()[0].shape[-1] == last
    assert templates() == 0


@pytest.mark.slow
def test_a_template_holds_no_bytes_of_a_launch() -> None:
    references = []
    for _ in range(3):
        operands = tile(), tile(), tile((128, 1))
        planned("activation", operands[0], nl.exp, operands[1], bias=operands[2])
        planned("tensor_scalar", operands[0], operands[1], nl.add, operands[2])
        references += [weakref.ref(operand.storage.array) for operand in operands]
        del operands
    gc.collect()
    assert templates() == 2
    assert [reference() for reference in references] == [None] * 9


def test_functions_of_operands_that_are_columns_take_the_new_ones() -> None:
    def scaled(x, columns):
        data, column = nl.load(x), nl.load(columns)
        out = nl.ndarray((3, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in range(3):
            result = nl.ndarray(x.shape, dtype=x.dtype)
            nisa.activation(
                dst=result, op=nl.copy, data=data, scale=column[:, i : i + 1], bias=column[:, 3 + i : 4 + i]
            )
            nisa.dma_copy(dst=out[i], src=result)
        return out

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    columns = np.arange(12, dtype=np.float32).reshape(2, 6)
    for _ in range(2):
        (out,) = simulate.launch(scaled, [((x, columns), {})]).outputs
        for i in range(3):
            assert np.array_equal(out[i], x * columns[:, i : i + 1] + columns[:, 3 + i : 4 + i])


def test_the_known_calls_do_not_grow_without_end() -> None:
    few = Memo(capacity=3)
    sizes = []
    for value in range(5):
        book.bind(book.INSTRUCTIONS["memset"], (CHIP,), (tile((1, 1)), value), {}, few)
        sizes.append(len(few.calls))
    assert sizes == [1, 2, 3, 1, 2]


def test_a_run_time_address_is_part_of_a_template() -> None:
    for width in (32, 64, 32):
        index, data = tile((128, 1), dtype="int32"), tile((256, width), MemoryRegion.private_hbm)
        plan = planned(
            "dma_copy", tile((128, width)), data.ap([[width, 128], [1, width]], vector_offset=index)
        )
        (source,) = plan.reads
        assert source.storage is data.storage and source.dynamic.index is index
    assert templates() == 2


def test_views_of_one_tensor_are_told_from_views_of_two() -> None:
    def rows(table: NkiTensor, index: NkiTensor) -> NkiTensor:
        return table.ap([[6, 8], [1, 6]], vector_offset=index)

    for _ in range(3):
        table, other = (tile((20, 6), MemoryRegion.private_hbm) for _ in range(2))
        index, data = tile((8, 1), dtype="int32"), tile((8, 6))
        plan = planned("dma_compute", rows(table, index), [rows(table, index), data], reduce_op=nl.add)
        assert plan.writes[0].storage is table.storage and data in plan.reads
        for refused in (rows(other, index), rows(table, tile((8, 1), dtype="int32"))):
            with pytest.raises(RuleViolation, match="DMA-COMPUTE-ROWS"):
                planned("dma_compute", rows(table, index), [refused, data], reduce_op=nl.add)
    assert templates() == 1


@pytest.mark.slow
def test_random_instructions_agree_with_the_second_opinion_when_their_plans_are_known() -> None:
    for _ in range(3):
        tally = run(150, 11)
    assert len(book.MEMO.calls) > 60
    assert tally.instructions >= 150
