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

from model.config.heads import HeadLayout
from model.plan.parameters import BlockCounts, ModelCounts
from model.state import window_pages

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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


def footprint(model: ModelCounts, dtype: str, tp: int, tokens: int) -> Footprint:
    """Bytes that each rank holds of a model in `dtype`."""
    size = DTYPE_BYTES[dtype]
    elements = model.embedding + model.per_layer_rows + model.projections + model.final_norms
    elements += _share(model.config.vocab_size, tp) * model.config.hidden_size
    elements += sum(layers.count * _layer(layers, tp) for layers in model.layers)
    elements += _share(model.encoder.parameters, tp) if model.encoder else 0
    cache = sum(layers.count * _cache(layers, tp, tokens) for layers in model.layers)
    return Footprint(tp, tokens, elements * size, cache * size)


@dataclass(frozen=True)
class PageKind:
    """Pages of the layers that see `window` positions, or all: how many, and the bytes of one on each rank."""

    window: int | None
    page_bytes: int
    pages: int = 0


def page_kinds(model: ModelCounts, dtype: str, tp: int, block_size: int, length: int) -> list[PageKind]:
    """The kinds of pages of sequences of up to `length` tokens."""
    found = []
    for window in model.config.windows(length):
        own = (each for each in model.layers if _is_of_kind(each.window, window, length))
        elements = sum(each.count * _cache(replace(each, window=None), tp, block_size) for each in own)
        found.append(PageKind(window, elements * DTYPE_BYTES[dtype]))
    return found


@dataclass(frozen=True)
class Demand:
    """What a cache is divided for: at most so many `sequences`, of `mean` tokens on average and `longest` at most.

    A step computes so many `tokens`.
    """

    sequences: int
    mean: int
    longest: int
    tokens: int


def with_pages(kinds: Sequence[PageKind], free_bytes: int, block_size: int, demand: Demand) -> list[PageKind]:
    """As many pages of every kind as fit, such that sequences of the mean length run out of all kinds together.

    Windows get no more than all sequences hold, where other layers can use the rest, and leave room for one sequence
    of the longest length.
    """
    wide = [each for each in kinds if each.window is None]
    held = {each: window_pages(each.window, block_size, 1, 0) for each in kinds if each.window is not None}
    page_bytes = sum(each.page_bytes for each in wide)
    window_bytes = sum(each.page_bytes * pages for each, pages in held.items())
    chunk = demand.tokens // block_size if held else 0
    free_bytes = max(0, free_bytes - chunk * sum(each.page_bytes for each in held))
    count = free_bytes // (page_bytes * -(-demand.mean // block_size) + window_bytes)
    if wide and held:
        room = free_bytes - page_bytes * -(-demand.longest // block_size)
        count = max(0, min(demand.sequences, count, room // window_bytes))
        free_bytes -= count * window_bytes
    return [
        replace(each, pages=count * held[each] + chunk if each in held else free_bytes // each.page_bytes)
        for each in kinds
    ]


def possible_tp(model: ModelCounts, most: int) -> list[int]:
    """The powers of two up to `most` that can share the model."""
    most = min(most, model.config.most_ranks)
    return [2**exponent for exponent in range(most.bit_length())]


def smallest_tp(
    model: ModelCounts, dtype: str, tokens: int, batch: int, cores: int, core_bytes: int
) -> int | None:
    """The fewest of at most `cores` ranks that hold the model and `batch` sequences."""
    for tp in possible_tp(model, cores):
        if footprint(model, dtype, tp, tokens).sequences(core_bytes) >= batch:
            return tp
    return None


def _layer(layers: BlockCounts, tp: int) -> int:
    layout, width = HeadLayout(*layers.divided, tp), layers.mlp_width or tp
    return (
        layers.norms
        + layers.whole
        + _part(layers.attention - layers.attention_shared, layout.heads_of_rank, layout.heads)
        + _part(layers.attention_shared + layers.attention_again, layout.kv_heads_of_rank, layout.kv_heads)
        + _part(layers.mlp, _share(width, tp), width)
        + _share(layers.experts, tp)
        + _share(layers.mixer, tp)
    )


def _is_of_kind(own: int | None, window: int | None, length: int) -> bool:
    """Whether a layer that sees `own` positions has pages of the kind of a window."""
    return (own if own is not None and own < length else None) == window


def _cache(layers: BlockCounts, tp: int, tokens: int) -> int:
    layout = HeadLayout(*layers.divided, tp)
    elements = layers.cache_per_sequence + layers.cache_per_token * layers.seen(tokens)
    return _part(elements, layout.kv_heads_of_rank, layout.kv_heads)


def _part(elements: int, held: int, parts: int) -> int:
    """The elements of `held` of `parts` equal parts, heads or a width."""
    return -(-elements * held // parts)


def _share(parameters: int, ranks: int) -> int:
    return _part(parameters, 1, ranks)
