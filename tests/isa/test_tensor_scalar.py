"""tensor_scalar, and the bitvec operators it shares with tensor_tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nkw.targets import TARGETS as CHIPS
from simulate.hardware import hardware
from simulate.isa import Engine
from simulate.nki import language as nl
from simulate.numerics import ALU_OPERATORS
from tests.isa.alu import ARITHMETIC, BITS, DTYPES, SHAPES, bits_of, by_bits, scalar_by_scalar
from tests.isa.reference import (
    INTEGERS,
    as_float64,
    assert_same,
    assert_same_bits,
    rounded,
    sample,
    through_float32,
)
from tests.isa.tiles import PSUM, TARGETS, Fresh, Given, execute, healthy, plan, refuses, tile


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_bitvec_operators_work_on_raw_bits(name: str, dtype: str) -> None:
    x, y = sample(dtype, (128, 5), "x"), sample(dtype, (128, 5), "y")
    if name.endswith("shift"):
        y = (bits_of(y) % (8 * y.dtype.itemsize + 2)).astype(y.dtype)
    done = execute(
        "trn1", "tensor_tensor", dst=Fresh((128, 5), dtype), data1=x, data2=y, op=getattr(nl, name)
    )
    assert_same_bits(done["dst"], by_bits(name, x, y))
    column = y[:, :1].copy()
    for operand, reverse in ((column, False), (column, True), (int(y[0, 0]), False), (int(y[0, 0]), True)):
        done = execute(
            "trn1",
            "tensor_scalar",
            dst=Fresh((128, 5), dtype),
            data=x,
            op0=getattr(nl, name),
            operand0=operand,
            reverse0=reverse,
        )
        other = np.broadcast_to(np.asarray(operand, x.dtype), x.shape).copy()
        expected = by_bits(name, other, x) if reverse else by_bits(name, x, other)
        assert_same_bits(done["dst"], expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_invert_takes_no_operand(dtype: str) -> None:
    x = sample(dtype, (3, 9))
    for operand in (None, 0):
        done = execute(
            "trn1", "tensor_scalar", dst=Fresh((3, 9), dtype), data=x, op0=nl.invert, operand0=operand
        )
        assert_same_bits(done["dst"], (2 ** (8 * x.dtype.itemsize) - 1 - bits_of(x)).view(x.dtype))


def test_bitvec_operators_take_integers_of_one_size() -> None:
    good = {"dst": tile((8, 8), "uint16"), "data1": tile((8, 8), "int16"), "data2": tile((8, 8), "uint16")}
    plan("trn1", "tensor_tensor", **good, op=nl.bitwise_or)
    for operand in good:
        for dtype in ("float16", "int32", "uint8"):
            wrong = {**good, operand: tile((8, 8), dtype)}
            refuses("NKW-BITVEC-INTEGER", "trn1", "tensor_tensor", **wrong, op=nl.bitwise_or)
    scalar = {"dst": tile((8, 8), "int16"), "data": tile((8, 8), "int16"), "op0": nl.bitwise_and}
    for number, accepted in ((-(2**15), True), (-(2**15) - 1, False), (2**16 - 1, True), (2**16, False)):
        if accepted:
            plan("trn1", "tensor_scalar", **scalar, operand0=number)
        else:
            refuses("NKW-BITVEC-OPERAND", "trn1", "tensor_scalar", **scalar, operand0=number)
    refuses("NKW-BITVEC-OPERAND", "trn1", "tensor_scalar", **scalar, operand0=1.0)
    refuses("NKW-BITVEC-OPERAND", "trn1", "tensor_scalar", **scalar, operand0=None)
    plan("trn1", "tensor_scalar", **scalar, operand0=tile((8, 1), "int16"))
    refuses("NKW-DTYPE-ALLOWED", "trn1", "tensor_scalar", **scalar, operand0=tile((8, 1), "uint16"))
    floats = {**scalar, "dst": tile((8, 8), "float16")}
    refuses("NKW-BITVEC-INTEGER", "trn1", "tensor_scalar", **floats, operand0=1)


@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("names", [("multiply", "add"), ("subtract", "maximum"), ("greater", "subtract")])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_tensor_scalar_chains_two_operators(
    dtypes: tuple[str, str, str], names: tuple[str, str], reverse: tuple[bool, bool]
) -> None:
    shape = SHAPES[len(dtypes[0]) % len(SHAPES)]
    data, column = sample(dtypes[0], shape), sample("float32", (shape[0], 1))
    first, second = (
        (lambda x, y, f=ARITHMETIC[n]: f(y, x)) if r else ARITHMETIC[n] for n, r in zip(names, reverse)
    )
    number = 1.1  # not a float32 number: it is rounded first
    per_partition = np.broadcast_to(column.reshape(-1, *(1,) * (len(shape) - 1)), shape).astype(np.float64)
    inner = rounded(scalar_by_scalar(first, as_float64(data), per_partition), "float32")
    fixed = np.full(shape, float(np.float32(number)))
    expected = through_float32(scalar_by_scalar(second, inner, fixed), dtypes[2])
    for operand0 in (column, Given(column, PSUM)):
        done = execute(
            "trn2",
            "tensor_scalar",
            dst=Fresh(shape, dtypes[2]),
            data=data,
            op0=getattr(nl, names[0]),
            operand0=operand0,
            reverse0=reverse[0],
            op1=getattr(nl, names[1]),
            operand1=number,
            reverse1=reverse[1],
        )
        assert_same(done["dst"], expected)


def test_the_scalar_engine_gives_the_same_values() -> None:
    data = sample("bfloat16", (127, 9))
    call = {"data": data, "op0": nl.multiply, "operand0": 0.3, "op1": nl.add, "operand1": -1.7}
    vector, scalar = (
        execute("trn2", "tensor_scalar", dst=Fresh((127, 9)), **call, engine=engine)["dst"]
        for engine in (Engine.vector, Engine.scalar)
    )
    assert_same_bits(scalar, vector)


def test_rsqrt_and_power_run_on_gpsimd() -> None:
    data = np.array([[4.0**k for k in range(-8, 8)]], np.float32)
    done = execute("trn1", "tensor_scalar", dst=Fresh(data.shape), data=data, op0=nl.rsqrt, operand0=0.0)
    assert_same(done["dst"], 2.0 ** -np.arange(-8.0, 8.0).reshape(1, -1))
    powers = execute("trn1", "tensor_scalar", dst=Fresh(data.shape), data=data, op0=nl.power, operand0=3.0)
    assert_same(powers["dst"], 4.0 ** (3 * np.arange(-8.0, 8.0)).reshape(1, -1))
    chained = execute(
        "trn1",
        "tensor_scalar",
        dst=Fresh(data.shape),
        data=data,
        op0=nl.add,
        operand0=0.0,
        op1=nl.rsqrt,
        operand1=None,
    )
    assert_same_bits(chained["dst"], done["dst"])


@pytest.mark.parametrize("target", TARGETS)
def test_who_does_tensor_scalar(target: str) -> None:
    base = {"dst": tile((8, 8)), "data": tile((8, 8))}
    multiply_add = {"op0": nl.multiply, "operand0": 2.0, "op1": nl.add, "operand1": 1.0}
    multiply, add = {"op0": nl.multiply, "operand0": 2.0}, {"op0": nl.add, "operand0": 2.0}
    rsqrt, power = {"op0": nl.rsqrt, "operand0": None}, {"op0": nl.power, "operand0": 2.0}
    mixed = {"op0": nl.multiply, "operand0": 2.0, "op1": nl.rsqrt}
    for call in (multiply_add, multiply, add):
        assert plan(target, "tensor_scalar", **base, **call).engine is Engine.vector
        if target == "trn1":
            refuses("NKW-ENGINE", target, "tensor_scalar", **base, **call, engine=Engine.scalar)
        else:
            assert plan(target, "tensor_scalar", **base, **call, engine=Engine.scalar).engine is Engine.scalar
        refuses("NKW-ENGINE", target, "tensor_scalar", **base, **call, engine=Engine.gpsimd)
    for call in (rsqrt, power, mixed):
        assert plan(target, "tensor_scalar", **base, **call).engine is Engine.gpsimd
        assert plan(target, "tensor_scalar", **base, **call, engine=Engine.gpsimd).engine is Engine.gpsimd
        refuses("NKW-ENGINE", target, "tensor_scalar", **base, **call, engine=Engine.vector)
        in_psum = {**base, "data": tile((8, 8), buffer=PSUM)}
        refuses("NKW-GPSIMD-PSUM", target, "tensor_scalar", **in_psum, **call)
    in_psum = {"op0": nl.power, "operand0": tile((8, 1), buffer=PSUM)}
    refuses("NKW-GPSIMD-PSUM", target, "tensor_scalar", **base, **in_psum)
    refuses("NKW-ENGINE", target, "tensor_scalar", **base, **add, engine=Engine.tensor)
    if target != "trn1":
        for call in (
            {"op0": nl.add, "operand0": 1.0, "op1": nl.multiply, "operand1": 2.0},
            {"op0": nl.maximum, "operand0": 1.0},
        ):
            refuses("NKW-TENSOR-SCALAR-CHAIN", target, "tensor_scalar", **base, **call, engine=Engine.scalar)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["abs_max", "abs_min", "square", "relu", "abs", "reciprocal"])
def test_operators_of_later_chips(target: str, name: str) -> None:
    operator = ALU_OPERATORS[name]
    call = healthy(
        "tensor_scalar", op0=operator, operand0=None if operator.arity == 1 else 1.0, op1=None, operand1=None
    )
    if target == "trn3" or name in ("abs", "reciprocal"):
        plan(target, "tensor_scalar", **call)
    else:
        refuses("NKW-OPERATOR-CHIP", target, "tensor_scalar", **call)


def test_unary_operators() -> None:
    data = sample("float32", (5, 8))
    for name, function in (("abs", abs), ("square", lambda x: x * x), ("relu", lambda x: max(x, 0.0))):
        for operand in (None, 0, 0.0):
            done = execute(
                "trn3",
                "tensor_scalar",
                dst=Fresh((5, 8)),
                data=data,
                op0=ALU_OPERATORS[name],
                operand0=operand,
            )
            assert_same(done["dst"], rounded(scalar_by_scalar(function, as_float64(data)), "float32"))
    for operand in (1.0, tile((8, 1))):
        call = healthy("tensor_scalar", op0=nl.abs, operand0=operand)
        refuses("NKW-UNARY-OPERAND", "trn3", "tensor_scalar", **call)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"operand0": None}, "NKW-NUMBER"),
        ({"operand0": "2"}, "NKW-NUMBER"),
        ({"operand0": 1e39}, "NKW-FLOAT32-RANGE"),
        ({"operand0": tile((8, 1), "int32")}, "NKW-DTYPE-ALLOWED"),
        ({"operand0": tile((8, 2))}, "NKW-VECTOR-OPERAND"),
        ({"operand0": tile((7, 1))}, "NKW-VECTOR-OPERAND"),
        ({"operand0": tile((1, 8))}, "NKW-VECTOR-OPERAND"),
        ({"op1": None}, "NKW-TENSOR-SCALAR-OPERAND1"),
        ({"op1": nl.bitwise_and, "operand1": 1}, "NKW-OPERATOR-FAMILY"),
        ({"op0": nl.bypass, "operand0": None}, "NKW-OPERATOR-CHIP"),
        ({"op0": nl.average}, "NKW-TENSOR-SCALAR-OPERATOR"),
        ({"op0": "add"}, "NKW-OPERATOR"),
        ({"op0": nl.exp, "operand0": None}, "NKW-OPERATOR"),
        ({"dst": tile((8, 7))}, "NKW-ELEMENTS-AGREE"),
        ({"dst": tile((7, 8))}, "NKW-PARTITIONS-AGREE"),
    ],
)
def test_refusals_of_tensor_scalar(changes: dict[str, Any], code: str) -> None:
    refuses(code, "trn2", "tensor_scalar", **healthy("tensor_scalar", **changes))


def test_the_message_of_a_missing_operator_on_a_chip() -> None:
    error = refuses(
        "NKW-OPERATOR-CHIP",
        "trn2",
        "tensor_scalar",
        dst=tile((8, 8)),
        data=tile((8, 8)),
        op0=nl.abs_max,
        operand0=1.0,
    )
    chips = [target for target in CHIPS if hardware(target).alu_extended_operators]
    assert str(error) == (
        "[NKW-OPERATOR-CHIP] tensor_scalar: Some operators exist on later generations only.\n"
        "  seen:  op0=abs_max on trn2\n"
        f"  limit: {' or '.join(chips)}\n"
        "  dst = (8, 8) float32 in sbuf\n"
        "  data = (8, 8) float32 in sbuf\n"
        "  op0 = abs_max\n"
        "  operand0 = 1.0\n"
        "  try:   compose it from operators this chip has"
    )
