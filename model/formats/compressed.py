"""Config of compressed-tensors, the container of llm-compressor and vLLM: groups of weights, and activations.

Stored weights have one element a byte (`float-quantized`, `int-quantized`, `naive-quantized`, `mxfp8-quantized`) or
several elements in a word (`pack-quantized`, `mxfp4-pack-quantized`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model.formats.format import ConfigFields, Container, Format
from model.formats.groups import Group, Groups, find_contradiction, find_invalid_pattern
from model.formats.int4 import Int4
from model.formats.mx import BLOCK, Mx, Mx8
from model.formats.scaled import ELEMENT, INT8, Scaled, describe_quantised_rows
from nkw.errors import shown

METHOD = "compressed-tensors"
_EXPONENTS = "torch.uint8"
"""`scale_dtype` of scales that are exponents."""
_STORAGES = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "pack-quantized",
)


@dataclass(frozen=True)
class Compressed(Groups):
    """Groups that `config_groups` of compressed-tensors describes."""

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Container | None:
        """Return the groups of weights and the list `ignore`; None if a group is unsupported or there is none.

        Scales of caches are not read here (`kv_cache_scheme`).

        Raises:
            ModelError: A field has a wrong type.
        """
        fields = quantization_config
        _check_storage(fields, "format")
        for name in ("sparsity_config", "transform_config"):
            setting = fields.get(name, None)
            if setting and not _is_dense(setting):
                fields.unsupported(name, f"{setting!r:.60}; only quantised weights without it are read")
        config_groups = fields.table("config_groups")
        tables = [(name, config_groups.table(name)) for name in config_groups.names]
        with_weights = [(name, table) for name, table in tables if "weights" in table]
        formats = [(name, table, _read_weights(table)) for name, table in with_weights]
        groups = tuple(
            Group(name, _read_names(table, "targets", ("Linear",)), format)
            for name, table, format in formats
            if format is not None
        )
        ignore = _read_names(fields, "ignore", ())
        targets = [target for group in groups for target in group.targets]
        invalid = find_invalid_pattern((*targets, *ignore))
        contradiction = None if invalid else find_contradiction(groups, ignore)
        if not with_weights and fields.get("kv_cache_scheme", None) is not None:
            return None  # the checkpoint has plain weights and scales of caches
        if not with_weights:
            fields.unsupported("config_groups", "no group has weights; a quantised model has one at least")
        elif invalid is not None:
            fields.unsupported("config_groups", f"{shown(invalid, 60)!r} is not a regular expression")
        elif contradiction is not None:
            fields.unsupported("config_groups", contradiction)
        elif len(groups) == len(with_weights):
            group_formats = {name: format for name, _, format in formats}
            remarks = dict.fromkeys(
                remark
                for name, table in tables
                for remark in _describe_activations(table, group_formats.get(name))
            )
            return cls(METHOD, groups, ignore, True, tuple(remarks))
        return None


def _check_storage(fields: ConfigFields, name: str) -> None:
    """Record a storage format in the field `name` that is not read; the field may be absent."""
    storage = fields.get(name, _STORAGES[0])
    if storage not in _STORAGES:
        fields.unsupported(name, f"{storage!r:.60}; known are {', '.join(_STORAGES)}")


def _is_dense(setting: object) -> bool:
    """Return whether the value of `sparsity_config` describes tensors without sparsity."""
    return isinstance(setting, dict) and setting.get("format") == "dense"


def _read_names(fields: ConfigFields, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the list of strings in a field; the default if it is absent. Other values are recorded as unsupported."""
    names = fields.get(name, list(default))
    if isinstance(names, list) and all(isinstance(element, str) for element in names):
        return tuple(names)
    fields.unsupported(name, f"{names!r:.60} is not a list of names")
    return default


def _describe_activations(group: ConfigFields, format: Format | None) -> Iterator[str]:
    """Yield a sentence if a group of weights in a format quantises inputs or outputs that kernels do not quantise."""
    for name in ("input_activations", "output_activations"):
        if name == "input_activations" and isinstance(format, Scaled) and format.quantises_rows:
            yield describe_quantised_rows(name, format)
        elif name in group:
            bits = group.table(name).get("num_bits", 8)
            yield (
                f"config.json quantises {name.removesuffix('_activations')} rows of linear layers to {bits!r:.10} bits "
                f"({name}); they are not quantised: kernels multiply them in the dtype of activations."
            )


def _find_row_scales(group: ConfigFields) -> tuple[bool, bool]:
    """Return whether a group rounds each input row to 8 bits as its weights, and whether the scales are static.

    Weights and rows are both floats or both integers of 8 bits, and symmetric. Weights have a scale for each output or
    for the tensor. Rows have a scale each that is computed from the row, or one static scale together.
    """
    if "input_activations" not in group or "weights" not in group:
        return False, False
    rows, weights = group.table("input_activations"), group.table("weights")
    is_static = rows.get("dynamic", False) is False
    required = {
        "num_bits": 8,
        "type": weights.get("type", "int"),
        "strategy": "tensor" if is_static else "token",
        "dynamic": not is_static,
    }
    defaults = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    is_quantised = (
        all(rows.get(name, defaults[name]) == setting for name, setting in required.items())
        and rows.get("symmetric", True) is True
        and weights.get("num_bits", 8) == 8
        and weights.get("strategy", None) in ("channel", "tensor")
    )
    return is_quantised, is_quantised and is_static


def _read_weights(group: ConfigFields) -> Format | None:
    """Return the format of a group's weights; None if it is unsupported, which is recorded.

    Raises:
        ModelError: A field has a wrong type.
    """
    _check_storage(group, "format")
    weights = group.table("weights")
    bits, number = weights.get("num_bits", 8), weights.get("type", "int")
    group_size = weights.get("group_size", None)
    strategy = weights.get("strategy", _infer_strategy(group_size))
    has_exponents = weights.get("scale_dtype", None) == _EXPONENTS or bits == 4
    if number == "float" and strategy == "group" and group_size == BLOCK and has_exponents and bits in (4, 8):
        return Mx8() if bits == 8 else Mx(METHOD)
    if (number, bits) == ("int", 4):
        return Int4.from_config(weights)
    if (number, bits) not in (("float", 8), ("int", 8)):
        weights.unsupported(
            "num_bits",
            f"{bits!r:.20} with type {number!r:.20}; known are float of 8, int of 4 or 8, MXFP4, MXFP8",
        )
        return None
    if weights.get("symmetric", True) is not True:
        weights.unsupported("symmetric", "False; floats have no zero points, and those of int8 are not read")
        return None
    element = INT8 if number == "int" else ELEMENT
    blocks: dict[Any, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy in ("tensor", "channel"):
        return Scaled(METHOD, *blocks[strategy], element, *_find_row_scales(group))
    if strategy == "block":
        return Scaled(METHOD, *weights.pair("block_structure"), element)
    if strategy == "group":
        return Scaled(METHOD, 1, weights.count("group_size"), element)
    weights.unsupported("strategy", f"{strategy!r:.60}; known are tensor, channel, group, block")
    return None


def _infer_strategy(group_size: object) -> str:
    """Return the strategy of scales that a group size means where config.json names none."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"
