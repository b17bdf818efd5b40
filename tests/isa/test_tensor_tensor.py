"""tensor_tensor against float64 and Python integers, and who does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulate.isa import Engine
from simulate.nki import language as nl
from tests.isa.alu import ARITHMETIC, DTYPES, SHAPES, scalar_by_scalar
from tests.isa.reference import (
    STORAGE,
    as_float64,
    assert_same,
    assert_same_bits,
    sample,
    through_float32,
)
from tests.isa.tiles import PSUM, Fresh, execute, healthy, plan, refuses, tile


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_tensor_tensor_computes_in_float32_and_rounds_once(name: str, dtypes: tuple[str, str, str]) -> None:
    shape = SHAPES[len(name) % len(SHAPES)]
    x, y = sample(dtypes[0], shape, "x"), sample(dtypes[1], shape, "y")
    y.reshape(-1)[::3] = x.reshape(-1)[::3].astype(y.dtype)  # some equal ones
    expected = through_float32(scalar_by_scalar(ARITHMETIC[name], as_float64(x), as_float64(y)), dtypes[2])
    done = execute(
        "trn1", "tensor_tensor", dst=Fresh(shape, dtypes[2]), data1=x, data2=y, op=getattr(nl, name)
    )
    assert_same(done["dst"], expected)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
def test_32_bit_integers_are_exact_on_gpsimd_and_wrap(name: str, dtype: str) -> None:
    shape = (127, 6)
    x, y = sample(dtype, shape, "x"), sample(dtype, shape, "y")
    exact = [ARITHMETIC[name](a, b) % 2**32 for a, b in zip(x.reshape(-1).tolist(), y.reshape(-1).tolist())]
    expected = np.array(exact, np.uint32).view(STORAGE[dtype]).reshape(shape)
    call = {"dst": Fresh(shape, dtype), "data1": x, "data2": y, "op": getattr(nl, name)}
    assert_same_bits(execute("trn2", "tensor_tensor", **call)["dst"], expected)
    on_vector = execute("trn2", "tensor_tensor", **call, engine=Engine.vector)["dst"]
    rounded_twice = scalar_by_scalar(ARITHMETIC[name], as_float64(x), as_float64(y))
    assert_same(on_vector, through_float32(rounded_twice, dtype))


def test_who_does_tensor_tensor() -> None:
    operands = {"data1": tile((8, 8), "int32"), "data2": tile((8, 8), "uint32"), "dst": tile((8, 8), "int32")}
    for op, changes, engine in (
        (nl.add, {}, Engine.gpsimd),
        (nl.maximum, {}, Engine.vector),
        (nl.add, {"dst": tile((8, 8), "float32")}, Engine.vector),
        (nl.add, {"data1": tile((8, 8), "int16")}, Engine.vector),
        (nl.add, {"data1": tile((8, 8), "int32", PSUM)}, Engine.vector),
        (nl.bitwise_and, {}, Engine.vector),
        (nl.power, {}, Engine.gpsimd),
    ):
        assert plan("trn1", "tensor_tensor", **{**operands, **changes}, op=op).engine is engine
    refuses("NKW-ENGINE", "trn1", "tensor_tensor", **operands, op=nl.power, engine=Engine.vector)
    refuses("NKW-ENGINE", "trn1", "tensor_tensor", **operands, op=nl.add, engine=Engine.scalar)
    floats = healthy("tensor_tensor", dst=tile((8, 8), buffer=PSUM), engine=Engine.gpsimd)
    refuses("NKW-GPSIMD-PSUM", "trn1", "tensor_tensor", **floats)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bits_are_for_the_vector_engine(name: str, target: str) -> None:
    operands = {operand: tile((8, 8), "int32") for operand in ("dst", "data1", "data2")}
    call = {**operands, "op": getattr(nl, name)}
    assert plan(target, "tensor_tensor", **call, engine=Engine.vector).engine is Engine.vector
    assert plan(target, "tensor_tensor", **call).engine is Engine.vector
    refuses("NKW-ENGINE", target, "tensor_tensor", **call, engine=Engine.gpsimd)
    assert (
        plan(target, "tensor_tensor", **{**operands, "op": nl.add}, engine=Engine.gpsimd).engine
        is Engine.gpsimd
    )


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"op": nl.abs}, "NKW-DEVICE-OPERATOR"),
        ({"op": nl.abs_max}, "NKW-OPERATOR-CHIP"),
        ({"op": nl.exp}, "NKW-OPERATOR"),
        ({"data2": tile((8, 9))}, "NKW-ELEMENTS-AGREE"),
        ({"data2": tile((1, 8))}, "NKW-PARTITIONS-AGREE"),
        ({"dst": tile((8, 4))}, "NKW-ELEMENTS-AGREE"),
        ({"data1": tile((8, 8), buffer=PSUM), "data2": tile((8, 8), buffer=PSUM)}, "NKW-ONE-PSUM-INPUT"),
    ],
)
def test_refusals_of_tensor_tensor(changes: dict[str, Any], code: str) -> None:
    refuses(code, "trn2", "tensor_tensor", **healthy("tensor_tensor", **changes))
    plan("trn2", "tensor_tensor", **healthy("tensor_tensor", data1=tile((8, 8), buffer=PSUM)))
