"""The cache of a layer: its arrays on one rank, the size of a page, and what launches are given of it.

Keys and values lie in one of three ways. Without pages and slots, a row of the arrays holds a sequence. With pages,
block tables name the pages of a sequence. What an encoder leaves behind lies in slots: each sequence names its row.
Their dtype and scales are those of a `CacheFormat`, which the step names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from model.config.heads import HeadLayout
from model.errors import ModelError
from model.layers.launch import FLOAT32, INT32, Argument, Launch, LeastWork, StepShape, Value
from model.layers.paged import STATES, CacheGroup, Slots, name_in_group
from model.layers.shard import Shard

AUTO = "auto"
"""The name of the cache format that a step has by default."""

Scale = Callable[[str, int], np.ndarray]
"""Returns the scales [heads] of an array, by its name and the number of key/value heads of the model."""


@dataclass(frozen=True)
class CacheFormat:
    """How a cache stores keys and values.

    dtype  of the stored numbers; None: that of activations
    scale  the scales of heads: a stored number stands for itself times the scale of its head, and kernels round keys
           and values to such numbers (`nki_kernels.cache.scales`, which lists the dtypes). None: for itself
    """

    dtype: np.dtype | None = None
    scale: Scale | None = None


CACHE_FORMATS = {
    AUTO: CacheFormat(),
}
"""The cache formats by name, as vLLM's `kv_cache_dtype`."""


def check_cache_dtype(name: str) -> None:
    """Raise ModelError for a name that is none of CACHE_FORMATS."""
    if name not in CACHE_FORMATS:
        raise ModelError(f"kv_cache_dtype is {name!r:.40}; it is one of {', '.join(CACHE_FORMATS)}")


@dataclass(frozen=True)
class HeadScales:
    """The scales of an array of keys or values, which a rank has of its heads: [1, heads], float32."""

    scale: Scale
    array: str
    heads: HeadLayout

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return the scales of a rank; those of heads that are padding are 1."""
        scales = np.ones((1, self.heads.kv_heads_of_rank), FLOAT32)
        heads = self.heads.keys(shard.rank)
        scales[0, : len(heads)] = self.scale(self.array, self.heads.kv_heads)[heads.start : heads.stop]
        return scales


@dataclass(frozen=True)
class Cache:
    """The arrays that a layer keeps from step to step on one rank; their first axis is pages, slots or sequences.

    arrays      keys and values, or the one array of latent attention, or the states of a recurrent layer
    step        the step, as the layer's cache group sees it
    group       the cache group whose pages, slots and positions the step names
    parameters  the parameters of attention kernels that take the arrays; none of recurrent layers
    is_copied   whether a page or slot that several sequences share is copied before one of them writes to it
    scales      the scales of both arrays, by the parameters of attention kernels that take them
    """

    arrays: tuple[Value, ...]
    step: StepShape
    group: CacheGroup = None
    parameters: tuple[str, ...] = ()
    is_copied: bool = True
    scales: tuple[tuple[str, HeadScales], ...] = ()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, one slot, or the cache of one sequence, over all arrays."""
        return sum(array.nbytes for array in self.arrays) // self.arrays[0].shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, which a launch that writes to them returns."""
        return tuple(array.name for array in self.arrays)

    @property
    def constants(self) -> Mapping[str, HeadScales]:
        """The scales by name, which are arrays of a rank that are neither weights nor states."""
        return {f"{scales.array}.scale": scales for _, scales in self.scales}

    @property
    def positions(self) -> Value:
        """The positions [tokens, 1] of new tokens, counted from the first one that the cache or its table holds."""
        return Value(name_in_group("positions", self.step, self.group), (self.step.tokens, 1), INT32)

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arrays, and where a kernel finds sequences and writes new tokens in them.

        With pages, `slots` [tokens, 1] are where new tokens are written, and `block_tables` [sequences, blocks] the
        pages that they read. Beside sequences that decode, `prompt_tables` are those of the prompts. With slots,
        `cache_rows` [sequences, 1] are the rows of the sequences. Scales are [1, heads of the rank].
        """
        step = self.step
        arrays: dict[str, Argument] = dict(zip(self.parameters, self.arrays))
        for parameter, scales in self.scales:
            shape = (1, scales.heads.kv_heads_of_rank)
            arrays[parameter] = Value(f"{scales.array}.scale", shape, FLOAT32)
        if isinstance(self.group, Slots):
            return arrays | {"cache_rows": Value("state_slots", (step.sequences, 1), INT32)}
        if not step.block_size:
            assert step.decoding is None, "sequences decode beside prompts on pages"
            return arrays
        arrays |= {"slots": Value(name_in_group("slot_mapping", step, self.group), (step.tokens, 1), INT32)}
        if step.decoding is None:
            return arrays | {"block_tables": self._table("block_tables", step)}
        tables = {"block_tables": step.decoding, "prompt_tables": step}
        return arrays | {name: self._table(name, table_step) for name, table_step in tables.items()}

    def _table(self, parameter: str, step: StepShape) -> Value:
        """The block table [sequences, blocks] of a step."""
        window = self.group if isinstance(self.group, int) else None
        blocks = step.for_window(window).cache_length // step.block_size
        return Value(name_in_group(parameter, self.step, self.group), (step.sequences, blocks), INT32)

    def copy(self, copies: int) -> Launch:
        """A kernel that copies so many pages or slots of the one or two arrays."""
        first, second = (*self.arrays, None)[:2]
        arguments: dict[str, Argument] = {"cache": first, "other": second}
        for parameter in ("sources", "destinations"):
            name = name_in_group(f"copy_{parameter}", self.step, self.group)
            arguments[parameter] = Value(name, (copies, 1), INT32)
        work = LeastWork(0.0, 2.0 * copies * self.page_bytes)
        return Launch("copy_pages", arguments, self.names, work, copies)


def create_cache(name: str, heads: HeadLayout, dim: int, step: StepShape, window: int | None = None) -> Cache:
    """Create keys and values of a rank's heads of `dim` elements, in pages if the step has such, in the step's format.

    Pages are [pages, block, heads, dim]. Else keys are [sequences, heads, dim, length] and values [sequences, heads,
    length, dim]: a decode step contracts over `dim`, which lies on the partitions of a tile that is read from HBM.
    Layers that see a `window` of positions may have pages of their own.
    """
    if step.block_size:
        shape = (step.for_window(window).pages, step.block_size, heads.kv_heads_of_rank, dim)
        cache = _keys_and_values(name, shape, shape, step, window)
    else:
        cache = _contiguous(
            name, (step.sequences, heads.kv_heads_of_rank, dim, step.cache_length), step, window
        )
    format = CACHE_FORMATS[step.cache_dtype]
    arrays = tuple(replace(array, dtype=format.dtype or step.activations) for array in cache.arrays)
    if format.scale is None:
        return replace(cache, arrays=arrays)
    keys, values = (HeadScales(format.scale, array.name, heads) for array in arrays)
    return replace(cache, arrays=arrays, scales=(("k_scale", keys), ("v_scale", values)))


def create_encoder_cache(name: str, heads: int, dim: int, positions: int, step: StepShape) -> Cache:
    """Create keys and values of all `positions` of an encoder, in slots if the step has such.

    A prompt fills a slot that nothing changes later, so no slot is ever copied.

    Raises ModelError for another format than that of activations.
    """
    _check_plain(step, "keys and values of an encoder")
    rows, group = (step.slots, STATES) if step.slots else (step.sequences, None)
    return replace(_contiguous(name, (rows, heads, dim, positions), step, group), is_copied=False)


def create_latent_cache(name: str, width: int, step: StepShape) -> Cache:
    """Create rows of latents and keys of `width` elements: [pages, block, width] or [sequences, length, width].

    Raises ModelError for another format than that of activations.
    """
    _check_plain(step, "rows of latent attention")
    lengths = (step.pages, step.block_size) if step.block_size else (step.sequences, step.cache_length)
    return Cache((Value(f"{name}.rows", (*lengths, width), step.activations),), step, None, ("cache",))


def _check_plain(step: StepShape, content: str) -> None:
    if CACHE_FORMATS[step.cache_dtype] != CacheFormat():
        raise ModelError(
            f"kv_cache_dtype is {step.cache_dtype}, but {content} have the dtype of activations; use {AUTO}"
        )


def _contiguous(name: str, key_shape: tuple[int, int, int, int], step: StepShape, group: CacheGroup) -> Cache:
    """Create keys [rows, heads, dim, length] and values [rows, heads, length, dim]."""
    rows, heads, dim, length = key_shape
    return _keys_and_values(name, key_shape, (rows, heads, length, dim), step, group)


def _keys_and_values(
    name: str, key_shape: tuple[int, ...], value_shape: tuple[int, ...], step: StepShape, group: CacheGroup
) -> Cache:
    keys = Value(f"{name}.keys", key_shape, step.activations)
    values = Value(f"{name}.values", value_shape, step.activations)
    return Cache((keys, values), step, group, ("k_cache", "v_cache"))
