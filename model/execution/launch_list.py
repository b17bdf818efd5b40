"""The launch list of layers: what a step launches, and what copies pages of their states."""

from __future__ import annotations

from collections.abc import Iterable

from model.layers.joint import joined
from model.layers.launch import FLOAT32, INT32, Argument, Launch, StepShape, Value, copied
from model.layers.layer import Layer
from model.layers.paged import CacheGroup, name_in_group
from model.network import Section


def launches_of(section: Section, shape: StepShape) -> list[Launch]:
    """The launches of neighbouring layers, in order; joint launches take the place of their parts."""
    return joined(launch for layer in section for launch in layer.launches(shape))


def copies_of(layers: Iterable[Layer], shape: StepShape, copies: int, group: CacheGroup) -> list[Launch]:
    """Return the launches that copy so many pages or slots of a cache group."""
    name = name_in_group("copy_sources", shape, group)
    caches = (cache for layer in layers for cache in layer.caches(shape) if cache.is_copied)
    return [
        cache.copy(copies) for cache in caches if name_in_group("copy_sources", shape, cache.group) == name
    ]


def copy_sizes(copies: int) -> list[int]:
    """Return the copies that each launch makes of so many: powers of two that `copy_pages` takes."""
    size = 1
    while size < copies and _takes_copies(2 * size):
        size *= 2
    full_launches, remainder = divmod(copies, size)
    return [size] * full_launches + ([1 << (remainder - 1).bit_length()] if remainder else [])


def _takes_copies(copies: int) -> bool:
    """Return whether one launch of `copy_pages` makes so many copies, whatever the size of a page is."""
    pages, numbers = Value("pages", (1, 1), FLOAT32), Value("numbers", (copies, 1), INT32)
    arguments: dict[str, Argument] = {
        "cache": pages,
        "other": None,
        "sources": numbers,
        "destinations": numbers,
    }
    return Launch("copy_pages", arguments, (), copied(numbers), copies).refusal is None
