"""MX formats: an element packs four values, and 8 partitions x 4 values share one power-of-two scale.

These 8 partitions are a group. The scale of partition group g lies in row 32 (g // 4) + g % 4 of the scale tile, whose
view starts at partition 0, 4, 8 or 12 of a quadrant: every quadrant of data uses four rows of the same quadrant of
scales. A biased exponent e stands for the scale 2**(e - 127), and 255 for NaN. The planners of quantize_mx and
nc_matmul_mx use this module.
"""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.shapes import flat
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import DType

PACKED = 4
GROUP_PARTITIONS = 8
SCALE_BIAS = 127
SCALE_NAN = 255
_SCALE_DTYPES = ("float8_e8m0fnu", "uint8")
_SCALE_STARTS = (0, 4, 8, 12)


def check_scale(hardware: Hardware, operand: str, scale: NkiTensor, data: NkiTensor, columns: int) -> None:
    """Check the rules of the scale tile that belongs to `data`; raise RuleViolation if one is broken.

    Args:
        hardware: Record of the chip.
        operand: Name of the scale tile, for messages.
        scale: The scale tile.
        data: The packed tile.
        columns: Packed elements per partition of `data`.
    """
    rules.is_tensor(operand, scale)
    rules.lies_in(operand, scale, MemoryRegion.sbuf)
    rules.partitions_within_limit(hardware, operand, scale)
    rules.dtype_among(operand, scale, *_SCALE_DTYPES)
    rules.not_indirect(operand, scale)
    scale_start(hardware, operand, scale)
    scale_shape(hardware, operand, scale, data, columns)


def slice_scale_rows(
    hardware: Hardware, scale: NkiTensor, data: NkiTensor, columns: int
) -> tuple[NkiTensor, ...]:
    """Return the views of a scale tile that have the scales of `data`, one per quadrant of data with up to four rows.

    Args:
        hardware: Record of the chip.
        scale: The scale tile.
        data: The packed tile.
        columns: Packed elements per partition of `data`; a 2D scale tile is cut to so many columns.
    """
    width = hardware.partitions_per_quadrant
    groups = data.shape[0] // GROUP_PARTITIONS
    per_quadrant = width // GROUP_PARTITIONS
    return tuple(
        (scale[:, :columns] if scale.ndim == 2 else scale)[width * q : width * q + per_quadrant]
        for q in range(-(-groups // per_quadrant))
    )


def read_exponents(rows: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the biased exponents int32 (groups, columns) in the arrays of a scale tile's rows."""
    joined = np.concatenate([flat(row_view) for row_view in rows], axis=0)
    if joined.dtype == np.float32:  # NKI_PRECISE_FP=0, see encode_scales
        exponents = np.frexp(joined)[1] - 1 + SCALE_BIAS
        return np.where(np.isnan(joined), SCALE_NAN, exponents).astype(np.int32)
    return joined.view(np.uint8).astype(np.int32)


def decode_exponents(biased: np.ndarray) -> np.ndarray:
    """Return the float32 scales 2**(e - 127) of biased exponents e; NaN for 255."""
    powers = np.ldexp(np.float32(1), biased - SCALE_BIAS)
    return np.where(biased == SCALE_NAN, np.float32(np.nan), powers)


def encode_scales(biased: np.ndarray, dtype: DType) -> np.ndarray:
    """Return biased exponents as an array of the storage dtype in which a scale tile of `dtype` keeps them."""
    if dtype.storage == np.float32:  # how NKI_PRECISE_FP=0 keeps float8_e8m0fnu
        return decode_exponents(biased)
    return biased.astype(np.uint8).view(dtype.storage)


@rule(
    "NKW-MX-SCALE-START",
    limit="0, 4, 8 or 12 of a quadrant",
    hint="slice the scale tile as scale[0:…], scale[4:…], scale[8:…] or scale[12:…] of a quadrant",
)
def scale_start(hardware: Hardware, operand: str, scale: NkiTensor) -> None:
    """A scale tile starts at partition 0, 4, 8 or 12 of a quadrant.

    Raises RuleViolation otherwise.
    """
    start = rules.first_partition(scale)
    if start % hardware.partitions_per_quadrant not in _SCALE_STARTS:
        raise RuleViolation(scale_start, f"{operand} starts at partition {start}")


@rule("NKW-MX-SCALE-SHAPE", hint="allocate it like the data, (P, columns)")
def scale_shape(hardware: Hardware, operand: str, scale: NkiTensor, data: NkiTensor, columns: int) -> None:
    """A scale tile has a column per packed element (free dims count together), row 32 (g // 4) + g % 4 for group g.

    Raises RuleViolation otherwise.
    """
    last = data.shape[0] // GROUP_PARTITIONS - 1
    per_quadrant = hardware.partitions_per_quadrant // GROUP_PARTITIONS
    needed = hardware.partitions_per_quadrant * (last // per_quadrant) + last % per_quadrant + 1
    # More columns than are needed can be left out where they are one dim.
    wide_enough = scale.shape[1] >= columns if scale.ndim == 2 else scale.free_size == columns
    if scale.shape[0] < needed or not wide_enough:
        raise RuleViolation(
            scale_shape,
            f"{operand} has shape {scale.shape} for {data.shape[0]} partitions of data",
            limit=f"at least ({needed}, {columns})",
        )


@rule("NKW-MX-CHIP", hint="nisa.nc_matmul with fp8 operands")
def mx_on_chip(hardware: Hardware) -> None:
    """MX instructions exist from gen4 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.mx:
        raise RuleViolation(mx_on_chip, f"an MX instruction on {hardware.name}")


@rule("NKW-MX-PARTITIONS", hint="pad the contraction dim with zeros")
def whole_quadrants(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """MX data covers whole quadrants: 32, 64, 96 or 128 partitions.

    Raises RuleViolation otherwise.
    """
    if tile.shape[0] % hardware.partitions_per_quadrant:
        raise RuleViolation(
            whole_quadrants,
            f"{operand} has {tile.shape[0]} partitions",
            limit=f"a multiple of {hardware.partitions_per_quadrant}",
        )
