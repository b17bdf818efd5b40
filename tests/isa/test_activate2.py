"""activate2: its stages and reductions, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, sample
from tests.isa.tiles import PARTITIONS, Fresh, execute, execute_all, plan, refuses, tile, twins

NAME = "activate2"
CMD = nisa.reduce_cmd
BYPASS = nl.bypass
PAIRS = [
    (nl.multiply, nl.add),
    (nl.multiply, nl.subtract),
    (nl.multiply, BYPASS),
    (nl.add, BYPASS),
    (nl.subtract, BYPASS),
    (BYPASS, BYPASS),
]
SCALAR = {
    "multiply": lambda a, b: np.float32(a * b),
    "add": lambda a, b: np.float32(a + b),
    "subtract": lambda a, b: np.float32(a - b),
}


def call(**changes):
    base = {"dst": tile((8, 6)), "op": nl.relu, "data": tile((8, 6)), "imm0": 2.0, "imm1": 0.5}
    return {**base, "op0": nl.multiply, "op1": nl.add, **changes}


def test_exists_on_gen4_only():
    plan("trn3", NAME, **call())
    for target in ("trn1", "trn2"):
        refuses("NKW-ACTIVATE2-CHIP", target, NAME, **call())


@pytest.mark.parametrize(
    ("op0", "op1"), list(itertools.product([nl.multiply, nl.add, nl.subtract, BYPASS], repeat=2))
)
def test_takes_six_pairs_of_operators(op0, op1):
    if (op0, op1) in PAIRS:
        plan("trn3", NAME, **call(op0=op0, op1=op1))
    else:
        refuses("NKW-ACTIVATE2-PAIR", "trn3", NAME, **call(op0=op0, op1=op1))


test_refuses_and_accepts_the_twin = twins(
    "trn3",
    NAME,
    call,
    ("NKW-ELEMENTS-AGREE", {"data": tile((8, 5))}, {"data": tile((8, 2, 3))}),
    ("NKW-NUMBER", {"imm0": None}, {"imm0": 1}),
    ("NKW-NUMBER", {"imm1": None}, {"imm1": None, "op1": BYPASS}),
    ("NKW-VECTOR-OPERAND", {"imm0": tile((8, 6))}, {"imm0": tile((8, 1))}),
    (
        "NKW-ACTIVATE2-IMMEDIATES",
        {"imm0": tile((8, 1)), "imm1": tile((8, 1), "bfloat16")},
        {"imm0": 1.0, "imm1": tile((8, 1), "bfloat16")},
    ),
    ("NKW-ACTIVATE2-REVERSE", {"op1": BYPASS, "reverse1": True}, {"reverse1": True}),
    ("NKW-ACTIVATE2-REVERSE", {"op0": BYPASS, "op1": BYPASS, "reverse0": True}, {"reverse0": True}),
    (
        "NKW-ACTIVATE2-REDUCE-OP",
        {"reduce_cmd": CMD.reduce},
        {"reduce_cmd": CMD.reduce, "reduce_op": nl.abs_max},
    ),
    ("NKW-VECTOR-REDUCE-OPERATOR", {"reduce_op": nl.multiply}, {"reduce_op": nl.minimum}),
    (
        "NKW-VECTOR-REDUCE-CMD",
        {"reduce_op": nl.add, "reduce_cmd": CMD.load_reduce},
        {"reduce_op": nl.add, "reduce_cmd": CMD.reset},
    ),
    ("NKW-VECTOR-OPERAND", {"reduce_res": tile((7, 1))}, {"reduce_res": tile((8, 1))}),
    (
        "NKW-VECTOR-OPERAND",
        {"op": nl.prelu, "relu_param": tile((8, 2))},
        {"op": nl.prelu, "relu_param": tile((8, 1))},
    ),
)


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize(("op0", "op1"), PAIRS)
@pytest.mark.parametrize("reverse", [False, True])
def test_applies_its_stages_in_order(partitions, op0, op1, reverse):
    data, imm1 = sample("float32", (partitions, 7)), sample("float32", (partitions, 1))
    reverses = {"reverse0": reverse and op0 is not BYPASS, "reverse1": reverse and op1 is not BYPASS}
    result = execute(
        "trn3",
        NAME,
        dst=Fresh((partitions, 7)),
        op=nl.relu,
        data=data,
        imm0=3.0,
        imm1=imm1,
        **{"op0": op0, "op1": op1, **reverses},
    )["dst"]
    for p in range(partitions):
        for f in range(7):
            value = data[p, f]
            for op, imm in ((op0.__name__, np.float32(3)), (op1.__name__, imm1[p, 0])):
                if op != "bypass":
                    value = SCALAR[op](imm, value) if reverse else SCALAR[op](value, imm)
            assert result[p, f] == max(value, 0)


def test_prelu_takes_its_slope_from_relu_param():
    data, slope = sample("float32", (4, 6)), np.array([[0.5], [0.25], [2.0], [0.0]], np.float32)
    arguments = {"op": nl.prelu, "data": data, "imm0": None, "imm1": None, "op0": BYPASS, "op1": BYPASS}
    result = execute("trn3", NAME, dst=Fresh((4, 6)), **arguments, relu_param=slope)["dst"]
    assert_same(result, np.where(data >= 0, data, data.astype(float) * slope))


@pytest.mark.parametrize(
    ("reduce_op", "fold", "identity"),
    [
        (nl.add, sum, 0.0),
        (nl.maximum, max, -np.inf),
        (nl.minimum, min, np.inf),
        (nl.abs_max, lambda row: max(row, key=abs), 0.0),
        (nl.abs_min, lambda row: min(row, key=abs), np.inf),
    ],
)
def test_reduces_into_the_scalar_registers(reduce_op, fold, identity):
    data = np.array([[1, -7, 3, 5], [-2, 9, 4, -1], [8, 6, -3, 2]], np.float32)
    common = {
        "dst": Fresh((3, 4), "bfloat16"),
        "op": nl.copy,
        "imm0": 1.0,
        "imm1": 0.0,
        "op0": nl.add,
        "op1": BYPASS,
    }
    common = {**common, "data": data, "reduce_op": reduce_op}
    read = {**common, "reduce_res": Fresh((3, 1))}
    once = execute("trn3", NAME, **read, reduce_cmd=CMD.reset_reduce)["reduce_res"]
    assert_same(once, [[fold([x + 1 for x in row])] for row in data.tolist()])
    assert_same(execute("trn3", NAME, **read, reduce_cmd=CMD.reset)["reduce_res"], np.full((3, 1), identity))
    calls = [
        (NAME, {**common, "reduce_cmd": CMD.reset_reduce}),
        (NAME, common),
        (NAME, {**read, "reduce_cmd": CMD.reduce}),
    ]
    twice = execute_all("trn3", calls)["reduce_res"]
    assert_same(twice, [[fold([x + 1 for x in row] * 2)] for row in data.tolist()])


def test_shares_its_registers_with_activation():
    data = np.ones((2, 5), np.float32)
    first = {
        "dst": Fresh((2, 5)),
        "op": nl.copy,
        "data": data,
        "reduce_op": nl.add,
        "reduce_cmd": CMD.reset_reduce,
    }
    second = {
        **first,
        "imm0": 1.0,
        "imm1": 0.0,
        "op0": nl.multiply,
        "op1": BYPASS,
        "reduce_cmd": CMD.reduce,
    }
    result = execute_all("trn3", [("activation", first), (NAME, {**second, "reduce_res": Fresh((2, 1))})])
    assert (result["reduce_res"] == 10).all()
