"""How the weights of a checkpoint are quantised: `quantization_config` of config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.config.fields import MOST_COUNT, Fields
from model.fp8 import Block
from simulate.errors import shown

WIDENED = ("fp8", "compressed-tensors")
"""Methods whose weights are widened in every family."""
_FIELD = "quantization_config"


@dataclass(frozen=True)
class Quantisation:
    """The method's name, and for weights of eight bits the block of elements that share a scale."""

    method: str
    block: Block | None = None


def quantisation(fields: Fields, widened: tuple[str, ...] = ()) -> Quantisation | None:
    """What `quantization_config` says, None without it. A method that is not widened is a refusal.

    `widened` are those of a family beside the ones that every family has. ModelError for fields of other types.
    """
    if _FIELD not in fields:
        return None
    own = fields.table(_FIELD)
    method = own.get("quant_method", "unnamed")
    if method == "fp8":
        return Quantisation(method, _fp8(own))
    if method == "compressed-tensors":
        return Quantisation(method, _compressed(own))
    named = shown(str(method), 40)
    if method not in widened:
        fields.unsupported(
            _FIELD, f"weights quantised by {named}; {', '.join((*WIDENED, *widened))} are widened, no others"
        )
    return Quantisation(named)


def _fp8(own: Fields) -> Block:
    """Blocks of `weight_block_size`; without it one scale for each tensor."""
    kind = own.get("fmt", "e4m3")
    if kind != "e4m3":
        own.unsupported("fmt", f"{kind!r:.60}; weights of eight bits are widened from e4m3")
    return _block(own, "weight_block_size") or Block(None, None)


def _compressed(own: Fields) -> Block | None:
    """The block that the weights of all groups have."""
    groups = own.table("config_groups")
    blocks = [_of_group(groups.table(name)) for name in groups.names]
    if len(set(blocks)) != 1:
        named = shown(", ".join(groups.names) or "none", 60)
        own.unsupported("config_groups", f"{named}; groups whose weights are quantised alike are widened")
        return None
    if own.get("kv_cache_scheme", None) is not None:
        own.unsupported("kv_cache_scheme", "caches have the dtype of activations")
    return blocks[0]


def _of_group(group: Fields) -> Block | None:
    """The block of a group's weights; another quantisation than to e4m3 by multiplication is a refusal."""
    weights = group.table("weights")
    known: tuple[tuple[str, Any], ...] = (("type", "float"), ("num_bits", 8), ("symmetric", True))
    for name, wanted in known:
        value = weights.get(name, None)
        if value != wanted:
            weights.unsupported(name, f"{value!r:.60}; weights are widened where it is {wanted!r}")
    strategy = weights.get("strategy", None)
    if strategy == "tensor":
        return Block(None, None)
    if strategy == "channel":
        return Block(1, None)
    if strategy == "block":
        return _block(weights, "block_structure", required=True)
    weights.unsupported("strategy", f"{strategy!r:.60}; known are tensor, channel, block")
    return None


def _block(own: Fields, name: str, required: bool = False) -> Block | None:
    """Rows and columns in a field; None where it is absent and not required."""
    value = own.get(name, None)
    if value is None and not required:
        return None
    whole = isinstance(value, list) and all(type(each) is int and 0 < each <= MOST_COUNT for each in value)
    if not whole or len(value) != 2:
        raise own.error(name, f"{value!r:.60} is not two positive whole numbers")
    return Block(*value)
