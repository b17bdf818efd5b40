"""Cycles per element: what one more element per partition adds to an instruction's latency on gen2.

The factors are those of the nki.isa reference of release 2.26, the last to print them; but for reciprocal, whose
published kernels contradict the 8 of that reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.tiles import PSUM, plan, tile

_ROW: dict[str, tuple[str, float, Callable[[int], dict[str, Any]]]] = {
    "memset": ("memset", 1, lambda n: {"dst": tile((4, n)), "value": 0}),
    "memset of 16-bit zeros": ("memset", 1 / 2, lambda n: {"dst": tile((4, n), "bfloat16"), "value": 0}),
    "memset of 16-bit ones": ("memset", 1, lambda n: {"dst": tile((4, n), "bfloat16"), "value": 1}),
    "memset of 16-bit integer zeros": ("memset", 1, lambda n: {"dst": tile((4, n), "int16"), "value": 0}),
    "reciprocal": ("reciprocal", 1, lambda n: {"dst": tile((4, n)), "data": tile((4, n))}),
    "tensor_copy": ("tensor_copy", 1, lambda n: {"dst": tile((4, n)), "src": tile((4, n))}),
    "tensor_scalar": (
        "tensor_scalar",
        1,
        lambda n: {"dst": tile((4, n)), "data": tile((4, n)), "op0": nl.add, "operand0": 1.0},
    ),
    "tensor_scalar of two operators": (
        "tensor_scalar",
        1,
        lambda n: {
            "dst": tile((4, n)),
            "data": tile((4, n)),
            "op0": nl.add,
            "operand0": 1.0,
            "op1": nl.multiply,
            "operand1": 2.0,
        },
    ),
    "rsqrt on GpSimd": (
        "tensor_scalar",
        1,
        lambda n: {"dst": tile((4, n)), "data": tile((4, n)), "op0": nl.rsqrt, "operand0": None},
    ),
    "tensor_tensor in SBUF": (
        "tensor_tensor",
        2,
        lambda n: {"dst": tile((4, n)), "data1": tile((4, n)), "data2": tile((4, n)), "op": nl.add},
    ),
    "tensor_tensor with PSUM": (
        "tensor_tensor",
        1,
        lambda n: {
            "dst": tile((4, n)),
            "data1": tile((4, n), buffer=PSUM),
            "data2": tile((4, n)),
            "op": nl.add,
        },
    ),
    "scalar_tensor_tensor": (
        "scalar_tensor_tensor",
        2,
        lambda n: _scalar_tensor_tensor(n, "float32", nl.subtract, nl.multiply),
    ),
    "scalar_tensor_tensor of bfloat16": (
        "scalar_tensor_tensor",
        2,
        lambda n: _scalar_tensor_tensor(n, "bfloat16", nl.add, nl.multiply),
    ),
    "scalar_tensor_tensor, fast case": (
        "scalar_tensor_tensor",
        1,
        lambda n: _scalar_tensor_tensor(n, "bfloat16", nl.subtract, nl.multiply),
    ),
    "tensor_reduce": ("tensor_reduce", 1, lambda n: _tensor_reduce(n, "float32", nl.add)),
    "tensor_reduce of bfloat16": ("tensor_reduce", 1, lambda n: _tensor_reduce(n, "bfloat16", nl.minimum)),
    "tensor_reduce, fast case": ("tensor_reduce", 1 / 2, lambda n: _tensor_reduce(n, "bfloat16", nl.maximum)),
    "max8": ("max8", 1, lambda n: {"dst": tile((4, 8)), "src": tile((4, n))}),
    "nc_find_index8": (
        "nc_find_index8",
        1,
        lambda n: {"dst": tile((4, 8), "uint32"), "data": tile((4, n)), "vals": tile((4, 8))},
    ),
    "nc_match_replace8": (
        "nc_match_replace8",
        1,
        lambda n: {"dst": tile((4, n)), "data": tile((4, n)), "vals": tile((4, 8)), "imm": 0.0},
    ),
    "iota": ("iota", 1, lambda n: {"dst": tile((4, n)), "pattern": [[1, n]]}),
    "affine_select": (
        "affine_select",
        1,
        lambda n: {
            "dst": tile((4, n)),
            "pattern": [[1, n]],
            "channel_multiplier": 0,
            "on_true_tile": tile((4, n)),
            "on_false_value": 0.0,
        },
    ),
    "activation": (
        "activation",
        1,
        lambda n: {
            "dst": tile((4, n)),
            "op": nl.exp,
            "data": tile((4, n)),
            "reduce_cmd": nisa.reduce_cmd.idle,
        },
    ),
}


def _scalar_tensor_tensor(n: int, dtype: str, op0: Any, op1: Any) -> dict[str, Any]:
    data = tile((4, n), dtype)
    return {"dst": data, "data": data, "op0": op0, "operand0": 1.0, "op1": op1, "operand1": data}


def _tensor_reduce(n: int, dtype: str, op: Any) -> dict[str, Any]:
    return {"dst": tile((4, 1), dtype), "op": op, "data": tile((4, n), dtype), "axis": 1}


@pytest.mark.parametrize("case", _ROW)
def test_cycles_per_element(case: str) -> None:
    name, per_element, call = _ROW[case]
    short, long = (plan("trn1", name, **call(n)).cost for n in (1024, 2048))
    for more, less in (
        (long.latency_cycles, short.latency_cycles),
        (long.interval_cycles, short.interval_cycles),
    ):
        # Both are sums of the element cycles and overheads that are no whole numbers; each sum rounds twice.
        assert abs(more - less - 1024 * per_element) <= 2 * (math.ulp(more) + math.ulp(less))


@pytest.mark.parametrize("case", _ROW)
def test_a_short_instruction_costs_at_least_the_smallest_interval(case: str) -> None:
    name, _, call = _ROW[case]
    assert plan("trn1", name, **call(8)).cost.interval_cycles >= 64


def test_float32_is_transposed_in_several_passes() -> None:
    wide, narrow = (
        plan("trn1", "nc_transpose", dst=tile((64, 128), d, PSUM), data=tile((128, 64), d)).cost
        for d in ("float32", "bfloat16")
    )
    assert wide.interval_cycles == 4 * narrow.interval_cycles
    assert wide.flops == 0
