"""Grouped-query attention with rotary positions, its norm before it and the residual after it.

    q, k, v = qkv_projection(x)          RMSNorm fused in; heads divided over the ranks
    q, k    = rmsnorm(q), rmsnorm(k)     head by head, where the model has such norms
    q, k    = rope(q), rope(k)           for a prompt, both in the launch of qkv_projection
    o       = attention_prefill(q, k, v) for a prompt, attention_decode(q, k, v) for one token of each sequence
    x       = output_projection(o, x)    all-reduced over the ranks, plus x

Attention fills the cache. In a decode step all of it is one launch for up to 128 sequences, `attention_block_decode`.

State: keys [sequences, heads, head_dim, length] and values [sequences, heads, length, head_dim] of a rank's heads. Keys
lie transposed, because a decode step contracts over head_dim, which then is the partition axis of a tile read straight
from HBM; values contract over positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model import rope
from model.config.parts import GroupedAttention, Positions
from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import (
    INT32,
    Axis,
    Growth,
    Launch,
    LeastWork,
    Phase,
    StepShape,
    Tensor,
    Value,
    Weight,
    product,
)
from model.layers.layer import Constant, States
from model.layers.norm import RmsNorm
from model.layers.shard import ROW_PARALLEL, Shard, by_heads
from model.precision import FLOAT32

_SEQUENCES = 128
"""Sequences that one launch of a decode step takes."""


@dataclass(frozen=True)
class AttentionTensors:
    """Names of the projections in a checkpoint, each [out, in]."""

    query: str
    key: str
    value: str
    output: str


@dataclass(frozen=True)
class RotaryTable:
    """Cosines (`which` is 0) or sines (1) of `count` positions, [count, head_dim / 2], the same on every rank."""

    positions: Positions
    head_dim: int
    count: int
    which: int

    def __call__(self, shard: Shard) -> np.ndarray:
        """The table."""
        return rope.tables(self.positions.rope, self.head_dim, self.positions.limit, self.count)[self.which]


@dataclass(frozen=True)
class Attention:
    """x + attention(norm(x)); `head_norms` are those of queries and keys, where there are any."""

    name: str
    hidden: int
    heads: GroupedAttention
    positions: Positions
    norm: RmsNorm
    tensors: AttentionTensors
    head_norms: tuple[RmsNorm, RmsNorm] | None = None

    @property
    def w_qkv(self) -> Weight:
        """[hidden, queries + keys + values] of a rank's heads."""
        names, own = self.tensors, self.heads
        return Weight(
            f"{self.name}.w_qkv",
            (
                Tensor(names.query, (own.query_width, self.hidden), by_heads(own.heads)),
                Tensor(names.key, (own.kv_width, self.hidden), by_heads(own.kv_heads)),
                Tensor(names.value, (own.kv_width, self.hidden), by_heads(own.kv_heads)),
            ),
        )

    @property
    def w_o(self) -> Weight:
        """[a rank's heads, hidden]."""
        shape = (self.hidden, self.heads.query_width)
        return Weight(f"{self.name}.w_o", (Tensor(self.tensors.output, shape, ROW_PARALLEL),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The norms and both projections."""
        norms = (self.norm, *(self.head_norms or ()))
        return (*(each.weight for each in norms), self.w_qkv, self.w_o)

    def states(self, step: StepShape) -> Sequence[Value]:
        """Keys and values of a rank's heads, by sequence."""
        heads, dim = self.heads.kv_heads_of_rank(step.ranks), self.heads.head_dim
        return (
            Value(f"{self.name}.keys", (step.sequences, heads, dim, step.cache_length), step.activations),
            Value(f"{self.name}.values", (step.sequences, heads, step.cache_length, dim), step.activations),
        )

    def _tables(self, step: StepShape) -> tuple[Value, Value]:
        shape = (min(step.cache_length, self.positions.limit), self.heads.head_dim // 2)
        cos, sin = (Value(f"{self.positions.name}.{function}", shape, FLOAT32) for function in ("cos", "sin"))
        return cos, sin

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Cosines and sines of every position, which equal layers share."""
        return {
            table.name: RotaryTable(self.positions, self.heads.head_dim, table.shape[0], which)
            for which, table in enumerate(self._tables(step))
        }

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Of a prompt: projection, attention, output. A decode step is one launch, or one for every 128 sequences."""
        if step.phase is Phase.decode:
            whole, rest = divmod(step.sequences, _SEQUENCES)
            chunks = [(rows, repeat) for rows, repeat in ((_SEQUENCES, whole), (rest, 1)) if rows and repeat]
            return [self._decode(step, rows, repeat) for rows, repeat in chunks]
        q, k, v = self._projected(step)
        x = Value("x", (step.tokens, self.hidden), step.activations)
        w_qkv, w_o = self.w_qkv.value(step), self.w_o.value(step)
        norms = [norm.weight.value(step) for norm in self.head_norms] if self.head_norms else [None, None]
        at = Value("positions", (step.tokens, 1), INT32)
        norm = (self.norm.weight.value(step), w_qkv, self.norm.eps, q.shape[1], k.shape[1])
        turn = (None, at, *self._tables(step), self.heads.head_dim, *norms)
        o = Value("o", q.shape, step.activations)
        rows = step.tokens
        return [
            Launch("qkv_projection", (x, *norm, *turn), ("q", "k", "v"), product(rows, w_qkv), rows),
            self._prefill(step, q, k, v),
            Launch("output_projection", (o, w_o, x, Axis.tensor), ("x",), product(rows, w_o), rows),
        ]

    def _projected(self, step: StepShape) -> tuple[Value, Value, Value]:
        heads, kv_heads = self.heads.heads // step.ranks, self.heads.kv_heads_of_rank(step.ranks)
        q, k, v = (
            Value(name, (step.tokens, count * self.heads.head_dim), step.activations)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        return q, k, v

    def _prefill(self, step: StepShape, q: Value, k: Value, v: Value) -> Launch:
        tokens, of_each = step.tokens, step.tokens // step.sequences
        keys, values = self.states(step)
        moved = step.activations.itemsize * tokens * (2.0 * q.shape[1] + 4.0 * k.shape[1])
        return Launch(
            "attention_prefill",
            (q, k, v, keys, values, self.heads.head_dim**-0.5),
            ("o", keys.name, values.name),
            LeastWork(2.0 * q.shape[1] * tokens * (of_each + 1), moved),
            tokens,
            growth=Growth.square,
            refusal=self._refusal(step),
        )

    def _decode(self, step: StepShape, rows: int, repeat: int) -> Launch:
        """The step of `rows` sequences."""
        x = Value("x", (step.tokens, self.hidden), step.activations)
        x = x.last(rows) if rows < step.tokens else x
        q, k, _ = self._projected(step)
        keys, values = self.states(replace(step, sequences=rows))
        at = Value("positions", (rows, 1), INT32)
        w_qkv, w_o = self.w_qkv.value(step), self.w_o.value(step)
        norms = [norm.weight.value(step) for norm in self.head_norms] if self.head_norms else [None, None]
        scale = self.heads.head_dim**-0.5
        products = product(rows, w_qkv, w_o, moved_bytes=float(keys.nbytes + values.nbytes))
        attended = 4.0 * q.shape[1] * step.cache_length * rows
        return Launch(
            "attention_block_decode",
            (
                *(x, self.norm.weight.value(step), w_qkv, self.norm.eps, q.shape[1], k.shape[1]),
                *(keys, values, at, scale, w_o, keys.shape[1], *self._tables(step), *norms, Axis.tensor),
            ),
            ("x", keys.name, values.name),
            LeastWork(products.operations + attended, products.bytes),
            rows,
            repeat=repeat,
            refusal=self._refusal(step),
        )

    def _refusal(self, step: StepShape) -> str:
        window = self.heads.window
        narrow = window is not None and window < step.context
        return f"the model gives its kernels no window yet, here of {window} tokens" if narrow else ""

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Softmax over all earlier positions; exponentials relative to the largest score of all.

        In a prompt of more than 4,096 tokens the kernel rounds exponentials relative to the largest score so far. In a
        decode step it adds exponentials up after they were rounded.
        """
        own, names = self.heads, self.tensors
        normed = self.norm.reference(x, numpy)
        query, key, value = (
            numpy.rounded(numpy.product(normed, name)).reshape(len(x), -1, own.head_dim).swapaxes(0, 1)
            for name in (names.query, names.key, names.value)
        )
        if self.head_norms is not None:
            query, key = (norm.reference(each, numpy) for norm, each in zip(self.head_norms, (query, key)))
        turn = self.positions.rope, self.positions.limit, span
        query, key = (numpy.rotated(each, *turn) for each in (query, key))
        keys, values = (
            np.concatenate([states[name], each], axis=1) if name in states else each
            for name, each in ((f"{self.name}.keys", key), (f"{self.name}.values", value))
        )
        states[f"{self.name}.keys"], states[f"{self.name}.values"] = keys, values
        group = own.heads // own.kv_heads
        scores = query @ np.repeat(keys, group, axis=0).swapaxes(1, 2)
        scores *= np.float32(own.head_dim**-0.5)
        tokens, length = scores.shape[1:]
        future = np.arange(length) > np.arange(length - tokens, length)[:, None]
        scores[:, future] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = numpy.rounded(scores)
        total = (weights if span.start else scores).sum(axis=-1, keepdims=True)
        mixed = weights @ np.repeat(values, group, axis=0) / total
        mixed = numpy.rounded(mixed).swapaxes(0, 1).reshape(tokens, -1)
        return numpy.rounded(x + numpy.summed_product(mixed, names.output))
