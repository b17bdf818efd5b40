"""tensor_scalar_reduce: results, reductions through the registers, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, sample, through_float32
from tests.isa.tiles import PARTITIONS, TARGETS, Fresh, execute, execute_all, plan, refuses, tile

NAME = "tensor_scalar_reduce"
CMD = nisa.reduce_cmd


def call(**changes):
    base = {"dst": tile((8, 6)), "data": tile((8, 6)), "op0": nl.add, "operand0": 1.0, "reduce_op": nl.add}
    return {**base, "reduce_res": tile((8, 1)), **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("reduce_op", [nl.add, nl.multiply, nl.maximum, nl.minimum, nl.max, nl.min])
def test_accepts_documented_reductions_on_every_chip(target, reduce_op):
    plan(target, NAME, **call(reduce_op=reduce_op))


@pytest.mark.parametrize(
    ("code", "target", "bad", "good"),
    [
        ("NKW-ELEMENTS-AGREE", "trn1", {"data": tile((8, 7))}, {"data": tile((8, 3, 2))}),
        ("NKW-ARITHMETIC-OPERATOR", "trn1", {"op0": nl.bitwise_and}, {"op0": nl.logical_and}),
        (
            "NKW-OPERATOR-CHIP",
            "trn2",
            {"op0": nl.square, "operand0": None},
            {"op0": nl.abs, "operand0": None},
        ),
        ("NKW-UNARY-OPERAND", "trn3", {"op0": nl.square}, {"op0": nl.square, "operand0": 0}),
        ("NKW-NUMBER", "trn1", {"operand0": None}, {"operand0": 2}),
        ("NKW-DTYPE-ALLOWED", "trn1", {"operand0": tile((8, 1), "bfloat16")}, {"operand0": tile((8, 1))}),
        ("NKW-VECTOR-REDUCE-OPERATOR", "trn1", {"reduce_op": nl.subtract}, {"reduce_op": nl.multiply}),
        ("NKW-VECTOR-REDUCE-CMD", "trn1", {"reduce_cmd": CMD.idle}, {"reduce_cmd": CMD.reduce}),
        (
            "NKW-VECTOR-REDUCE-INIT",
            "trn1",
            {"reduce_cmd": CMD.load_reduce},
            {"reduce_cmd": CMD.load_reduce, "reduce_init": tile((8, 1))},
        ),
        ("NKW-VECTOR-REDUCE-INIT", "trn1", {"reduce_init": 0.0}, {"reduce_init": None}),
        ("NKW-VECTOR-OPERAND", "trn1", {"reduce_res": tile((8, 2))}, {"reduce_res": None}),
        ("NKW-SCALAR-REDUCE-REVERSE", "trn1", {"reverse0": True}, {"reverse0": False}),
    ],
)
def test_refuses_and_accepts_the_twin(code, target, bad, good):
    plan(target, NAME, **call(**good))
    refuses(code, target, NAME, **call(**bad))


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_reduces_the_results_of_each_partition(partitions):
    data = np.round(sample("float32", (partitions, 3, 5)))
    operand = np.round(sample("float32", (partitions, 1)))
    for reduce_op, fold in ((nl.add, sum), (nl.maximum, max), (nl.minimum, min)):
        result = execute(
            "trn2",
            NAME,
            dst=Fresh((partitions, 15)),
            data=data,
            op0=nl.subtract,
            operand0=operand,
            reduce_op=reduce_op,
            reduce_res=Fresh((partitions, 1)),
        )
        expected = data.reshape(partitions, 15).astype(float) - operand
        assert_same(result["dst"], expected)
        assert_same(result["reduce_res"], [[fold(row)] for row in expected.tolist()])


def test_a_maximum_of_negative_results_is_negative():
    data = -np.ones((2, 4), np.float32)
    arguments = {
        "dst": Fresh((2, 4)),
        "data": data,
        "op0": nl.multiply,
        "operand0": 2.0,
        "reduce_op": nl.maximum,
    }
    assert (execute("trn2", NAME, **arguments, reduce_res=Fresh((2, 1)))["reduce_res"] == -2).all()


def test_the_sum_is_of_float32_results_before_they_are_rounded_to_dst():
    data = np.full((1, 4), 1 + 2.0**-12, np.float32)
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((1, 4), "bfloat16"),
        data=data,
        op0=nl.multiply,
        operand0=1.0,
        reduce_op=nl.add,
        reduce_res=Fresh((1, 1)),
    )
    assert result["dst"].tolist() == [[1, 1, 1, 1]]
    assert result["reduce_res"] == 4 + 2.0**-10


def test_registers_carry_over_load_and_negate():
    data = np.arange(8, dtype=np.float32).reshape(2, 4)
    common = {"dst": Fresh((2, 4)), "data": data, "op0": nl.add, "operand0": 0.0, "reduce_op": nl.add}
    init = np.array([[10.0], [20.0]], np.float32)
    sums = data.astype(float).sum(1, keepdims=True)
    load = (NAME, {**common, "reduce_cmd": CMD.load_reduce, "reduce_init": init})
    read = (
        NAME,
        {**common, "reduce_cmd": CMD.reduce, "reduce_res": Fresh((2, 1)), "reduce_res_negate": True},
    )
    assert_same(execute_all("trn2", [load, read])["reduce_res"], -(init + 2 * sums))
    again = (NAME, {**common, "reduce_cmd": CMD.reduce, "reduce_res": Fresh((2, 1))})
    assert_same(execute_all("trn2", [load, read, again])["reduce_res"], init + 3 * sums)


def test_reduce_without_a_start_is_refused():
    arguments = {"dst": Fresh((1, 2)), "data": np.ones((1, 2), np.float32), "op0": nl.add, "operand0": 0.0}
    summed = {**arguments, "reduce_op": nl.maximum, "reduce_res": Fresh((1, 1))}
    with pytest.raises(RuleViolation, match="NKW-REGISTERS-UNSET"):
        execute("trn2", NAME, **summed, reduce_cmd=CMD.reduce)
    assert execute("trn2", NAME, **summed, reduce_cmd=CMD.reset_reduce)["reduce_res"].tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", ["bfloat16", "int16", "uint8"])
def test_dst_and_reduce_res_are_rounded_once(dtype):
    data = sample("float32", (4, 9))
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((4, 9), dtype),
        data=data,
        op0=nl.multiply,
        operand0=3.0,
        reduce_op=nl.maximum,
        reduce_res=Fresh((4, 1), dtype),
    )
    exact = through_float32(data.astype(np.float64) * 3, "float32")
    assert_same(result["dst"], through_float32(exact, dtype))
    assert_same(result["reduce_res"], through_float32(exact.max(1, keepdims=True), dtype))


def test_reading_the_registers_out_costs_extra():
    with_result, without = (plan("trn2", NAME, **call(reduce_res=r)).cost for r in (tile((8, 1)), None))
    assert (
        with_result.latency_cycles - without.latency_cycles == hardware("trn2").vector_accumulate_extra_cycles
    )
