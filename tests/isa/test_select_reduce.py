"""select_reduce: the selection, its maximum, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, sample, through_float32
from tests.isa.tiles import PARTITIONS, PSUM, TARGETS, Fresh, execute, execute_all, plan, tile, twins

NAME = "select_reduce"
CMD = nisa.reduce_cmd


def call(**changes):
    base = {"dst": tile((8, 6)), "predicate": tile((8, 6), "uint8"), "on_true": tile((8, 6)), "on_false": 0.0}
    return {**base, **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_accepts_every_chip(target, dtype):
    plan(target, NAME, **call(predicate=tile((8, 6), dtype)))


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-DTYPE-ALLOWED", {"predicate": tile((8, 6), "uint32")}, {"predicate": tile((8, 6), "uint16")}),
    ("NKW-SELECT-REDUCE-DTYPE", {"on_true": tile((8, 6), "int32")}, {"on_true": tile((8, 6), "int16")}),
    ("NKW-SELECT-REDUCE-DTYPE", {"on_true": tile((8, 6), "tfloat32")}, {"on_true": tile((8, 6), "float32")}),
    ("NKW-SELECT-REDUCE-DTYPE", {"on_true": tile((8, 6), "uint32")}, {"dst": tile((8, 6), "uint32")}),
    ("NKW-ELEMENTS-AGREE", {"on_true": tile((8, 5))}, {"on_true": tile((8, 2, 3))}),
    ("NKW-ELEMENTS-AGREE", {"dst": tile((8, 5))}, {"dst": tile((8, 3, 2))}),
    ("NKW-VECTOR-OPERAND", {"on_false": tile((8, 6))}, {"on_false": tile((8, 1))}),
    ("NKW-NUMBER", {"on_false": "x"}, {"on_false": float("-inf")}),
    (
        "NKW-ONE-PSUM-INPUT",
        {"on_true": tile((8, 6), buffer=PSUM), "predicate": tile((8, 6), "uint8", PSUM)},
        {"on_true": tile((8, 6), buffer=PSUM), "dst": tile((8, 6), buffer=PSUM)},
    ),
    ("NKW-VECTOR-REDUCE-OPERATOR", {"reduce_op": nl.minimum}, {"reduce_op": nl.maximum}),
    ("NKW-VECTOR-REDUCE-CMD", {"reduce_cmd": CMD.load_reduce}, {"reduce_cmd": CMD.reset_reduce}),
    ("NKW-DTYPE-ALLOWED", {"reduce_res": tile((8, 1), "int32")}, {"reduce_res": tile((8, 1), "bfloat16")}),
)


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("as_tile", [False, True])
def test_selects_and_reduces(partitions, reverse, as_tile):
    predicate = (sample("int16", (partitions, 7)) % 3).astype(np.int16)
    on_true = sample("bfloat16", (partitions, 7))
    other = sample("float32", (partitions, 1)) if as_tile else -1.5
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((partitions, 7)),
        predicate=predicate,
        on_true=on_true,
        on_false=other,
        reduce_res=Fresh((partitions, 1)),
        reduce_cmd=CMD.reset_reduce,
        reverse_pred=reverse,
    )
    expected = [
        [
            float(x) if (flag == 0) == reverse else float(other[p, 0] if as_tile else other)
            for x, flag in zip(on_true[p], predicate[p])
        ]
        for p in range(partitions)
    ]
    assert_same(result["dst"], expected)
    assert_same(result["reduce_res"], [[max(row)] for row in expected])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint8"])
def test_dst_is_rounded_once_and_the_maximum_is_not_rounded_with_it(dtype):
    on_true = sample("float32", (3, 8))
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((3, 8), dtype),
        predicate=np.ones((3, 8), np.uint8),
        on_true=on_true,
        on_false=0.0,
        reduce_res=Fresh((3, 1)),
        reduce_cmd=CMD.reset_reduce,
    )
    assert_same(result["dst"], through_float32(on_true.astype(np.float64), dtype))
    assert_same(result["reduce_res"], on_true.max(1, keepdims=True))


def test_ranks_may_differ():
    on_true = sample("float32", (4, 2, 3))
    predicate = np.ones((4, 6), np.uint8)
    result = execute("trn2", NAME, dst=Fresh((4, 3, 2)), predicate=predicate, on_true=on_true, on_false=0.0)[
        "dst"
    ]
    assert_same(result.reshape(4, 6), on_true.reshape(4, 6))


def test_idle_leaves_the_registers_undefined():
    ones = np.ones((2, 3), np.float32)
    common = {"dst": Fresh((2, 3)), "predicate": np.ones((2, 3), np.uint8), "on_true": ones, "on_false": 0.0}
    read = {**common, "reduce_res": Fresh((2, 1)), "reduce_cmd": CMD.reduce}
    reset = {**common, "reduce_cmd": CMD.reset_reduce}
    assert (execute_all("trn2", [(NAME, reset), (NAME, read)])["reduce_res"] == 1).all()
    assert np.isnan(execute_all("trn2", [(NAME, reset), (NAME, common), (NAME, read)])["reduce_res"]).all()
    idle = {**common, "reduce_res": Fresh((2, 1))}
    assert np.isnan(execute_all("trn2", [(NAME, reset), (NAME, idle)])["reduce_res"]).all()
    with pytest.raises(RuleViolation, match="NKW-REGISTERS-UNSET"):
        execute("trn2", NAME, **idle)
