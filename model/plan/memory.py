"""Memory of a plan: bytes of weights and cache on each core, by the number of ranks, and on each instance.

A rank holds the weights as the layers cut them: embedding tables, norms and what makes inputs of every layer whole, and
its part of everything else. A tied table is held a second time, transposed, for the head, and so are projections of
keys that are values too; heads that are padding, and key/value heads that several ranks hold, count on every rank.
Activations, code and what the runtime keeps for itself are not counted, so a plan that fills a core to the brim will
not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.layers.paged import Slots
from model.plan.sizes import DTYPE_BYTES, ModelSizes
from model.state import window_pages


@dataclass(frozen=True)
class MeshShape:
    """The ranks of one copy of a model: `pp` stages of `ep` groups of `tp` ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Of the copy."""
        return self.tp * self.pp * self.ep


@dataclass(frozen=True)
class Footprint:
    """Bytes that one of `tp` ranks holds: weights, and for each sequence of `tokens` tokens a part of the cache."""

    tp: int
    tokens: int
    weight_bytes: int
    cache_bytes_per_sequence: int

    @property
    def bytes_with_one(self) -> int:
        """Weights and one sequence."""
        return self.weight_bytes + self.cache_bytes_per_sequence

    def sequences(self, capacity_bytes: int) -> int:
        """Sequences whose cache fits beside the weights; 0 where not even one does."""
        free = capacity_bytes - self.weight_bytes
        if free < 0:
            return 0
        # A model without a cache has no bound of this kind; one byte keeps the division defined.
        return free // max(1, self.cache_bytes_per_sequence)


def footprint(model: ModelSizes, dtype: str, tp: int, tokens: int, ep: int = 1) -> Footprint:
    """Bytes that each rank holds of a model in `dtype`, where `ep` groups of ranks hold its routed experts once."""
    elements = sum(section.count * section.elements(tp, ep).total() for section in model.sections)
    return Footprint(tp, tokens, elements * DTYPE_BYTES[dtype], model.cache_bytes(tokens, dtype, tp))


@dataclass(frozen=True)
class PageKind:
    """Pages of the layers that see `window` positions, or all: how many, and the bytes of one on each rank.

    Those of recurrent layers are slots, each for the states of one sequence.
    """

    window: int | None
    page_bytes: int
    pages: int = 0
    recurrent: bool = False


def page_kinds(model: ModelSizes, dtype: str, tp: int, block_size: int, length: int) -> list[PageKind]:
    """The kinds of pages of sequences of up to `length` tokens; what does not grow with them lies in slots."""
    page_bytes = dict.fromkeys(model.config.windows(length), 0)
    for group, size in model.page_bytes(tp, dtype).items():
        if not isinstance(group, Slots):
            page_bytes[group if group is not None and group < length else None] += block_size * size
    return [PageKind(window, size) for window, size in page_bytes.items()]


@dataclass(frozen=True)
class Demand:
    """What a cache is divided for: at most so many `sequences`, of `mean` tokens on average and `longest` at most.

    A step computes so many `tokens`. Of recurrent layers a sequence has so many `slots`: its own and its snapshots.
    """

    sequences: int
    mean: int
    longest: int
    tokens: int
    slots: int = 1


def with_pages(kinds: Sequence[PageKind], free_bytes: int, block_size: int, demand: Demand) -> list[PageKind]:
    """As many pages of every kind as fit, such that sequences of the mean length run out of all kinds together.

    Windows and slots get no more than all sequences hold, where other layers can use the rest, and leave room for one
    sequence of the longest length.
    """
    wide = [each for each in kinds if each.window is None and not each.recurrent]
    windows = {each: window_pages(each.window, block_size, 1, 0) for each in kinds if each.window is not None}
    held = windows | {each: demand.slots for each in kinds if each.recurrent}
    page_bytes = sum(each.page_bytes for each in wide)
    window_bytes = sum(each.page_bytes * pages for each, pages in held.items())
    chunk = demand.tokens // block_size if windows else 0
    free_bytes = max(0, free_bytes - chunk * sum(each.page_bytes for each in windows))
    count = free_bytes // (page_bytes * -(-demand.mean // block_size) + window_bytes)
    if (wide and held) or len(held) > len(windows):
        room = free_bytes - page_bytes * -(-demand.longest // block_size)
        count = max(0, min(demand.sequences, count, room // window_bytes))
        free_bytes -= count * window_bytes
    return [
        replace(each, pages=count * held[each] + chunk * (each in windows))
        if each in held
        else replace(each, pages=free_bytes // each.page_bytes)
        for each in kinds
    ]


def possible_tp(model: ModelSizes, most: int) -> list[int]:
    """The powers of two up to `most` that can share the model."""
    most = min(most, model.config.most_ranks)
    return [2**exponent for exponent in range(most.bit_length())]


def smallest_tp(
    model: ModelSizes, dtype: str, tokens: int, batch: int, cores: int, core_bytes: int, ep: int = 1
) -> int | None:
    """The fewest of at most `cores` ranks, in `ep` groups of as many, that hold the model and `batch` sequences."""
    for tp in possible_tp(model, cores):
        if footprint(model, dtype, tp, tokens, ep).sequences(core_bytes) >= batch:
            return tp
    return None
