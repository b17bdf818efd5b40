"""exponential: results, the running sum, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from tests.isa.reference import assert_same, sample, through_float32
from tests.isa.tiles import PARTITIONS, Fresh, execute, execute_all, plan, refuses, tile, twins

NAME = "exponential"
CMD = nisa.reduce_cmd
EXP_ULPS = 4  # numpy states less than 3 units in the last place for its float32 exp


def call(**changes):
    return {"dst": tile((8, 6)), "src": tile((8, 6)), **changes}


def test_exists_on_gen4_only():
    plan("trn3", NAME, **call())
    for target in ("trn1", "trn2"):
        refuses("NKW-EXPONENTIAL-CHIP", target, NAME, **call())


@pytest.mark.parametrize(
    "dtype", "float8_e4m3 float8_e5m2 float16 bfloat16 float32 int8 int16 int32 uint8 uint16".split()
)
def test_accepts_documented_dtypes(dtype):
    plan("trn3", NAME, **call(dst=tile((8, 6), dtype), src=tile((8, 6), dtype)))


test_refuses_and_accepts_the_twin = twins(
    "trn3",
    NAME,
    call,
    ("NKW-DTYPE-ALLOWED", {"dst": tile((8, 6), "uint32")}, {"src": tile((8, 6), "uint32")}),
    ("NKW-DTYPE-ALLOWED", {"src": tile((8, 6), "tfloat32")}, {"dst": tile((8, 6), "tfloat32")}),
    ("NKW-DTYPE-ALLOWED", {"src": tile((8, 6), "float8_e4m3fn")}, {}),
    ("NKW-ELEMENTS-AGREE", {"src": tile((8, 5))}, {"src": tile((8, 3, 2))}),
    ("NKW-EXPONENTIAL-DIMS", {"src": tile((8, 1, 2, 3, 1))}, {"src": tile((8, 2, 3, 1))}),
    ("NKW-DTYPE-ALLOWED", {"max_value": tile((8, 1), "bfloat16")}, {"max_value": tile((8, 1))}),
    ("NKW-VECTOR-OPERAND", {"max_value": tile((8, 6))}, {"max_value": 3}),
    ("NKW-DTYPE-ALLOWED", {"reduce_res": tile((8, 1), "int32")}, {"reduce_res": tile((8, 1), "float16")}),
    ("NKW-VECTOR-REDUCE-CMD", {"reduce_cmd": CMD.reset}, {"reduce_cmd": CMD.reduce}),
    ("NKW-EXPONENTIAL-INIT", {"reduce_init": 1.0}, {"reduce_init": 0.0}),
    (
        "NKW-EXPONENTIAL-INIT",
        {"reduce_init": tile((8, 1))},
        {"reduce_init": tile((8, 1)), "reduce_cmd": CMD.load_reduce},
    ),
)


def close(actual, expected, ulps):
    return np.all(np.abs(actual.astype(np.float64) - expected) <= ulps * 2.0**-24 * 2 * np.abs(expected))


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_subtracts_the_maximum_of_each_partition(partitions):
    src = np.round(sample("float32", (partitions, 9)) * 4) / 4  # differences of quarters are exact
    highest = src.max(1, keepdims=True)
    result = execute("trn3", NAME, dst=Fresh((partitions, 9)), src=src, max_value=highest)["dst"]
    expected = [[math.exp(float(x) - float(m)) for x in row] for row, (m,) in zip(src, highest)]
    assert close(result, np.array(expected), EXP_ULPS)


def test_extremes():
    src = np.array([[0, -np.inf, np.inf, np.nan, -200, 89]], np.float32)
    result = execute("trn3", NAME, dst=Fresh((1, 6)), src=src)["dst"]
    assert_same(result, np.array([[1, 0, np.inf, np.nan, 0, np.inf]]))


def test_the_sum_runs_through_the_registers():
    src = np.zeros((3, 5), np.float32)  # exp(0) is 1, so sums count elements
    common = {"dst": Fresh((3, 5), "bfloat16"), "src": src}
    read = {**common, "reduce_res": Fresh((3, 1))}
    reset, reduce = {**common, "reduce_cmd": CMD.reset_reduce}, {**read, "reduce_cmd": CMD.reduce}
    assert (execute_all("trn3", [(NAME, reset), (NAME, reduce)])["reduce_res"] == 10).all()
    start = np.array([[1.0], [2.0], [3.0]], np.float32)
    load = {**read, "reduce_cmd": CMD.load_reduce, "reduce_init": start}
    assert_same(execute("trn3", NAME, **load)["reduce_res"], start + 5)
    assert np.isnan(execute_all("trn3", [(NAME, reset), (NAME, common), (NAME, reduce)])["reduce_res"]).all()
    with pytest.raises(RuleViolation, match="NKW-REGISTERS-UNSET"):
        execute("trn3", NAME, **read)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "int8", "uint16"])
def test_results_are_rounded_once(dtype):
    src = sample("float32", (4, 8))
    wide = execute("trn3", NAME, dst=Fresh((4, 8)), src=src)["dst"]
    narrow = execute("trn3", NAME, dst=Fresh((4, 8), dtype), src=src)["dst"]
    assert_same(narrow, through_float32(wide.astype(np.float64), dtype))


def test_does_four_elements_per_cycle():
    short, long = (plan("trn3", NAME, **call(dst=tile((8, n)), src=tile((8, n)))).cost for n in (400, 2000))
    assert long.latency_cycles - short.latency_cycles == 400
    assert plan("trn3", NAME, **call(reduce_res=tile((8, 1)))).cost.latency_cycles == (
        plan("trn3", NAME, **call()).cost.latency_cycles + hardware("trn3").vector_accumulate_extra_cycles
    )
