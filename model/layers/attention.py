"""Grouped-query attention with the norm before it, its positions, and the residual after it.

    q, k, v = qkv_projection(x)          norm and biases fused in; heads divided over the ranks
    q, k    = norm(q), norm(k)           head by head in the launch of qkv_projection, or whole in launches of their own
    q, k    = rope(q), rope(k)           in the launch of qkv_projection, if no norm of whole queries comes before it
    o       = attention_prefill(q, k, v) for a prompt, attention_decode(q, k, v) for new tokens of each sequence
    x       = output_projection(o, x)    all-reduced over the ranks, plus x; a norm after it is a launch that adds x

Where rows are cut over the ranks (sequence parallelism), each has its own rows of x: the first launch gathers them, and
the last one gives each rank its rows of the sum. Queries, keys, values and attention are of all rows.

Attention fills the cache. A decode step with an RMSNorm before it and without biases is one launch for up to 128
tokens, `attention_block_decode`.

Where sequences decode beside prompts, all but attention takes their rows alike, and `attention_mixed` both kinds.

What the layer holds stands in `attention_weights.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from model.config.parts import HeadNorm
from model.layers import paged
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention_weights import AttentionWeights
from model.layers.launch import (
    INT32,
    Argument,
    Axis,
    Growth,
    Launch,
    LeastWork,
    Phase,
    StepShape,
    Value,
    copied,
    product,
)
from model.layers.layer import States
from model.layers.norm import bias_of
from model.layers.shard import query_span
from model.layers.softmax import mixed_values
from model.layers.weight import value_of

_ROWS = 128
"""Rows, one for each token, that one launch of a decode step takes."""
_WIDEST_BLOCK = 8192
"""The largest hidden size of `attention_block_decode`; the kernels of its parts take twice that in bfloat16."""
_LARGEST_HEAD = 256
"""Elements of a head that attention_block_decode takes; attention_decode takes 512."""


@dataclass(frozen=True)
class Attention(AttentionWeights):
    """x + attention(norm(x)), or x + after(attention(x))."""

    mixes: ClassVar[bool] = True

    @property
    def _whole_norms(self) -> bool:
        """Whether queries and keys are normalised whole, over the heads of all ranks."""
        return self.heads.head_norm is HeadNorm.width

    @property
    def _rotates_by_position(self) -> bool:
        """Whether the rows of the tables of rotations are the positions, or nothing is rotated."""
        own = self.heads.positions
        return own is None or own.rope.longest_short is None

    @property
    def _is_one_launch(self) -> bool:
        """Whether `attention_block_decode` takes a decode step."""
        plain = self.norm is not None and self.norm.bias is None and self.norm.offset == 0.0
        fits = self.hidden <= _WIDEST_BLOCK and self.heads.head_dim <= _LARGEST_HEAD
        plain = plain and fits and not self.after
        biased = self.b_qkv is not None or self.b_o is not None
        own_heads = self.owner is None and not self.heads.value_norm and not self._whole_norms
        return plain and not biased and own_heads and self._rotates_by_position

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Projection, attention, output; a decode step is one launch where that is possible."""
        if step.phase is Phase.prefill:
            both = self._prefill(step) if step.decoding is None else self._beside(step)
            return [*self._project(step), both, *self._finish(step)]
        if self._is_one_launch:
            return [self._decode_block(step, sequences, repeat) for sequences, repeat in chunks(step)]
        attend = [self._decode(step, sequences, repeat) for sequences, repeat in chunks(step)]
        return [*self._project(step), *attend, *self._finish(step)]

    def _project(self, step: StepShape) -> list[Launch]:
        """Queries, keys and values, normalised and rotated."""
        q, k, _ = self._projected(step)
        x = Value("x", (step.own_rows, self.hidden), step.activations)
        at = Value("positions" if self._rotates_by_position else "rope_rows", (step.tokens, 1), INT32)
        w_qkv, b_qkv = self.w_qkv.value(step), value_of(self.b_qkv, step)
        cos, sin = (None, None) if self._whole_norms else self._tables(step)
        norms = [None, None] if self._whole_norms else self._head_weights(step)
        first = self.norm or next(iter(self.head_norms), None)
        eps, offset = (first.eps, first.offset) if first else (0.0, 0.0)
        arguments: tuple[Argument, ...] = (
            *(x, self.norm.weight.value(step) if self.norm else None, w_qkv, eps, q.shape[1]),
            *(0 if self.owner else k.shape[1], b_qkv, None if cos is None else at, cos, sin),
            *(self.heads.head_dim, *norms, bias_of(self.norm, step), offset),
            *((Axis.tensor, step.sequence_ranks) if step.sequence_ranks > 1 else (None, 1)),
            self.heads.value_norm,
        )
        work, names = product(step.tokens, w_qkv), ("q", "k", "v")[: len(self.projections.inputs)]
        launches = [Launch("qkv_projection", arguments, names, work, step.tokens)]
        if not self._whole_norms:
            return launches
        for norm, each, label in zip(self.head_norms, (q, k), ("queries", "keys")):
            launches.append(norm.launch(step, each, each.name, label, None))
        cos, sin = self._tables(step)
        if cos is not None and not self._rotates_in_attention(step):
            for each, label in ((q, "queries"), (k, "keys")):
                turn = (each, at, cos, sin, each.shape[1] // self.heads.head_dim)
                launches.append(Launch("rope", turn, (each.name,), copied(each), step.tokens, label))
        return launches

    def _rotates_in_attention(self, step: StepShape) -> bool:
        """Whether `attention_decode` rotates queries and keys, which were normalised whole before."""
        return self._whole_norms and self._rotates_by_position and step.phase is Phase.decode

    def _head_weights(self, step: StepShape) -> list[Value | None]:
        own: list[Value | None] = [norm.weight.value(step) for norm in self.head_norms]
        return own + [None] * (2 - len(own))

    def _finish(self, step: StepShape) -> list[Launch]:
        """The output projection, plus the residual; with a norm between them, where there is one."""
        x = Value("x", (step.own_rows, self.hidden), step.activations)
        q, _, _ = self._projected(step)
        o, w_o, rows = Value("o", q.shape, step.activations), self.w_o.value(step), step.tokens
        finish: tuple[Argument, ...] = (Axis.tensor, value_of(self.b_o, step))
        if step.sequence_ranks > 1:
            finish += (step.sequence_ranks,)
        if self.after is None:
            added = (o, w_o, x, *finish)
            return [Launch("output_projection", added, ("x",), product(rows, w_o), rows)]
        y = Value("attended", x.shape, x.dtype)
        alone = (o, w_o, None, *finish)
        return [
            Launch("output_projection", alone, (y.name,), product(rows, w_o), rows),
            self.after.launch(step, y, "x", "after attention", x),
        ]

    def _projected(self, step: StepShape) -> tuple[Value, Value, Value]:
        own = self.heads.layout(step.ranks)
        q, k, v = (
            Value(name, (step.tokens, count * self.heads.head_dim), step.activations)
            for name, count in (
                ("q", own.heads_of_rank),
                ("k", own.kv_heads_of_rank),
                ("v", own.kv_heads_of_rank),
            )
        )
        return q, k, v

    def _window(self, length: int) -> int | None:
        """The window, where it is shorter than `length` positions."""
        window = self.heads.window
        return window if window is not None and window < length else None

    def _masks(self, step: StepShape, rows: int) -> tuple[Argument, ...]:
        """Window, soft cap and sinks of a decode step; positions in the sequence, where others count from a page on."""
        window = self.heads.window
        masks = (
            self._window(step.of_window(window).cache_length),
            self.heads.softcap,
            value_of(self._sinks, step),
        )
        at = paged.positions(step, None, rows)
        return masks if paged.positions(step, window, rows) == at else (*masks, at)

    def _prefill(self, step: StepShape) -> Launch:
        tokens, end = step.tokens, step.prefix + step.tokens // step.sequences
        q, k, v = self._projected(step)
        keys, values = self._caches(step)
        held = step.of_window(self.heads.window)
        pairs = step.sequences * (self.heads.pairs(end) - self.heads.pairs(step.prefix))
        passes = 4 if self.owner is None else 2
        elements = (
            tokens * (2 * q.shape[1] + passes * k.shape[1]) + 2 * step.sequences * held.prefix * k.shape[1]
        )
        window = self._window(held.prefix + tokens // step.sequences)
        at = paged.positions(step, self.heads.window, tokens) if step.prefix else None
        cached = self._kv_heads(step), at, held.prefix, *paged.places(step, self.heads.window, tokens)
        masks: tuple[Argument, ...] = (window, self.heads.softcap, value_of(self._sinks, step))
        masks += () if self.heads.causal else (False,)
        return Launch(
            "attention_prefill",
            (q, *self._new(k, v), keys, values, self.heads.score_scale, *cached, *masks),
            self._attends_into(keys, values),
            LeastWork(4.0 * q.shape[1] * pairs, float(step.activations.itemsize * elements)),
            tokens,
            growth=Growth.square,
            window=window,
        )

    def _beside(self, step: StepShape) -> Launch:
        """Attention of what decodes, then of the prompts."""
        prompts, decoded = self._prefill(step.prompts), step.decoded
        q, k, v = self._projected(step)
        keys, values = self._caches(step)
        at = paged.positions(step, self.heads.window, step.tokens)
        places = paged.mixed_places(step, self.heads.window)
        length = decoded.of_window(self.heads.window).cache_length
        held = step.of_window(self.heads.window).prefix
        window = self._window(max(length, held + step.new_tokens))
        operations, moved = self._attended(decoded, decoded.sequences)
        return Launch(
            "attention_mixed",
            (
                *(q, *self._new(k, v), keys, values, at, self.heads.score_scale, decoded.tokens),
                *(
                    self._kv_heads(step),
                    *places,
                    held,
                    window,
                    self.heads.softcap,
                    value_of(self._sinks, step),
                ),
            ),
            prompts.results,
            LeastWork(prompts.work.operations + operations, prompts.work.bytes + moved),
            step.tokens,
            growth=Growth.square,
            window=prompts.window,
        )

    def _new(self, k: Value, v: Value) -> tuple[Value | None, Value | None]:
        """Keys and values that attention writes to the cache."""
        return (k, v) if self.owner is None else (None, None)

    def _attends_into(self, keys: Value, values: Value) -> tuple[str, ...]:
        """What a launch of attention returns."""
        return ("o", keys.name, values.name) if self.owner is None else ("o",)

    def _decode(self, step: StepShape, sequences: int, repeat: int) -> Launch:
        """Attention of the new tokens of some sequences."""
        rows = sequences * step.new_tokens
        q, k, v = (each.last(rows) if rows < step.tokens else each for each in self._projected(step))
        keys, values = self._caches(replace(step, sequences=sequences))
        at = paged.positions(step, self.heads.window, rows)
        tables = self._tables(step) if self._rotates_in_attention(step) else (None, None)
        slots, block_tables = paged.places(step, self.heads.window, rows)
        places = slots if self.owner is None else None, block_tables
        options = (None, None, 0.0, *places, *self._masks(step, rows))
        attended = (q, *self._new(k, v), keys, values, at)
        return Launch(
            "attention_decode",
            (*attended, self.heads.score_scale, self._kv_heads(step), *tables, *options),
            self._attends_into(keys, values),
            LeastWork(*self._attended(step, sequences)),
            rows,
            repeat=repeat,
        )

    def _attended(self, step: StepShape, sequences: int) -> tuple[float, float]:
        """Operations and bytes of a step's attention of sequences whose caches are full."""
        q, k, _ = self._projected(step)
        seen = sequences * self.heads.seen(step.cache_length)
        return 4.0 * step.new_tokens * q.shape[1] * seen, 2.0 * k.shape[1] * seen * step.activations.itemsize

    def _decode_block(self, step: StepShape, sequences: int, repeat: int) -> Launch:
        """The step of some sequences, norm and both projections included."""
        assert self.norm is not None
        rows = sequences * step.new_tokens
        x = Value("x", (step.tokens, self.hidden), step.activations)
        x = x.last(rows) if rows < step.tokens else x
        q, k, _ = self._projected(step)
        keys, values = self._caches(replace(step, sequences=sequences))
        at = paged.positions(step, self.heads.window, rows)
        w_qkv, w_o = self.w_qkv.value(step), self.w_o.value(step)
        attended, moved = self._attended(step, sequences)
        products = product(rows, w_qkv, w_o, moved_bytes=moved)
        options = (*paged.places(step, self.heads.window, rows), *self._masks(step, rows))
        return Launch(
            "attention_block_decode",
            (
                *(x, self.norm.weight.value(step), w_qkv, self.norm.eps, q.shape[1], k.shape[1]),
                *(keys, values, at, self.heads.score_scale, w_o, self._kv_heads(step), *self._tables(step)),
                *(*self._head_weights(step), Axis.tensor, *options),
            ),
            ("x", keys.name, values.name),
            LeastWork(products.operations + attended, products.bytes),
            rows,
            repeat=repeat,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Softmax over the positions that each token sees; exponentials relative to the largest score of all.

        In a prompt of more than 4,096 tokens the kernel rounds exponentials relative to the largest score so far. In a
        decode step it adds exponentials up after they were rounded.
        """
        normed = x if self.norm is None else self.norm.reference(x, numpy)
        query, *new = self._heads(normed, span, numpy)
        keys, values = self._seen(new, states)
        mixed = mixed_values(query, keys, values, self.heads, span, numpy, self.sinks)
        y = numpy.summed_product(mixed, self.projections.output, partial(query_span, *self.heads.divided))
        if self.after is not None:
            y = self.after.reference(numpy.rounded(y), numpy)
        return numpy.rounded(x + y)

    def _heads(self, normed: np.ndarray, span: Span, numpy: Arithmetic) -> list[np.ndarray]:
        """Queries, keys and values, or queries alone, [heads, tokens, head_dim]: normalised and rotated."""
        found = [numpy.rounded(numpy.product(normed, projection)) for projection, _ in self._inputs()]
        turned = range(min(2, len(found)))
        if self._whole_norms:
            for each, norm in zip(turned, self.head_norms):
                found[each] = norm.reference(found[each], numpy)
        found = [each.reshape(len(normed), -1, self.heads.head_dim).swapaxes(0, 1) for each in found]
        if not self._whole_norms:
            for each, norm in zip(turned, self.head_norms):
                found[each] = norm.reference(found[each], numpy)
        if self.heads.value_norm and self.norm is not None:
            found[2] = numpy.norm(found[2], None, self.norm.eps)
        if self.heads.positions is not None:
            for each in turned:
                found[each] = numpy.rotated(found[each], self.heads.positions, span)
        return found

    def _seen(self, new: Sequence[np.ndarray], states: States) -> Sequence[np.ndarray]:
        """Keys and values that tokens may attend to, with the new ones, which are kept except in an encoder."""
        if not self.heads.causal:
            return new
        names = [f"{self.owner or self.name}.{each}" for each in ("keys", "values")]
        for name, each in zip(names, new):
            states[name] = np.concatenate([states[name], each], axis=1) if name in states else each
        return [states[name] for name in names]


def chunks(step: StepShape) -> list[tuple[int, int]]:
    """How many sequences each launch of a decode step takes, and how often it is repeated for others."""
    most = _ROWS // step.new_tokens
    whole, rest = divmod(step.sequences, most)
    return [(sequences, repeat) for sequences, repeat in ((most, whole), (rest, 1)) if sequences and repeat]
