"""How matmuls and transposes are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle.draw import ANY, INTEGERS, Draw, Tile
from tests.oracle.formats import FORMATS
from tests.oracle.streams.common import MATMUL_INPUTS, Arguments, draws


def _matmul_inputs(d: Draw) -> tuple[str, str]:
    if d.chance(0.3):
        wide = ("float32", "tfloat32")
        return d.pick(wide), d.pick(wide)
    if d.generation >= 4 and d.chance(0.2):
        return "float8_e4m3fn", d.pick(("float8_e4m3fn", "bfloat16"))
    return d.pick(MATMUL_INPUTS), d.pick(MATMUL_INPUTS)


def _psum(d: Draw, m: int, n: int, dtype: str, apart_from: tuple[Any, ...], **how: Any) -> Tile:
    """Draw a PSUM destination: often one that was written before, to accumulate onto."""
    return d.tile(m, n, dtype, "psum", filled=False, apart_from=apart_from, **how)


@draws
def nc_matmul(d: Draw) -> Arguments:
    (k, n), m = d.size(), d.pick(d.partitions)
    first, second = _matmul_inputs(d)
    if d.chance(0.1):
        return _transposing_matmul(d, k, m, first)
    double = d.generation >= 3 and d.chance(0.15)
    if double:
        first, second = d.pick(MATMUL_INPUTS[2:]), d.pick(MATMUL_INPUTS[2:])
        stationary = d.tile(k, 2 * m, first, shape=(k, 2, m))
        moving = d.tile(k, 2 * n, second, shape=(k, 2, n))
    else:
        stationary, moving = d.tile(k, m, first), d.source(k, n, second)
    dtype = "bfloat16" if d.generation >= 4 and d.chance(0.4) else "float32"
    dst = _psum(d, m, n, dtype, (stationary, moving))
    written = dst.oracle.memory.state[dst.oracle.addresses].all()
    accumulate = d.pick((None, None, False, True) if written else (None, False))
    arguments = {"dst": dst, "stationary": stationary, "moving": moving, "accumulate": accumulate}
    if double:
        arguments["perf_mode"] = "double_row"
    return {**arguments, **_array_tile(d, k, m, double)} if d.chance(0.25) else arguments


def _array_tile(d: Draw, k: int, m: int, double: bool) -> Arguments:
    """Draw rows and columns of the array that hold the stationary tile; double_row takes whole columns."""
    sizes = (32, 64, 128) if d.generation >= 3 else (64, 128)
    rows = d.pick([size for size in sizes if size >= k])
    columns = 128 if double else d.pick([size for size in sizes if size >= m])
    position = tuple(size * int(d.random.integers(128 // size)) for size in (rows, columns))
    return {"tile_position": position, "tile_size": (rows, columns)}


def _transposing_matmul(d: Draw, k: int, m: int, dtype: str) -> Arguments:
    """Draw a matmul whose moving operand is an identity: dst is stationary transposed, in its dtype where bits move."""
    identity = d.tile(k, k, dtype, shape=(k, k), values=FORMATS[dtype].encode(np.eye(k)))
    stationary = d.tile(k, m, dtype, apart_from=(identity,))
    dst = _psum(d, m, k, dtype if d.generation >= 3 else "float32", (stationary, identity))
    return {"dst": dst, "stationary": stationary, "moving": identity, "is_transpose": True}


@draws
def nc_transpose(d: Draw) -> Arguments:
    by_matmul = d.chance(0.6)
    if not by_matmul:
        p, f = d.upto(32), d.upto(32)
        data = d.source(p, f, d.dtype(), d.buffer())
        dst = d.result(f, p, data.dtype, d.buffer(), apart_from=(data,))
        return {"dst": dst, "data": data, "engine": "vector"}
    p, f = d.pick(d.partitions), d.pick(d.partitions)
    allowed = (*MATMUL_INPUTS, "float32", "tfloat32")
    if d.generation == 3:
        allowed = ("bfloat16", "float16", "float32", *INTEGERS)
    elif d.generation > 3:
        allowed = ANY
    data = d.source(p, f, d.dtype(allowed))
    dst = d.result(f, p, data.dtype, "psum", apart_from=(data,))
    return {"dst": dst, "data": data, "engine": d.pick(("unknown", "tensor"))}


def _scale(d: Draw, p: int, f: int, filled: bool = True) -> Tile:
    """Draw a scale tile from partition 0, 4, 8 or 12 of a quadrant on: four rows per quadrant of data, or more."""
    needed = 32 * (p // 32 - 1) + 4
    start = d.pick((0, 0, 4, 8, 12)) + 32 * int(d.random.integers((128 - needed) // 32 + 1))
    rows = needed + int(d.random.integers(min(128 - start - needed, 28) + 1))
    low = d.random.integers(110, 140, (rows, f)).astype(np.uint64)
    values = np.where(d.random.random((rows, f)) < 0.005, 255, low) if filled else None
    return d.tile(
        rows, f, "uint8", values=values, filled=filled, shape=(rows, f), start=start, reuse=0.0, keep=False
    )


@draws
def nc_matmul_mx(d: Draw) -> Arguments | None:
    if d.generation < 4:
        return None
    k, m, n = d.pick((32, 32, 64, 128)), 2 * d.upto(8), d.upto(12)
    packed = ("float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4")
    stationary, moving = (
        d.tile(k, m, d.pick(packed), shape=(k, m)),
        d.tile(k, n, d.pick(packed), shape=(k, n)),
    )
    scales = _scale(d, k, m), _scale(d, k, n)
    dst = _psum(d, m, n, d.pick(("float32", "bfloat16")), ())
    written = dst.oracle.memory.state[dst.oracle.addresses].all()
    tile = {}
    if d.chance(0.3):
        size = d.pick([size for size in (32, 64, 128) if size >= k])
        tile = {"tile_position": (size * int(d.random.integers(128 // size)), 0), "tile_size": (size, 128)}
    return {
        **tile,
        "dst": dst,
        "stationary": stationary,
        "moving": moving,
        "stationary_scale": scales[0],
        "moving_scale": scales[1],
        "accumulate": d.pick((None, None, False, True) if written else (None, False)),
    }


@draws
def quantize_mx(d: Draw) -> Arguments | None:
    if d.generation < 4:
        return None
    p, f = d.pick((32, 32, 64, 96, 128)), d.upto(6)
    src = d.tile(p, 4 * f, d.pick(("bfloat16", "float16")))
    dst = d.tile(p, f, d.pick(("float8_e4m3fn_x4", "float8_e5m2_x4")), filled=False, apart_from=(src,))
    return {"dst": dst, "src": src, "dst_scale": _scale(d, p, f, filled=False)}
