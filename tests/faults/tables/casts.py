"""Casts that saturate, integers that wrap, and integers that floats round on their way."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault

FP8 = ml_dtypes.float8_e4m3


def quantised(x, scale):
    return np.rint(x * np.float32(scale)).astype(np.int8)


@fault("NKW-INT-SATURATED", ramp(8, 16), answer=lambda x: quantised(x, 4.0))
def scaled_beyond_int8(x, sick):
    """The scale of a quantisation maps the largest value to 240 instead of 120."""
    out = nl.ndarray((8, 16), dtype=nl.int8)
    nisa.tensor_scalar(  # blamed
        dst=out, data=nl.load(x), op0=nl.multiply, operand0=8.0 if sick else 4.0
    )
    return copied_out(out)


@fault("NKW-INT-SATURATED", ramp(8, 16) - 8, answer=lambda x: x.astype(np.int16))
def negative_as_unsigned(x, sick):
    """Differences that may be negative are cast to an unsigned dtype, which makes them 0; on the Scalar engine."""
    tile = nl.load(x)
    middle = nl.ndarray((8, 16), dtype=nl.uint8 if sick else nl.int8)
    for block in range(2):
        rows = slice(block * 8, block * 8 + 8)
        nisa.activation(dst=middle[:, rows], op=nl.copy, data=tile[:, rows])  # blamed
    out = nl.ndarray((8, 16), dtype=nl.int16)
    nisa.tensor_copy(dst=out, src=middle)
    return copied_out(out)


@fault("NKW-INT-SATURATED", 3 * ramp(8, 16), answer=lambda x: x.astype(np.int32).T @ x.astype(np.int32))
def dot_product_in_int16(x, sick):
    """Sums of products reach 57,000 and are copied from PSUM to int16."""
    tile = nl.load(x, dtype=nl.bfloat16)
    sums = nl.ndarray((16, 16), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=tile, moving=tile)
    kept = nl.ndarray((16, 16), dtype=nl.int16 if sick else nl.int32)
    nisa.tensor_copy(dst=kept, src=sums)  # blamed
    out = nl.ndarray((16, 16), dtype=nl.int32)
    nisa.tensor_copy(dst=out, src=kept)
    return copied_out(out)


@fault("NKW-INT-SATURATED", ramp(4, 8) * 1000, answer=lambda x: x.astype(np.int32))
def cast_by_a_dma(x, sick):
    """A DMA casts floats up to 30,000 to bytes."""
    tile = nl.ndarray((4, 8), dtype=nl.uint8 if sick else nl.int16)
    nisa.dma_copy(dst=tile, src=x)  # blamed
    out = nl.ndarray((4, 8), dtype=nl.int32)
    nisa.tensor_copy(dst=out, src=tile)
    return copied_out(out)


@fault("NKW-INT-WRAPPED", ramp(4, 8, dtype=np.int32) + 65530, answer=lambda x: (x - 65500) * x)
def product_of_ids(x, sick):
    """The product of two numbers of 17 bits does not fit into 32 bits; GpSimd wraps it."""
    tile, other = nl.load(x), nl.ndarray((4, 8), dtype=nl.int32)
    nisa.tensor_scalar(dst=other, data=tile, op0=nl.subtract, operand0=0.0 if sick else 65500.0)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=other, op=nl.multiply)  # blamed
    return copied_out(tile)


@fault("NKW-INT-WRAPPED", np.full((4, 8), 2**29, np.int32), answer=lambda x: x + x + x)
def sum_in_a_loop(x, sick):
    """A count that doubles passes 2**31 in the loop."""
    tile = nl.load(x)
    total = nl.load(x)
    for _ in range(4 if sick else 2):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-INT-WRAPPED", ramp(4, 8, dtype=np.uint32), answer=lambda x: x + 1)
def difference_below_zero(x, sick):
    """An unsigned difference is negative and wraps to about 2**32."""
    tile, one = nl.load(x), nl.full((4, 8), 1, dtype=nl.uint32)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=one, op=nl.subtract if sick else nl.add)  # blamed
    return copied_out(tile)


@fault("NKW-INT-NAN", ramp(4, 8), answer=lambda x: np.rint(x * (np.float32(1) / (x + 1))).astype(np.int32))
def ratio_as_integer(x, sick):
    """0 / 0 is cast to an integer, which becomes 0 here and anything on the chip."""
    tile, below = nl.load(x), nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=below, data=below, op0=nl.add, operand0=1.0)
    nisa.reciprocal(dst=below, data=below)
    out = nl.ndarray((4, 8), dtype=nl.int32)
    nisa.tensor_tensor(dst=out, data1=tile, data2=below, op=nl.multiply)  # blamed
    return copied_out(out)


@fault("NKW-INT-FLOAT32", ramp(4, 8, dtype=np.int32) + 4097, answer=lambda x: (x * 4099).astype(np.int32))
def rows_times_a_stride(x, sick):
    """Row numbers pass through a float32 tile, where row times stride exceeds 2**24."""
    tile = nl.load(x)
    stride = nl.full((4, 8), 4099, dtype=nl.int32)
    out = nl.ndarray((4, 8), dtype=nl.int32)
    if sick:
        rows, offsets = nl.ndarray((4, 8), dtype=nl.float32), nl.ndarray((4, 8), dtype=nl.float32)
        nisa.tensor_copy(dst=rows, src=tile)
        nisa.tensor_scalar(dst=offsets, data=rows, op0=nl.multiply, operand0=4099.0)  # blamed
        nisa.tensor_copy(dst=out, src=offsets)
    else:
        nisa.tensor_tensor(dst=out, data1=tile, data2=stride, op=nl.multiply)
    return copied_out(out)


@fault("NKW-INT-FLOAT32", ramp(4, 8, dtype=np.int32) + 2**23, answer=lambda x: x + x + 1)
def count_in_float32(x, sick):
    """A count is kept in float32, which adds 1 to even numbers only."""
    tile = nl.load(x)
    count = nl.ndarray((4, 8), dtype=nl.float32 if sick else nl.int32)
    one = nl.full((4, 8), 1, dtype=nl.int32)
    nisa.tensor_tensor(dst=count, data1=tile, data2=tile, op=nl.add)
    if sick:
        nisa.tensor_scalar(dst=count, data=count, op0=nl.add, operand0=1.0)  # blamed
    else:
        nisa.tensor_tensor(dst=count, data1=count, data2=one, op=nl.add)
    out = nl.ndarray((4, 8), dtype=nl.int32)
    nisa.tensor_copy(dst=out, src=count)
    return copied_out(out)


@fault("NKW-INT-ROUNDED", ramp(4, 8, dtype=np.int32) + 1001, answer=lambda x: x.astype(np.float32))
def positions_by_way_of_float32(x, sick):
    """Positions are float32 first and bfloat16 then, which rounds them."""
    tile, wide = nl.load(x), nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=tile)
    narrow = nl.ndarray((4, 8), dtype=nl.bfloat16 if sick else nl.float32)
    nisa.activation(dst=narrow, op=nl.copy, data=wide)  # blamed
    nisa.tensor_copy(dst=wide, src=narrow)
    return copied_out(wide)


@fault("NKW-INT-ROUNDED", ramp(4, 1), answer=lambda x: x + np.arange(512, dtype=np.float32))
def positions_by_iota(x, sick):
    """iota writes the positions of 512 columns to bfloat16, which has 256 of them."""
    positions = nl.ndarray((4, 512), dtype=nl.bfloat16 if sick else nl.float32)
    nisa.iota(dst=positions, pattern=[[1, 512]])  # blamed
    total = nl.ndarray((4, 512), dtype=nl.float32)
    nisa.tensor_scalar(dst=total, data=positions, op0=nl.add, operand0=nl.load(x))
    return copied_out(total)


@fault("NKW-FP8-UNDERFLOW", ramp(8, 16) + 1, answer=lambda x: (x * np.float32(4)).astype(FP8))
def divided_twice(x, sick):
    """The scale of an fp8 cast is the inverse of what it should be: most results become zero."""
    out = nl.ndarray((8, 16), dtype=nl.float8_e4m3)
    scale = 2.0**-16 if sick else 4.0
    nisa.activation(dst=out, op=nl.copy, data=nl.load(x), scale=scale)  # blamed
    return copied_out(out)


@fault(
    "NKW-FP8-OVERFLOW",
    ramp(8, 16),
    answer=lambda x: ((x * np.float32(8)).astype(FP8), (x * np.float32(8)).sum(1, keepdims=True)),
)
def overflow_beside_a_sum(x, sick):
    """The instruction that casts to fp8 also sums rows in the accumulator registers."""
    out, total = nl.ndarray((8, 16), dtype=nl.float8_e4m3), nl.ndarray((8, 1), dtype=nl.float32)
    nisa.activation_reduce(  # blamed
        dst=out, op=nl.copy, data=nl.load(x), reduce_op=nl.add, reduce_res=total, scale=16.0 if sick else 8.0
    )
    return copied_out(out), copied_out(total)


@fault(
    "NKW-INT-FLOAT32",
    ramp(4, 8, dtype=np.int32) + 2**22,
    answer=lambda x: x[:, 0:2].sum(1, keepdims=True, dtype=np.int32),
)
def sum_of_large_counts(x, sick):
    """The sum of a row of integers passes 2**24 in the float32 of a reduction."""
    total = nl.ndarray((4, 1), dtype=nl.int32)
    tile = nl.load(x)
    nisa.tensor_reduce(dst=total, data=tile[:, 0 : 7 if sick else 2], op=nl.add, axis=1)  # blamed
    return copied_out(total)
