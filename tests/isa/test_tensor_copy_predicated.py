"""tensor_copy_predicated: which elements it writes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.hardware import hardware
from tests.isa.reference import FLOATS, INTEGERS, assert_same_bits, every_bit_pattern, sample, through_float32
from tests.isa.tiles import PARTITIONS, PSUM, TARGETS, Given, execute, plan, tile, twins

NAME = "tensor_copy_predicated"


def call(**changes):
    return {"dst": tile((8, 6)), "src": tile((8, 6)), "predicate": tile((8, 6), "uint8"), **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("predicate", ["uint8", "uint16", "uint32"])
def test_accepts_unsigned_predicates_on_every_chip(target, predicate):
    assert plan(target, NAME, **call(predicate=tile((8, 6), predicate))).engine.name == "vector"


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-DTYPE-ALLOWED", {"predicate": tile((8, 6), "int8")}, {"predicate": tile((8, 6), "uint8")}),
    ("NKW-DTYPE-ALLOWED", {"predicate": tile((8, 6))}, {}),
    ("NKW-SAME-DTYPE", {"src": tile((8, 6), "bfloat16")}, {"src": tile((8, 6), "float32")}),
    ("NKW-ELEMENTS-AGREE", {"src": tile((8, 7))}, {"src": tile((8, 2, 3))}),
    ("NKW-ELEMENTS-AGREE", {"predicate": tile((8, 5), "uint8")}, {"predicate": tile((8, 3, 2), "uint8")}),
    ("NKW-PARTITIONS-AGREE", {"src": tile((7, 6))}, {}),
    (
        "NKW-ONE-PSUM-INPUT",
        {"src": tile((8, 6), buffer=PSUM), "predicate": tile((8, 6), "uint8", PSUM)},
        {"src": tile((8, 6), buffer=PSUM)},
    ),
    ("NKW-NUMBER", {"src": "1"}, {"src": 1}),
    ("NKW-FLOAT32-RANGE", {"src": 1e39}, {"src": 1e38}),
    # Eight digits of the largest float32 lie above it and round to it; half a unit above rounds to infinity.
    ("NKW-FLOAT32-RANGE", {"src": -(2.0**128 - 2.0**103)}, {"src": -3.4028235e38}),
    (
        "NKW-PACKED-DTYPE",
        {"dst": tile((8, 6), "float8_e5m2_x4"), "src": tile((8, 6), "float8_e5m2_x4")},
        {"dst": tile((8, 6), "uint32"), "src": tile((8, 6), "uint32")},
    ),
)


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("reverse", [False, True])
def test_writes_selected_elements_and_keeps_the_others(partitions, reverse):
    old, new = (sample("float32", (partitions, 13), seed) for seed in "ab")
    chosen = (sample("uint16", (partitions, 13)) % 3).astype(np.uint16)
    result = execute("trn2", NAME, dst=old, src=new, predicate=chosen, reverse_pred=reverse)["dst"]
    for p in range(partitions):
        for f in range(13):
            taken = (chosen[p, f] == 0) if reverse else (chosen[p, f] != 0)
            assert result[p, f] == (new if taken else old)[p, f]


def test_a_predicate_that_fills_its_byte_reverses_logically():
    predicate = np.array([[0, 1, 255]], np.uint8)
    result = execute(
        "trn2", NAME, dst=np.zeros((1, 3), np.float32), src=1.0, predicate=predicate, reverse_pred=True
    )
    assert result["dst"].tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_bits_are_kept(dtype):
    old, new = every_bit_pattern(dtype, (4, 8)), every_bit_pattern(dtype, (4, 8))[::-1].copy()
    predicate = np.arange(32, dtype=np.uint8).reshape(4, 8) % 2
    result = execute("trn2", NAME, dst=old, src=new, predicate=predicate)["dst"]
    assert_same_bits(
        result,
        np.where(predicate == 1, new.view(f"u{new.itemsize}"), old.view(f"u{old.itemsize}")).view(old.dtype),
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_number_is_rounded_once(dtype):
    old = sample(dtype, (2, 3))
    result = execute("trn2", NAME, dst=old, src=2.7, predicate=np.ones((2, 3), np.uint8))["dst"]
    assert (result.astype(np.float64) == through_float32(np.float64(2.7), dtype)).all()


def test_ranks_may_differ():
    old, new = np.zeros((4, 6), np.float32), np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    predicate = Given(np.ones((4, 3, 2), np.uint8), PSUM)
    assert (execute("trn2", NAME, dst=old, src=new, predicate=predicate)["dst"] == new.reshape(4, 6)).all()


def test_two_streams_from_sbuf_take_twice_as_long():
    def cycles(**changes):
        wide = {
            "dst": tile((8, 1000)),
            "src": tile((8, 1000)),
            "predicate": tile((8, 1000), "uint8"),
            **changes,
        }
        return plan("trn2", NAME, **wide).cost.latency_cycles

    fixed = hardware("trn2").vector_latency_overhead_ns * hardware("trn2").vector_clock_ghz
    assert cycles() == 2000 + fixed
    assert cycles(src=tile((8, 1000), buffer=PSUM)) == 1000 + fixed
