"""What the library's tests use of the vendor's `neuron_dtypes`: casts between numpy arrays of the chip's dtypes.

An array of a packed x4 dtype is an array of unsigned words, one for four values, whose `dtype` tells its name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from simulate.numerics import DTYPES, DType, as_dtype

_PACKED = 4


class Packed(np.ndarray):
    """Words of four values each; `dtype` is the packed one, `plain` the words themselves."""

    packed: DType | None = None

    def __array_finalize__(self, source: Any) -> None:
        """Keep the packed dtype in a view or a copy."""
        self.packed = getattr(source, "packed", None)

    @property
    def dtype(self) -> Any:
        """The packed dtype."""
        return self.packed if self.packed is not None else self.plain.dtype

    @property
    def plain(self) -> np.ndarray:
        """The words."""
        return np.ndarray.view(self, np.ndarray)

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Return a view of the words."""
        return self.plain.view(*args, **kwargs)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the words, if of another dtype; casting packed values to it is refused."""
        if dtype == self.packed:
            return self.copy()
        raise TypeError(f"{self.packed} has no cast to {dtype}")

    def __reduce__(self) -> Any:
        """Return what pickle stores: words with a name."""
        return _packed, (self.plain, str(self.packed))


def _packed(words: np.ndarray, name: str) -> Packed:
    made = np.ndarray.view(words, Packed)
    made.packed = DTYPES[name]
    return made


def static_cast(values: Any, dtype: Any) -> np.ndarray:
    """Cast values to another dtype; for x4 dtypes four neighbours of the last dim become one word, and back."""
    wanted = _dtype(dtype)
    if isinstance(values, Packed):
        if wanted == values.packed:
            return values.copy()
        assert values.packed is not None and values.packed.packed_storage is not None
        return _unpacked(values.plain, values.packed).astype(_storage(wanted))
    values = np.asarray(values)
    if isinstance(wanted, DType) and wanted.packed_storage is not None:
        elements = np.ascontiguousarray(values.astype(np.float32).astype(wanted.packed_storage))
        return _packed(_words(elements, wanted), str(wanted))
    if values.dtype.kind == "V" or str(values.dtype) in DTYPES:
        values = values.astype(np.float32) if _is_ml(values.dtype) else values
    return values.astype(_storage(wanted))


def allocating(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return numpy's zeros or empty, for packed dtypes too."""

    def allocate(shape: Any, dtype: Any = float, *args: Any, **kwargs: Any) -> np.ndarray:
        if isinstance(dtype, DType) and dtype.is_packed:
            return _packed(function(shape, dtype.storage, *args, **kwargs), str(dtype))
        return function(shape, _storage(dtype), *args, **kwargs)

    return allocate


def _is_ml(dtype: np.dtype) -> bool:
    return str(dtype).startswith(("bfloat16", "float8"))


def _words(elements: np.ndarray, dtype: DType) -> np.ndarray:
    codes = elements.view(np.uint8).reshape(*elements.shape[:-1], -1, _PACKED).astype(dtype.storage)
    bits = dtype.storage.itemsize * 8 // _PACKED
    mask = dtype.storage.type((1 << bits) - 1)
    words = np.zeros(codes.shape[:-1], dtype.storage)
    for index in range(_PACKED):
        words |= (codes[..., index] & mask) << dtype.storage.type(index * bits)
    return words


def _unpacked(words: np.ndarray, dtype: DType) -> np.ndarray:
    bits = dtype.storage.itemsize * 8 // _PACKED
    mask = (1 << bits) - 1
    codes = np.stack([(words >> (index * bits)) & mask for index in range(_PACKED)], -1).astype(np.uint8)
    return codes.reshape(*words.shape[:-1], -1).view(dtype.packed_storage).astype(np.float32)


def _dtype(dtype: Any) -> Any:
    try:
        return as_dtype(dtype)
    except ValueError:  # a 64-bit type, which the host may have
        return np.dtype(dtype)


def _storage(dtype: Any) -> np.dtype:
    return np.dtype(bool) if dtype == "bool_" else getattr(dtype, "storage", dtype)


def finfo(dtype: Any) -> Any:
    """Return what is asked of a floating dtype: the numpy dtype that holds it, and its range."""
    known = as_dtype(dtype)
    return SimpleNamespace(dtype=known.storage, max=known.max, min=-known.max)


def is_float_type(dtype: Any) -> bool:
    """Return whether a dtype is a floating one."""
    known = _dtype(dtype)
    return known.is_float if isinstance(known, DType) else known.kind == "f"


def sizeinbytes(dtype: Any) -> int:
    """Return the bytes of one element."""
    return as_dtype(dtype).itemsize


def module() -> ModuleType:
    """Return the stand-in, to be imported as `neuron_dtypes`."""
    made = ModuleType("neuron_dtypes")
    made.__dict__.update(DTYPES, static_cast=static_cast, finfo=finfo)
    made.__dict__.update(is_float_type=is_float_type, sizeinbytes=sizeinbytes)
    return made
