"""Container of bitsandbytes: int8 weights of LLM.int8, each output with its largest magnitude.

A module has `weight` int8 [out, in], `SCB` float32 [out], the largest magnitudes, and mostly `weight_format`, the
number of a layout, of which 0 is row by row. The value of element [i, j] is element * SCB[i] / 127. LLM.int8 multiplies
inputs with a magnitude above a threshold by these numbers in 16 bits, and other inputs rounded to 8 bits. Kernels
multiply all inputs by these numbers in the dtype of activations, which is how LLM.int8 defines its outlier columns.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np

from model.errors import ModelError
from model.formats.format import ELEMENTS, SCALES, ConfigFields, Container, QuantisedWeight, Shape
from model.formats.groups import CLASSES, Group, Groups, read_skipped_modules
from model.formats.scaled import INT8, LARGEST, Scaled

METHOD = "bitsandbytes"
_FORMAT = Scaled(METHOD, 1, None, INT8)
_REMARK = (
    "LLM.int8 rounds inputs below llm_int8_threshold to 8 bits; kernels multiply all inputs in the dtype of "
    "activations, as LLM.int8 does those above."
)


@dataclass(frozen=True)
class BitsAndBytes(Groups):
    """Container of int8 weights; the tensors of a module decide whether it is quantised."""

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Container | None:
        """Return the container of a config with `load_in_8bit`; None, and a recorded message, for others."""
        if quantization_config.get("load_in_8bit", False) is not True:
            quantization_config.unsupported(
                "load_in_8bit", "not true; of bitsandbytes only weights of 8 bits are read"
            )
            return None
        skipped = read_skipped_modules(quantization_config, "llm_int8_skip_modules")
        return cls(METHOD, (Group(METHOD, CLASSES, _FORMAT),), skipped, remarks=(_REMARK,))

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove the int8 weight `name`, `SCB` and `weight_format` from `tensors` and return the weight.

        It is None, and nothing is removed, if the weight is not int8. A row of zeros may have the magnitude 0.

        Raises:
            ModelError: `SCB` is missing, has a wrong shape or dtype, or is not finite, or below 0, or 0 for a row with
                other numbers; or the layout is unknown.
        """
        elements = tensors.get(name)
        if elements is None or elements.dtype != INT8 or elements.shape != shape or len(shape) != 2:
            return None
        module = name.removesuffix(".weight")
        scale_name, layout_name = f"{module}.SCB", f"{module}.weight_format"
        if scale_name not in tensors:
            raise ModelError(f"{name} is int8 and has no scales; tensor {scale_name} is missing")
        largest = tensors[scale_name]
        if largest.shape != (shape[0],) or largest.dtype != np.float32:
            raise ModelError(
                f"{scale_name} is {largest.dtype} {largest.shape}; a weight {shape} has float32 {(shape[0],)}"
            )
        layout = tensors.get(layout_name, np.zeros((), np.uint8))
        if layout.size != 1 or layout.reshape(())[()] != 0:
            raise ModelError(f"{layout_name} is not 0; only weights row by row are read: save {module} again")
        is_zero = largest == 0
        if is_zero.any():
            is_zero[is_zero] = ~elements[is_zero].any(axis=1)
        is_wrong = ~(np.isfinite(largest) & (largest > 0)) & ~is_zero
        if is_wrong.any():
            raise ModelError(
                f"{scale_name} contains {largest[is_wrong][0]}; largest magnitudes are finite and above 0: quantise "
                f"{name} again"
            )
        scales = np.where(is_zero, np.float32(1), largest / np.float32(LARGEST[INT8]))[:, None]
        for stored_name in (name, scale_name, layout_name):
            tensors.pop(stored_name, None)
        return QuantisedWeight.from_tensors(_FORMAT, {ELEMENTS: elements, SCALES: scales}, shape, dtype)
