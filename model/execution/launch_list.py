"""Launch lists: the kernel launches of a step, and the launches that copy pages of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

from model.layers.attention import Attention
from model.layers.joint import join_launches
from model.layers.launch import FLOAT32, INT32, Launch, StepShape, Value, count_copy_work
from model.layers.layer import Layer
from model.layers.paged import CacheGroup, name_in_group
from model.network import Section


def list_launches(section: Section, shape: StepShape) -> list[Launch]:
    """Return the launches of a section's layers in order; joint launches replace the launches that they fuse.

    Args:
        section: Neighbouring layers, such as one decoder layer.
        shape: The sizes of the step.
    """
    return join_launches((launch for layer in section for launch in layer.launches(shape)), shape.lnc)


def list_copies(layers: Iterable[Layer], shape: StepShape, copies: int, group: CacheGroup) -> list[Launch]:
    """Return the launches that make `copies` copies of pages or slots, one launch for each cache of a cache group.

    Args:
        layers: The layers, whose caches are looked through.
        shape: The sizes of the step, which decide the sizes of caches.
        copies: Number of copies of each launch.
        group: The cache group: a window, None for attention to all positions, or recurrent states.
    """
    name = name_in_group("copy_sources", shape, group)
    caches = (cache for layer in layers for cache in layer.caches(shape) if cache.is_copied)
    return [
        cache.copy(copies) for cache in caches if name_in_group("copy_sources", shape, cache.group) == name
    ]


def list_packs(layers: Iterable[Layer], shape: StepShape, count: int) -> list[Launch]:
    """Return the launches that pack `count` full pages to four bits, one for each layer with such pages.

    Args:
        layers: The layers.
        shape: The sizes of the step, which decide the sizes of caches.
        count: Number of pages of each launch.
    """
    attention = (layer for layer in layers if isinstance(layer, Attention))
    return [pages.pack(count) for layer in attention if (pages := layer.full_pages(shape)) is not None]


def list_copy_sizes(copies: int) -> list[int]:
    """Return the numbers of copies of the launches that together make `copies` copies.

    Each is a power of two that the kernel takes. The last launch may make more copies than remain.
    """
    size = 1
    while size < copies and _can_copy(2 * size):
        size *= 2
    full_launches, remainder = divmod(copies, size)
    return [size] * full_launches + ([1 << (remainder - 1).bit_length()] if remainder else [])


def _can_copy(copies: int) -> bool:
    """Return whether one launch of the kernel `copy_pages` can make `copies` copies, of pages of any size."""
    pages, numbers = Value("pages", (1, 1), FLOAT32), Value("numbers", (copies, 1), INT32)
    return (
        Launch(
            "copy_pages",
            {"cache": pages, "other": None, "sources": numbers, "destinations": numbers},
            (),
            count_copy_work(numbers),
            copies,
        ).refusal
        is None
    )
