"""Dtypes that an instruction does not take, or not together."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault(
    "NKW-BITVEC-INTEGER",
    ramp(4, 4, dtype=np.int32),
    ramp(4, 4, dtype=np.int32) + 5,
    answer=lambda x, y: x & y,
)
def bits_of_floats(x, y, sick):
    """A bitwise and of float32 tiles."""
    dtype = nl.float32 if sick else nl.int32
    left, right = nl.load(x, dtype=dtype), nl.load(y, dtype=dtype)
    both = nl.ndarray((4, 4), dtype=dtype)
    nisa.tensor_tensor(dst=both, data1=left, data2=right, op=nl.bitwise_and)  # blamed
    return copied_out(both)


@fault("NKW-MATMUL-DTYPE", ramp(5, 4) % 8, ramp(5, 6) % 8, answer=lambda a, b: a.T @ b)
def e4m3fn_matmul(a, b, sick):
    """trn2 multiplies float8_e4m3, not float8_e4m3fn."""
    dtype = nl.float8_e4m3fn if sick else nl.float8_e4m3
    left, right = nl.load(a, dtype=dtype), nl.load(b, dtype=dtype)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    return copied_out(sums)


@fault("NKW-OPERATOR-FAMILY", ramp(4, 4, dtype=np.int32), answer=lambda x: (x << 1) | 1)
def families_mixed(x, sick):
    """A shift and an addition in one instruction."""
    tile = nl.load(x)
    second = nl.add if sick else nl.bitwise_or
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.left_shift, operand0=1, op1=second, operand1=1)  # blamed
    return copied_out(tile)


@fault("NKW-DTYPE-ALLOWED", ramp(4, 8), answer=lambda x: np.minimum(x, 9))
def float_predicate(x, sick):
    """The result of a comparison in float32 is used as the predicate of a copy."""
    tile = nl.load(x)
    chosen = nl.ndarray((4, 8), dtype=nl.float32 if sick else nl.uint8)
    nisa.tensor_scalar(dst=chosen, data=tile, op0=nl.greater, operand0=9.0)
    clipped = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=clipped, src=tile)
    nisa.tensor_copy_predicated(dst=clipped, src=9.0, predicate=chosen)  # blamed
    return copied_out(clipped)


@fault("NKW-DMA-HWDGE", ramp(4, 4), answer=lambda x: x.astype(ml_dtypes.bfloat16))
def hardware_descriptors(x, sick):
    """A DMA with hardware descriptors converts float32 to bfloat16."""
    tile = nl.ndarray((4, 4), dtype=nl.bfloat16)
    mode = nisa.dge_mode.hwdge if sick else nisa.dge_mode.swdge
    nisa.dma_copy(dst=tile, src=x, dge_mode=mode)  # blamed
    return copied_out(tile)


@fault(
    "NKW-MATMUL-DTYPE",
    ramp(5, 4, dtype=np.int32),
    ramp(5, 6, dtype=np.int32),
    answer=lambda a, b: (a.T @ b).astype(np.float32),
)
def integer_matmul(a, b, sick):
    """The Tensor engine has no integers."""
    dtype = nl.int32 if sick else nl.float32
    left, right = nl.load(a, dtype=dtype), nl.load(b, dtype=dtype)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    return copied_out(sums)


@fault("NKW-MEMSET-INTEGER", ramp(4, 4, dtype=np.int32), answer=lambda x: x + 2)
def memset_of_a_fraction(x, sick):
    """An integer tile is filled with 1.5."""
    tile = nl.ndarray((4, 4), dtype=nl.int32)
    nisa.memset(dst=tile, value=1.5 if sick else 2)  # blamed
    nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(x), op=nl.add)
    return copied_out(tile)


@fault("NKW-MATMUL-DTYPE", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def mixed_matmul(a, b, sick):
    """A float32 operand beside a bfloat16 one."""
    left = nl.load(a)
    right = nl.load(b, dtype=nl.bfloat16 if sick else nl.float32)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right)  # blamed
    return copied_out(sums)


@fault(
    "NKW-PACKED-DTYPE",
    np.full((4, 8), 8, ml_dtypes.float8_e4m3fn).view(np.uint32),
    answer=lambda x: np.full((4, 8), 16, np.float32),
    target="trn3",
)
def packed_arithmetic(x, sick):
    """Four fp8 values in one element are added as if they were numbers."""
    bits = nl.load(x)
    tile = bits.view(nl.float8_e4m3fn_x4 if sick else nl.float8_e4m3fn)
    result = nl.ndarray(tile.shape, dtype=tile.dtype)
    nisa.tensor_tensor(dst=result, data1=tile, data2=tile, op=nl.add)  # blamed
    return copied_out(result)


@fault(
    "NKW-INDEX-TILE",
    ramp(6, 4),
    np.array([[5], [0], [1]], np.int32),
    answer=lambda table, ids: table[ids[:, 0]],
)
def row_numbers(table, ids, sick):
    """Row numbers of a gather are float32."""
    index = nl.load(ids, dtype=nl.float32 if sick else nl.int32)
    rows = nl.ndarray((3, 4), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index))  # blamed
    return copied_out(rows)


@fault(
    "NKW-DTYPE-ALLOWED",
    ramp(4, 8, dtype=ml_dtypes.bfloat16),
    ramp(4, 1, dtype=ml_dtypes.bfloat16),
    answer=lambda x, factors: x.astype(np.float32) * factors.astype(np.float32),
)
def scale_in_bfloat16(x, factors, sick):
    """The scale of an activation is a bfloat16 tile, because the data are bfloat16."""
    tile, scale = nl.load(x), nl.load(factors)
    if not sick:
        scale = nl.load(factors, dtype=nl.float32)
    result = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.activation(dst=result, op=nl.relu, data=tile, scale=scale)  # blamed
    return copied_out(result)


@fault(
    "NKW-SELECT-REDUCE-DTYPE",
    ramp(4, 8, dtype=np.int32),
    (ramp(4, 8) % 2).astype(np.uint8),
    answer=lambda ids, mask: ids * mask,
)
def selected_integers(ids, mask, sick):
    """Token ids are chosen with select_reduce, which takes no 32-bit integers."""
    tile, chosen = nl.load(ids), nl.load(mask)
    result = nl.ndarray((4, 8), dtype=nl.int32)
    if sick:
        nisa.select_reduce(dst=result, predicate=chosen, on_true=tile, on_false=0.0)  # blamed
    else:
        nisa.memset(dst=result, value=0)
        nisa.tensor_copy_predicated(dst=result, src=tile, predicate=chosen)
    return copied_out(result)


@fault("NKW-BITVEC-OPERAND", ramp(4, 8, dtype=np.int32), answer=lambda x: x << 4)
def shift_by_a_float(x, sick):
    """The distance of a shift is written as 4.0."""
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.left_shift, operand0=4.0 if sick else 4)  # blamed
    return copied_out(tile)


@fault("NKW-SAME-DTYPE", ramp(4, 6), answer=lambda x: x.T)
def transposed_cast(x, sick):
    """nc_transpose moves bits; it does not round to bfloat16 on the way."""
    tile = nl.load(x)
    turned = nl.ndarray((6, 4), dtype=nl.bfloat16 if sick else nl.float32)
    nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.vector)  # blamed
    return copied_out(turned)


@fault(
    "NKW-VIEW-DTYPE",
    ramp(4, 8, dtype=np.int8),
    answer=lambda x: np.ascontiguousarray(x[:, 0:4]).view(np.int16),
)
def view_of_odd_bytes(x, sick):
    """Three int8 columns cannot be seen as int16."""
    tile = nl.load(x)
    columns = 3 if sick else 4
    view = tile[:, 0:columns].view(nl.int16)  # blamed
    return copied_out(view)
