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
from model.layers.cache import Cache, FullPages, create_cache, create_full_pages
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
    count_product_work,
    split_into_launches,
)
from model.layers.layer import Constant, States
from model.layers.projection import Projection
from model.layers.shard import by_query_heads
from model.layers.softmax import attend
from model.layers.weight import Tensor, Weight, create_argument, list_row_arguments


@dataclass(frozen=True)
class Attention(AttentionHeads):
    """Attention layer: x + attention(norm(x)), or x + after(attention(x)).

    `sinks` names the checkpoint tensor of attention sinks, one score for each head, if the model has them. A layer with
    an `owner` reads the cache of that layer and writes nothing to it. An encoder's layer with a causal mask is not
    `is_cached`: no later step reads its keys and values.
    """

    sinks: str | None = None
    is_cached: bool = True
    mixes: ClassVar[bool] = True

    @property
    def _sinks(self) -> Weight | None:
        """Attention sinks of a rank's heads, [1, heads of the rank]; None for a model without sinks."""
        if self.sinks is None:
            return None
        cut = by_query_heads(*self.heads.divided)
        return Weight(f"{self.name}.sinks", (Tensor(self.sinks, (self.heads.heads,), cut),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norms, of both projections with their biases, and of the sinks."""
        return (*super().weights, *(() if self._sinks is None else (self._sinks,)))

    @property
    def _has_cache(self) -> bool:
        """Whether keys and values are kept between steps; a layer without a causal mask belongs to an encoder."""
        return self.heads.causal and self.is_cached

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the cache of keys and values of a rank's heads; () for a layer that reads the cache of an `owner`."""
        return () if self.owner is not None else self.read_caches(step)

    def read_caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the cache that the layer reads: its own, or its `owner`'s cache, which `caches` leaves out.

        If full pages have four bits, they are a cache of their own.
        """
        if not self._has_cache:
            return ()
        pages = self.full_pages(step)
        return (self._cache(step),) if pages is None else (pages.packed, pages.newest)

    def _cache(self, step: StepShape) -> Cache:
        """Return the cache that a layer with a cache reads: of its `owner`, or of the layer itself."""
        name = self.owner or self.name
        return create_cache(name, self.heads.layout(step.ranks), self.heads.head_dim, step, self.heads.window)

    def full_pages(self, step: StepShape) -> FullPages | None:
        """Return the full pages of four bits, with the cache of newer ones; None if all positions are stored alike."""
        if not self._has_cache:
            return None
        return create_full_pages(self.name, self.heads.layout(step.ranks), self.heads.head_dim, step)

    def _list_cache_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the kernel arguments for the cache, by parameter name; None for the arrays of a layer without one."""
        if not self._has_cache:
            return {"k_cache": None, "v_cache": None, "sequences": step.sequences}
        return (self.full_pages(step) or self._cache(step)).arguments

    def _count_cached_bytes(self, step: StepShape) -> float:
        """Return the bytes of a cached position of a rank's heads, keys and values together; 0 without a cache."""
        if not self._has_cache:
            return 0.0
        pages = self.full_pages(step)
        if pages is not None:
            return pages.packed.page_bytes / step.block_size
        return 2.0 * self._describe_projected(step)[1].shape[1] * self._cache(step).arrays[0].dtype.itemsize

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute a rank's rotary tables and scales of the cache, by array name."""
        scales = self._cache(step).constants if self._has_cache else {}
        return {**super().constants(step), **scales}

    @property
    def cached_projections(self) -> Mapping[str, Projection]:
        """Projections to keys and to values, by the names of the cache arrays; empty for layers that cache nothing."""
        if self.owner is not None or not self._has_cache:
            return {}
        return dict(zip((f"{self.name}.keys", f"{self.name}.values"), self.projections.inputs[1:3]))

    @property
    def _is_block(self) -> bool:
        """Whether `attention_block_decode` has all parameters that a decode step of this layer needs."""
        lacks_parameters = self.after or self.owner or self.b_qkv or self.b_o or self._whole_norms
        return (
            self.norm is not None
            and (self.norm.bias, self.norm.offset) == (None, 0.0)
            and not (lacks_parameters or self.heads.value_norm or self.heads.output_gate)
            and self._rotates_by_position
        )

    def _is_read_by_block(self, step: StepShape) -> bool:
        """Return whether `attention_block_decode` has a parameter for each array of both projections.

        A quantised weight may have arrays, such as scales, that only the separate kernels read. They also quantise rows
        where a format does so, which the kernel does not.
        """
        from model.device import list_kernel_parameters  # takes as long to import as the rest of the model

        arguments: dict[str, Argument] = {
            **self.w_qkv.arguments("w_qkv", step),
            **self.w_o.arguments("w_o", step),
            **list_row_arguments(step, self.w_qkv, self.w_o),
        }
        return arguments.keys() <= set(list_kernel_parameters("attention_block_decode"))

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of projection, attention and output for one step.

        In a decode step one launch of `attention_block_decode` for up to 128 tokens replaces the three. The exceptions
        are layers for which the kernel lacks parameters, and shapes that it refuses and `attention_decode` takes.
        """
        if step.phase is Phase.prefill:
            attend = self._prefill(step) if step.decoding is None else self._attend_mixed(step, step.decoding)
            return [*self._project(step), attend, *self._project_output(step)]
        attends = [self._decode(step, sequences, repeat) for sequences, repeat in split_sequences(step)]
        if self._is_block and self._is_read_by_block(step) and self.full_pages(step) is None:
            blocks = [
                self._decode_block(step, sequences, repeat) for sequences, repeat in split_sequences(step)
            ]
            # Separate launches do not help if attention itself is refused for the same reason.
            if all(block.refusal in (None, attend.refusal) for block, attend in zip(blocks, attends)):
                return blocks
        return [*self._project(step), *attends, *self._project_output(step)]

    def _limit_window(self, length: int) -> int | None:
        """Return the layer's attention window if it is shorter than `length` positions; None if it limits nothing."""
        window = self.heads.window
        return window if window is not None and window < length else None

    def _list_score_arguments(self, step: StepShape, window: int | None) -> dict[str, Argument]:
        """Return the kernel arguments `window`, `softcap` and `sinks` [1, heads of a rank]; absent ones are None."""
        return {"window": window, "softcap": self.heads.softcap, "sinks": create_argument(self._sinks, step)}

    def _list_decode_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments of both decode kernels for the cache, the positions and the scores.

        If `positions` count from the first page of a window, `rope_positions` are the positions in the sequence.
        """
        length = step.for_window(self.heads.window).cache_length
        positions = self._describe_positions(step)
        rope_positions = replace(positions, name="positions")
        return {
            **self._list_cache_arguments(step),
            "positions": positions,
            **self._list_score_arguments(step, self._limit_window(length)),
            **({} if positions == rope_positions else {"rope_positions": rope_positions}),
        }

    def _describe_positions(self, step: StepShape) -> Value:
        """Return the positions of new tokens, counted as the block tables of the cache, or of full pages, count."""
        pages = self.full_pages(step)
        return (self._cache(step) if pages is None else pages.packed).positions

    def _prefill(self, step: StepShape) -> Launch:
        """Return the launch of `attention_prefill`: attention of prompts' tokens to these and their cached prefixes.

        Its results are "o" and the cache to which it writes the new keys and values, if it does.
        """
        tokens, end = step.tokens, step.prefix + step.tokens // step.sequences
        q, k, v = self._describe_projected(step)
        window_step = step.for_window(self.heads.window)
        pairs = step.sequences * (self.heads.count_pairs(end) - self.heads.count_pairs(step.prefix))
        operations = 4.0 * q.shape[1] * pairs
        # Activations are the queries, the outputs and, without an owner, the new keys and values.
        activations = 2 * tokens * (q.shape[1] + (k.shape[1] if self.owner is None else 0))
        cached = self._count_cached_bytes(step) * (tokens + step.sequences * window_step.prefix)
        moved = step.activations.itemsize * activations + cached
        window = self._limit_window(window_step.prefix + tokens // step.sequences)
        return Launch(
            "attention_prefill",
            {
                "q": q,
                **self._list_written_arguments(k, v),
                **self._list_cache_arguments(step),
                "scale": self.heads.score_scale,
                "num_kv_heads": self._count_kv_heads(step),
                "prefix": window_step.prefix,
                **self._list_score_arguments(step, window),
                "causal": self.heads.causal,
                **({"positions": self._describe_positions(step)} if step.prefix else {}),
            },
            self._list_result_names(step),
            LeastWork(operations, float(moved), operations),
            tokens,
            growth=Growth.square,
            window=window,
        )

    def _attend_mixed(self, step: StepShape, decoding: StepShape) -> Launch:
        """Return the launch of `attention_mixed`: attention of decoding sequences and of prompts in one launch.

        The rows of `decoding` come before the rows of the prompts. `step` describes the prompts and counts all rows.
        """
        prompts = self._prefill(step.prompts)
        q, k, v = self._describe_projected(step)
        length = decoding.for_window(self.heads.window).cache_length
        prefix = step.for_window(self.heads.window).prefix
        window = self._limit_window(max(length, prefix + step.new_tokens))
        return Launch(
            "attention_mixed",
            {
                "q": q,
                **self._list_written_arguments(k, v),
                **self._list_cache_arguments(step),
                "positions": self._describe_positions(step),
                "scale": self.heads.score_scale,
                "decoding": decoding.tokens,
                "num_kv_heads": self._count_kv_heads(step),
                "prefix": prefix,
                **self._list_score_arguments(step, window),
            },
            prompts.results,
            prompts.work + self._count_decode_work(decoding, decoding.sequences),
            step.tokens,
            growth=Growth.square,
            window=prompts.window,
        )

    def _list_written_arguments(self, k: Value, v: Value) -> dict[str, Argument]:
        """Return the arguments `k` and `v`, which attention writes to the cache; empty for a layer with an `owner`."""
        return {"k": k, "v": v} if self.owner is None else {}

    def _list_result_names(self, step: StepShape) -> tuple[str, ...]:
        """Return the names of the results of an attention launch: "o", and the cache arrays that it writes."""
        writes = self.owner is None and self._has_cache
        return ("o", *self._cache(step).names) if writes else ("o",)

    def _decode(self, step: StepShape, sequences: int, repeat: int) -> Launch:
        """Return the launch of `attention_decode` for the new tokens of `sequences` sequences.

        The launch has `repeat` as its repeat count. If it takes fewer sequences than the step, it reads the last rows.
        """
        rows = sequences * step.new_tokens
        q, k, v = (
            projected.take_last(rows) if rows < step.tokens else projected
            for projected in self._describe_projected(step)
        )
        launch_step = replace(step, tokens=rows, sequences=sequences)
        arguments: dict[str, Argument] = {
            "q": q,
            **self._list_written_arguments(k, v),
            "scale": self.heads.score_scale,
            "num_kv_heads": self._count_kv_heads(step),
            **self._list_decode_arguments(launch_step),
            **(self._list_rotation_arguments(step) if self._rotates_in_attention(step) else {}),
        }
        if self.owner is not None:  # nothing is written to the cache
            arguments.pop("slots", None)
        return Launch(
            "attention_decode",
            arguments,
            self._list_result_names(launch_step),
            self._count_decode_work(step, sequences),
            rows,
            repeat=repeat,
        )

    def _count_decode_work(self, step: StepShape, sequences: int) -> LeastWork:
        """Return the least work of decode attention of `sequences` sequences, each with a full cache or window."""
        q, _, _ = self._describe_projected(step)
        seen = sequences * self.heads.count_seen(step.cache_length)
        operations = 4.0 * step.new_tokens * q.shape[1] * seen
        return LeastWork(operations, seen * self._count_cached_bytes(step), operations)

    def _decode_block(self, step: StepShape, sequences: int, repeat: int) -> Launch:
        """Return the launch of `attention_block_decode`: norm, projections and attention of `sequences` sequences.

        Its `fused` are the launches that it replaces. If it takes fewer sequences than the step, it reads the last
        rows.
        """
        assert self.norm is not None
        rows = sequences * step.new_tokens
        x = Value("x", (step.tokens, self.hidden), step.activations)
        x = x.take_last(rows) if rows < step.tokens else x
        q, k, _ = self._describe_projected(step)
        launch_step = replace(step, tokens=rows, sequences=sequences)
        matrices = self.w_qkv.arguments("w_qkv", step) | self.w_o.arguments("w_o", step)
        return Launch(
            "attention_block_decode",
            {
                "x": x,
                "norm_weight": self.norm.weight.value(step),
                **matrices,
                "eps": self.norm.eps,
                "q_size": q.shape[1],
                "kv_size": k.shape[1],
                "scale": self.heads.score_scale,
                "num_kv_heads": self._count_kv_heads(step),
                **self._list_rotation_arguments(step),
                **self._list_head_norm_arguments(step),
                "replica_group": Axis.tensor,
                **self._list_decode_arguments(launch_step),
            },
            ("x", *self._cache(launch_step).names),
            count_product_work(rows, matrices["w_qkv"], matrices["w_o"])
            + self._count_decode_work(step, sequences),
            rows,
            repeat=repeat,
            fused=tuple(
                replace(launch, repeat=repeat)
                for launch in (
                    *self._project(launch_step),
                    self._decode(launch_step, sequences, 1),
                    *self._project_output(launch_step),
                )
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] after the layer, computed in NumPy; appends keys and values to `states`.

        Exponentials of scores are relative to the largest score of a token.
        In prompts of more than 4,096 tokens the kernel rounds exponentials relative to the running maximum. In a
        decode step the kernel adds exponentials after they are rounded.
        """
        normed = x if self.norm is None else self.norm.reference(x, numpy)
        query, *new = self._project_heads(normed, span, numpy)
        keys, values = self._append_to_cache(new, states, numpy)
        mixed = self._attend(query, keys, values, span, numpy)
        y = self._project_mixed(mixed, normed, numpy)
        if self.after is not None:
            y = self.after.reference(numpy.round(y), numpy)
        return numpy.round(x + y)

    def _attend(
        self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, span: Span, numpy: Arithmetic
    ) -> np.ndarray:
        """Return the outputs of all heads, [tokens, heads * head_dim].

        With pages of four bits, the tokens of each page attend to their own page as it is, and to rounded earlier ones.

        Args:
            query: [heads, tokens, head_dim].
            keys: All keys, [key/value heads, positions, head_dim], the last of which are those of the tokens.
            values: All values, like `keys`.
            span: Positions of the tokens.
            numpy: Arithmetic of the model.
        """
        if not (numpy.caching.format.packs_pages and self.heads.causal):
            return attend(query, keys, values, self.heads, span, numpy, self.sinks)
        end, page = keys.shape[1], numpy.caching.block_size
        start = end - query.shape[1]
        rounded = [numpy.round(array) for array in numpy.caching.round_pages(keys, values)]
        outputs = []
        for first in range(start // page * page, end, page):
            last = min(end, first + page)
            seen_keys, seen_values = (
                np.concatenate([old[:, :first], new[:, first:last]], axis=1)
                for old, new in zip(rounded, (keys, values))
            )
            rows = query[:, max(first, start) - start : last - start]
            outputs.append(attend(rows, seen_keys, seen_values, self.heads, span, numpy, self.sinks))
        return np.concatenate(outputs)

    def _append_to_cache(
        self, new: Sequence[np.ndarray], states: States, numpy: Arithmetic
    ) -> Sequence[np.ndarray]:
        """Append keys and values `new` to `states` and return all keys and values, [heads, positions, head_dim] each.

        They are as the cache format stores them. `new` is empty for a layer with an `owner`, which reads the owner's
        states. Without a cache, in an encoder, `new` is returned and `states` stays unchanged.
        """
        if not self._has_cache:
            return new
        names = [f"{self.owner or self.name}.{name}" for name in ("keys", "values")]
        for name, heads in zip(names, new):
            array = numpy.caching.store_heads(name, heads)
            states[name] = np.concatenate([states[name], array], axis=1) if name in states else array
        return [states[name] for name in names]


def split_sequences(step: StepShape) -> list[tuple[int, int]]:
    """Return (sequences of a launch, repeats) of each size of launch, so that a launch has at most 128 tokens."""
    return split_into_launches(step.sequences, PARTITIONS // step.new_tokens)
