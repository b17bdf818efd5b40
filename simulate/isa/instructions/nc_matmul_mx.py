"""nc_matmul_mx: a matmul of MXFP8 or MXFP4 operands that applies their scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import RuleViolation, Unsupported, rule
from simulate.hardware import Hardware
from simulate.isa import costs, indirection, mx, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.instructions.nc_matmul import (
    MODES,
    accumulate_is_tristate,
    matches_result,
    moving_fits,
    result_dtype,
    stationary_fits,
)
from simulate.isa.plan import SUMS_PRODUCTS, Domain, Plan
from simulate.isa.shapes import flat
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import DTYPES, DType, to_float32

_OPERANDS = ("float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4")
_FP4_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@instruction
def nc_matmul_mx(
    hardware: Hardware,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: tuple[int, int] | None = None,
    tile_size: tuple[int, int] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> Plan:
    """Sum S[k, m, q] 2^(ss[k//8, m] - 127) M[k, n, q] 2^(ms[k//8, n] - 127) over k, q into dst[m, n]. gen4.

    q runs over the four values of an x4 element, the first in its lowest bits. stationary: [K, M] @ SBUF, K a
    multiple of 32, M even and at most 128. moving: [K, N] @ SBUF. Each float8_e5m2_x4, float8_e4m3fn_x4 or
    float4_e2m1fn_x4; the two may differ. Scales: uint8 or float8_e8m0fnu @ SBUF, laid out as
    `simulate.isa.mx` says; further columns are ignored, and 255 is NaN. dst: [M, N] @ PSUM, float32 or
    bfloat16.

    Values are scaled and summed in float32. tile_position (row, 0) and tile_size (rows, 128) choose rows of
    the array and do not change the result; `accumulate` is that of nc_matmul. N is at most what the PSUM
    holds: an older text says 512 or 1024, the current one 4096 (float32) or 8192 (bfloat16). dst may be scattered by
    `.indirect`; gathering data and scales by one index, as documented, is not simulated.

    Raises RuleViolation. Cost: costs.matmul of K rows, with the operations of 4 K.
    """
    mx.mx_on_chip(hardware)
    rules.check_tile(hardware, "dst", dst, MemoryRegion.psum, indirect=True)
    data_is_not_indirect(stationary, moving, stationary_scale, moving_scale)
    for operand, tile in (("stationary", stationary), ("moving", moving)):
        rules.check_tile(hardware, operand, tile, MemoryRegion.sbuf)
        rules.dtype_among(operand, tile, *_OPERANDS)
        mx.whole_quadrants(hardware, operand, tile)
    rules.same_partitions("stationary", stationary, "moving", moving)
    dst = indirection.regroup_for_tensor_engine(dst)
    indirection.check(hardware, Engine.tensor, dst, stationary)
    columns, streamed = stationary.free_size, moving.free_size
    stationary_fits(hardware, columns)
    even_columns(columns)
    moving_fits(hardware, streamed, dst)
    matches_result(dst, columns, streamed)
    result_dtype(hardware, dst)
    mx.check_scale(hardware, "stationary_scale", stationary_scale, stationary, columns)
    mx.check_scale(hardware, "moving_scale", moving_scale, moving, streamed)
    if tile_position is not None or tile_size is not None:
        row_tile(hardware, stationary.shape[0], tile_position, tile_size)
    accumulate_is_tristate(accumulate)
    stationary_rows = mx.slice_scale_rows(hardware, stationary_scale, stationary, columns)
    moving_rows = mx.slice_scale_rows(hardware, moving_scale, moving, streamed)

    def compute(weights: np.ndarray, rows: np.ndarray, *scales: np.ndarray) -> tuple[np.ndarray]:
        quadrants = len(stationary_rows)
        left = _dequantize(weights, stationary.dtype, mx.read_exponents(scales[:quadrants]))
        right = _dequantize(rows, moving.dtype, mx.read_exponents(scales[quadrants:]))
        return (left.T @ right,)

    return Plan(
        engine=Engine.tensor,
        reads=(stationary, moving, *stationary_rows, *moving_rows),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.matmul(hardware, mx.PACKED * stationary.shape[0], columns, streamed, False),
        name=name,
        propagate=propagation.contracted_with_scales,
        accumulate=MODES[accumulate],
        effects=SUMS_PRODUCTS,
    )


def _dequantize(packed: np.ndarray, dtype: DType, biased: np.ndarray) -> np.ndarray:
    """Return an operand's values times their scales as float32 (4 * partitions, columns), four rows per partition.

    Args:
        packed: The operand, whose elements pack four values.
        dtype: Its x4 dtype.
        biased: Biased exponents of the scales, (groups of 8 partitions, columns).
    """
    values = unpack_values(flat(packed), dtype)
    values *= np.repeat(mx.decode_exponents(biased), mx.GROUP_PARTITIONS, axis=0)[..., None]
    return values.transpose(0, 2, 1).reshape(-1, values.shape[1])


def unpack_values(packed: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the four values of every x4 element as float32, in a new last dim of size 4."""
    if dtype == "float4_e2m1fn_x4":
        nibbles = packed[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)
        return _FP4_VALUES[nibbles & 0xF]
    element = DTYPES[str(dtype).removesuffix("_x4")]
    octets = np.ascontiguousarray(packed).astype("<u4", copy=False).view(np.uint8).view(element.storage)
    return to_float32(octets.reshape(*packed.shape, mx.PACKED), element)


def data_is_not_indirect(*tiles: NkiTensor) -> None:
    """Raise Unsupported if a tile is a view by .indirect, whose lists of offsets run through quadrants of scales."""
    if any(isinstance(tile, NkiTensor) and indirection.is_indirect(tile) for tile in tiles):
        raise Unsupported(
            "NKW-UNSUPPORTED",
            "nc_matmul_mx with .indirect data and scales is not simulated; gather them with nisa.tensor_copy first",
        )


@rule("NKW-MX-STATIONARY", hint="pad the stationary tile with a column of zeros")
def even_columns(columns: int) -> None:
    """The stationary tile of nc_matmul_mx has an even number of columns.

    Raises RuleViolation otherwise.
    """
    if columns % 2:
        raise RuleViolation(even_columns, f"{columns} columns")


@rule(
    "NKW-MX-ROW-TILE",
    hint="pass both, as tile_position=(32, 0), tile_size=(32, 128); split operands of more rows",
)
def row_tile(hardware: Hardware, rows: int, position: Any, size: Any) -> None:
    """tile_position (row, 0) and tile_size (rows, 128) come together; the row is a multiple of the size.

    Raises RuleViolation otherwise.
    """
    fits = (
        isinstance(position, (tuple, list))
        and isinstance(size, (tuple, list))
        and len(position) == len(size) == 2
        and size[0] in hardware.matmul_tile_sizes
        and size[1] == hardware.stationary_free_max
        and position[1] == 0
        and position[0] % size[0] == 0
        and 0 <= position[0] <= hardware.partitions - size[0]
        and rows <= size[0]
    )
    if not fits:
        raise RuleViolation(
            row_tile,
            f"tile_position={position}, tile_size={size}, {rows} rows",
            limit=f"row sizes {hardware.matmul_tile_sizes}, column size {hardware.stationary_free_max}",
        )
