"""The launch list of layers: what a step launches, and what copies pages of their states."""

from __future__ import annotations

from collections.abc import Iterable

from model.layers.joint import joined
from model.layers.launch import Launch, StepShape
from model.layers.layer import Layer
from model.layers.paged import MOST_COPIES, CacheGroup, name_in_group
from model.network import BlockLayers


def launches_of(part: BlockLayers, shape: StepShape) -> list[Launch]:
    """The launches of neighbouring layers, in order; joint launches take the place of their parts."""
    return joined(launch for layer in part for launch in layer.launches(shape))


def copies_of(layers: Iterable[Layer], shape: StepShape, copies: int, group: CacheGroup) -> list[Launch]:
    """Return the launches that copy so many pages or slots of a cache group."""
    name = name_in_group("copy_sources", shape, group)
    caches = (cache for layer in layers for cache in layer.caches(shape) if cache.is_copied)
    return [
        cache.copy(copies) for cache in caches if name_in_group("copy_sources", shape, cache.group) == name
    ]


def copy_sizes(copies: int) -> list[int]:
    """The copies that each launch makes of so many: a power of two."""
    whole, rest = divmod(copies, MOST_COPIES)
    return [MOST_COPIES] * whole + ([1 << (rest - 1).bit_length()] if rest else [])
