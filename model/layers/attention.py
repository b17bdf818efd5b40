"""Grouped-query attention with the norm before it, rotary embeddings, and the residual after it.

    q, k, v = qkv_projection(x)          `attention_heads` lists the launches before and after attention
    o       = attention_prefill(q, k, v) in a prefill step, attention_decode(q, k, v) in a decode step
    x       = output_projection(o, x)

Attention writes new keys and values to the cache. A decode step with a plain RMSNorm and no biases is one launch of
`attention_block_decode` for up to 128 tokens. `attention_mixed` computes sequences that decode together with prompts;
the other kernels treat the rows of both alike.

The cache has keys [sequences, heads, head_dim, length] and values [sequences, heads, length, head_dim] of a rank's
heads, or pages. A decode step contracts keys over head_dim, so head_dim is the partition axis of a tile loaded from
HBM without a transpose. Values contract over positions. Layers with a window may have pages of their own (`StepShape`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention_heads import AttentionHeads
from model.layers.cache import Cache, create_cache
from model.layers.launch import (
    PARTITIONS,
    Argument,
    Axis,
    Growth,
    Launch,
    LeastWork,
    Phase,
    StepShape,
    Value,
    product,
    split_into_launches,
)
from model.layers.layer import Constant, States
from model.layers.shard import by_query_heads
from model.layers.softmax import mixed_values
from model.layers.weight import Tensor, Weight, value_of

ENCODED = "encoder.attention"
"""The cache name that all layers of an encoder share; attention writes this cache and nothing reads it later."""


@dataclass(frozen=True)
class Attention(AttentionHeads):
    """Attention layer: x + attention(norm(x)), or x + after(attention(x)).

    `sinks` names the checkpoint tensor of attention sinks, one score for each head, if the model has them. A layer with
    an `owner` reads the cache of that layer and writes nothing to it.
    """

    sinks: str | None = None
    mixes: ClassVar[bool] = True

    @property
    def _sinks(self) -> Weight | None:
        """The sinks of a rank's heads, [1, heads]."""
        if self.sinks is None:
            return None
        cut = by_query_heads(*self.heads.divided)
        return Weight(f"{self.name}.sinks", (Tensor(self.sinks, (self.heads.heads,), cut),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The norms, both projections and their biases, and the sinks."""
        return (*super().weights, *(() if self._sinks is None else (self._sinks,)))

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the cache of keys and values of a rank's heads; empty for a layer with an `owner`."""
        return () if self.owner is not None else (self._cache(step),)

    def read_caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the cache that the layer reads: its own, or the cache of its `owner`."""
        return (self._cache(step),)

    def _cache(self, step: StepShape) -> Cache:
        """Return the cache that the layer reads; all layers of an encoder share one, as none is read again."""
        name = self.owner or (self.name if self.heads.causal else ENCODED)
        return create_cache(name, self.heads.layout(step.ranks), self.heads.head_dim, step, self.heads.window)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the rotary tables and the scales of the cache."""
        return {**super().constants(step), **self._cache(step).constants}

    @property
    def _is_block(self) -> bool:
        """Whether `attention_block_decode` computes a decode step of this layer."""
        plain = self.norm is not None and self.norm.bias is None and self.norm.offset == 0.0
        plain = plain and not self.after
        biased = self.b_qkv is not None or self.b_o is not None
        projects_all_heads = self.owner is None and not self.heads.value_norm and not self._whole_norms
        plain = plain and not biased and not self.heads.output_gate
        return plain and projects_all_heads and self._rotates_by_position

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of projection, attention and output; a decode step is one launch where possible."""
        if step.phase is Phase.prefill:
            decoding = step.decoding
            attend = self._prefill(step) if decoding is None else self._mixed(step, decoding)
            return [*self._project(step), attend, *self._finish(step)]
        attends = [self._decode(step, sequences, repeat) for sequences, repeat in chunks(step)]
        if self._is_block:
            blocks = [self._decode_block(step, sequences, repeat) for sequences, repeat in chunks(step)]
            # Three launches do not help where attention itself is refused in the same words.
            if all(block.refusal in (None, attend.refusal) for block, attend in zip(blocks, attends)):
                return blocks
        return [*self._project(step), *attends, *self._finish(step)]

    def _window(self, length: int) -> int | None:
        """The window, where it is shorter than `length` positions."""
        window = self.heads.window
        return window if window is not None and window < length else None

    def _score_arguments(self, step: StepShape, window: int | None) -> dict[str, Argument]:
        """Return the arguments that change the scores: window, soft cap, and sinks [1, heads of a rank]."""
        return {"window": window, "softcap": self.heads.softcap, "sinks": value_of(self._sinks, step)}

    def _decode_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments of both decode kernels for the cache, the positions and the scores.

        If `positions` count from the first page of a window, `rope_positions` are the positions in the sequence.
        """
        cache, length = self._cache(step), step.for_window(self.heads.window).cache_length
        arguments: dict[str, Argument] = {
            **cache.arguments,
            "positions": cache.positions,
            **self._score_arguments(step, self._window(length)),
        }
        in_sequence = replace(cache.positions, name="positions")
        if cache.positions != in_sequence:
            arguments |= {"rope_positions": in_sequence}
        return arguments

    def _prefill(self, step: StepShape) -> Launch:
        tokens, end = step.tokens, step.prefix + step.tokens // step.sequences
        q, k, v = self._projected(step)
        cache = self._cache(step)
        window_step = step.for_window(self.heads.window)
        pairs = step.sequences * (self.heads.pairs(end) - self.heads.pairs(step.prefix))
        operations = 4.0 * q.shape[1] * pairs
        # Queries, outputs and, of a layer with a cache of its own, keys and values are activations.
        activations = 2 * tokens * (q.shape[1] + (k.shape[1] if self.owner is None else 0))
        cached = 2 * k.shape[1] * (tokens + step.sequences * window_step.prefix)
        moved = step.activations.itemsize * activations + cache.arrays[0].dtype.itemsize * cached
        window = self._window(window_step.prefix + tokens // step.sequences)
        arguments: dict[str, Argument] = {
            "q": q,
            **self._new(k, v),
            **cache.arguments,
            "scale": self.heads.score_scale,
            "num_kv_heads": self._kv_heads(step),
            "prefix": window_step.prefix,
            **self._score_arguments(step, window),
            "causal": self.heads.causal,
        }
        if step.prefix:
            arguments |= {"positions": cache.positions}
        return Launch(
            "attention_prefill",
            arguments,
            self._results(cache),
            LeastWork(operations, float(moved), operations),
            tokens,
            growth=Growth.square,
            window=window,
        )

    def _mixed(self, step: StepShape, decoding: StepShape) -> Launch:
        """Attention of the sequences that decode, whose rows come first, and of the prompts."""
        prompts = self._prefill(step.prompts)
        q, k, v = self._projected(step)
        cache = self._cache(step)
        length = decoding.for_window(self.heads.window).cache_length
        prefix = step.for_window(self.heads.window).prefix
        window = self._window(max(length, prefix + step.new_tokens))
        return Launch(
            "attention_mixed",
            {
                "q": q,
                **self._new(k, v),
                **cache.arguments,
                "positions": cache.positions,
                "scale": self.heads.score_scale,
                "decoding": decoding.tokens,
                "num_kv_heads": self._kv_heads(step),
                "prefix": prefix,
                **self._score_arguments(step, window),
            },
            prompts.results,
            prompts.work + self._attended(decoding, decoding.sequences),
            step.tokens,
            growth=Growth.square,
            window=prompts.window,
        )

    def _new(self, k: Value, v: Value) -> dict[str, Argument]:
        """The keys and values that attention writes to the cache; none where the layer reads another one's cache."""
        return {"k": k, "v": v} if self.owner is None else {}

    def _results(self, cache: Cache) -> tuple[str, ...]:
        """The names of what a launch of attention returns."""
        return ("o", *cache.names) if self.owner is None else ("o",)

    def _decode(self, step: StepShape, sequences: int, repeat: int) -> Launch:
        """Return the launch of attention for the new tokens of `sequences` sequences."""
        rows = sequences * step.new_tokens
        q, k, v = (
            projected.last(rows) if rows < step.tokens else projected for projected in self._projected(step)
        )
        launch_step = replace(step, tokens=rows, sequences=sequences)
        arguments: dict[str, Argument] = {
            "q": q,
            **self._new(k, v),
            "scale": self.heads.score_scale,
            "num_kv_heads": self._kv_heads(step),
            **self._decode_arguments(launch_step),
        }
        if self._rotates_in_attention(step):
            arguments |= self._rotation_arguments(step)
        if self.owner is not None:  # nothing is written to the cache
            arguments.pop("slots", None)
        return Launch(
            "attention_decode",
            arguments,
            self._results(self._cache(launch_step)),
            self._attended(step, sequences),
            rows,
            repeat=repeat,
        )

    def _attended(self, step: StepShape, sequences: int) -> LeastWork:
        """Return the work of a step's attention of sequences whose caches are full."""
        q, k, _ = self._projected(step)
        seen = sequences * self.heads.seen(step.cache_length)
        itemsize = self._cache(step).arrays[0].dtype.itemsize
        operations = 4.0 * step.new_tokens * q.shape[1] * seen
        return LeastWork(operations, 2.0 * k.shape[1] * seen * itemsize, operations)

    def _decode_block(self, step: StepShape, sequences: int, repeat: int) -> Launch:
        """Return the launch for `sequences` sequences that includes the norm and both projections."""
        assert self.norm is not None
        rows = sequences * step.new_tokens
        x = Value("x", (step.tokens, self.hidden), step.activations)
        x = x.last(rows) if rows < step.tokens else x
        q, k, _ = self._projected(step)
        launch_step = replace(step, tokens=rows, sequences=sequences)
        w_qkv, w_o = self.w_qkv.value(step), self.w_o.value(step)
        return Launch(
            "attention_block_decode",
            {
                "x": x,
                "norm_weight": self.norm.weight.value(step),
                "w_qkv": w_qkv,
                "eps": self.norm.eps,
                "q_size": q.shape[1],
                "kv_size": k.shape[1],
                "scale": self.heads.score_scale,
                "w_o": w_o,
                "num_kv_heads": self._kv_heads(step),
                **self._rotation_arguments(step),
                **self._head_norm_arguments(step),
                "replica_group": Axis.tensor,
                **self._decode_arguments(launch_step),
            },
            ("x", *self._cache(launch_step).names),
            product(rows, w_qkv, w_o) + self._attended(step, sequences),
            rows,
            repeat=repeat,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Compute the layer in NumPy; exponentials are relative to the largest score of a token.

        In prompts of more than 4,096 tokens the kernel rounds exponentials relative to the running maximum. In a
        decode step the kernel adds exponentials after they are rounded.
        """
        normed = x if self.norm is None else self.norm.reference(x, numpy)
        query, *new = self._heads(normed, span, numpy)
        keys, values = self._seen(new, states)
        mixed = mixed_values(query, keys, values, self.heads, span, numpy, self.sinks)
        y = self._output(mixed, normed, numpy)
        if self.after is not None:
            y = self.after.reference(numpy.rounded(y), numpy)
        return numpy.rounded(x + y)

    def _seen(self, new: Sequence[np.ndarray], states: States) -> Sequence[np.ndarray]:
        """Keys and values that tokens may attend to, with the new ones, which are kept except in an encoder."""
        if not self.heads.causal:
            return new
        names = [f"{self.owner or self.name}.{name}" for name in ("keys", "values")]
        for name, array in zip(names, new):
            states[name] = np.concatenate([states[name], array], axis=1) if name in states else array
        return [states[name] for name in names]


def chunks(step: StepShape) -> list[tuple[int, int]]:
    """How many sequences each launch of a decode step takes, and how often it is repeated for others."""
    return split_into_launches(step.sequences, PARTITIONS // step.new_tokens)
