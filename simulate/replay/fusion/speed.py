"""Matmuls of bfloat16 matrices with float32 sums, by the CPU's bfloat16 instructions, which numpy does not use.

oneMKL multiplies bfloat16 matrices directly (`cblas_gemm_bf16bf16f32`); torch for x86-64 contains oneMKL and exports
its functions. Without oneMKL, torch multiplies. Its bfloat16 matmul would round the result to bfloat16, so the operands
are widened, which is exact, and multiplied as float32 matrices with the precision "medium": oneDNN then converts the
operands back, which is exact too, and adds the products in float32.

Both libraries take subnormal operands as zeros, as the instructions do.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import InvalidArgument

VARIABLE = "NKW_SPEED"

_onemkl_allowed = ContextVar("onemkl_allowed", default=True)

_LIBRARIES = ("libtorch_cpu.so", "torch_cpu.dll", "libtorch_cpu.dylib")
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112  # of the C interface of BLAS
_MEASURED = (
    128,
    1024,
    1024,
)  # rows, depth and columns of the product that is timed: a tile's rows, some milliseconds
_REPETITIONS = 5  # the first one also loads the library
_NUMBER, _ADDRESS = ctypes.c_int, ctypes.c_void_p
_SIGNATURE = (
    *(_NUMBER,) * 6,  # layout, transposition of A and B, M, N, K
    ctypes.c_float,
    *(_ADDRESS, _NUMBER) * 2,  # A and B with their leading dimensions
    ctypes.c_float,
    *(_ADDRESS, _NUMBER),  # C
)


def wanted() -> bool:
    """Whether NKW_SPEED=torch is set, torch is installed, and this processor multiplies bfloat16 faster than float32.

    Warns once where numpy multiplies all the same. NKW_SPEED=numpy is the default. Raises InvalidArgument for another
    value.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "numpy", "torch"):
        raise InvalidArgument("NKW-REPLAY-OPTION", f"{VARIABLE} is {text!r}; set it to numpy or torch")
    if text != "torch":
        return False
    if not available():
        warn_of_absence()
        return False
    if relative_time() >= 1.0:
        warn_of_slowness()
        return False
    return True


@cache
def relative_time() -> float:
    """The time of a bfloat16 product over that of the same float32 product by numpy; measured once per process."""
    left, right = np.ones((_MEASURED[0], _MEASURED[1]), np.float32), np.ones(_MEASURED[1:], np.float32)
    out = np.empty((_MEASURED[0], _MEASURED[2]), np.float32)
    narrow = left.astype(ml_dtypes.bfloat16), right.astype(ml_dtypes.bfloat16)
    if has_onemkl():
        seconds = _shortest(lambda: multiply(*narrow, out))
    else:
        seconds = _shortest(lambda: multiply_widened(*narrow, out, *_MEASURED[1:]))
    return seconds / _shortest(lambda: np.matmul(left, right, out=out))


def _shortest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPETITIONS):
        begun = perf_counter()
        run()
        seconds.append(perf_counter() - begun)
    return min(seconds)


@cache
def warn_of_slowness() -> None:
    """Warn, once per process, that bfloat16 takes longer than float32 on this processor."""
    warnings.warn(
        f"{VARIABLE} is torch, but this processor takes {relative_time():.1f} times as long for a bfloat16 product as "
        "for a float32 product: numpy multiplies",
        stacklevel=3,
    )


@cache
def warn_of_absence() -> None:
    """Warn, once per process, that torch is not installed."""
    warnings.warn(
        f"{VARIABLE} is torch, but torch is not installed: numpy multiplies; pip install 'nki-workbench[speed]'",
        stacklevel=3,
    )


def available() -> bool:
    """Whether torch is installed."""
    return _folder() is not None


def has_onemkl() -> bool:
    """Whether oneMKL is there and not excluded, so that bfloat16 matrices need no widening."""
    return _onemkl_allowed.get() and _gemm() is not None


@contextmanager
def without_onemkl() -> Iterator[None]:
    """Let torch multiply inside a `with` block, also where oneMKL is there, to compare the two."""
    token = _onemkl_allowed.set(False)
    try:
        yield
    finally:
        _onemkl_allowed.reset(token)


def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out = left @ right for bfloat16 matrices of two bytes an element and a float32 `out`, by oneMKL.

    Each matrix has stride 1 along one axis; its rows or columns do not overlap.
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
    """out = left @ right for bfloat16 matrices, with float32 products and sums, by torch.

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
    """The transposition flag of a matrix, and its leading dimension in elements."""
    (rows, columns), (down, right) = matrix.shape, (step // matrix.itemsize for step in matrix.strides)
    if right == 1 or columns == 1:
        return _AS_IT_IS, down if rows > 1 else columns
    return _TRANSPOSED, right


@cache
def _folder() -> Path | None:
    """The folder of torch's libraries; torch is not imported, which would take a second."""
    found = find_spec("torch")
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places)), "lib") if places else None


@cache
def _gemm() -> Callable[..., None] | None:
    """oneMKL's matmul of bfloat16 matrices; None where no library exports it."""
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
