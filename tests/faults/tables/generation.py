"""Instructions, operators and options that the chip's generation does not have."""

from __future__ import annotations

import ml_dtypes
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import TWO_RANKS, copied_out, inner, ramp, sum_of_two
from tests.faults.table import fault


@fault("NKW-BIAS-IMMEDIATE", ramp(4, 4) - 8, answer=lambda x: np.maximum(x + 1, 0), target="trn1")
def bias_number_on_trn1(x, sick):
    """On gen2 the bias of activation is a tile."""
    tile = nl.load(x)
    bias = 1.0 if sick else nl.ones((4, 1), dtype=nl.float32)
    nisa.activation(dst=tile, op=nl.relu, data=tile, bias=bias)  # blamed
    return copied_out(tile)


@fault(
    "NKW-NONZERO-CHIP",
    ramp(1, 8, dtype=np.int32),
    answer=lambda x: x.sum(axis=1, keepdims=True).astype(np.int32),
    target="trn1",
)
def count_on_trn1(x, sick):
    """nonzero_with_count exists from gen3 on."""
    tile = nl.load(x)
    result = nl.ndarray((1, 9), dtype=nl.int32)
    if sick:
        nisa.nonzero_with_count(dst=result, src=tile)  # blamed
    nisa.tensor_reduce(dst=result[:, 8:9], op=nl.add, data=tile, axis=1)
    return copied_out(result[:, 8:9])


@fault("NKW-DMA-PRIORITY", ranks=TWO_RANKS, answer=sum_of_two)
def dma_priority_on_trn2(x, rank, sick):
    """DMA traffic classes exist on gen4."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group, first = ncc.ReplicaGroup([[0, 1]]), 0 if sick else None
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add, priority=first)  # blamed
    return copied_out(total)


@fault(
    "NKW-MATMUL-DOUBLE-ROW",
    ramp(8, 2, 4) % 8,
    ramp(8, 2, 6) % 8,
    answer=lambda a, b: np.einsum("kjm,kjn->mn", a, b),
    target="trn1",
)
def double_row_on_trn1(a, b, sick):
    """double_row exists from gen3 on."""
    left, right = nl.load(a, dtype=nl.float8_e4m3), nl.load(b, dtype=nl.float8_e4m3)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    if sick:
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, perf_mode="double_row")  # blamed
    else:
        for half in range(2):
            nisa.nc_matmul(dst=sums, stationary=left[:, half], moving=right[:, half])
    return copied_out(sums)


@fault("NKW-EXPONENTIAL-CHIP", np.zeros((4, 4), np.float32), answer=lambda x: np.ones((4, 4), np.float32))
def exponential_on_trn2(x, sick):
    """exponential is an instruction of gen4."""
    tile = nl.load(x)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    if sick:
        nisa.exponential(dst=result, src=tile)  # blamed
    else:
        nisa.activation(dst=result, op=nl.exp, data=tile)
    return copied_out(result)


@fault("NKW-DMA-HWDGE", ramp(4, 4), answer=lambda x: x, target="trn1")
def hardware_descriptors_on_trn1(x, sick):
    """Descriptor generation in hardware exists from gen3 on."""
    tile = nl.ndarray((4, 4), dtype=nl.float32)
    mode = nisa.dge_mode.hwdge if sick else nisa.dge_mode.unknown
    nisa.dma_copy(dst=tile, src=x, dge_mode=mode)  # blamed
    return copied_out(tile)


@fault("NKW-MX-CHIP", ramp(32, 8) % 8, answer=lambda x: x.astype(ml_dtypes.float8_e4m3))
def mx_on_trn2(x, sick):
    """quantize_mx exists on gen4."""
    tile = nl.load(x, dtype=nl.bfloat16)
    result = nl.ndarray((32, 8), dtype=nl.float8_e4m3)
    if sick:
        packed = nl.ndarray((32, 2), dtype=nl.float8_e4m3fn_x4)
        scales = nl.ndarray((4, 2), dtype=nl.uint8)
        nisa.quantize_mx(dst=packed, src=tile, dst_scale=scales)  # blamed
    nisa.tensor_copy(dst=result, src=tile)
    return copied_out(result)


@fault("NKW-OPERATOR-CHIP", ramp(4, 4), ramp(4, 4)[::-1].copy(), answer=lambda x, y: np.maximum(x, y))
def operator_of_gen4(x, y, sick):
    """abs_max as an operator exists on gen4."""
    left, right = nl.load(x), nl.load(y)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=result, data1=left, data2=right, op=nl.abs_max if sick else nl.maximum)  # blamed
    return copied_out(result)


@fault(
    "NKW-RANGE-SELECT-CHIP",
    ramp(4, 8),
    ramp(4, 1),
    ramp(4, 1) + 5,
    answer=lambda x, low, high: np.minimum(np.maximum(x, low), high),
    target="trn1",
)
def range_select_on_trn1(x, low, high, sick):
    """range_select exists from gen3 on."""
    tile, first, last = nl.load(x), nl.load(low), nl.load(high)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    if sick:
        nisa.range_select(kept, tile, nl.greater_equal, nl.less, first, last)  # blamed
    else:
        nisa.tensor_scalar(dst=kept, data=tile, op0=nl.maximum, operand0=first, op1=nl.minimum, operand1=last)
    return copied_out(kept)
