"""Products of bfloat16 matrices by torch, which uses the CPU's bfloat16 instructions; numpy has none.

torch rounds the result of a product of bfloat16 matrices to bfloat16. So the operands are widened, which is exact, and
multiplied as float32 matrices with the precision "medium": oneDNN then converts them back, which is exact too, and
adds the products up in float32.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

VARIABLE = "NKW_SPEED"


def wanted() -> bool:
    """Whether NKW_SPEED=torch asks for torch and it is installed."""
    return os.environ.get(VARIABLE) == "torch" and available()


def available() -> bool:
    """Whether torch is installed; imports it."""
    return _torch() is not None


@cache
def _torch() -> ModuleType | None:
    try:
        import torch
    except ImportError:
        return None
    return torch


def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray, height: int, width: int) -> None:
    """out = left @ right for bfloat16 matrices, whose products and sums are float32.

    `left` is widened whole, `right` in blocks of `height` by `width`.
    """
    torch = _torch()
    assert torch is not None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")

    def widened(matrix: np.ndarray) -> Any:
        return torch.from_numpy(matrix.view(np.uint16).view(np.int16)).view(torch.bfloat16).float()

    try:
        wide = widened(left)
        for start in range(0, right.shape[1], width):
            result = torch.from_numpy(out[:, start : start + width])
            for first in range(0, right.shape[0], height):
                block = widened(right[first : first + height, start : start + width])
                product = torch.mm(wide[:, first : first + height], block)
                result.copy_(product) if first == 0 else result.add_(product)
    finally:
        torch.set_float32_matmul_precision(before)
