"""Cross-attention: tokens of a decoder attend to the output of an encoder, whose keys and values are computed once.

    k, v = norm(encoded) @ w_k, w_v      launches after the last layer of the encoder (`EncodedHeads`)
    q    = norm(x) @ w_q
    o    = attention(q, k, v)            attention_prefill of a prompt stores k and v; attention_decode reads them
    x    = x + o @ w_o                   summed over the ranks; each rank has some of the heads

The cache has keys [sequences, heads, head_dim, positions] and values [sequences, heads, positions, head_dim] for all
positions of the encoder. A decode step reads all positions.

In the engine, each sequence has a slot, which is one row of both arrays. The prompt fills the slot, and later steps
only read it. Pages are not needed, because the number of encoder positions is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.config.mixers import GroupedAttention
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention import split_sequences
from model.layers.attention_heads import AttentionProjections
from model.layers.cache import Cache, create_encoder_cache
from model.layers.launch import (
    INT32,
    Axis,
    Growth,
    Launch,
    LeastWork,
    Phase,
    StepShape,
    Value,
    count_product_work,
)
from model.layers.layer import Constant, Stateless, States
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.shard import ROW, Cut, Shard, by_kv_heads, by_query_heads
from model.layers.softmax import attend
from model.layers.weight import Weight, create_argument

LAST_OF_WINDOW = "encoder.last_position"
"""Name of the array of the last encoder position of each sequence; an input of the step if there are slots."""


@dataclass(frozen=True)
class LastPositions:
    """Constant with the last encoder position of each sequence; equal ones are one array of all layers."""

    sequences: int
    position: int

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return [sequences, 1] int32 filled with `position`, equal on all ranks."""
        return np.full((self.sequences, 1), self.position, np.int32)


@dataclass(frozen=True)
class CrossAttention:
    """Cross-attention layer: x + attention(norm(x), encoded) over `heads.cross_positions` encoder positions."""

    component: ClassVar[str] = "attention"

    name: str
    hidden: int
    heads: GroupedAttention
    norm: Norm
    projections: AttentionProjections

    def _find_projection(self, letter: str) -> tuple[Projection, Cut, Cut]:
        """Return (projection, cut of its matrix, cut of its bias); `letter` is "q", "k", "v" or "o" for the output.

        The cuts divide the heads over the ranks, except that every rank has the whole bias of the output.
        """
        query, key, value = self.projections.inputs
        query_heads, kv_heads = by_query_heads(*self.heads.divided), by_kv_heads(*self.heads.divided)
        return {
            "q": (query, query_heads, query_heads),
            "k": (key, kv_heads, kv_heads),
            "v": (value, kv_heads, kv_heads),
            "o": (self.projections.output, replace(query_heads, axis=1), ROW),
        }[letter]

    def _matrix(self, letter: str) -> Weight:
        projection, cut, _ = self._find_projection(letter)
        return Weight(f"{self.name}.w_{letter}", (projection.weight(cut),))

    def _bias(self, letter: str) -> Weight | None:
        projection, _, cut = self._find_projection(letter)
        if projection.bias is None:
            return None
        return Weight(f"{self.name}.b_{letter}", (projection.bias_row(cut),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norm and of the four projections, with the biases that the checkpoint has."""
        weights = [weight for letter in "qkvo" for weight in (self._matrix(letter), self._bias(letter))]
        return (*self.norm.weights, *(weight for weight in weights if weight is not None))

    def _cache(self, step: StepShape) -> Cache:
        heads, positions = self.heads.layout(step.ranks), self.heads.cross_positions
        return create_encoder_cache(self.name, heads, self.heads.head_dim, positions, step)

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the cache of the encoder's keys and values of a rank's heads."""
        return (self._cache(step),)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute the scales of the cache and the last encoder position of each sequence.

        The positions are [sequences, 1] int32. If the step has slots, they are an input of the step and not here.
        """
        scales = self._cache(step).constants
        if step.slots:
            return scales
        return {LAST_OF_WINDOW: LastPositions(step.sequences, self.heads.cross_positions - 1), **scales}

    @property
    def cached_projections(self) -> Mapping[str, Projection]:
        """Projections to keys and to values, by the names of the cache arrays."""
        return dict(zip(self._state_names, self.projections.inputs[1:]))

    def list_encoder_launches(self, step: StepShape, norm: Norm) -> Sequence[Launch]:
        """Return two launches that compute this layer's keys and values of all encoder positions on a rank.

        They read the encoder's hidden states `x` [tokens, hidden] and apply `norm`, the last norm of the encoder. The
        results are `<name>.new_keys` and `<name>.new_values`, which a prompt's attention stores in the cache.
        """
        x = Value("x", (step.tokens, self.hidden), step.activations)
        return [
            self._project(step, x, norm, letter, new.name, label)
            for letter, new, label in zip(
                "kv", self._describe_encoded(step), ("decoder's keys", "decoder's values")
            )
        ]

    def _describe_encoded(self, step: StepShape) -> tuple[Value, Value]:
        """Return the keys and values that the encoder's launches write, [sequences * positions, heads * head_dim]."""
        rows = step.sequences * self.heads.cross_positions
        width = self.heads.layout(step.ranks).kv_heads_of_rank * self.heads.head_dim
        keys, values = (
            Value(f"{self.name}.{name}", (rows, width), step.activations)
            for name in ("new_keys", "new_values")
        )
        return keys, values

    def _project(self, step: StepShape, x: Value, norm: Norm, letter: str, result: str, label: str) -> Launch:
        """Return the launch of `qkv_projection` that writes norm(x) times a projection to the array `result`.

        `letter` selects the projection as in `_find_projection`, and `label` distinguishes the launch in reports.
        """
        weight = self._matrix(letter).value(step)
        return Launch(
            "qkv_projection",
            {
                "x": x,
                "norm_weight": norm.weight.value(step),
                "w_qkv": weight,
                "eps": norm.eps,
                "q_size": weight.shape[1],
                "bias": create_argument(self._bias(letter), step),
                "norm_bias": create_argument(norm.bias_weight, step),
            },
            (result,),
            count_product_work(x.shape[0], weight),
            x.shape[0],
            label,
        )

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the queries, of attention to the encoder, and of the output projection with residual.

        In a prefill step attention also stores the encoder's keys and values. A decode step may have several launches
        of attention, each for at most 128 tokens.
        """
        x = Value("x", (step.tokens, self.hidden), step.activations)
        w_o = self._matrix("o").value(step)
        queries = Value("q", (step.tokens, w_o.shape[0]), step.activations)
        project = self._project(step, x, self.norm, "q", queries.name, "queries to the encoder")
        if step.phase is Phase.prefill:
            attend = [self._prefill(step, queries)]
        else:
            attend = [self._decode(step, queries, *chunk) for chunk in split_sequences(step)]
        output = Launch(
            "output_projection",
            {
                "o": replace(queries, name="o"),
                "w_o": w_o,
                "residual": x,
                "replica_group": Axis.tensor,
                "bias": create_argument(self._bias("o"), step),
            },
            ("x",),
            count_product_work(step.tokens, w_o),
            step.tokens,
            "of the encoder",
        )
        return [project, *attend, output]

    def _count_work(self, queries: Value, step: StepShape, sequences: int, passes: int) -> LeastWork:
        """Return the least work of attention of `queries` [tokens, width] to all encoder positions.

        Keys and values of `sequences` sequences are moved `passes` times: 1 to read them, 2 to also store them.
        """
        operations = 4.0 * queries.shape[0] * queries.shape[1] * self.heads.cross_positions
        width = self.heads.layout(step.ranks).kv_heads_of_rank * self.heads.head_dim
        itemsize = self._cache(step).arrays[0].dtype.itemsize
        cache_bytes = 2 * sequences * self.heads.cross_positions * width * itemsize
        return LeastWork(operations, float(2 * queries.nbytes + passes * cache_bytes), operations)

    def _prefill(self, step: StepShape, queries: Value) -> Launch:
        """Return the launch of `attention_prefill` of prompts to all encoder positions.

        It also copies the encoder's new keys and values to the cache.
        """
        new_keys, new_values = self._describe_encoded(step)
        cache = self._cache(step)
        return Launch(
            "attention_prefill",
            {
                "q": queries,
                "k": new_keys,
                "v": new_values,
                **cache.arguments,
                "scale": self.heads.score_scale,
                "num_kv_heads": self.heads.layout(step.ranks).kv_heads_of_rank,
                "causal": False,
            },
            ("o", *cache.names),
            self._count_work(queries, step, step.sequences, 2),
            step.tokens,
            "to the encoder",
            Growth.full_step,
        )

    def _decode(self, step: StepShape, queries: Value, sequences: int, repeat: int) -> Launch:
        """Return the launch of `attention_decode` for the new tokens of `sequences` sequences, with count `repeat`.

        If these are fewer than the sequences of the step, the launch reads the last rows of all its arrays.
        """
        rows = sequences * step.new_tokens
        queries = queries if rows == step.tokens else queries.take_last(rows)
        arguments = self._cache(replace(step, sequences=sequences)).arguments
        last = Value(LAST_OF_WINDOW, (step.sequences, 1), INT32)
        if sequences < step.sequences:
            last = last.take_last(sequences)
            cache_rows = arguments.get("cache_rows")
            if isinstance(cache_rows, Value):
                arguments |= {"cache_rows": cache_rows.take_last(sequences)}
        return Launch(
            "attention_decode",
            {
                "q": queries,
                **arguments,
                "positions": last,
                "scale": self.heads.score_scale,
                "num_kv_heads": self.heads.layout(step.ranks).kv_heads_of_rank,
            },
            ("o",),
            self._count_work(queries, step, sequences, 1),
            rows,
            "to the encoder",
            repeat=repeat,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] after the layer, computed in NumPy from the keys and values in `states`.

        `store_encoded` must have stored them. `span` decides as in `attend` which exponentials are summed.
        """
        query = numpy.round(numpy.multiply(self.norm.reference(x, numpy), self.projections.inputs[0]))
        keys, values = (states[name] for name in self._state_names)
        mixer = replace(self.heads, causal=False)
        mixed = attend(self._split_heads(query), keys, values, mixer, span, numpy)
        head_span = by_query_heads(*self.heads.divided).span
        return numpy.round(x + numpy.sum_partial_products(mixed, self.projections.output, head_span))

    def store_encoded(self, normed: np.ndarray, states: States, numpy: Arithmetic) -> None:
        """Set `<name>.keys` and `<name>.values` in `states`, [heads, positions, head_dim] each, rounded.

        They are projections of `normed`, the normalised encoder output [positions, hidden].
        """
        for name, projection in zip(self._state_names, self.projections.inputs[1:]):
            heads = self._split_heads(numpy.round(numpy.multiply(normed, projection)))
            states[name] = numpy.caching.store_heads(name, heads)

    @property
    def _state_names(self) -> tuple[str, str]:
        return f"{self.name}.keys", f"{self.name}.values"

    def _split_heads(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), -1, self.heads.head_dim).swapaxes(0, 1)


@dataclass(frozen=True)
class EncodedHeads(Stateless):
    """Last layer of an encoder: its norm, and the keys and values of every cross-attention layer."""

    norm: Norm
    layers: tuple[CrossAttention, ...]

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norm; the projections belong to the layers of the decoder."""
        return self.norm.weights

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return two launches for each cross-attention layer: its keys, then its values, of all encoder positions."""
        return [launch for layer in self.layers for launch in layer.list_encoder_launches(step, self.norm)]

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [positions, hidden] unchanged; store the keys and values of every layer in `states`.

        They are projections of the normalised x.
        """
        normed = self.norm.reference(x, numpy)
        for layer in self.layers:
            layer.store_encoded(normed, states, numpy)
        return x
