"""Schemes of `nkw quantize`: the number format of weights, the method of rounding, and the activations.

A scheme says how the weights of linear layers are rounded and stored. Activations that a scheme quantises are quantised
by token when the model runs, so their scales are not stored. Caches of keys and values are never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from model.errors import ModelError

GROUP_SIZES = (32, 64, 128)
"""Columns that may share a scale, other than a whole row."""
MX_GROUP = 32
"""Elements of a block of the MX formats, which share a power of two."""


class Numbers(Enum):
    """Number formats of stored weights. A value is the name in reports."""

    fp8 = "e4m3fn"
    int8 = "int8"
    int4 = "int4"
    mxfp8 = "mxfp8"
    mxfp4 = "mxfp4"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self in (Numbers.int4, Numbers.mxfp4) else 8


class Method(Enum):
    """Methods that choose the rounded weights. All but `nearest` read the inputs of layers in a calibration text."""

    nearest = "round to nearest"
    gptq = "GPTQ"
    awq = "AWQ"
    smoothquant = "SmoothQuant"
    outliers = "LLM.int8"


@dataclass(frozen=True)
class Scheme:
    """What a quantised folder contains.

    name         of the option --scheme
    numbers      number format of the weights
    container    storage: a `format` of compressed-tensors, or "bitsandbytes"
    method       how weights are rounded
    activations  number format to which a runtime rounds the rows before a product; None for none
    group        columns that share a scale; None for whole rows
    """

    name: str
    numbers: Numbers
    container: str
    method: Method = Method.nearest
    activations: Numbers | None = None
    group: int | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether the method reads the inputs of layers."""
        return self.method is not Method.nearest

    @property
    def needs_products(self) -> bool:
        """Whether the method reads sums of products of inputs, and not only sums and maxima of them."""
        return self.method in (Method.gptq, Method.awq)

    def with_group(self, group: int | None) -> Scheme:
        """Return the scheme with one scale for each `group` columns of a row; None keeps the group of the scheme.

        Raises:
            ModelError: The scheme has no groups of this size.
        """
        if group is None or group == self.group:
            return self
        if self.numbers is not Numbers.int4 or group not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            names = ", ".join(name for name, scheme in SCHEMES.items() if scheme.numbers is Numbers.int4)
            raise ModelError(
                f"--group-size {group} with --scheme {self.name}: schemes with groups are {names}, and their groups "
                f"have {sizes} columns"
            )
        return replace(self, group=group)


PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
BITSANDBYTES = "bitsandbytes"

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", Numbers.fp8, FLOATS),
        Scheme("fp8-dynamic", Numbers.fp8, FLOATS, activations=Numbers.fp8),
        Scheme("int8", Numbers.int8, PACKED),
        Scheme("w8a8", Numbers.int8, INTEGERS, activations=Numbers.int8),
        Scheme("int4", Numbers.int4, PACKED),
        Scheme("gptq", Numbers.int4, PACKED, Method.gptq),
        Scheme("awq", Numbers.int4, PACKED, Method.awq),
        Scheme("smoothquant", Numbers.int8, INTEGERS, Method.smoothquant, Numbers.int8),
        Scheme("llm-int8", Numbers.int8, BITSANDBYTES, Method.outliers, Numbers.int8),
        Scheme("mxfp8", Numbers.mxfp8, "mxfp8-quantized", group=MX_GROUP),
        Scheme("mxfp4", Numbers.mxfp4, "mxfp4-pack-quantized", group=MX_GROUP),
    )
}
"""Schemes by name."""
