"""Unsigned elements of at most 8 bits, each with the scale and the zero point of its group, however groups are made.

The value of an element is (element - zero) * scale, computed in float32. Containers use this format for weights whose
groups no kernel reads: those in activation order, whose groups are scattered over the inputs, groups of other sizes
than 32, 64 and 128 or with a shorter last one, and asymmetric elements of 8 bits. Such weights are widened when they
are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np

from model.formats.format import ELEMENTS, SCALES, ConfigFields, Format, QuantisedWeight, Shape, TensorSpec

ZEROS = "zeros"
"""Name of the stored tensor of zero points."""
_LARGEST = 255
_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True)
class Affine(Format):
    """Format of elements of the container `method`; `is_ordered` says that groups follow an activation order."""

    method: str
    is_ordered: bool = False

    @property
    def name(self) -> str:
        """`quant_method` of config.json."""
        return self.method

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentence that weights in activation order are widened."""
        if not self.is_ordered:
            return ()
        return (
            "Weights in activation order (desc_act) are widened when they are loaded: inputs of one group are "
            "scattered over a row, and over the ranks that divide it.",
        )

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Affine | None:
        """Return None: containers choose this format."""
        return None

    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of elements, scales (float32) and zero points (uint8) of each element, all [out, in]."""
        codes = TensorSpec(shape, _BYTE)
        return {ELEMENTS: codes, SCALES: TensorSpec(shape, np.dtype(np.float32)), ZEROS: codes}

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Return None and remove nothing: containers make weights of this format."""
        return None

    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return (element - zero) * scale of each element, float32 [out, in]."""
        wide = tensors[ELEMENTS].astype(np.float32)
        wide -= tensors[ZEROS]
        wide *= tensors[SCALES]
        return wide

    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return elements, scales and zero points of numbers [out, in], of which a row shares scale and zero point.

        The scale is the range of a row, with 0, over 255, or 1 for a row of zeros.
        """
        highest = np.maximum(array.max(axis=1, keepdims=True), 0).astype(np.float32)
        lowest = np.minimum(array.min(axis=1, keepdims=True), 0).astype(np.float32)
        scales = np.where(highest > lowest, (highest - lowest) / np.float32(_LARGEST), np.float32(1))
        zeros = np.clip(np.rint(-lowest / scales), 0, _LARGEST)
        elements = np.clip(np.rint(array / scales) + zeros, 0, _LARGEST).astype(_BYTE)
        return {
            ELEMENTS: elements,
            SCALES: np.broadcast_to(scales, array.shape).copy(),
            ZEROS: np.broadcast_to(zeros.astype(_BYTE), array.shape).copy(),
        }
