"""Helpers of the draws: the table of draws, operator names, and the common operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle.draw import ANY, INTEGERS, Draw, Tile
from tests.oracle.formats import FORMATS

Arguments = dict[str, Any]

DRAWS: dict[str, Callable[[Draw], Arguments | None]] = {}

BINARY = (
    "add subtract multiply maximum minimum equal not_equal greater_equal greater less_equal less logical_and "
    "logical_or logical_xor"
).split()

BITVEC = "bitwise_and bitwise_or bitwise_xor left_shift right_shift".split()

REDUCTIONS = "add subtract multiply maximum minimum logical_and logical_or logical_xor".split()

COMPARISONS = "equal less less_equal greater greater_equal".split()

FUNCTIONS = (
    "copy square sigmoid relu gelu gelu_dx gelu_apprx_tanh gelu_apprx_sigmoid gelu_apprx_sigmoid_dx silu silu_dx tanh "
    "softplus mish erf erf_dx exp log sin arctan sqrt rsqrt reciprocal sign abs"
).split()

MATMUL_INPUTS = ("bfloat16", "float16", "float8_e4m3", "float8_e5m2")

PACKED = ("float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4")

PLAIN = tuple(name for name in ANY if name != "tfloat32")


def draws(draw: Callable[[Draw], Arguments | None]) -> Callable[[Draw], Arguments | None]:
    """Enter a draw under its name."""
    DRAWS[draw.__name__] = draw
    return draw


def same_size(d: Draw, dtype: str) -> str:
    return d.pick([name for name in INTEGERS if FORMATS[name].bytes == FORMATS[dtype].bytes])


def binary_operator(d: Draw) -> str:
    extra = ["abs_max", "abs_min"] if d.generation >= 4 else []
    return d.pick(BINARY + extra)


def destination(
    d: Draw, p: int, f: int, sources: tuple[Any, ...], dtype: str | None = None, **how: Any
) -> Tile:
    """Draw a destination apart from all sources, or now and then one of them: in place."""
    dtype = dtype or d.dtype()
    for source in sources:
        fits = (
            isinstance(source, Tile)
            and source.dtype == dtype
            and source.shape[0] == p
            and source.free_size == f
        )
        dense = fits and 0 not in source.simulated.strides
        writable = fits and source.oracle.memory.buffer in how.get("buffers", ("sbuf", "psum"))
        if fits and dense and writable and d.chance(0.15):
            return source
    how.pop("buffers", None)
    buffer = how.pop("buffer", None) or d.buffer()
    return d.result(p, f, dtype, buffer, apart_from=sources, **how)


def number_or_column(d: Draw, p: int, dtype: str = "float32", buffer: str | None = None) -> Any:
    """Draw a number or a (P, 1) tile."""
    return d.number() if d.chance(0.5) else d.column(p, dtype, buffer=buffer or d.buffer())


def unary_operator(d: Draw) -> str:
    return d.pick(["abs"] + (["square", "relu"] if d.generation >= 4 else []))
