"""Caches of layers: their arrays on one rank, the size of a page, and the arguments of kernels that use them.

A layer creates a `Cache` for a step with one of the `create_…` functions, and passes its `arguments` to its launches.
Runners allocate the arrays, and plans count them.

Keys and values have one of three layouts. Without pages and slots, row i of an array belongs to sequence i. With pages,
block tables list the pages of a sequence. The keys and values of an encoder are in slots, one for each sequence.
`model.layers.cache_formats` has their dtypes and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from model.config.heads import HeadLayout
from model.layers.cache_formats import CACHE_FORMATS, CacheFormat, CacheScales
from model.layers.launch import FLOAT32, INT32, UINT8, Argument, Launch, LeastWork, Phase, StepShape, Value
from model.layers.paged import FULL_PAGES, NEWEST, STATES, CacheGroup, Slots, name_in_group
from model.layers.shard import Shard


@dataclass(frozen=True)
class HeadScales:
    """Scales of an array of keys or values on a rank: [1, a rank's key/value heads], float32."""

    scales: CacheScales
    array: str
    heads: HeadLayout

    @property
    def count(self) -> int:
        """Number of scales on a rank."""
        return self.heads.kv_heads_of_rank

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return the scales of a rank's key/value heads, [1, heads of the rank] float32; a padding head has scale 1."""
        scales = np.ones((1, self.heads.kv_heads_of_rank), FLOAT32)
        heads = self.heads.keys(shard.rank)
        scales[0, : len(heads)] = self.scales.find(self.array, self.heads.kv_heads)[heads.start : heads.stop]
        return scales


@dataclass(frozen=True)
class LatentScales:
    """Scales of the rows of latent attention, the same on every rank: of the latent and of the rotated key.

    A norm determines the magnitudes of latents, and nothing those of keys. So one scale for both would waste bits.
    """

    scales: CacheScales
    array: str
    count: int = 2

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return the two scales, [1, 2] float32."""
        return self.scales.find(self.array, self.count)[None]


@dataclass(frozen=True)
class Cache:
    """Arrays that a layer keeps between steps on one rank; their first axis is pages, slots or sequences.

    arrays      keys and values, or the one array of latent attention, or the states of a recurrent layer
    step        the step whose launches read and write the cache
    group       the cache group, whose pages, slots and positions are inputs of the step
    parameters  names of the kernel parameters that take the arrays; empty for recurrent layers
    is_copied   whether a shared page or slot is copied before a sequence writes to it
    scales      pairs of a kernel parameter and the scales that it takes, for keys and for values
    """

    arrays: tuple[Value, ...]
    step: StepShape
    group: CacheGroup = None
    parameters: tuple[str, ...] = ()
    is_copied: bool = True
    scales: tuple[tuple[str, HeadScales | LatentScales], ...] = ()

    @property
    def page_bytes(self) -> int:
        """Bytes of one entry of the first axis - a page, slot or sequence - summed over all arrays."""
        return sum(array.nbytes for array in self.arrays) // self.arrays[0].shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays. A launch that writes to the arrays lists these names among its results."""
        return tuple(array.name for array in self.arrays)

    @property
    def constants(self) -> Mapping[str, HeadScales | LatentScales]:
        """Functions that compute a rank's scales, by the names of the scale arrays; empty without scales.

        They are constants of the layer, neither weights nor states.
        """
        return {f"{scales.array}.scale": scales for _, scales in self.scales}

    @property
    def positions(self) -> Value:
        """Positions of new tokens, [tokens, 1] int32, counted from the first position in the cache or block table."""
        return Value(name_in_group("positions", self.step, self.group), (self.step.tokens, 1), INT32)

    @property
    def arguments(self) -> dict[str, Argument]:
        """Kernel arguments by parameter name: the arrays, their scales, and the indices of sequences in them.

        With pages, `slots` [tokens, 1] is the slot mapping of new tokens, and `block_tables` [sequences, blocks] lists
        the pages to read. If sequences decode together with prompts, `prompt_tables` lists the pages of the prompts.
        With slots, `cache_rows` [sequences, 1] are the rows of the sequences. Scales are [1, scales of the rank].
        """
        step = self.step
        arrays: dict[str, Argument] = dict(zip(self.parameters, self.arrays))
        for parameter, scales in self.scales:
            arrays[parameter] = Value(f"{scales.array}.scale", (1, scales.count), FLOAT32)
        if isinstance(self.group, Slots):
            return arrays | {"cache_rows": Value("state_slots", (step.sequences, 1), INT32)}
        if not step.block_size:
            assert step.decoding is None, "sequences decode beside prompts on pages"
            return arrays
        arrays |= {"slots": Value(name_in_group("slot_mapping", step, self.group), (step.tokens, 1), INT32)}
        if step.decoding is None:
            return arrays | {"block_tables": self._create_table("block_tables", step)}
        tables = {"block_tables": step.decoding, "prompt_tables": step}
        return arrays | {name: self._create_table(name, table_step) for name, table_step in tables.items()}

    def _create_table(self, parameter: str, step: StepShape) -> Value:
        """Return the block table of `step`, [sequences, blocks] int32, as an argument named after `parameter`.

        `step` gives the sizes: the step of the cache, or its `decoding`. The name ends with the window if the cache's
        group has block tables of its own.
        """
        window = self.group if isinstance(self.group, int) else None
        blocks = step.for_window(window).cache_length // step.block_size
        return Value(name_in_group(parameter, self.step, self.group), (step.sequences, blocks), INT32)

    def copy(self, copies: int) -> Launch:
        """Return the launch that copies `copies` pages or slots in every array, within the cache.

        The step's inputs `copy_sources` and `copy_destinations`, [copies, 1] int32 each, have the indices of the pages
        or slots. Their names end with the window or "states" as in `name_in_group`.
        """
        first, second = (*self.arrays, None)[:2]
        arguments: dict[str, Argument] = {"cache": first, "other": second}
        for parameter in ("sources", "destinations"):
            name = name_in_group(f"copy_{parameter}", self.step, self.group)
            arguments[parameter] = Value(name, (copies, 1), INT32)
        work = LeastWork(0.0, 2.0 * copies * self.page_bytes)
        return Launch("copy_pages", arguments, self.names, work, copies)


def create_cache(name: str, heads: HeadLayout, dim: int, step: StepShape, window: int | None = None) -> Cache:
    """Create the cache of keys and values of an attention layer, with the format and scales of the step.

    With pages both arrays are [pages, block, heads, dim]. Without, keys are [sequences, heads, dim, length] and values
    [sequences, heads, length, dim]: a decode step contracts keys over `dim`, the partition axis of a loaded tile.
    `heads` counts the key/value heads of a rank. The dtype is that of the cache format, by default the activations'.

    Args:
        name: Beginning of the arrays' names, `<name>.keys` and `<name>.values`.
        heads: Division of key/value heads over the ranks.
        dim: Elements of a head.
        step: The step; its `block_size` is 0 without pages.
        window: Positions that a token attends to, if limited; the layer then uses the pages that the step has for this
            window, or else the common pages.
    """
    if CACHE_FORMATS[step.cache_dtype].packs_pages:
        assert window is None and step.block_size, "pages of four bits are for attention to all positions"
        window = NEWEST
    if step.block_size:
        shape = (step.for_window(window).pages, step.block_size, heads.kv_heads_of_rank, dim)
        cache = _create_keys_and_values(name, shape, shape, step, window)
    else:
        cache = _create_contiguous(
            name, (step.sequences, heads.kv_heads_of_rank, dim, step.cache_length), step, window
        )
    return _apply_format(cache, heads, step)


@dataclass(frozen=True)
class FullPages:
    """Full pages of four bits, and the cache of the pages that new tokens fill.

    newest  pages in the dtype of the activations, of the cache group NEWEST
    packed  pages [pages, rows, heads of the rank, bytes] uint8, as `nki_kernels.cache.nibble_pages` has them
    """

    newest: Cache
    packed: Cache

    @property
    def arguments(self) -> dict[str, Argument]:
        """Kernel arguments by parameter name: the pages of both caches, and the indices of sequences in them.

        `block_tables`, or `prompt_tables`, name full pages; `slots` and `newest_tables` the pages of `newest`.
        """
        step, newest = self.packed.step, self.newest.arguments
        arguments = self.packed.arguments | {name: newest[name] for name in ("k_cache", "v_cache", "slots")}
        if step.phase is Phase.decode or step.decoding is not None:
            arguments["newest_tables"] = newest["block_tables"]
        return arguments

    def pack(self, count: int) -> Launch:
        """Return the launch that packs `count` pages that a step has filled.

        The inputs FULL_PAGES, [count, 1] int32 each, have the numbers of the pages in both caches.
        """
        arguments: dict[str, Argument] = dict(zip(self.packed.parameters, self.packed.arrays))
        arguments |= dict(zip(self.newest.parameters, self.newest.arrays))
        for parameter, name in zip(("sources", "destinations"), FULL_PAGES):
            arguments[parameter] = Value(name, (count, 1), INT32)
        work = LeastWork(0.0, float(count * (self.newest.page_bytes + self.packed.page_bytes)))
        return Launch("pack_pages", arguments, self.packed.names, work, count)


def create_full_pages(name: str, heads: HeadLayout, dim: int, step: StepShape) -> FullPages | None:
    """Create the full pages of an attention layer; None for a format that stores all positions alike.

    Args:
        name: Beginning of the arrays' names: `<name>.key_pages` and `<name>.value_pages`.
        heads: Division of key/value heads over the ranks.
        dim: Elements of a head.
        step: The step, with pages.
    """
    if not CACHE_FORMATS[step.cache_dtype].packs_pages:
        return None
    count, block, local_heads = step.pages, step.block_size, heads.kv_heads_of_rank
    shapes = (count, block + 4, local_heads, dim // 2), (count, block, local_heads, dim // 2 + 4)
    keys, values = (
        Value(f"{name}.{array}_pages", shape, UINT8) for array, shape in zip(("key", "value"), shapes)
    )
    packed = Cache((keys, values), step, None, ("k_pages", "v_pages"))
    return FullPages(create_cache(name, heads, dim, step), packed)


def create_encoder_cache(name: str, heads: HeadLayout, dim: int, positions: int, step: StepShape) -> Cache:
    """Create the cache of keys and values of all encoder positions, in slots if the step has slots.

    Keys are [rows, heads, dim, positions] and values [rows, heads, positions, dim] in the step's cache format. A row is
    a slot or, without slots, a sequence; `heads` divides the key/value heads over the ranks. A slot is filled together
    with its prompt and never written again, so slots are not copied.
    """
    rows, group = (step.slots, STATES) if step.slots else (step.sequences, None)
    cache = _create_contiguous(name, (rows, heads.kv_heads_of_rank, dim, positions), step, group)
    return _apply_format(replace(cache, is_copied=False), heads, step)


def create_latent_cache(name: str, width: int, step: StepShape) -> Cache:
    """Create the cache of latent attention: one array `<name>.rows` in the step's cache format.

    It is [pages, block, width], or [sequences, length, width] without pages; every rank has all of it.
    """
    lengths = (step.pages, step.block_size) if step.block_size else (step.sequences, step.cache_length)
    format = CACHE_FORMATS[step.cache_dtype]
    rows = Value(f"{name}.rows", (*lengths, width), format.choose_dtype(step.activations))
    scales = (
        (("row_scale", LatentScales(step.cache_scales, rows.name)),)
        if format.is_rounded(step.activations)
        else ()
    )
    return Cache((rows,), step, None, ("cache",), scales=scales)


def _apply_format(cache: Cache, heads: HeadLayout, step: StepShape) -> Cache:
    """Return a cache of keys and values with the dtype and, if there are any, the scales of the step's format."""
    format: CacheFormat = CACHE_FORMATS[step.cache_dtype]
    keys, values = (replace(array, dtype=format.choose_dtype(step.activations)) for array in cache.arrays)
    cache = replace(cache, arrays=(keys, values))
    if not format.is_rounded(step.activations):
        return cache
    k_scale, v_scale = (HeadScales(step.cache_scales, array.name, heads) for array in (keys, values))
    return replace(cache, scales=(("k_scale", k_scale), ("v_scale", v_scale)))


def _create_contiguous(
    name: str, key_shape: tuple[int, int, int, int], step: StepShape, group: CacheGroup
) -> Cache:
    """Create a cache of keys [rows, heads, dim, length] and values [rows, heads, length, dim] without pages.

    `key_shape` is the shape of the keys; a row is a sequence or a slot.
    """
    rows, heads, dim, length = key_shape
    return _create_keys_and_values(name, key_shape, (rows, heads, length, dim), step, group)


def _create_keys_and_values(
    name: str, key_shape: tuple[int, ...], value_shape: tuple[int, ...], step: StepShape, group: CacheGroup
) -> Cache:
    keys = Value(f"{name}.keys", key_shape, step.activations)
    values = Value(f"{name}.values", value_shape, step.activations)
    return Cache((keys, values), step, group, ("k_cache", "v_cache"))
