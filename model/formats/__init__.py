"""Number formats of weights in checkpoints, one file each; `Format.widen` defines a format.

A quantised weight is stored in several tensors, such as elements of few bits and their scales. To widen it means to
compute its numbers in float32 or bfloat16.
"""

from __future__ import annotations

from model.formats.affine import Affine
from model.formats.bitsandbytes import BitsAndBytes
from model.formats.cache_scheme import FP8_CACHES, CacheScheme
from model.formats.compressed import Compressed
from model.formats.format import ConfigFields, Container, Format, QuantisedWeight, TensorSpec, Weight
from model.formats.int4 import Int4
from model.formats.modelopt import ModelOpt
from model.formats.mx import Mx, Mx8
from model.formats.plain import Plain
from model.formats.scaled import INT8, Scaled
from model.formats.words import Words
from nkw.errors import shown

__all__ = [
    "FORMATS",
    "FP8_CACHES",
    "SCHEMES",
    "Affine",
    "BitsAndBytes",
    "CacheScheme",
    "Compressed",
    "Container",
    "Format",
    "Int4",
    "ModelOpt",
    "Mx",
    "Mx8",
    "Plain",
    "QuantisedWeight",
    "Scaled",
    "TensorSpec",
    "Weight",
    "Words",
    "read_cache_scheme",
    "read_format",
    "read_method",
]

FORMATS: dict[str, type[Container]] = {
    "fp8": Scaled,
    "compressed-tensors": Compressed,
    "gptq": Words,
    "awq": Words,
    "bitsandbytes": BitsAndBytes,
    "modelopt": ModelOpt,
    "mxfp4": Mx,
}
"""Containers by `quant_method` of config.json."""

SCHEMES: dict[str, Format] = {
    "fp8": Scaled("fp8", 1, None),
    "fp8-dynamic": Scaled("fp8", 1, None, has_quantised_rows=True),
    "int8": Scaled("compressed-tensors", 1, None, INT8),
    "w8a8": Scaled("compressed-tensors", 1, None, INT8, has_quantised_rows=True),
    "int4": Int4("compressed-tensors"),
}
"""Formats to which plain weights can be quantised when they are loaded, by the name in `--quantization`.

All have a scale for each output of a weight.
"""

_FIELD, _UNNAMED = "quantization_config", "unnamed"


def read_format(fields: ConfigFields, family_methods: tuple[str, ...] = ()) -> Container | None:
    """Return the container that `quantization_config` of a config.json describes; None if it is absent or unknown.

    An unknown method, or a value that no format supports, is recorded with `fields.unsupported`.

    Args:
        fields: Fields of the config.json.
        family_methods: Methods that the model's family reads in addition to the general ones.

    Raises:
        ModelError: A field has a wrong type.
    """
    if _FIELD not in fields:
        return None
    quantization_config = fields.table(_FIELD)
    method = quantization_config.get("quant_method", _UNNAMED)
    known = [name for name, format in FORMATS.items() if format.is_general or name in family_methods]
    if method not in known:
        named = read_method(fields)
        fields.unsupported(_FIELD, f"weights quantised by {named}; {', '.join(known)} are widened, no others")
        return None
    return FORMATS[method].from_config(quantization_config)


def read_cache_scheme(fields: ConfigFields) -> CacheScheme:
    """Return the scheme of quantised caches of a config.json; `FP8_CACHES` if it names none.

    Raises:
        ModelError: A field has a wrong type.
    """
    return CacheScheme.from_config(fields.table(_FIELD)) if _FIELD in fields else FP8_CACHES


def read_method(fields: ConfigFields) -> str | None:
    """Return `quant_method` of a config.json, known or not, as printable text of at most 40 characters.

    Returns "unnamed" for a `quantization_config` without a method, and None for a config.json without this object.
    """
    if _FIELD not in fields:
        return None
    return shown(str(fields.table(_FIELD).get("quant_method", _UNNAMED)), 40)
