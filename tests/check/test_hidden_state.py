"""Detectors of values and of state that outlives an instruction, at their limits and on healthy patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from tests.check.launched import codes
from tests.faults.data import copied_out


def activation_kernel(op: str) -> Callable[..., Any]:
    def kernel(x):
        tile = nl.load(x)
        nisa.activation(dst=tile, op=getattr(nl, op), data=tile)
        return copied_out(tile)

    return kernel


def column(value: float) -> np.ndarray:
    tile = np.full((4, 2), 1, np.float32)
    tile[1, 1] = value
    return tile


LIMITS = [
    ("sin", np.pi, 1),
    ("sin", -np.pi, -1),
    ("arctan", np.pi / 2, 1),
    ("log", 2.0**64, 1),
    ("log", 2.0**-64, -1),
    ("sqrt", 2.0**118, 1),
    ("rsqrt", 2.0**-87, -1),
    ("rsqrt", 2.0**97, 1),
    ("reciprocal", 2.0**42, 1),
    ("reciprocal", 2.0**-42, -1),
    ("reciprocal", -(2.0**42), -1),
]


@pytest.mark.parametrize(("op", "limit", "direction"), LIMITS)
def test_a_function_is_reported_from_the_first_value_outside_its_range(op, limit, direction) -> None:
    inside = np.float32(limit)  # kernels clip to pi as float32
    outside = np.nextafter(inside, np.float32(direction * np.inf))
    assert codes(activation_kernel(op), column(inside)) == []
    assert codes(activation_kernel(op), column(outside)) == ["NKW-FUNCTION-RANGE"]


@pytest.mark.parametrize("op", ["exp", "tanh", "sigmoid", "square", "gelu", "relu"])
def test_functions_for_all_inputs_are_never_reported(op) -> None:
    assert codes(activation_kernel(op), column(-1e18)) == []


def test_the_root_of_an_exact_zero_is_not_reported() -> None:
    assert codes(activation_kernel("sqrt"), column(0.0)) == []
    assert codes(activation_kernel("sqrt"), column(-1e-30)) == ["NKW-FUNCTION-RANGE"]


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3", 240.0), ("float8_e5m2", 57344.0)])
def test_a_cast_to_fp8_is_reported_where_it_overflows(dtype, most) -> None:
    def kernel(x):
        small = nl.ndarray((4, 2), dtype=getattr(nl, dtype))
        nisa.tensor_copy(dst=small, src=nl.load(x))
        return copied_out(small)

    assert codes(kernel, column(most)) == []
    assert codes(kernel, column(most * 1.25)) == ["NKW-FP8-OVERFLOW"]
    assert codes(kernel, column(np.inf)) == []  # what was infinite before is no overflow


@pytest.mark.parametrize("exceeds", [True, False])
def test_integers_are_judged_before_an_instruction_overwrites_them(exceeds) -> None:
    def kernel(x):
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.minimum, operand0=5.0)
        return copied_out(tile)

    value = 2**24 + exceeds
    expected = ["NKW-INT-FLOAT32"] if exceeds else []
    assert codes(kernel, np.array([[value, 1], [3, 4]], np.int32)) == expected


def summed(commands: list[str], used: bool = False) -> Callable[..., Any]:
    """Sum column blocks in the Scalar registers, read out after each block; with `used`, a copy uses each."""

    def kernel(x):
        tile = nl.load(x)
        sums = nl.ndarray((4, 1), dtype=nl.float32)
        other = nl.ndarray((4, 1), dtype=nl.float32)
        for i in range(len(commands)):
            block = tile[:, i * 2 : i * 2 + 2]
            command = getattr(nisa.reduce_cmd, commands[i])
            nisa.activation(
                dst=block, op=nl.relu, data=block, reduce_op=nl.add, reduce_res=sums, reduce_cmd=command
            )
            if used:
                nisa.tensor_copy(dst=other, src=sums)
        return copied_out(sums)

    return kernel


BLOCKS = np.arange(24, dtype=np.float32).reshape(4, 6)


def register_codes(kernel: Callable[..., Any]) -> list[str]:
    """Return the codes about accumulator registers; kernels that overwrite their sums get others as well."""
    return [code for code in codes(kernel, BLOCKS) if code.startswith("NKW-REGISTERS")]


@pytest.mark.parametrize(
    ("commands", "used", "expected"),
    [
        (["reset_reduce", "reduce", "reduce"], False, []),
        (["reset", "reduce", "idle"], False, []),  # an idle Scalar instruction reads the sum out
        (["reset_reduce", "reset_reduce", "reset_reduce"], True, []),
        (["reset_reduce", "reduce", "reduce"], True, ["NKW-REGISTERS-REOPENED"]),
    ],
)
def test_sums_in_the_scalar_registers(commands, used, expected) -> None:
    assert register_codes(summed(commands, used)) == expected


@pytest.mark.parametrize(("command", "expected"), [("reset_reduce", []), ("idle", ["NKW-REGISTERS-IDLE"])])
def test_an_idle_vector_instruction_reads_out_what_it_spoils(command, expected) -> None:
    def kernel(x):
        tile, highest = nl.load(x), nl.ndarray((4, 1), dtype=nl.float32)
        chosen, kept = nl.ndarray((4, 6), dtype=nl.uint8), nl.ndarray((4, 6), dtype=nl.float32)
        nisa.memset(dst=chosen, value=1)
        for reduce_command in (nisa.reduce_cmd.reset_reduce, getattr(nisa.reduce_cmd, command)):
            nisa.select_reduce(
                dst=kept,
                predicate=chosen,
                on_true=tile,
                on_false=0.0,
                reduce_res=highest,
                reduce_cmd=reduce_command,
            )
        return copied_out(highest)

    assert register_codes(kernel) == expected


@pytest.mark.parametrize(("between", "expected"), [("scalar", []), ("vector", ["NKW-REGISTERS-IDLE"])])
def test_only_instructions_of_the_same_engine_spoil_its_registers(between, expected) -> None:
    def kernel(x):
        tile = nl.load(x)
        sums = nl.ndarray((4, 1), dtype=nl.float32)
        chosen = nl.ndarray((4, 6), dtype=nl.uint8)
        nisa.tensor_scalar(dst=chosen, data=tile, op0=nl.greater, operand0=3.0)
        kept = nl.ndarray((4, 6), dtype=nl.float32)
        for command in (nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce):
            nisa.tensor_scalar_reduce(
                dst=kept,
                data=tile,
                op0=nl.add,
                operand0=0.0,
                reduce_op=nl.add,
                reduce_res=sums,
                reduce_cmd=command,
            )
            if between == "scalar":
                nisa.activation(dst=nl.ndarray((4, 6), dtype=nl.float32), op=nl.relu, data=tile)
            else:
                nisa.select_reduce(dst=kept, predicate=chosen, on_true=tile, on_false=0.0)
        return copied_out(sums)

    assert register_codes(kernel) == expected


@pytest.mark.parametrize(("seeded", "expected"), [(True, []), (False, ["NKW-RANDOM-UNSEEDED"])])
def test_a_generator_is_reported_once_unless_it_is_seeded(seeded, expected) -> None:
    def kernel(x):
        tile = nl.load(x)
        if seeded:
            nisa.set_rng_seed(src_seeds=tile[0:1, 0:1])
        for _ in range(3):
            nisa.dropout(dst=tile, data=tile, prob=0.5)
        return copied_out(tile)

    assert codes(kernel, BLOCKS) == expected
