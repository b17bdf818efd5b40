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
from math import prod

import ml_dtypes
import numpy as np

from model.config.heads import HeadLayout
from model.config.parts import SpeechEncoder
from model.families import compose
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.paged import Slots
from model.layers.shard import Shard
from model.plan.parameters import STATE_BYTES, BlockCounts, ModelCounts
from model.state import window_pages

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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


def footprint(model: ModelCounts, dtype: str, tp: int, tokens: int, ep: int = 1) -> Footprint:
    """Bytes that each rank holds of a model in `dtype`, where `ep` groups of ranks hold its routed experts once."""
    size = DTYPE_BYTES[dtype]
    elements = _elements(model, tp, ep)
    cache = sum(layers.count * cache_bytes(layers, tp, tokens, size) for layers in model.layers)
    return Footprint(tp, tokens, elements * size, cache)


@dataclass(frozen=True)
class PageKind:
    """Pages of the layers that see `window` positions, or all: how many, and the bytes of one on each rank.

    Those of recurrent layers are slots, each for the states of one sequence.
    """

    window: int | None
    page_bytes: int
    pages: int = 0
    recurrent: bool = False


def page_kinds(model: ModelCounts, dtype: str, tp: int, block_size: int, length: int) -> list[PageKind]:
    """The kinds of pages of sequences of up to `length` tokens; what does not grow with them lies in slots."""
    elements = np.dtype(getattr(ml_dtypes, dtype, dtype))
    step = StepShape(Phase.decode, 1, 1, length, length, tp, elements, WeightDtypes(elements))
    step = replace(step, pages=1, block_size=block_size, slots=1)
    page_bytes = dict.fromkeys(model.config.windows(length), 0)
    for layer in compose(model.config).layers:
        for cache in layer.caches(step):
            if not isinstance(cache.group, Slots):
                is_windowed = cache.group is not None and cache.group < length
                page_bytes[cache.group if is_windowed else None] += cache.page_bytes
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


def possible_tp(model: ModelCounts, most: int) -> list[int]:
    """The powers of two up to `most` that can share the model."""
    most = min(most, model.config.most_ranks)
    return [2**exponent for exponent in range(most.bit_length())]


def smallest_tp(
    model: ModelCounts, dtype: str, tokens: int, batch: int, cores: int, core_bytes: int, ep: int = 1
) -> int | None:
    """The fewest of at most `cores` ranks, in `ep` groups of as many, that hold the model and `batch` sequences."""
    for tp in possible_tp(model, cores):
        if footprint(model, dtype, tp, tokens, ep).sequences(core_bytes) >= batch:
            return tp
    return None


def _elements(model: ModelCounts, tp: int, ep: int) -> int:
    """Elements of weights on a rank; with an encoder of speech those of the layers, which hold much of it whole."""
    if isinstance(model.encoder, SpeechEncoder):
        return sum(prod(each.shape(Shard(0, tp))) for each in compose(model.config).weights)
    elements = model.embedding + model.per_layer_rows + model.projections + model.final_norms
    elements += shared(model.config.vocab_size, tp) * model.config.hidden_size
    elements += sum(layers.count * layer_elements(layers, tp, ep) for layers in model.layers)
    return elements + (shared(model.encoder.parameters, tp) if model.encoder else 0)


def layer_elements(layers: BlockCounts, tp: int, ep: int = 1) -> int:
    """The weights of one layer on a rank; `ep` groups of ranks hold its routed experts once."""
    layout, width = HeadLayout(*layers.divided, tp), layers.mlp_width or tp
    return (
        layers.norms
        + layers.whole
        + layers.attention_whole
        + layers.buffers
        + _part(
            layers.attention - layers.attention_shared - layers.attention_whole,
            *(layout.heads_of_rank, layout.heads),
        )
        + _part(layers.attention_shared + layers.attention_again, layout.kv_heads_of_rank, layout.kv_heads)
        + _part(layers.mlp, shared(width, tp), width)
        + shared(layers.experts - layers.experts_whole, tp * ep)
        + shared(layers.experts_whole, ep)
        + shared(layers.mixer - layers.mixer_shared, tp)
        + _part(layers.mixer_shared, layout.kv_heads_of_rank, layout.kv_heads)
    )


def cache_bytes(layers: BlockCounts, tp: int, tokens: int, size: int) -> int:
    """The cache of one layer on a rank, of a sequence of so many tokens, in a dtype of `size` bytes."""
    layout = HeadLayout(*layers.divided, tp)
    states = _part(layers.state_per_sequence, layout.heads_of_rank, layout.heads)
    others = layers.cache_per_sequence - layers.state_per_sequence
    others += layers.cache_per_token * layers.seen(tokens)
    return STATE_BYTES * states + size * _part(others, layout.kv_heads_of_rank, layout.kv_heads)


def _part(elements: int, held: int, parts: int) -> int:
    """The elements of `held` of `parts` equal parts, heads or a width."""
    return -(-elements * held // parts)


def shared(parameters: int, ranks: int) -> int:
    """What each rank holds of parameters that all ranks share."""
    return _part(parameters, 1, ranks)
