"""MXFP4 weights of gpt-oss checkpoints: blocks of 32 elements of 4 bits that share a power of two.

A weight [in, out] of an expert is stored as `…_blocks` [out, in / 32, 16], two elements in a byte, the lower bits
first, and `…_scales` [out, in / 32], exponents with a bias of 127. bfloat16 represents every product exactly, except
products of 2^128 and more, which are infinite. A scale of 255 means NaN (OCP Microscaling Formats, 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import ml_dtypes
import numpy as np

from model.errors import ModelError
from model.formats.format import ELEMENTS, SCALES, ConfigFields, Format, QuantisedWeight, Shape, TensorSpec

BLOCK = 32
"""Elements that share a scale."""
DTYPE = np.dtype(ml_dtypes.bfloat16)
"""Dtype to which elements are widened."""

_SUFFIXES = {ELEMENTS: "_blocks", SCALES: "_scales"}
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN_SCALE = 127, 255
_LARGEST_EXPONENT = 2
"""Largest exponent of an element: 6 is 1.5 * 2^2."""


@dataclass(frozen=True)
class Mx(Format):
    """MXFP4 format; it is read only in families whose experts use it, because there is no general convention."""

    is_general: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the format, "mxfp4"."""
        return "mxfp4"

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Mx | None:
        """Return the format, which has no parameters; `quantization_config` is not read."""
        return cls()

    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of elements [out, in / 32, 16] and scales [out, in / 32], uint8 each, for [out, in]."""
        blocks = shape[0], -(-shape[1] // BLOCK)
        byte = np.dtype(np.uint8)
        return {
            ELEMENTS: TensorSpec((*blocks, BLOCK // 2), byte, (1, BLOCK)),
            SCALES: TensorSpec(blocks, byte, (1, BLOCK)),
        }

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove `<name>_blocks` and `<name>_scales` from `tensors` and return the weight, of shape [in, out].

        It is None, and nothing is removed, if `tensors` has the plain weight `name` or neither of the two. `dtype` is
        ignored: the weight widens to bfloat16.

        Raises:
            ModelError: One of the two tensors is missing, or one has a wrong shape or dtype.
        """
        names = {tensor: name + suffix for tensor, suffix in _SUFFIXES.items()}
        if name in tensors or not any(stored_name in tensors for stored_name in names.values()):
            return None
        missing = [stored_name for stored_name in names.values() if stored_name not in tensors]
        if missing:
            raise ModelError(f"tensor {missing[0]} is missing")
        stored = {tensor: tensors.pop(stored_name) for tensor, stored_name in names.items()}
        stored_shape = shape[::-1]
        for tensor, spec in self.describe_tensors(stored_shape).items():
            if stored[tensor].shape != spec.shape or shape[0] % BLOCK:
                raise ModelError(
                    f"{names[tensor]} has shape {stored[tensor].shape}; a weight {shape} has {spec.shape}"
                )
            if stored[tensor].dtype != spec.dtype:
                raise ModelError(f"{names[tensor]} has dtype {stored[tensor].dtype}, not {spec.dtype}")
        return QuantisedWeight.from_tensors(self, stored, stored_shape, DTYPE).T

    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return each element times its block's power of two, float32 [out, in]; NaN in a block with scale 255."""
        scales = tensors[SCALES]
        indices = scales[:, :, None].astype(np.uint16) << 8 | tensors[ELEMENTS]
        return np.take(_list_pairs(), indices, axis=0).reshape(len(scales), -1)

    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the stored elements and scales, uint8, of numbers [out, in]; `in` must be a multiple of 32.

        A block's scale makes its largest element at least 4 and below 8. Elements above 6 become 6, as in OCP
        Microscaling Formats 1.0, 6.3; ties go to the even code.
        """
        blocks = array.astype(np.float32).reshape(len(array), -1, BLOCK)
        most = np.abs(blocks).max(axis=2)
        exponents = np.where(most > 0, np.floor(np.log2(np.where(most > 0, most, 1))), -_BIAS)
        exponents = np.clip(exponents - _LARGEST_EXPONENT, -_BIAS, _BIAS)
        scaled = np.abs(blocks) / np.exp2(exponents)[:, :, None]
        codes = _round_to_even_code(np.minimum(scaled, _MAGNITUDES[-1]))
        codes |= np.signbit(blocks).astype(np.uint8) << 3
        stored = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
        return {ELEMENTS: stored, SCALES: (exponents + _BIAS).astype(np.uint8)}


def _round_to_even_code(magnitudes: np.ndarray) -> np.ndarray:
    """Return the indices in `_MAGNITUDES`, uint8, of the nearest magnitudes from 0 to 6; ties go to the even index."""
    middles = np.add(_MAGNITUDES[1:], _MAGNITUDES[:-1]) / 2
    below, above = (np.searchsorted(middles, magnitudes, side) for side in ("left", "right"))
    return np.where(below % 2 == 0, below, above).astype(np.uint8)


@lru_cache(maxsize=1)
def _list_pairs() -> np.ndarray:
    """Return a table, float32 [65536, 2]: row 256 * scale + byte has the byte's two elements times 2^(scale - 127)."""
    half = np.array([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], np.float32)
    codes = np.arange(256)
    elements = np.stack([half[codes & 15], half[codes >> 4]], axis=1)
    exponents = np.arange(256, dtype=np.int32) - _BIAS
    with np.errstate(over="ignore"):
        pairs = np.ldexp(elements, exponents[:, None, None])
    pairs[_NAN_SCALE] = np.nan
    return pairs.reshape(-1, 2)
