"""Matmuls of bfloat16 matrices with float32 sums, by the CPU's bfloat16 instructions, which numpy does not use.

oneMKL multiplies bfloat16 matrices directly (`cblas_gemm_bf16bf16f32`); torch for x86-64 contains oneMKL and exports
its functions. Without oneMKL, torch multiplies. Its bfloat16 matmul would round the result to bfloat16. So the
operands are widened, which is exact, and multiplied as float32 matrices with the precision "medium". oneDNN then
converts the operands back, which is exact too, and adds the products in float32.

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
_ROW_MAJOR, _NOT_TRANSPOSED, _TRANSPOSED = 101, 111, 112  # of the C interface of BLAS
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


def is_enabled() -> bool:
    """Return whether products of bfloat16 matrices are to be computed by torch's libraries.

    NKW_SPEED must be torch, torch installed, and a measured bfloat16 product faster than a float32 product. Otherwise
    numpy multiplies; if NKW_SPEED is torch, a warning says so once per process.

    Raises:
        InvalidArgument: NKW_SPEED is neither numpy, torch nor empty.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "numpy", "torch"):
        raise InvalidArgument("NKW-REPLAY-OPTION", f"{VARIABLE} is {text!r}; set it to numpy or torch")
    if text != "torch":
        return False
    if not is_torch_installed():
        warn_of_absence()
        return False
    if measure_relative_time() >= 1.0:
        warn_of_slowness()
        return False
    return True


@cache
def measure_relative_time() -> float:
    """Return the time of a bfloat16 product over that of numpy's float32 product, measured once per process."""
    left, right = np.ones((_MEASURED[0], _MEASURED[1]), np.float32), np.ones(_MEASURED[1:], np.float32)
    out = np.empty((_MEASURED[0], _MEASURED[2]), np.float32)
    narrow = left.astype(ml_dtypes.bfloat16), right.astype(ml_dtypes.bfloat16)
    if has_onemkl():
        seconds = _measure_shortest(lambda: multiply(*narrow, out))
    else:
        seconds = _measure_shortest(lambda: multiply_widened(*narrow, out, *_MEASURED[1:]))
    return seconds / _measure_shortest(lambda: np.matmul(left, right, out=out))


def _measure_shortest(run: Callable[[], object]) -> float:
    """Return the shortest time of several calls, in seconds."""
    seconds = []
    for _ in range(_REPETITIONS):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    return min(seconds)


@cache
def warn_of_slowness() -> None:
    """Warn, once per process, that bfloat16 takes longer than float32 on this processor."""
    warnings.warn(
        f"{VARIABLE} is torch, but this processor takes {measure_relative_time():.1f} times as long for a bfloat16 "
        "product as for a float32 product: numpy multiplies",
        stacklevel=3,
    )


@cache
def warn_of_absence() -> None:
    """Warn, once per process, that torch is not installed."""
    warnings.warn(
        f"{VARIABLE} is torch, but torch is not installed: numpy multiplies; pip install 'nki-workbench[speed]'",
        stacklevel=3,
    )


def is_torch_installed() -> bool:
    """Return whether torch is installed; it is not imported."""
    return _find_libraries() is not None


def has_onemkl() -> bool:
    """Return whether torch contains oneMKL and `without_onemkl` does not exclude it."""
    return _onemkl_allowed.get() and _load_gemm() is not None


@contextmanager
def without_onemkl() -> Iterator[None]:
    """Exclude oneMKL inside a `with` block, so that torch multiplies, to compare the two."""
    token = _onemkl_allowed.set(False)
    try:
        yield
    finally:
        _onemkl_allowed.reset(token)


def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Write left @ right to `out` by oneMKL, with float32 sums; `has_onemkl` must hold.

    Each matrix has stride 1 along one axis, and its rows or columns do not overlap.

    Args:
        left: bfloat16 [rows, depth], two bytes an element.
        right: bfloat16 [depth, columns].
        out: float32 [rows, columns].
    """
    if _find_leading(out)[0] == _TRANSPOSED:
        left, right, out = right.T, left.T, out.T
    gemm = _load_gemm()
    assert gemm is not None
    (turned_left, step_left), (turned_right, step_right) = _find_leading(left), _find_leading(right)
    (rows, depth), columns = left.shape, right.shape[1]
    a, b, c = (matrix.__array_interface__["data"][0] for matrix in (left, right, out))
    gemm(
        *(_ROW_MAJOR, turned_left, turned_right, rows, columns, depth),
        *(1.0, a, step_left, b, step_right),
        *(0.0, c, _find_leading(out)[1]),
    )


def multiply_widened(left: np.ndarray, right: np.ndarray, out: np.ndarray, height: int, width: int) -> None:
    """Write left @ right to `out` by torch, with float32 products and sums.

    Args:
        left: bfloat16 [rows, depth], which is widened at once.
        right: bfloat16 [depth, columns], which is widened in blocks.
        out: float32 [rows, columns].
        height: The number of rows of a block of `right`.
        width: The number of columns of a block of `right`.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")

    def view_as_bfloat16(matrix: np.ndarray) -> Any:
        return torch.from_numpy(matrix.view(np.uint16).view(np.int16)).view(torch.bfloat16)

    try:
        wide = view_as_bfloat16(left).float()
        scratch = torch.empty(height * width)
        for start in range(0, right.shape[1], width):
            result = torch.from_numpy(out[:, start : start + width])
            for first in range(0, right.shape[0], height):
                narrow_block = view_as_bfloat16(right[first : first + height, start : start + width])
                wide_block = scratch[: narrow_block.numel()].view(narrow_block.shape).copy_(narrow_block)
                product = torch.mm(wide[:, first : first + height], wide_block)
                result.copy_(product) if first == 0 else result.add_(product)
    finally:
        torch.set_float32_matmul_precision(before)


def _find_leading(matrix: np.ndarray) -> tuple[int, int]:
    """Return the transposition flag of a matrix for BLAS, and its leading dimension in elements."""
    (rows, columns), (down, right) = matrix.shape, (step // matrix.itemsize for step in matrix.strides)
    if right == 1 or columns == 1:
        return _NOT_TRANSPOSED, down if rows > 1 else columns
    return _TRANSPOSED, right


@cache
def _find_libraries() -> Path | None:
    """Return the folder of torch's libraries, or None; torch is not imported, as the import would take a second."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders)), "lib") if folders else None


@cache
def _load_gemm() -> Callable[..., None] | None:
    """Return oneMKL's matmul of bfloat16 matrices, loaded once; None if no library of torch exports it."""
    folder = _find_libraries()
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
