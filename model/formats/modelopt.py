"""Container of modelopt: fp8 weights with one scale each, and static scales of their inputs.

A module has `weight` float8_e4m3fn [out, in], `weight_scale` float32 of one number, and `input_scale`. The description
is in config.json, or in hf_quant_config.json beside it. Scales of caches, `k_scale` and `v_scale`, are not read here.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.formats.format import ConfigFields, Container
from model.formats.groups import CLASSES, Group, Groups, read_skipped_modules
from model.formats.scaled import Scaled, describe_quantised_rows

METHOD = "modelopt"


@dataclass(frozen=True)
class ModelOpt(Groups):
    """Container of fp8 weights; the tensors of a module decide whether it is quantised."""

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Container | None:
        """Return the container of `quant_algo` FP8; None, and a recorded message, for other algorithms."""
        algorithm = quantization_config.get("quant_algo", None)
        if algorithm != "FP8":
            quantization_config.unsupported("quant_algo", f"{algorithm!r:.60}; of modelopt, FP8 is read")
            return None
        skipped = read_skipped_modules(quantization_config, "exclude_modules", "ignore")
        format = Scaled(METHOD, None, None, has_quantised_rows=True, has_static_rows=True)
        remark = describe_quantised_rows("input_scale", format)
        return cls(METHOD, (Group(METHOD, CLASSES, format),), skipped, remarks=(remark,))
