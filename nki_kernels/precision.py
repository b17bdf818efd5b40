"""The precision in which the numpy references compute."""

from __future__ import annotations

import numpy as np


def widened(array: np.ndarray) -> np.ndarray:
    """An array in float32, as the engines compute; float64 stays, so that a reference can be run in float64."""
    return array.astype(np.result_type(array.dtype, np.float32), copy=False)
