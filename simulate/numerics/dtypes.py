"""Element types of a NeuronCore: how many bytes, which bits, how large a value.

A `DType` is a string, so that `nl.bfloat16 == "bfloat16"` is true and NumPy accepts it if it knows the name. It carries
the NumPy dtype of its bits (`storage`): ml_dtypes types for bfloat16, fp8 and e8m0, float32 for tfloat32, uint8 for
bool_, and plain unsigned integers for the packed x4 types, whose values only MX instructions may read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn, final

import ml_dtypes
import numpy as np

from nkw.errors import InvalidArgument


@final
class DType(str):
    """Element type: a string with its name, and how its bits are stored.

    Attributes:
        storage: NumPy dtype in which the simulator keeps elements.
        itemsize: Bytes of an element on the chip. `storage` is wider only if values are kept as float32 in the host.
        is_float: Whether it is a floating-point dtype; False for packed dtypes.
        is_integer: Whether it is an integer dtype; True for bool_, which is stored as uint8.
        is_packed: Whether it is an x4 dtype, which packs four values into one element.
        max: Largest finite value.
        packed_storage: NumPy dtype of one of the four packed values; None for all other dtypes.
    """

    __slots__ = ("is_float", "is_integer", "is_packed", "itemsize", "max", "packed_storage", "storage")

    storage: np.dtype[Any]
    itemsize: int
    is_float: bool
    is_integer: bool
    is_packed: bool
    max: float
    packed_storage: np.dtype[Any] | None

    def __new__(
        cls, name: str, storage: Any, *, largest: float, packs: Any = None, itemsize: int | None = None
    ) -> DType:
        """Create a dtype.

        Args:
            name: Its documented name.
            storage: The NumPy dtype of its bits.
            largest: The largest finite value.
            packs: For an x4 dtype, the NumPy dtype of one of the four packed values; else None.
            itemsize: Bytes of an element on the chip; None for those of `storage`.
        """
        self = super().__new__(cls, name)
        bits = np.dtype(storage)
        integer = bits.kind in "iu" and packs is None
        attributes = {
            "storage": bits,
            "itemsize": itemsize or bits.itemsize,
            "is_float": not integer and packs is None,
            "is_integer": integer,
            "is_packed": packs is not None,
            "max": float(largest),
            "packed_storage": None if packs is None else np.dtype(packs),
        }
        for attribute, value in attributes.items():
            object.__setattr__(self, attribute, value)
        return self

    def __setattr__(self, attribute: str, value: object) -> NoReturn:
        raise AttributeError(f"dtype {self} is constant; {attribute} cannot be set")

    def __delattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"dtype {self} is constant; {attribute} cannot be deleted")

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if self == "int64":
            return _int64, ()
        kept_wide = self is not DTYPES[self]
        return (_kept_as_float32 if kept_wide else as_dtype), (str(self),)

    def stored_as_float32(self) -> DType:
        """Return this dtype as NKI_PRECISE_FP=0 keeps it: equal name and size on the chip, `storage` float32.

        The result equals this dtype as a string, but is another object. float32 and tfloat32 return the same object.

        Raises:
            InvalidArgument: This is no floating-point dtype.
        """
        return _kept_as_float32(str(self))


bool_ = DType("bool_", np.uint8, largest=1)
int8 = DType("int8", np.int8, largest=2**7 - 1)
uint8 = DType("uint8", np.uint8, largest=2**8 - 1)
int16 = DType("int16", np.int16, largest=2**15 - 1)
uint16 = DType("uint16", np.uint16, largest=2**16 - 1)
int32 = DType("int32", np.int32, largest=2**31 - 1)
uint32 = DType("uint32", np.uint32, largest=2**32 - 1)
float16 = DType("float16", np.float16, largest=(2 - 2**-10) * 2.0**15)
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16, largest=(2 - 2**-7) * 2.0**127)
tfloat32 = DType("tfloat32", np.float32, largest=(2 - 2**-10) * 2.0**127)
float32 = DType("float32", np.float32, largest=(2 - 2**-23) * 2.0**127)
float8_e4m3 = DType("float8_e4m3", ml_dtypes.float8_e4m3, largest=240)
float8_e4m3fn = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn, largest=448)
float8_e5m2 = DType("float8_e5m2", ml_dtypes.float8_e5m2, largest=57344)
float8_e8m0fnu = DType("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, largest=2.0**127)
float8_e5m2_x4 = DType("float8_e5m2_x4", np.uint32, largest=57344, packs=ml_dtypes.float8_e5m2)
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", np.uint32, largest=448, packs=ml_dtypes.float8_e4m3fn)
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", np.uint16, largest=6, packs=ml_dtypes.float4_e2m1fn)

DTYPES: Mapping[str, DType] = MappingProxyType(
    {str(dtype): dtype for dtype in tuple(globals().values()) if isinstance(dtype, DType)}
)
"""Every dtype of the hardware by its documented name."""

int64 = DType("int64", np.int64, largest=2**63 - 1)
"""Dtype of 64-bit scalars (0.7), for DMAs and scalars only; no engine computes with it, so DTYPES does not have it."""

_KEPT_AS_FLOAT32: dict[str, DType] = {}


def _int64() -> DType:
    return int64


def _kept_as_float32(name: str) -> DType:
    dtype = _KEPT_AS_FLOAT32.get(name)
    if dtype is None:
        exact = DTYPES[name]
        if not exact.is_float:
            raise InvalidArgument(
                "NKW-DTYPE",
                f"{name} is no floating-point dtype; only those are kept as float32, so use it unchanged",
            )
        wide = exact.storage == np.float32
        dtype = exact if wide else DType(name, np.float32, largest=exact.max, itemsize=exact.itemsize)
        _KEPT_AS_FLOAT32[name] = dtype
    return dtype


_BY_NAME: dict[str, DType] = {**DTYPES, "bool": bool_}
_TOO_WIDE = {"float64": float32, "int64": int32, "uint64": uint32}


def as_dtype(value: object) -> DType:
    """Return the chip's dtype that a kernel or a host array means.

    Args:
        value: A DType, a name ("bool" counts as bool_), a NumPy dtype or scalar type, an ml_dtypes type or a torch
            dtype. torch is never imported: its dtypes print as `torch.<name>`, and the name counts.

    Raises:
        InvalidArgument: The chip has no such dtype; for 64-bit types the message names the 32-bit one (NKW-DTYPE).
    """
    if type(value) is DType:
        return value
    name = _name(value)
    dtype = _BY_NAME.get(name)
    if dtype is not None:
        return dtype
    if name in _TOO_WIDE:
        raise InvalidArgument(
            "NKW-DTYPE",
            f"{value!r} is a 64-bit type; NeuronCores have no 64-bit types, use {_TOO_WIDE[name]}",
        )
    raise InvalidArgument(
        "NKW-DTYPE", f"{value!r} is no dtype of a NeuronCore; pass one of {', '.join(DTYPES)}"
    )


def _name(value: object) -> str:
    if isinstance(value, str):
        return str(value)
    text = str(value)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    if isinstance(value, (np.dtype, type)):
        try:
            return np.dtype(value).name
        except TypeError:
            return text
    return text
