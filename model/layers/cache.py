"""The cache of a layer: its arrays on one rank, the size of a page, and what launches are given of it.

Keys and values lie in one of three ways. Without pages and slots, a row of the arrays holds a sequence. With pages,
block tables name the pages of a sequence. What an encoder leaves behind lies in slots: each sequence names its row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.layers.launch import INT32, Argument, Launch, LeastWork, StepShape, Value
from model.layers.paged import STATES, Kind, Slots, of_kind


@dataclass(frozen=True)
class Cache:
    """The arrays that a layer keeps from step to step on one rank; their first axis is pages, slots or sequences.

    arrays      keys and values, or the one array of latent attention, or the states of a recurrent layer
    step        the step, as the layer's cache group sees it
    group       the cache group whose pages, slots and positions the step names
    parameters  the parameters of attention kernels that take the arrays; none of recurrent layers
    is_copied   whether a page or slot that several sequences share is copied before one of them writes to it
    """

    arrays: tuple[Value, ...]
    step: StepShape
    group: Kind = None
    parameters: tuple[str, ...] = ()
    is_copied: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, one slot, or the cache of one sequence, over all arrays."""
        return sum(array.nbytes for array in self.arrays) // self.arrays[0].shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, which a launch that writes to them returns."""
        return tuple(array.name for array in self.arrays)

    @property
    def positions(self) -> Value:
        """The positions [tokens, 1] of new tokens, counted from the first one that the cache or its table holds."""
        return Value(of_kind("positions", self.step, self.group), (self.step.tokens, 1), INT32)

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arrays, and where a kernel finds sequences and writes new tokens in them.

        With pages, `slots` [tokens, 1] are where new tokens are written, and `block_tables` [sequences, blocks] the
        pages that they read. Beside sequences that decode, `prompt_tables` are those of the prompts. With slots,
        `cache_rows` [sequences, 1] are the rows of the sequences.
        """
        step = self.step
        arrays: dict[str, Argument] = dict(zip(self.parameters, self.arrays))
        if isinstance(self.group, Slots):
            return arrays | {"cache_rows": Value("state_slots", (step.sequences, 1), INT32)}
        if not step.block_size:
            assert step.decoding is None, "sequences decode beside prompts on pages"
            return arrays
        arrays["slots"] = Value(of_kind("slots", step, self.group), (step.tokens, 1), INT32)
        if step.decoding is None:
            return arrays | {"block_tables": self._table("block_tables", step)}
        tables = {"block_tables": step.decoding, "prompt_tables": step}
        return arrays | {name: self._table(name, part) for name, part in tables.items()}

    def _table(self, parameter: str, step: StepShape) -> Value:
        """The block table [sequences, blocks] of a step."""
        window = self.group if isinstance(self.group, int) else None
        blocks = step.of_window(window).cache_length // step.block_size
        return Value(of_kind(parameter, self.step, self.group), (step.sequences, blocks), INT32)

    def copy(self, copies: int) -> Launch:
        """A kernel that copies so many pages or slots of the one or two arrays."""
        first, second = (*self.arrays, None)[:2]
        arguments: dict[str, Argument] = {"cache": first, "other": second}
        for parameter in ("sources", "destinations"):
            name = of_kind(f"copy_{parameter}", self.step, self.group)
            arguments[parameter] = Value(name, (copies, 1), INT32)
        work = LeastWork(0.0, 2.0 * copies * self.page_bytes)
        return Launch("copy_pages", arguments, self.names, work, copies)


def create_cache(name: str, heads: int, dim: int, step: StepShape, window: int | None = None) -> Cache:
    """Create keys and values of `heads` heads of `dim` elements, in pages if the step has such.

    Pages are [pages, block, heads, dim]. Else keys are [sequences, heads, dim, length] and values [sequences, heads,
    length, dim]: a decode step contracts over `dim`, which lies on the partitions of a tile that is read from HBM.
    Layers that see a `window` of positions may have pages of their own.
    """
    if not step.block_size:
        return _contiguous(name, (step.sequences, heads, dim, step.cache_length), step, window)
    shape = (step.of_window(window).pages, step.block_size, heads, dim)
    return _keys_and_values(name, shape, shape, step, window)


def create_encoder_cache(name: str, heads: int, dim: int, positions: int, step: StepShape) -> Cache:
    """Create keys and values of all `positions` of an encoder, in slots if the step has such.

    A prompt fills a slot that nothing changes later, so no slot is ever copied.
    """
    rows, group = (step.slots, STATES) if step.slots else (step.sequences, None)
    return replace(_contiguous(name, (rows, heads, dim, positions), step, group), is_copied=False)


def create_latent_cache(name: str, width: int, step: StepShape) -> Cache:
    """Create rows of latents and keys of `width` elements: [pages, block, width] or [sequences, length, width]."""
    lengths = (step.pages, step.block_size) if step.block_size else (step.sequences, step.cache_length)
    return Cache((Value(f"{name}.rows", (*lengths, width), step.activations),), step, None, ("cache",))


def _contiguous(name: str, key_shape: tuple[int, int, int, int], step: StepShape, group: Kind) -> Cache:
    """Create keys [rows, heads, dim, length] and values [rows, heads, length, dim]."""
    rows, heads, dim, length = key_shape
    return _keys_and_values(name, key_shape, (rows, heads, length, dim), step, group)


def _keys_and_values(
    name: str, key_shape: tuple[int, ...], value_shape: tuple[int, ...], step: StepShape, group: Kind
) -> Cache:
    keys = Value(f"{name}.keys", key_shape, step.activations)
    values = Value(f"{name}.values", value_shape, step.activations)
    return Cache((keys, values), step, group, ("k_cache", "v_cache"))
