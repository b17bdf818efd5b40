"""Plain weights, which are not quantised: float32, float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np

from model.formats.format import ELEMENTS, ConfigFields, Format, QuantisedWeight, Shape, TensorSpec


@dataclass(frozen=True)
class Plain(Format):
    """Format of one tensor with a plain dtype."""

    dtype: np.dtype

    @property
    def name(self) -> str:
        """Name of the dtype, such as "bfloat16"."""
        return self.dtype.name

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Format | None:
        """Return None: `quantization_config` describes no plain weights."""
        return None

    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return the description of the one tensor "elements", which has the weight's shape and `dtype`."""
        return {ELEMENTS: TensorSpec(shape, self.dtype)}

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Return None and remove nothing: the checkpoint's tensor is the weight itself."""
        return None

    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return a copy of the tensor in float32."""
        return tensors[ELEMENTS].astype(np.float32)

    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the numbers rounded to `dtype`, as the tensor "elements"."""
        return {ELEMENTS: array.astype(self.dtype)}
