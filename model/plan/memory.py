"""Memory of a plan: bytes of weights and cache that each rank holds, and the number of sequences or pages that fit.

A rank holds all of the embedding tables, the norms and the projections to the inputs of every layer, and its shard of
the other weights. A tied embedding table is held a second time, transposed, for the output projection; so are
projections of keys that are values too. Padded heads, and key/value heads that several ranks hold, count on every rank.

Activations, code and the runtime's buffers are not counted, so a plan that fills all memory of a rank will not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.layers.paged import Slots
from model.plan.sizes import ModelSizes
from model.state import count_window_pages


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh of one copy of a model: `pp` pipeline stages of `ep` expert-parallel groups of `tp` ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of one copy."""
        return self.tp * self.pp * self.ep


@dataclass(frozen=True)
class Footprint:
    """Bytes that each of `tp` ranks holds: its weights, and its cache of one sequence of `tokens` tokens."""

    tp: int
    tokens: int
    weight_bytes: int
    cache_bytes_per_sequence: int

    @property
    def bytes_with_one(self) -> int:
        """Bytes on a rank of the weights and the cache of one sequence."""
        return self.weight_bytes + self.cache_bytes_per_sequence

    def sequences(self, capacity_bytes: int) -> int:
        """Return the number of sequences whose cache fits beside the weights; 0 if the weights do not fit.

        Args:
            capacity_bytes: Memory of a rank.
        """
        # A model without a cache has no limit; one byte keeps the division defined.
        return max(0, capacity_bytes - self.weight_bytes) // max(1, self.cache_bytes_per_sequence)


def compute_footprint(model: ModelSizes, dtype: str, tp: int, tokens: int, ep: int = 1) -> Footprint:
    """Return the bytes that each rank holds.

    Args:
        model: sizes of the model.
        dtype: dtype of weights and cache.
        tp: tensor-parallel ranks.
        tokens: tokens of a sequence in the cache.
        ep: groups of `tp` ranks that divide the routed experts among them; every group holds all other weights.
    """
    weight_bytes = sum(
        section.count * section.count_weight_bytes(tp, ep, dtype) for section in model.sections
    )
    return Footprint(tp, tokens, weight_bytes, model.count_cache_bytes(tokens, dtype, tp))


@dataclass(frozen=True)
class PageKind:
    """Pages of one cache group: the layers that see equally many positions share pages of one size.

    | field | meaning |
    |---|---|
    | `window` | positions that the layers attend to; None: all |
    | `page_bytes` | bytes of a page on each rank, of all layers of the group |
    | `pages` | number of pages |
    | `recurrent` | whether the layers are recurrent: a page is then a slot for the states of one sequence |
    """

    window: int | None
    page_bytes: int
    pages: int = 0
    recurrent: bool = False


def list_page_kinds(model: ModelSizes, dtype: str, tp: int, block_size: int, length: int) -> list[PageKind]:
    """Return a `PageKind` for each attention window of the model, with 0 pages; recurrent layers have none here.

    Beside full pages of four bits, newest pages are a kind of their own, with a window of one position.

    Args:
        model: sizes of the model.
        dtype: dtype of the cache.
        tp: tensor-parallel ranks.
        block_size: positions of a page.
        length: most tokens of a sequence; a window of at least this length counts as no window.
    """
    page_bytes = dict.fromkeys(model.config.list_windows(length), 0)
    for group, size in model.count_page_bytes(tp, dtype).items():
        if not isinstance(group, Slots):
            window = group if group is not None and group < length else None
            page_bytes[window] = page_bytes.get(window, 0) + block_size * size
    return [PageKind(window, size) for window, size in page_bytes.items()]


@dataclass(frozen=True)
class Demand:
    """Load for which memory is divided into pages: at most `sequences` of up to `longest` tokens, `mean` on average.

    A step computes up to `tokens` tokens. Each sequence takes `slots` pages of recurrent layers, for its state and for
    snapshots of the state.
    """

    sequences: int
    mean: int
    longest: int
    tokens: int
    slots: int = 1


def allocate_pages(
    page_kinds: Sequence[PageKind], free_bytes: int, block_size: int, demand: Demand
) -> list[PageKind]:
    """Return the same page kinds with as many pages as fit into `free_bytes`.

    Pages are divided such that sequences of the mean length use up all kinds at the same time. If layers that see all
    positions can use the remaining memory, windows and slots get at most the pages of `demand.sequences` sequences.
    They also leave memory for one sequence of `demand.longest` tokens.

    Args:
        page_kinds: kinds of pages; their number of pages is ignored.
        free_bytes: bytes of a rank for all pages.
        block_size: positions of a page.
        demand: the load.
    """
    unbounded_bytes = sum(
        page_kind.page_bytes
        for page_kind in page_kinds
        if page_kind.window is None and not page_kind.recurrent
    )
    windows = {
        page_kind: count_window_pages(page_kind.window, block_size, 1, 0)
        for page_kind in page_kinds
        if page_kind.window is not None
    }
    # Pages of a sequence, of the kinds that do not grow with its length.
    bounded = windows | {page_kind: demand.slots for page_kind in page_kinds if page_kind.recurrent}
    bounded_bytes = sum(page_kind.page_bytes * pages for page_kind, pages in bounded.items())
    chunk = demand.tokens // block_size if windows else 0
    free_bytes = max(0, free_bytes - chunk * sum(page_kind.page_bytes for page_kind in windows))
    count = free_bytes // (unbounded_bytes * -(-demand.mean // block_size) + bounded_bytes)
    if (unbounded_bytes and bounded) or len(bounded) > len(windows):
        room = free_bytes - unbounded_bytes * -(-demand.longest // block_size)
        count = max(0, min(demand.sequences, count, room // bounded_bytes))
        free_bytes -= count * bounded_bytes
    return [
        replace(page_kind, pages=count * bounded[page_kind] + chunk * (page_kind in windows))
        if page_kind in bounded
        else replace(page_kind, pages=free_bytes // page_kind.page_bytes)
        for page_kind in page_kinds
    ]


def list_powers_of_two(largest: int) -> list[int]:
    """Return the powers of two from 1 up to `largest`; [1] if `largest` is below 1."""
    return [2**exponent for exponent in range(max(1, largest).bit_length())]


def list_possible_tp(model: ModelSizes, cores: int) -> list[int]:
    """Return the numbers of tensor-parallel ranks to try: powers of two that give each rank a head, at most `cores`."""
    return list_powers_of_two(min(cores, model.config.most_busy_ranks))


def find_smallest_tp(
    model: ModelSizes, dtype: str, tokens: int, batch: int, cores: int, core_bytes: int, ep: int = 1
) -> int | None:
    """Return the fewest tensor-parallel ranks that hold the model and `batch` sequences; None if no number does.

    Args:
        model: sizes of the model.
        dtype: dtype of weights and cache.
        tokens: tokens of each sequence.
        batch: number of sequences.
        cores: most tensor-parallel ranks.
        core_bytes: HBM bytes of each rank.
        ep: groups of as many ranks that divide the routed experts among them.
    """
    for tp in list_possible_tp(model, cores):
        if compute_footprint(model, dtype, tp, tokens, ep).sequences(core_bytes) >= batch:
            return tp
    return None
