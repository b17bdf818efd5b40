"""Kernels whose result on a NeuronCore differs from what their source suggests."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault

LOW = -30000.0


@fault(
    "NKW-TRANSPOSE-SPREAD",
    ramp(8, 8),
    answer=lambda x: np.where(np.tri(8, dtype=bool), x, LOW).T,
    target="trn1",
)
def infinite_mask_transposed(x, sick):
    """Scores are masked with minus infinity, which the Tensor engine of trn1 spreads when it transposes them."""
    scores = nl.load(x)
    low = -np.inf if sick else LOW
    select = {"pattern": [[-1, 8]], "channel_multiplier": 1, "cmp_op": nl.greater_equal}
    nisa.affine_select(dst=scores, on_true_tile=scores, on_false_value=low, **select)
    turned = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=scores)  # blamed
    return copied_out(turned)


@fault(
    "NKW-INT-FLOAT32",
    np.array([[2**24 + 1], [2**24 + 3], [1], [7]], np.int32),
    answer=lambda positions: ((positions & (2**24 - 1)) < 2).astype(np.int32),
)
def integers_in_a_mask(positions, sick):
    """Positions beyond 2**24 are compared on the float32 path, where neighbours are equal."""
    tile = nl.load(positions)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=2**24 - 1)
    before = nl.ndarray((4, 1), dtype=nl.int32)
    nisa.tensor_scalar(dst=before, data=tile, op0=nl.less, operand0=2.0)  # blamed
    return copied_out(before)


@fault(
    "NKW-INT-FLOAT32", np.array([[2**24 + 1], [2**24 + 3], [5], [7]], np.int32), answer=lambda ids: ids + ids
)
def large_integers(ids, sick):
    """Vocabulary offsets beyond 2**24 are added on the float32 path."""
    tile = nl.load(ids)
    engine = nisa.engine.vector if sick else nisa.engine.gpsimd
    doubled = nl.ndarray((4, 1), dtype=nl.int32, name="doubled")
    nisa.tensor_tensor(dst=doubled, data1=tile, data2=tile, op=nl.add, engine=engine)  # blamed
    return copied_out(doubled)


@fault(
    "NKW-PSUM-INIT",
    ramp(2, 5, 4),
    ramp(5, 6),
    answer=lambda a, b: np.einsum("mki,kj->mij", a, b),
    target="trn1",
)
def memset_before_the_first_product(a, b, sick):
    """Every row block clears its PSUM tile on the Vector engine before it accumulates."""
    right = nl.load(b)
    out = nl.ndarray((2, 4, 6), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for m in range(2):
        sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name=f"sums{m}")
        if sick and m == 0:
            nisa.memset(dst=sums, value=0.0)
        nisa.nc_matmul(dst=sums, stationary=nl.load(a[m]), moving=right)  # blamed
        result = nl.ndarray((4, 6), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=sums)
        nisa.dma_copy(dst=out[m], src=result)
    return out


@fault("NKW-FP8-OVERFLOW", np.tile(np.array([[256, 64]], np.float32), (4, 4)), answer=lambda x: x / 2)
def overflowing_fp8(x, sick):
    """Activations are cast to fp8 without a scale, and those beyond 240 become infinite."""
    tile = nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=0.5)
    small = nl.ndarray((4, 8), dtype=nl.float8_e4m3)
    nisa.tensor_copy(dst=small, src=tile)  # blamed
    return copied_out(small)


@fault(
    "NKW-INT-FLOAT32",
    np.array([[2**24 + 1], [2**24 + 3], [5], [7]], np.int32),
    answer=lambda positions: positions,
)
def positions_in_float32(positions, sick):
    """Positions beyond 2**24 are stored as float32 by a DMA that converts."""
    tile = nl.load(positions)
    dtype = nl.float32 if sick else nl.int32
    moved = nl.ndarray((4, 1), dtype=dtype, name="moved")
    nisa.tensor_copy(dst=moved, src=tile)  # blamed
    return copied_out(moved)


@fault("NKW-AFFINE-CARRIED", ramp(3, 4, 8), answer=lambda x: x)
def tile_outside_an_affine_loop(x, sick):
    """A tile from outside is loaded in every iteration of a loop that declares its iterations independent."""
    out = nl.ndarray((3, 4, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    outside = nl.ndarray((4, 8), dtype=nl.float32, name="outside")
    nisa.memset(dst=outside, value=1.0)
    for block in nl.affine_range(3):
        tile = outside if sick else nl.ndarray((4, 8), dtype=nl.float32)
        nisa.dma_copy(dst=tile, src=x[block])  # blamed
        nisa.dma_copy(dst=out[block], src=tile)
    return out


@fault(
    "NKW-FP8-RANGE",
    np.full((4, 4), 448, ml_dtypes.float8_e4m3fn),
    np.full((4, 4), 224, ml_dtypes.float8_e4m3fn),
    answer=lambda x, small: small.astype(np.float32),
)
def wide_fp8(x, small, sick):
    """Host data in float8_e4m3fn reach 448, the chip's float8_e4m3 only 240."""
    kept, scaled = nl.load(x), nl.load(small)
    wide = nl.ndarray((4, 4), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=kept if sick else scaled)  # blamed
    return copied_out(wide)


@fault("NKW-INT-FLOAT32", ramp(4, 1, dtype=np.int32) + 4097, answer=lambda ids: ids * 4099)
def product_of_small_integers(ids, sick):
    """Both factors are exact as float32, and their product is above 2**24 and odd."""
    tile = nl.load(ids)
    product = nl.ndarray((4, 1), dtype=nl.int32, name="product")
    if sick:
        nisa.tensor_scalar(dst=product, data=tile, op0=nl.multiply, operand0=4099.0)  # blamed
    else:
        factor = nl.ndarray((4, 1), dtype=nl.int32)
        nisa.memset(dst=factor, value=4099)
        nisa.tensor_tensor(dst=product, data1=tile, data2=factor, op=nl.multiply, engine=nisa.engine.gpsimd)
    return copied_out(product)


@fault("NKW-HALF-OVERFLOW", ramp(4, 8) * 1000, answer=lambda x: x.sum(axis=1, keepdims=True) / 4)
def sum_in_float16(x, sick):
    """Every addend fits float16, their sum does not; the next instruction would divide infinity."""
    total = nl.ndarray((4, 1), dtype=nl.float16 if sick else nl.float32, name="total")
    nisa.tensor_reduce(dst=total, op=nl.add, data=nl.load(x), axis=1)  # blamed
    quarter = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.tensor_scalar(dst=quarter, data=total, op0=nl.multiply, operand0=0.25)
    return copied_out(quarter)


@fault("NKW-INT-ROUNDED", ramp(4, 4, dtype=np.int32) + 250, answer=lambda ids: ids.astype(np.float32))
def positions_in_bfloat16(ids, sick):
    """Positions above 256 are kept in bfloat16, where neighbours become equal."""
    kept = nl.ndarray((4, 4), dtype=nl.bfloat16 if sick else nl.float32, name="kept")
    nisa.tensor_copy(dst=kept, src=nl.load(ids))  # blamed
    wide = nl.ndarray((4, 4), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=kept)
    return copied_out(wide)


@fault(
    "NKW-EXPONENTIAL-IDLE",
    np.zeros((4, 8), np.float32),
    answer=lambda x: np.full((4, 8), 2, np.float32),
    target="trn3",
)
def idle_exponential(x, sick):
    """The exponential of the Vector engine leaves its registers undefined, and an addition follows."""
    powers = nl.ndarray((4, 8), dtype=nl.float32)
    command = nisa.reduce_cmd.idle if sick else nisa.reduce_cmd.reset_reduce
    nisa.exponential(dst=powers, src=nl.load(x), reduce_cmd=command)  # blamed
    nisa.tensor_scalar(dst=powers, data=powers, op0=nl.add, operand0=1.0)
    return copied_out(powers)


@fault("NKW-OFFSET-COMPUTED", ramp(8, 4), answer=lambda x: x)
def offset_counted_in_a_loop(x, sick):
    """A tile counts the rows that a device loop has moved, and is the offset of the next ones."""
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    count = nl.ndarray((1, 1), dtype=nl.int32)
    nisa.memset(dst=count, value=0)

    def body(i):
        first = count if sick else i
        tile = nl.ndarray((1, 4), dtype=nl.float32)
        nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=first))  # blamed
        nisa.dma_copy(dst=out.ap(pattern=[[4, 1], [1, 4]], scalar_offset=i), src=tile)
        nisa.tensor_scalar(dst=count, data=count, op0=nl.add, operand0=1)

    nl.fori_loop(0, 8, body)
    return out


@fault(
    "NKW-SCALES-CONTRACTED",
    (ramp(4, 4) % 8).astype(ml_dtypes.float8_e4m3),
    ramp(4, 1) + 1,
    ramp(4, 6),
    answer=lambda weights, scales, x: (weights.astype(np.float32).T @ x) * scales,
)
def scale_of_every_partition(weights, scales, x, sick):
    """Weights in fp8 are scaled by the input channel, over which the matmul sums."""
    small, column = nl.load(weights), nl.load(scales)
    wide = nl.ndarray((4, 4), dtype=nl.float32)
    if sick:
        nisa.tensor_scalar(dst=wide, data=small, op0=nl.multiply, operand0=column)
    else:
        nisa.tensor_copy(dst=wide, src=small)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=wide, moving=nl.load(x))  # blamed
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_scalar(dst=result, data=sums, op0=nl.multiply, operand0=column)
    return copied_out(result)
