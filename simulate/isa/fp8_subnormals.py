"""Subnormal fp8 operands of the Tensor engine, which take part in products or count as 0, as the record says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from simulate.hardware import Hardware
from simulate.memory import NkiTensor

SMALLEST_NORMAL = {
    name: float(ml_dtypes.finfo(name).smallest_normal)
    for name in ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
}
"""Smallest normal magnitude of every fp8 dtype of a matmul; nonzero magnitudes below it are subnormal."""

_Compute = Callable[..., tuple[np.ndarray]]


def flush_operands(hardware: Hardware, compute: _Compute, *operands: NkiTensor) -> _Compute:
    """Return `compute`, on a chip that flushes fp8 subnormals with a step before it that sets them to 0.

    Args:
        hardware: Record of the chip.
        compute: Function of a plan, which takes one float32 array for each operand.
        operands: Tiles that the Tensor engine multiplies.
    """
    floors = [SMALLEST_NORMAL.get(str(operand.dtype), 0.0) for operand in operands]
    if hardware.matmul_keeps_fp8_subnormals or not any(floors):
        return compute

    def compute_flushed(*arrays: Any) -> tuple[np.ndarray]:
        return compute(*(_flush(values, floor) if floor else values for values, floor in zip(arrays, floors)))

    return compute_flushed


def _flush(values: np.ndarray, floor: float) -> np.ndarray:
    """Return float32 values in which magnitudes below `floor` are 0; NaN stays NaN."""
    return values * (np.abs(values) >= np.float32(floor))
