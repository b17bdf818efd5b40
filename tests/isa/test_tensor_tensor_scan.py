"""tensor_tensor_scan: the recurrence against scalar Python, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.nki import language as nl
from tests.isa.reference import assert_same, sample, through_float32
from tests.isa.tiles import PARTITIONS, PSUM, TARGETS, Fresh, Given, execute, plan, tile, twins

NAME = "tensor_tensor_scan"
SCALAR = {
    nl.add: lambda a, b: np.float32(a + b),
    nl.subtract: lambda a, b: np.float32(a - b),
    nl.multiply: lambda a, b: np.float32(a * b),
    nl.maximum: max,
    nl.greater: lambda a, b: np.float32(a > b),
}


def call(**changes):
    base = {"dst": tile((8, 6)), "data0": tile((8, 6)), "data1": tile((8, 6)), "initial": 0.0}
    return {**base, "op0": nl.multiply, "op1": nl.add, **changes}


@pytest.mark.parametrize("target", TARGETS)
def test_accepts_every_chip(target):
    assert plan(target, NAME, **call()).engine.name == "vector"


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-ELEMENTS-AGREE", {"data1": tile((8, 7))}, {"data1": tile((8, 3, 2))}),
    ("NKW-ELEMENTS-AGREE", {"dst": tile((8, 5))}, {"dst": tile((8, 2, 3))}),
    ("NKW-PARTITIONS-AGREE", {"data1": tile((7, 6))}, {}),
    (
        "NKW-ONE-PSUM-INPUT",
        {"data0": tile((8, 6), buffer=PSUM), "data1": tile((8, 6), buffer=PSUM)},
        {"data0": tile((8, 6), buffer=PSUM), "dst": tile((8, 6), buffer=PSUM)},
    ),
    ("NKW-VECTOR-OPERAND", {"initial": tile((8, 2))}, {"initial": tile((8, 1), "bfloat16")}),
    ("NKW-NUMBER", {"initial": None}, {"initial": 1}),
    ("NKW-ARITHMETIC-OPERATOR", {"op0": nl.bitwise_or}, {"op0": nl.logical_or}),
    ("NKW-ARITHMETIC-OPERATOR", {"op1": nl.power}, {"op1": nl.maximum}),
    ("NKW-DEVICE-OPERATOR", {"op1": nl.abs}, {"op1": nl.subtract}),
    ("NKW-OPERATOR-CHIP", {"op0": nl.abs_max}, {"op0": nl.maximum}),
)


def reference(a, b, initial, op0, op1, reverse0, reverse1):
    result = np.empty(a.shape, np.float32)
    for p in range(a.shape[0]):
        state = np.float32(initial if np.isscalar(initial) else initial[p, 0])
        for f in range(a.shape[1]):
            x, y = np.float32(a[p, f]), np.float32(b[p, f])
            inner = SCALAR[op0](state, x) if reverse0 else SCALAR[op0](x, state)
            state = result[p, f] = SCALAR[op1](y, inner) if reverse1 else SCALAR[op1](inner, y)
    return result


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize(
    ("op0", "op1"), [(nl.multiply, nl.add), (nl.subtract, nl.subtract), (nl.greater, nl.maximum)]
)
@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True)])
def test_follows_the_recurrence(partitions, op0, op1, reverse):
    a, b = (sample("float32", (partitions, 11), seed) for seed in "ab")
    initial = sample("float32", (partitions, 1))
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((partitions, 11)),
        data0=a,
        data1=b,
        initial=initial,
        op0=op0,
        op1=op1,
        **dict(zip(("reverse0", "reverse1"), reverse)),
    )["dst"]
    assert_same(result, reference(a, b, initial, op0, op1, *reverse))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int8"])
def test_the_state_is_float32_whatever_dst_is(dtype):
    a, b = sample("float16", (3, 20)), sample("bfloat16", (3, 20))
    wide = reference(a, b, 0.25, nl.add, nl.subtract, False, False)
    result = execute(
        "trn2", NAME, dst=Fresh((3, 20), dtype), data0=a, data1=b, initial=0.25, op0=nl.add, op1=nl.subtract
    )["dst"]
    assert_same(result, through_float32(wide.astype(np.float64), dtype))


def test_free_dims_stream_in_row_major_order_and_one_input_may_lie_in_psum():
    a, b = sample("float32", (4, 2, 3)), sample("float32", (4, 6))
    result = execute(
        "trn2", NAME, dst=Fresh((4, 3, 2)), data0=Given(a, PSUM), data1=b, initial=0.0, op0=nl.add, op1=nl.add
    )["dst"]
    assert_same(result.reshape(4, 6), reference(a.reshape(4, 6), b, 0.0, nl.add, nl.add, False, False))


def test_costs_two_cycles_per_element():
    short, long = (
        plan(
            "trn2", NAME, **call(dst=tile((8, n)), data0=tile((8, n)), data1=tile((8, n)))
        ).cost.latency_cycles
        for n in (500, 1500)
    )
    assert long - short == 2000
