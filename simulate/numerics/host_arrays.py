"""Conversions between the host's arrays and the chip's dtypes: torch tensors of dtypes that NumPy lacks, packed dtypes.

`simulate.run` calls them for arguments and results of kernels. torch is imported only for an array that is a torch
tensor already.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import InvalidArgument
from simulate.hardware import Hardware
from simulate.numerics import DTYPES, DType, as_dtype

_TORCH_AS_BITS: dict[str, tuple[str, Any]] = {
    "bfloat16": ("uint16", ml_dtypes.bfloat16),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}
_PAIRS = "float4_e2m1fn_x2"
_PER_WORD = 4


def is_torch(value: Any) -> bool:
    """Return whether an object is a torch tensor, judged by the module of its class; does not import torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def from_torch(tensor: Any) -> tuple[np.ndarray, DType | None]:
    """Return a torch tensor as a NumPy array, and its dtype where the array's dtype does not tell it, else None.

    The array shares the memory of a tensor that is on the CPU. The second value is float4_e2m1fn_x4 for a tensor of
    float4_e2m1fn_x2, of which two elements form one; the last dim halves.

    Raises:
        InvalidArgument: The chip has no such dtype, or the last dim of float4_e2m1fn_x2 is odd or not contiguous.
    """
    import torch

    plain = tensor.detach().cpu()
    name = str(plain.dtype).removeprefix("torch.")
    if name == _PAIRS:
        packed = DTYPES["float4_e2m1fn_x4"]
        if plain.ndim == 0 or plain.shape[-1] % 2 or plain.stride()[-1] != 1:
            raise InvalidArgument(
                "NKW-DTYPE",
                f"{name} of shape {tuple(plain.shape)}: the last dim must be even and contiguous, as one element of "
                f"{packed} packs two of them; pad the last dim, or pass tensor.contiguous()",
            )
        return plain.view(torch.uint8).numpy().view(packed.storage), packed
    bits = _TORCH_AS_BITS.get(name)
    if bits is not None:
        return plain.view(getattr(torch, bits[0])).numpy().view(bits[1]), None
    try:
        return plain.numpy(), None
    except TypeError:
        raise InvalidArgument(
            "NKW-DTYPE", f"torch.{name} is no dtype of a NeuronCore; pass one of {', '.join(DTYPES)}"
        ) from None


def to_torch(array: np.ndarray) -> Any:
    """Return an array as a torch tensor that shares its memory.

    float8_e4m3, which torch lacks, is converted to a new tensor of float8_e4m3fn.
    """
    import torch

    if array.dtype == ml_dtypes.float8_e4m3:
        array = array.astype(ml_dtypes.float8_e4m3fn)
    for name, (bits, element) in _TORCH_AS_BITS.items():
        if array.dtype == element:
            return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(array)


def dtype_of(array: np.ndarray) -> DType:
    """Return the chip's dtype of a NumPy array.

    An array of a packed dtype of another package is recognised by the name of its dtype, or as a structured dtype of
    four fields of equal type.

    Raises:
        InvalidArgument: The chip has no such dtype.
    """
    fields = array.dtype.fields if isinstance(array.dtype, np.dtype) else None
    if fields is None:
        return as_dtype(_PACKED_NAMES.get(_normalise_name(str(array.dtype)), array.dtype))
    field_types = {field[0] for field in fields.values()}
    for dtype in DTYPES.values():
        same_size = dtype.storage.itemsize == array.dtype.itemsize
        if (
            dtype.is_packed
            and same_size
            and len(fields) == _PER_WORD
            and field_types == {dtype.packed_storage}
        ):
            return dtype
    return as_dtype(array.dtype)


def view_words(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Return an array of a packed dtype as unsigned integers, one for four values; a copy unless it is contiguous."""
    return np.ascontiguousarray(array).view(dtype.storage)


def convert_for_chip(chip: Hardware, dtype: DType) -> DType:
    """Return the dtype in which a host passes a dtype of torch to a chip.

    That is float8_e4m3 for float8_e4m3fn on chips whose matmul lacks float8_e4m3fn (before gen4), else the dtype
    itself.
    """
    return DTYPES["float8_e4m3"] if dtype == "float8_e4m3fn" and not chip.matmul_e4m3fn else dtype


def _normalise_name(name: str) -> str:
    """Return a key for a dtype's name that is equal for the spellings of different packages.

    For instance `mxfp8_e4m3_x4` and `float8_e4m3fn_x4` have the same key.
    """
    text = name.rpartition(".")[2].lower().replace("_", "").removeprefix("mx")
    return text.replace("float", "fp").replace("fn", "").removesuffix("dtype")


_PACKED_NAMES = {_normalise_name(str(dtype)): dtype for dtype in DTYPES.values() if dtype.is_packed}
