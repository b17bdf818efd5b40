"""Products of bfloat16 matrices with float32 sums, by the CPU's bfloat16 instructions; numpy has none.

oneMKL multiplies them as they lie (`cblas_gemm_bf16bf16f32`); torch for x86-64 carries oneMKL and shows its functions.
Where torch has no oneMKL, it multiplies itself. Its own product of bfloat16 matrices would round the result to
bfloat16, so there the operands are widened, which is exact, and multiplied as float32 matrices with the precision
"medium": oneDNN then converts them back, which is exact too, and adds the products up in float32.

Both take subnormal operands as zeros, as the instructions do.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from simulate.errors import InvalidArgument

VARIABLE = "NKW_SPEED"

_LIBRARIES = ("libtorch_cpu.so", "torch_cpu.dll", "libtorch_cpu.dylib")
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112  # of the C interface of BLAS
_NUMBER, _ADDRESS = ctypes.c_int, ctypes.c_void_p
_SIGNATURE = (
    *(_NUMBER,) * 6,  # layout, transposition of A and B, M, N, K
    ctypes.c_float,
    *(_ADDRESS, _NUMBER) * 2,  # A and B with their leading dimensions
    ctypes.c_float,
    *(_ADDRESS, _NUMBER),  # C
)


def wanted() -> bool:
    """Whether NKW_SPEED=torch asks for torch and it is installed; warns once where it is not.

    NKW_SPEED=numpy asks for what is done without it. Raises InvalidArgument for anything else.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "numpy", "torch"):
        raise InvalidArgument("NKW-REPLAY-OPTION", f"{VARIABLE}={text!r}; it is numpy or torch")
    if text != "torch":
        return False
    if not available():
        _warn_of_absence()
        return False
    return True


@cache
def _warn_of_absence() -> None:
    warnings.warn(
        f"{VARIABLE}=torch, but torch is not installed: numpy multiplies; pip install 'nki-workbench[speed]'",
        stacklevel=3,
    )


def available() -> bool:
    """Whether torch is installed."""
    return _folder() is not None


def multiplies_as_they_lie() -> bool:
    """Whether bfloat16 matrices need no widening."""
    return _gemm() is not None


def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out = left @ right for bfloat16 matrices of two bytes an element and a float32 `out`, by oneMKL.

    Each has a unit stride along one axis and follows itself without overlap along the other.
    """
    if _leading(out)[0] == _TRANSPOSED:
        left, right, out = right.T, left.T, out.T
    gemm = _gemm()
    assert gemm is not None
    (turned_left, step_left), (turned_right, step_right) = _leading(left), _leading(right)
    (rows, depth), columns = left.shape, right.shape[1]
    a, b, c = (each.__array_interface__["data"][0] for each in (left, right, out))
    gemm(
        *(_ROW_MAJOR, turned_left, turned_right, rows, columns, depth),
        *(1.0, a, step_left, b, step_right),
        *(0.0, c, _leading(out)[1]),
    )


def multiply_widened(left: np.ndarray, right: np.ndarray, out: np.ndarray, height: int, width: int) -> None:
    """out = left @ right for bfloat16 matrices, whose products and sums are float32, by torch.

    `left` is widened whole, `right` in blocks of `height` by `width`.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")

    def narrow(matrix: np.ndarray) -> Any:
        return torch.from_numpy(matrix.view(np.uint16).view(np.int16)).view(torch.bfloat16)

    try:
        wide = narrow(left).float()
        scratch = torch.empty(height * width)
        for start in range(0, right.shape[1], width):
            result = torch.from_numpy(out[:, start : start + width])
            for first in range(0, right.shape[0], height):
                part = narrow(right[first : first + height, start : start + width])
                block = scratch[: part.numel()].view(part.shape).copy_(part)
                product = torch.mm(wide[:, first : first + height], block)
                result.copy_(product) if first == 0 else result.add_(product)
    finally:
        torch.set_float32_matmul_precision(before)


def _leading(matrix: np.ndarray) -> tuple[int, int]:
    """How a matrix lies, and its leading dimension in elements."""
    (rows, columns), (down, right) = matrix.shape, (step // matrix.itemsize for step in matrix.strides)
    if right == 1 or columns == 1:
        return _AS_IT_IS, down if rows > 1 else columns
    return _TRANSPOSED, right


@cache
def _folder() -> Path | None:
    """Where torch's libraries are; importing torch takes a second, finding it does not."""
    found = find_spec("torch")
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places)), "lib") if places else None


@cache
def _gemm() -> Callable[..., None] | None:
    """oneMKL's product of bfloat16 matrices."""
    folder = _folder()
    if folder is None:
        return None
    for name in _LIBRARIES:
        try:
            function: Any = ctypes.CDLL(str(folder / name)).cblas_gemm_bf16bf16f32
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = _SIGNATURE, None
        return function
    return None
