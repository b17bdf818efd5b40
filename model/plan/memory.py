"""Memory of a plan: bytes of weights and cache on each core, by the number of ranks, and on each instance.

A rank holds the weights as the layers cut them: embedding tables, norms and what makes inputs of every layer whole, and
its part of everything else. A tied table is held a second time, transposed, for the head, and so are projections of
keys that are values too; heads that are padding, and key/value heads that several ranks hold, count on every rank.
Activations, code and what the runtime keeps for itself are not counted, so a plan that fills a core to the brim will
not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config.heads import HeadLayout
from model.plan.parameters import BlockCounts, ModelCounts

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


def _cache(layers: BlockCounts, tp: int, tokens: int) -> int:
    layout = HeadLayout(*layers.divided, tp)
    elements = layers.cache_per_sequence + layers.cache_per_token * layers.seen(tokens)
    return _part(elements, layout.kv_heads_of_rank, layout.kv_heads)


def _part(elements: int, held: int, parts: int) -> int:
    """The elements of `held` of `parts` equal parts, heads or a width."""
    return -(-elements * held // parts)


def _share(parameters: int, ranks: int) -> int:
    return _part(parameters, 1, ranks)
