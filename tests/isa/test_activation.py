"""activation and activation_reduce: scale, bias, the accumulator registers, and what each chip refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simulate.isa import Engine
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import as_float64, assert_same, rounded, sample, through_float32
from tests.isa.tiles import PSUM, TARGETS, Fresh, Given, execute, execute_all, healthy, plan, refuses, tile

_CMD = nisa.reduce_cmd
DTYPES = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("float16", "bfloat16"),
    ("float8_e4m3", "float16"),
    ("int32", "float32"),
    ("uint8", "int8"),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (127, 3, 7), (128, 9)])
def test_scale_and_bias_are_float32_and_the_result_rounds_once(
    target: str, dtypes: tuple[str, str], shape: tuple[int, ...]
) -> None:
    data = sample(dtypes[0], shape)
    scale, bias = sample("float32", (shape[0], 1), "s"), sample("bfloat16", (shape[0], 1), "b")
    column = (shape[0], *(1,) * (len(shape) - 1))
    values = as_float64(data)
    for given_scale, given_bias in ((scale, bias), (0.3, Given(bias, PSUM)), (1.0, None)):
        factor = scale.reshape(column) if given_scale is scale else np.float32(given_scale)
        scaled = rounded(values * np.asarray(factor, np.float64), "float32")
        shifted = (
            scaled if given_bias is None else rounded(scaled + bias.reshape(column).astype(float), "float32")
        )
        for op, function in (
            (nl.copy, lambda x: x),
            (nl.relu, lambda x: np.maximum(x, 0)),
            (nl.square, np.square),
        ):
            done = execute(
                target,
                "activation",
                dst=Fresh(shape, dtypes[1]),
                op=op,
                data=data,
                bias=given_bias,
                scale=given_scale,
            )
            assert_same(done["dst"], through_float32(function(shifted), dtypes[1]))


@pytest.mark.parametrize("op", ["exp", "tanh", "sigmoid"])
def test_a_function_of_the_table_is_applied_after_scale_and_bias(op: str) -> None:
    exact = {"exp": math.exp, "tanh": math.tanh, "sigmoid": lambda x: 1 / (1 + math.exp(-x))}[op]
    data = sample("bfloat16", (5, 9))
    done = execute("trn2", "activation", dst=Fresh((5, 9)), op=getattr(nl, op), data=data, scale=0.5)["dst"]
    expected = np.array([exact(x * 0.5) for x in data.astype(float).reshape(-1).tolist()]).reshape(5, 9)
    # Halving is exact; what is left is the float32 function, within a few units in the last place.
    assert (np.abs(done - expected) <= 4 * np.spacing(np.abs(expected).astype(np.float32))).all()


def _whole_numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Draw small whole numbers, whose float32 sums are exact in any order."""
    return np.random.default_rng(7).integers(-9, 10, shape).astype(np.float32)


def test_the_registers_add_up_over_instructions() -> None:
    data = _whole_numbers((127, 3, 7))
    one = data.reshape(127, -1).sum(axis=1, keepdims=True)
    call = {"dst": Fresh(data.shape), "op": nl.copy, "data": data}
    add = {"reduce_op": nl.add, "reduce_res": Fresh((127, 1))}
    for commands, expected in (
        ([_CMD.reset_reduce], one),
        ([_CMD.reset_reduce, _CMD.reduce], 2 * one),
        ([_CMD.reset_reduce, _CMD.reset_reduce], one),
        ([_CMD.reset_reduce, _CMD.idle], one),
        ([_CMD.reset_reduce, _CMD.reset], 0 * one),
        ([_CMD.reset_reduce, _CMD.reset, _CMD.reduce], one),
        ([_CMD.reset, _CMD.reduce], one),
    ):
        calls: list[tuple[str, dict[str, Any]]] = [
            ("activation", {**call, **add, "reduce_cmd": command}) for command in commands
        ]
        result = execute_all("trn2", calls)
        assert_same(result["reduce_res"], expected)
        assert_same(result["dst"], data)


def test_registers_survive_instructions_that_do_not_name_them() -> None:
    data = _whole_numbers((128, 8))
    call = {"dst": Fresh(data.shape), "op": nl.copy, "data": data, "reduce_op": nl.add}
    calls = [
        ("activation", {**call, "reduce_cmd": _CMD.reset_reduce}),
        ("activation", {"dst": call["dst"], "op": nl.copy, "data": data}),
        ("activation", {**call, "reduce_cmd": _CMD.reduce, "reduce_res": Fresh((128, 1))}),
    ]
    assert_same(execute_all("trn1", calls)["reduce_res"], 2 * data.sum(axis=1, keepdims=True))


def test_the_sum_is_taken_before_the_cast_of_the_outputs() -> None:
    data = np.full((2, 64), 1 + 2.0**-9, np.float32)
    done = execute(
        "trn2",
        "activation_reduce",
        dst=Fresh((2, 64), "bfloat16"),
        op=nl.copy,
        data=data,
        reduce_op=nl.add,
        reduce_res=Fresh((2, 1)),
    )
    assert (done["dst"] == 1).all()
    assert_same(done["reduce_res"], np.full((2, 1), 64 + 64 * 2.0**-9))


def test_reduce_res_may_be_the_destination() -> None:
    data = _whole_numbers((8, 1))
    done = execute_all(
        "trn2",
        [
            (
                "activation_reduce",
                {
                    "dst": Fresh((8, 1)),
                    "op": nl.square,
                    "data": data,
                    "reduce_op": nl.add,
                    "reduce_res": Fresh((8, 1)),
                },
            )
        ],
    )
    assert_same(done["reduce_res"], np.square(data))


@pytest.mark.parametrize("target", TARGETS)
def test_a_number_as_bias(target: str) -> None:
    call = healthy("activation", bias=0.5)
    if target == "trn1":
        refuses("NKW-BIAS-IMMEDIATE", target, "activation", **call)
    else:
        plan(target, "activation", **call)
        done = execute(
            target, "activation", dst=Fresh((2, 3)), op=nl.copy, data=_whole_numbers((2, 3)), bias=0.5
        )
        assert_same(done["dst"], _whole_numbers((2, 3)) + 0.5)
    for absent in (None, 0.0, 0):
        plan(target, "activation", **healthy("activation", bias=absent))


@pytest.mark.parametrize("target", TARGETS)
def test_a_bias_under_reciprocal(target: str) -> None:
    call = healthy("activation", op=nl.reciprocal)
    if target == "trn1":
        refuses("NKW-BIAS-RECIPROCAL", target, "activation", **call)
    else:
        plan(target, "activation", **call)
    plan(target, "activation", **{**call, "bias": None})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"scale": tile((8, 1), "bfloat16")}, "NKW-DTYPE-ALLOWED"),
        ({"scale": tile((8, 2))}, "NKW-VECTOR-OPERAND"),
        ({"bias": tile((8, 2))}, "NKW-VECTOR-OPERAND"),
        ({"bias": tile((7, 1))}, "NKW-VECTOR-OPERAND"),
        ({"bias": tile((8, 1), "tfloat32")}, "NKW-BIAS-DTYPE"),
        ({"reduce_res": tile((8, 2))}, "NKW-VECTOR-OPERAND"),
        ({"reduce_op": nl.maximum}, "NKW-ACTIVATION-REDUCE"),
        ({"reduce_op": None}, "NKW-ACTIVATION-REDUCE"),
        ({"reduce_cmd": _CMD.load_reduce}, "NKW-ACTIVATION-REDUCE-CMD"),
        ({"reduce_cmd": "reset"}, "NKW-ACTIVATION-REDUCE-CMD"),
        ({"op": nl.add}, "NKW-OPERATOR"),
        ({"dst": tile((8, 9))}, "NKW-ELEMENTS-AGREE"),
        ({"dst": tile((9, 8))}, "NKW-PARTITIONS-AGREE"),
    ],
)
def test_refusals_of_activation(changes: dict[str, Any], code: str) -> None:
    refuses(code, "trn2", "activation", **healthy("activation", **changes))
    if "reduce_cmd" not in changes:
        refuses(code, "trn2", "activation_reduce", **healthy("activation_reduce", **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "int32", "uint8"])
def test_a_bias_tile_of_any_dtype_but_tfloat32(dtype: str) -> None:
    plan("trn1", "activation", **healthy("activation", bias=tile((8, 1), dtype)))


def test_reading_the_registers_costs_an_extra_instruction() -> None:
    with_result = plan("trn2", "activation", **healthy("activation"))
    without = plan("trn2", "activation", **healthy("activation", reduce_res=None))
    assert with_result.engine is Engine.scalar
    assert with_result.cost.latency_cycles > without.cost.latency_cycles


def test_the_message_of_a_reduction_that_does_not_add() -> None:
    error = refuses(
        "NKW-ACTIVATION-REDUCE",
        "trn2",
        "activation_reduce",
        dst=tile((8, 8)),
        op=nl.exp,
        data=tile((8, 8), buffer=PSUM),
        reduce_op=nl.maximum,
        reduce_res=tile((8, 1)),
    )
    assert str(error) == (
        "[NKW-ACTIVATION-REDUCE] activation_reduce: The Scalar engine's accumulator registers add; reduce_op must be "
        "nl.add.\n"
        "  seen:  reduce_op=maximum\n"
        "  dst = (8, 8) float32 in sbuf\n"
        "  op = exp\n"
        "  data = (8, 8) float32 in psum\n"
        "  reduce_op = maximum\n"
        "  reduce_res = (8, 1) float32 in sbuf\n"
        "  try:   reduce_op=nl.add, or nisa.tensor_reduce for another operator"
    )
