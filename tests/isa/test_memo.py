"""Plans that are made again from those of calls that have equal layouts, against plans made anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from simulate.errors import RuleViolation
from simulate.hardware import hardware
from simulate.isa import book, memo
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.numerics import as_dtype
from tests.oracle.lockstep import run

CHIP = hardware("trn2")


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    before = dict(memo.CALLS)
    memo.CALLS.clear()
    yield
    memo.CALLS.clear()
    memo.CALLS.update(before)


def tile(
    shape: tuple[int, ...] = (128, 64), buffer: MemoryRegion = MemoryRegion.sbuf, dtype: str = "float32"
) -> NkiTensor:
    kind = as_dtype(dtype)
    return NkiTensor(shape, kind, Storage(shape, kind, buffer, ""))


def planned(instruction: str, /, *args: Any, **kwargs: Any) -> Any:
    return book.plan(book.INSTRUCTIONS[instruction], (CHIP,), args, kwargs)


def kept() -> int:
    return sum(call.kept for call in memo.CALLS.values())


def test_a_call_is_kept_the_second_time_it_is_made() -> None:
    counts = []
    for _ in range(3):
        planned("tensor_tensor", tile(), tile(), tile(), op=nl.add)
        counts.append(kept())
    assert counts == [0, 1, 1]


def test_a_plan_made_again_is_that_of_the_planner_with_the_new_tiles() -> None:
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
    assert kept() == 1
    memo.CALLS.clear()
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
    results = [each.compute(values[:, :64], values[:, 64:])[0] for each in (again, anew)]
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
    assert kept() == 1


@pytest.mark.parametrize("partitions", [127, 128])
def test_a_tile_of_another_layout_is_another_call(partitions: int) -> None:
    whole = tile((128, 64))
    for _ in range(3):
        planned("tensor_copy", tile((partitions, 64)), whole[0:partitions])
        with pytest.raises(RuleViolation, match=r"NKW-PARTITIONS-AGREE|NKW-PARTITION-START"):
            planned("tensor_copy", tile((partitions, 64)), whole[1:partitions])


def test_zero_is_told_from_minus_zero_and_a_number_from_a_truth() -> None:
    signs, words = [], []
    for _ in range(3):
        for value in (0.0, -0.0):
            signs.append(bool(np.signbit(planned("memset", tile((1, 1)), value).compute()[0]).all()))
        for value in (1, True, 1.0):
            words.append(planned("memset", tile((1, 1)), value).compute()[0].item())
    assert signs == [False, True] * 3
    assert words == [1.0] * 9
    assert kept() == 5


def test_a_chip_does_not_take_the_plan_of_another() -> None:
    costs = {}
    for _ in range(3):
        for target in ("trn1", "trn2", "trn3"):
            plan = book.plan_for("tensor_tensor", hardware(target), tile(), tile(), tile(), op=nl.add)
            assert costs.setdefault(target, plan.cost) == plan.cost
    assert costs["trn1"] != costs["trn2"]
    assert kept() == 3


def test_values_that_may_change_are_planned_anew() -> None:
    pattern = [[1, 64]]
    for last in (64, 32, 64):
        pattern[0][1] = last
        plan = planned("iota", tile((128, last), dtype="int32"), pattern)
        assert plan.compute()[0].shape[-1] == last
    assert kept() == 0


def test_what_is_kept_holds_no_bytes_of_a_launch() -> None:
    held = []
    for _ in range(3):
        operands = tile(), tile(), tile((128, 1))
        planned("activation", operands[0], nl.exp, operands[1], bias=operands[2])
        planned("tensor_scalar", operands[0], operands[1], nl.add, operands[2])
        held += [weakref.ref(operand.storage.array) for operand in operands]
        del operands
    gc.collect()
    assert kept() == 2
    assert [reference() for reference in held] == [None] * 9


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


def test_the_calls_that_are_known_do_not_grow_without_end() -> None:
    for number in range(memo.MOST_CALLS - 1):
        memo.met((number,), (), (), {})
    sizes = []
    for value in range(3):
        planned("memset", tile((1, 1)), value)
        sizes.append(len(memo.CALLS))
    assert sizes == [memo.MOST_CALLS, 1, 2]


def test_random_instructions_agree_with_the_second_opinion_when_their_plans_are_known() -> None:
    for _ in range(3):
        tally = run(150, 11)
    assert kept() > 60
    assert tally.instructions >= 150
