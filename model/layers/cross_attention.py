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

from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention import split_sequences
from model.layers.cache import Cache, create_encoder_cache
from model.layers.launch import (
    INT32,
    Growth,
    Launch,
    LeastWork,
    Phase,
    StepShape,
    Value,
)
from model.layers.layer import Constant, Stateless, States
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.separate_projections import SeparateProjections
from model.layers.shard import Shard
from model.layers.softmax import attend
from model.layers.weight import Weight

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
class CrossAttention(SeparateProjections):
    """Cross-attention layer: x + attention(norm(x), encoded) over `heads.cross_positions` encoder positions."""

    reads_stored: ClassVar[bool] = False  # decoders of speech get widened weights

    norm: Norm

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norm and of the four projections, with the biases that the checkpoint has."""
        return (*self.norm.weights, *super().weights)

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
            self._project(step, x, letter, (new.name,), label, norm)
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

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the queries, of attention to the encoder, and of the output projection with residual.

        In a prefill step attention also stores the encoder's keys and values. A decode step may have several launches
        of attention, each for at most 128 tokens.
        """
        x = Value("x", (step.tokens, self.hidden), step.activations)
        queries = Value("q", (step.tokens, self._count_columns(step)), step.activations)
        project = self._project(step, x, "q", (queries.name,), "queries to the encoder", self.norm)
        if step.phase is Phase.prefill:
            attend = [self._prefill(step, queries)]
        else:
            attend = [self._decode(step, queries, *chunk) for chunk in split_sequences(step)]
        return [project, *attend, self._project_output(step, "of the encoder")]

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
        return self._add_output(x, mixed, numpy)

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
