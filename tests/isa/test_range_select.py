"""range_select: the selection, its maximum, and what it refuses."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, sample, through_float32
from tests.isa.tiles import PARTITIONS, Fresh, execute, execute_all, plan, refuses, tile, twins

NAME = "range_select"
CMD = nisa.reduce_cmd
MINIMUM = -3.4028234663852886e38
COMPARE = {
    nl.equal: operator.eq,
    nl.less: operator.lt,
    nl.less_equal: operator.le,
    nl.greater: operator.gt,
    nl.greater_equal: operator.ge,
}


def call(**changes):
    base = {
        "dst": tile((8, 6)),
        "on_true_tile": tile((8, 6)),
        "comp_op0": nl.greater_equal,
        "comp_op1": nl.less,
    }
    return {**base, "bound0": tile((8, 1)), "bound1": tile((8, 1)), **changes}


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("op", COMPARE, ids=lambda op: op.__name__)
def test_accepts_documented_comparisons(target, op):
    plan(target, NAME, **call(comp_op0=op, comp_op1=op))


def test_refuses_the_first_generation():
    refuses("NKW-RANGE-SELECT-CHIP", "trn1", NAME, **call())


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-RANGE-SELECT-COMPARE", {"comp_op0": nl.not_equal}, {"comp_op0": nl.equal}),
    ("NKW-RANGE-SELECT-COMPARE", {"comp_op1": nl.add}, {"comp_op1": nl.less_equal}),
    (
        "NKW-DTYPE-ALLOWED",
        {"on_true_tile": tile((8, 6), "int32")},
        {"on_true_tile": tile((8, 6), "float8_e5m2")},
    ),
    ("NKW-DTYPE-ALLOWED", {"bound0": tile((8, 1), "bfloat16")}, {"bound0": tile((8, 1))}),
    ("NKW-OPERAND", {"bound1": 3.0}, {}),
    ("NKW-VECTOR-OPERAND", {"bound1": tile((8, 2))}, {}),
    ("NKW-ELEMENTS-AGREE", {"dst": tile((8, 5))}, {"dst": tile((8, 2, 3))}),
    ("NKW-RANGE-SELECT-POSITION", {"range_start": 2**24 - 5}, {"range_start": 2**24 - 6}),
    ("NKW-RANGE-SELECT-POSITION", {"range_start": -(2**24)}, {"range_start": 1 - 2**24}),
    ("NKW-RANGE-SELECT-POSITION", {"range_start": 1.0}, {"range_start": 1}),
    ("NKW-RANGE-SELECT-FILL", {"on_false_value": 0.0}, {"on_false_value": MINIMUM}),
    ("NKW-RANGE-SELECT-FILL", {"on_false_value": float("-inf")}, {"on_false_value": -3.4028235e38}),
    ("NKW-VECTOR-REDUCE-OPERATOR", {"reduce_op": nl.add}, {"reduce_op": nl.max}),
    ("NKW-VECTOR-REDUCE-CMD", {"reduce_cmd": CMD.load_reduce}, {"reduce_cmd": CMD.idle}),
    ("NKW-VECTOR-REDUCE-CMD", {"reduce_cmd": CMD.reset}, {"reduce_cmd": CMD.reduce}),
    ("NKW-VECTOR-OPERAND", {"reduce_res": tile((8, 2))}, {"reduce_res": tile((8, 1))}),
)


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize(
    ("op0", "op1"), [(nl.greater_equal, nl.less), (nl.equal, nl.less_equal), (nl.greater, nl.greater)]
)
def test_selects_by_position(partitions, op0, op1):
    data = sample("bfloat16", (partitions, 3, 4))
    bounds = {"bound0": np.arange(partitions) % 14 + 5.0, "bound1": np.arange(partitions) % 9 + 8.5}
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((partitions, 12)),
        on_true_tile=data,
        comp_op0=op0,
        comp_op1=op1,
        **{key: value[:, None].astype(np.float32) for key, value in bounds.items()},
        range_start=5,
        reduce_res=Fresh((partitions, 1)),
    )
    expected = np.full((partitions, 12), MINIMUM)
    for p in range(partitions):
        for i in range(12):
            if COMPARE[op0](5 + i, bounds["bound0"][p]) and COMPARE[op1](5 + i, bounds["bound1"][p]):
                expected[p, i] = float(data[p, i // 4, i % 4])
    assert_same(result["dst"], expected)
    assert_same(result["reduce_res"], expected.max(1, keepdims=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_the_fill_becomes_minus_infinity_in_narrow_dtypes(dtype):
    data = sample("float32", (2, 4))
    column = np.zeros((2, 1), np.float32)
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((2, 4), dtype),
        on_true_tile=data,
        comp_op0=nl.less,
        comp_op1=nl.less,
        bound0=column,
        bound1=column,
        reduce_res=Fresh((2, 1)),
    )
    assert np.isneginf(result["dst"].astype(np.float32)).all()
    assert_same(result["reduce_res"], np.full((2, 1), MINIMUM))
    assert_same(through_float32(np.full((2, 4), MINIMUM), dtype), result["dst"].astype(np.float64))


def test_the_maximum_runs_over_several_instructions_and_is_undefined_after_idle():
    low, high = np.zeros((2, 1), np.float32), np.full((2, 1), 100, np.float32)
    first, second = sample("float32", (2, 5)), sample("float32", (2, 5), "second") - 3
    common = {
        "dst": Fresh((2, 5)),
        "comp_op0": nl.greater_equal,
        "comp_op1": nl.less,
        "bound0": low,
        "bound1": high,
    }
    reset = (NAME, {**common, "on_true_tile": first})
    again = (NAME, {**common, "on_true_tile": first, "reduce_cmd": CMD.reduce, "reduce_res": Fresh((2, 1))})
    assert_same(execute_all("trn2", [reset, again])["reduce_res"], first.astype(float).max(1, keepdims=True))
    idle = (NAME, {**common, "on_true_tile": second, "reduce_cmd": CMD.idle})
    assert np.isnan(execute_all("trn2", [reset, idle, again])["reduce_res"]).all()
