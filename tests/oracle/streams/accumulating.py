"""How reductions, activations and scans are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle.draw import ANY, FLOATS, INTEGERS, Draw, Tile
from tests.oracle.formats import FORMATS
from tests.oracle.streams.common import (
    BITVEC,
    COMPARISONS,
    FUNCTIONS,
    PLAIN,
    REDUCTIONS,
    Arguments,
    binary_operator,
    destination,
    draws,
    number_or_column,
    same_size,
    unary_operator,
)


@draws
def tensor_reduce(d: Draw) -> Arguments:
    p, f = d.size()
    bits = d.chance(0.2)
    data = d.source(p, f, d.dtype(INTEGERS if bits else ANY), d.buffer())
    rank = len(data.shape)
    first = int(d.random.integers(1, rank))
    axes = tuple(range(first, rank))
    axis: Any = axes if len(axes) > 1 or d.chance(0.5) else axes[0]
    dtype = same_size(d, data.dtype) if bits else d.dtype()
    left = int(np.prod(data.shape[1:first]))
    dst = d.result(p, left, dtype, d.buffer(), apart_from=(data,))
    op = d.pick(BITVEC[:3]) if bits else d.pick(REDUCTIONS)
    keep = d.chance(0.3)
    return {
        "dst": dst,
        "op": op,
        "data": data,
        "axis": axis,
        "negate": not bits and d.chance(0.3),
        "keepdims": keep,
    }


@draws
def tensor_partition_reduce(d: Draw) -> Arguments:
    p, f = d.size()
    bits = d.chance(0.25)
    data = d.source(p, f, d.dtype(INTEGERS if bits else ANY))
    dst = d.result(1, f, same_size(d, data.dtype) if bits else d.dtype(), apart_from=(data,))
    return {
        "dst": dst,
        "op": d.pick(BITVEC[:2]) if bits else d.pick(("add", "average", "maximum")),
        "data": data,
    }


def _bias(d: Draw, p: int) -> Any:
    if d.chance(0.4):
        return None
    if d.generation >= 3 and d.chance(0.4):
        return d.number()
    return d.column(p, d.dtype(PLAIN), buffer=d.buffer())


@draws
def activation(d: Draw) -> Arguments:
    p, f = d.size()
    op = d.pick(FUNCTIONS)
    arguments: Arguments = {
        "op": op,
        "data": d.source(p, f, d.dtype(), d.buffer()),
        "bias": None if op == "reciprocal" and d.generation == 2 else _bias(d, p),
        "scale": 1.0 if d.chance(0.4) else number_or_column(d, p),
    }
    command = d.pick(("idle", "reset", "reduce", "reset_reduce"))
    dst = destination(d, p, f, tuple(arguments.values()))
    if command != "idle" or d.chance(0.3):
        res = d.column(p, d.dtype(), buffer=d.buffer(), apart_from=(dst, *arguments.values()), filled=False)
        arguments |= {"reduce_op": "add", "reduce_res": res if d.chance(0.7) else None, "reduce_cmd": command}
    return {"dst": dst, **arguments}


@draws
def activation_reduce(d: Draw) -> Arguments:
    p, f = d.size()
    arguments: Arguments = {
        "op": d.pick([name for name in FUNCTIONS if name != "reciprocal"]),
        "data": d.source(p, f, d.dtype(), d.buffer()),
        "reduce_op": "add",
        "bias": _bias(d, p),
        "scale": 1.0 if d.chance(0.4) else number_or_column(d, p),
    }
    dst = destination(d, p, f, tuple(arguments.values()))
    res = d.column(p, d.dtype(), buffer=d.buffer(), apart_from=(dst, *arguments.values()), filled=False)
    return {"dst": dst, "reduce_res": res, **arguments}


@draws
def activate2(d: Draw) -> Arguments | None:
    if d.generation < 4:
        return None
    p, f = d.size()
    pairs = (
        ("multiply", "add"),
        ("multiply", "subtract"),
        ("multiply", "bypass"),
        ("add", "bypass"),
        ("subtract", "bypass"),
        ("bypass", "bypass"),
    )
    op0, op1 = d.pick(pairs)
    arguments: Arguments = {
        "op": d.pick([*FUNCTIONS, "prelu", "prelu"]),
        "data": d.source(p, f, d.dtype(), d.buffer()),
        "imm0": number_or_column(d, p),
        "imm1": number_or_column(d, p),
        "op0": op0,
        "op1": op1,
        "relu_param": float(np.float32(d.random.standard_normal())) if d.chance(0.6) else d.column(p),
        "reverse0": op0 != "bypass" and d.chance(0.3),
        "reverse1": op1 != "bypass" and d.chance(0.3),
    }
    dst = destination(d, p, f, tuple(arguments.values()))
    if d.chance(0.6):
        res = d.column(p, d.dtype(), buffer=d.buffer(), apart_from=(dst, *arguments.values()), filled=False)
        arguments |= {
            "reduce_op": d.pick(("add", "maximum", "minimum", "abs_max", "abs_min")),
            "reduce_res": res if d.chance(0.7) else None,
            "reduce_cmd": d.pick(("idle", "reset", "reduce", "reset_reduce")),
        }
    return {"dst": dst, **arguments}


def _vector_result(d: Draw, p: int, apart_from: tuple[Any, ...]) -> Tile | None:
    if d.chance(0.3):
        return None
    dtype = d.dtype(("float32", "bfloat16", "float16"))
    return d.column(p, dtype, buffer=d.buffer(), apart_from=apart_from, filled=False)


@draws
def exponential(d: Draw) -> Arguments | None:
    if d.generation < 4:
        return None
    p, f = d.size()
    common = (
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3",
        "float8_e5m2",
        "int8",
        "int16",
        "int32",
        "uint8",
        "uint16",
    )
    command = d.pick(("idle", "reset_reduce", "reduce", "load_reduce"))
    arguments: Arguments = {
        "src": d.source(p, f, d.dtype((*common, "uint32")), d.buffer(), dims=4),
        "max_value": number_or_column(d, p),
        "reduce_cmd": command,
        "reduce_init": number_or_column(d, p) if command == "load_reduce" else 0.0,
    }
    dst = destination(d, p, f, tuple(arguments.values()), d.dtype((*common, "tfloat32")), dims=4)
    return {"dst": dst, "reduce_res": _vector_result(d, p, (dst, *arguments.values())), **arguments}


@draws
def tensor_scalar_reduce(d: Draw) -> Arguments:
    p, f = d.size()
    command = d.pick(("reset_reduce", "reduce", "load_reduce"))
    unary = d.chance(0.15)
    arguments: Arguments = {
        "data": d.source(p, f, d.dtype(), d.buffer()),
        "op0": unary_operator(d) if unary else binary_operator(d),
        "operand0": None if unary else number_or_column(d, p),
        "reduce_op": d.pick(("add", "multiply", "maximum", "minimum")),
        "reduce_cmd": command,
        "reduce_init": number_or_column(d, p) if command == "load_reduce" else None,
        "reduce_res_negate": d.chance(0.3),
    }
    dst = destination(d, p, f, tuple(arguments.values()))
    return {"dst": dst, "reduce_res": _vector_result(d, p, (dst, *arguments.values())), **arguments}


@draws
def range_select(d: Draw) -> Arguments | None:
    if d.generation < 3:
        return None
    p, f = d.size()
    bounds = [
        d.column(p, values=FORMATS["float32"].encode(d.random.integers(-2, f + 3, (p, 1)))) for _ in range(2)
    ]
    arguments = {
        "on_true_tile": d.source(p, f, d.dtype(FLOATS), d.buffer()),
        "comp_op0": d.pick(COMPARISONS),
        "comp_op1": d.pick(COMPARISONS),
        "bound0": bounds[0],
        "bound1": bounds[1],
        "reduce_cmd": d.pick(("idle", "reduce", "reset_reduce")),
        "range_start": int(d.random.integers(-3, 4)),
    }
    dst = destination(d, p, f, tuple(arguments.values()))
    return {"dst": dst, "reduce_res": _vector_result(d, p, (dst, *arguments.values())), **arguments}


@draws
def select_reduce(d: Draw) -> Arguments:
    p, f = d.size()
    narrow = tuple(name for name in ANY if name not in ("tfloat32", "int32", "uint32"))
    arguments = {
        "predicate": d.tile(p, f, d.pick(("int8", "uint8", "int16", "uint16"))),
        "on_true": d.source(p, f, d.dtype(narrow), d.buffer()),
        "on_false": number_or_column(d, p),
        "reduce_cmd": d.pick(("idle", "reduce", "reset_reduce")),
        "reverse_pred": d.chance(0.5),
    }
    dst = destination(d, p, f, tuple(arguments.values()))
    return {"dst": dst, "reduce_res": _vector_result(d, p, (dst, *arguments.values())), **arguments}


@draws
def tensor_tensor_scan(d: Draw) -> Arguments:
    p, f = d.size()
    arguments = {
        "data0": d.source(p, f, d.dtype()),
        "data1": d.source(p, f, d.dtype(), d.buffer()),
        "initial": number_or_column(d, p),
        "op0": binary_operator(d),
        "op1": binary_operator(d),
        "reverse0": d.chance(0.3),
        "reverse1": d.chance(0.3),
    }
    return {"dst": destination(d, p, f, tuple(arguments.values())), **arguments}


@draws
def tensor_scalar_cumulative(d: Draw) -> Arguments:
    p, f = d.size()
    allowed = tuple(name for name in PLAIN if name not in ("int32", "uint32"))
    command = d.pick(("reset_reduce", "reduce", "load_reduce"))
    arguments = {
        "src": d.source(p, f, d.dtype(allowed), d.buffer()),
        "op0": binary_operator(d),
        "op1": d.pick(("add", "subtract", "multiply", "maximum", "minimum")),
        "imm0": number_or_column(d, p),
        "imm1": number_or_column(d, p) if command == "load_reduce" else None,
        "reduce_cmd": command,
    }
    return {"dst": destination(d, p, f, tuple(arguments.values()), d.dtype(allowed)), **arguments}
