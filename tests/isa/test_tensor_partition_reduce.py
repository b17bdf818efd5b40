"""tensor_partition_reduce: reductions over partitions, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.nki import language as nl
from tests.isa.reference import INTEGERS, assert_same, sample
from tests.isa.tiles import PARTITIONS, PSUM, TARGETS, Fresh, execute, plan, tile, twins

NAME = "tensor_partition_reduce"


def call(**changes):
    return {"dst": tile((1, 6)), "op": nl.add, "data": tile((8, 6)), **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", [nl.add, nl.maximum, nl.max, nl.average])
def test_accepts_documented_operators_on_every_chip(target, op):
    assert plan(target, NAME, **call(op=op)).engine.name == "gpsimd"


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-PARTITION-REDUCE-OUTPUT", {"dst": tile((2, 6))}, {"dst": tile((1, 6))}),
    ("NKW-ELEMENTS-AGREE", {"dst": tile((1, 5))}, {"dst": tile((1, 2, 3))}),
    ("NKW-PARTITION-REDUCE-OPERATOR", {"op": nl.minimum}, {"op": nl.maximum}),
    (
        "NKW-PARTITION-REDUCE-OPERATOR",
        {"op": nl.bitwise_xor, "dst": tile((1, 6), "int8"), "data": tile((8, 6), "int8")},
        {"op": nl.bitwise_or, "dst": tile((1, 6), "int8"), "data": tile((8, 6), "int8")},
    ),
    (
        "NKW-BITVEC-INTEGER",
        {"op": nl.bitwise_and},
        {"op": nl.bitwise_and, "dst": tile((1, 6), "uint32"), "data": tile((8, 6), "uint32")},
    ),
    ("NKW-BUFFER", {"data": tile((8, 6), buffer=PSUM)}, {}),
    ("NKW-BUFFER", {"dst": tile((1, 6), buffer=PSUM)}, {}),
)


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_reduces_over_partitions(partitions):
    data = np.round(sample("float32", (partitions, 5)))  # small integers: every order of the sum is exact
    total = execute("trn2", NAME, dst=Fresh((1, 5)), op=nl.add, data=data)["dst"]
    assert total.tolist() == [[sum(float(row[f]) for row in data) for f in range(5)]]
    highest = execute("trn2", NAME, dst=Fresh((1, 5)), op=nl.maximum, data=data)["dst"]
    assert highest.tolist() == [[max(float(row[f]) for row in data) for f in range(5)]]


def test_averages_over_a_power_of_two_exactly():
    data = np.arange(64, dtype=np.float32).reshape(16, 4)
    assert_same(
        execute("trn2", NAME, dst=Fresh((1, 4)), op=nl.average, data=data)["dst"],
        data.astype(float).mean(0)[None],
    )


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bitwise_operators_work_on_raw_bits(dtype):
    data = sample(dtype, (33, 4))
    for op, fold in ((nl.bitwise_or, int.__or__), (nl.bitwise_and, int.__and__)):
        result = execute("trn2", NAME, dst=Fresh((1, 4), dtype), op=op, data=data)["dst"]
        for f in range(4):
            bits = int(data[0, f])
            for row in data[1:]:
                bits = fold(bits, int(row[f]))
            assert int(result[0, f]) == bits


def test_costs_a_step_per_level_of_a_tree():
    intervals = [plan("trn2", NAME, **call(data=tile((p, 6)))).cost.interval_cycles for p in (2, 64, 65, 128)]
    assert np.diff(intervals).tolist() == [30, 6, 0]
