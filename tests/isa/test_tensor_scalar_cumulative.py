"""tensor_scalar_cumulative: the scan, its registers, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, sample, through_float32
from tests.isa.tiles import PARTITIONS, TARGETS, Fresh, execute, execute_all, plan, tile, twins

NAME = "tensor_scalar_cumulative"
CMD = nisa.reduce_cmd
FOLDS = {
    nl.add: (lambda x, reg: np.float32(x + reg), 0.0),
    nl.subtract: (lambda x, reg: np.float32(x - reg), 0.0),
    nl.multiply: (lambda x, reg: np.float32(x * reg), 1.0),
    nl.maximum: (lambda x, reg: max(x, reg), -np.inf),
    nl.minimum: (lambda x, reg: min(x, reg), np.inf),
}


def call(**changes):
    return {"dst": tile((8, 6)), "src": tile((8, 6)), "op0": nl.add, "op1": nl.add, "imm0": 0.0, **changes}


@pytest.mark.parametrize("target", TARGETS)
def test_accepts_every_chip_and_dtype(target):
    for dtype in "bfloat16 float16 float32 float8_e4m3 float8_e5m2 int8 uint8 int16 uint16".split():
        plan(target, NAME, **call(dst=tile((8, 6), dtype), src=tile((8, 6), dtype)))


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-DTYPE-ALLOWED", {"src": tile((8, 6), "int32")}, {"src": tile((8, 6), "int16")}),
    ("NKW-DTYPE-ALLOWED", {"dst": tile((8, 6), "uint32")}, {"dst": tile((8, 6), "uint16")}),
    ("NKW-DTYPE-ALLOWED", {"imm0": tile((8, 1), "bfloat16")}, {"imm0": tile((8, 1))}),
    ("NKW-VECTOR-OPERAND", {"imm0": tile((8, 2))}, {"imm0": tile((8, 1))}),
    ("NKW-ELEMENTS-AGREE", {"src": tile((8, 5))}, {"src": tile((8, 2, 3))}),
    ("NKW-ARITHMETIC-OPERATOR", {"op0": nl.bitwise_and}, {"op0": nl.greater}),
    ("NKW-ARITHMETIC-OPERATOR", {"op0": nl.power}, {"op0": nl.multiply}),
    ("NKW-DEVICE-OPERATOR", {"op0": nl.abs}, {"op0": nl.maximum}),
    ("NKW-VECTOR-REDUCE-OPERATOR", {"op1": nl.logical_and}, {"op1": nl.minimum}),
    ("NKW-VECTOR-REDUCE-CMD", {"reduce_cmd": CMD.idle}, {"reduce_cmd": CMD.reduce}),
    ("NKW-VECTOR-REDUCE-CMD", {"reduce_cmd": CMD.reset}, {"reduce_cmd": CMD.reset_reduce}),
    ("NKW-VECTOR-REDUCE-INIT", {"reduce_cmd": CMD.load_reduce}, {"reduce_cmd": CMD.load_reduce, "imm1": 0.0}),
    ("NKW-VECTOR-REDUCE-INIT", {"imm1": 0.0}, {}),
)


def scanned(values, fold, start):
    result = np.empty(values.shape, np.float32)
    for p, row in enumerate(values):
        register = np.float32(start if np.isscalar(start) else start[p])
        for f, x in enumerate(row):
            register = fold(np.float32(x), register)
            result[p, f] = register
    return result


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("op1", FOLDS, ids=lambda op: op.__name__)
def test_scans_in_streaming_order(partitions, op1):
    fold, start = FOLDS[op1]
    src = sample("float32", (partitions, 19))
    result = execute("trn2", NAME, dst=Fresh((partitions, 19)), src=src, op0=nl.multiply, op1=op1, imm0=0.5)[
        "dst"
    ]
    assert_same(result, scanned(src * np.float32(0.5), fold, start))


@pytest.mark.parametrize("op1", FOLDS, ids=lambda op: op.__name__)
def test_load_reduce_starts_from_imm1_of_each_partition(op1):
    src, start = sample("float32", (5, 8)), sample("float32", (5, 1), "start")
    result = execute(
        "trn2",
        NAME,
        dst=Fresh((5, 8)),
        src=src,
        op0=nl.add,
        op1=op1,
        imm0=0.0,
        imm1=start,
        reduce_cmd=CMD.load_reduce,
    )["dst"]
    assert_same(result, scanned(src, FOLDS[op1][0], start[:, 0]))


def test_reduce_carries_on_where_the_last_instruction_stopped():
    src = sample("float32", (5, 16))
    expected = execute("trn2", NAME, dst=Fresh((5, 16)), src=src, op0=nl.add, op1=nl.subtract, imm0=1.0)[
        "dst"
    ]
    common = {"op0": nl.add, "op1": nl.subtract, "imm0": 1.0}
    halves = execute_all(
        "trn2",
        [
            (NAME, {"dst": Fresh((5, 8)), "src": src[:, :8].copy(), **common}),
            (NAME, {"dst": Fresh((5, 8)), "src": src[:, :8].copy(), **common}),
        ],
    )["dst"]
    assert_same(halves, expected[:, :8])

    def kernel(x):
        out = nl.ndarray((5, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        tile_, result = nl.load(x), nl.ndarray((5, 16), dtype=nl.float32)
        for columns, command in ((slice(0, 7), CMD.reset_reduce), (slice(7, 16), CMD.reduce)):
            nisa.tensor_scalar_cumulative(
                dst=result[:, columns],
                src=tile_[:, columns],
                op0=nl.add,
                op1=nl.subtract,
                imm0=1.0,
                reduce_cmd=command,
            )
        nisa.dma_copy(dst=out, src=result)
        return out

    import simulate

    assert_same(simulate.launch(kernel, [((src,), {})]).outputs[0], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint16", "float8_e4m3"])
def test_the_register_stays_float32_and_results_are_rounded_once(dtype):
    src = np.full((2, 40), 1.0 / 3, np.float32)
    result = execute("trn2", NAME, dst=Fresh((2, 40), dtype), src=src, op0=nl.add, op1=nl.add, imm0=0.0)[
        "dst"
    ]
    assert_same(result, through_float32(scanned(src, FOLDS[nl.add][0], 0.0).astype(np.float64), dtype))


def test_an_undefined_register_is_refused():
    arguments = {
        "dst": Fresh((2, 3)),
        "src": np.ones((2, 3), np.float32),
        "op0": nl.add,
        "op1": nl.add,
        "imm0": 0.0,
    }
    with pytest.raises(RuleViolation, match="NKW-REGISTERS-UNSET"):
        execute("trn2", NAME, **arguments, reduce_cmd=CMD.reduce)
    assert not np.isnan(execute("trn2", NAME, **arguments)["dst"]).any()
