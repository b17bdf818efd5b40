"""What a layer of grouped-query attention holds: its weights, keys and values, and tables of positions.

State: keys [sequences, heads, head_dim, length] and values [sequences, heads, length, head_dim] of a rank's heads. Keys
lie transposed, because a decode step contracts over head_dim, which then is the partition axis of a tile read straight
from HBM; values contract over positions. Or pages, of which layers with a window may have their own (`StepShape`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model import rope
from model.config.parts import GroupedAttention, Positions
from model.layers import paged
from model.layers.launch import Launch, StepShape, Value
from model.layers.layer import Constant
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.shard import ROW, Cut, Shard, by_kv_heads, by_query_heads
from model.layers.weight import Tensor, Weight
from model.precision import FLOAT32

ENCODED = "encoder.attention"
"""Of all layers of an encoder: the place of keys and values, which attention writes and nothing reads later."""


@dataclass(frozen=True)
class AttentionProjections:
    """The projections in a checkpoint: of queries, keys and values, or of queries alone; and of the output."""

    inputs: tuple[Projection, ...]
    output: Projection


@dataclass(frozen=True)
class RotaryTable:
    """Cosines (`which` is 0) or sines (1) of `count` positions, [count, half of what is rotated of a head].

    With longrope those of short sequences, and behind them those of long ones.
    """

    positions: Positions
    count: int
    which: int

    def __call__(self, shard: Shard) -> np.ndarray:
        """The table, the same on every rank."""
        own, short = self.positions, self.positions.rope.longest_short
        lengths = (self.count,) if short is None else (short, short + 1)
        parts = [rope.tables(own.rope, own.width, own.limit, self.count, length) for length in lengths]
        return np.concatenate([part[self.which] for part in parts])


@dataclass(frozen=True)
class AttentionWeights:
    """What a layer of attention holds: norms, projections and sinks; keys and values; tables of positions.

    `head_norms` are the norms of queries and keys, if any; `after` is one between the output and the residual.
    `sinks` is the tensor of a score of each head, where there is one.
    `owner` is the earlier layer whose keys and values this one attends to, where it has none of its own: it projects
    queries only and writes nothing.
    """

    name: str
    hidden: int
    heads: GroupedAttention
    norm: Norm | None
    projections: AttentionProjections
    head_norms: tuple[Norm, ...] = ()
    after: Norm | None = None
    owner: str | None = None
    sinks: str | None = None

    def _inputs(self) -> Iterable[tuple[Projection, Cut]]:
        kv_heads = by_kv_heads(*self.heads.divided)
        return zip(self.projections.inputs, (by_query_heads(*self.heads.divided), kv_heads, kv_heads))

    @property
    def w_qkv(self) -> Weight:
        """[hidden, queries + keys + values] of a rank's heads; of a layer without a cache [hidden, queries]."""
        return Weight(f"{self.name}.w_qkv", tuple(own.weight(cut) for own, cut in self._inputs()))

    @property
    def b_qkv(self) -> Weight | None:
        """The biases of queries, keys and values of a rank's heads, as a row."""
        if all(each.bias is None for each in self.projections.inputs):
            return None
        return Weight(f"{self.name}.b_qkv", tuple(own.bias_row(cut) for own, cut in self._inputs()))

    @property
    def w_o(self) -> Weight:
        """[a rank's heads, hidden]."""
        cut = by_query_heads(*self.heads.divided, axis=1)
        return Weight(f"{self.name}.w_o", (self.projections.output.weight(cut),))

    @property
    def b_o(self) -> Weight | None:
        """The bias of the output, a row on every rank."""
        if self.projections.output.bias is None:
            return None
        return Weight(f"{self.name}.b_o", (self.projections.output.bias_row(ROW),))

    @property
    def _sinks(self) -> Weight | None:
        """The sinks of a rank's heads, as a row."""
        if self.sinks is None:
            return None
        cut = by_query_heads(*self.heads.divided)
        return Weight(f"{self.name}.sinks", (Tensor(self.sinks, (self.heads.heads,), cut),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The norms, both projections and their biases, and the sinks."""
        norms = [each for each in (self.norm, *self.head_norms, self.after) if each is not None]
        others = [each for each in (self.b_qkv, self.b_o, self._sinks) if each is not None]
        return (*(weight for norm in norms for weight in norm.weights), self.w_qkv, self.w_o, *others)

    def states(self, step: StepShape) -> Sequence[Value]:
        """Keys and values of a rank's heads, by sequence or by page; none of a layer that reads those of another."""
        return () if self.owner is not None else self._caches(step)

    def _caches(self, step: StepShape) -> tuple[Value, Value]:
        """The keys and values that the layer reads. All layers of an encoder share one array, as none keeps its own."""
        name = self.owner or (self.name if self.heads.causal else ENCODED)
        heads, dim = self._kv_heads(step), self.heads.head_dim
        if step.block_size:
            step = step.of_window(self.heads.window)
            shape = (step.pages, step.block_size, heads, dim)
            return Value(f"{name}.keys", shape, step.activations), Value(
                f"{name}.values", shape, step.activations
            )
        return (
            Value(f"{name}.keys", (step.sequences, heads, dim, step.cache_length), step.activations),
            Value(f"{name}.values", (step.sequences, heads, step.cache_length, dim), step.activations),
        )

    def copy_launches(self, step: StepShape, copies: int) -> Sequence[Launch]:
        """A kernel that copies pages of keys and values."""
        if self.owner is not None:
            return []
        return [paged.copy(step, self.heads.window, self._caches(step), copies)]

    def _tables(self, step: StepShape) -> tuple[Value | None, Value | None]:
        own = self.heads.positions
        if own is None:
            return None, None
        rows = min(step.cache_length, own.limit) * (1 if own.rope.longest_short is None else 2)
        shape = (rows, -(-own.width // 2))
        cos, sin = (Value(f"{own.name}.{function}", shape, FLOAT32) for function in ("cos", "sin"))
        return cos, sin

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Cosines and sines of every position, which equal layers share."""
        own = self.heads.positions
        return {
            table.name: RotaryTable(own, min(step.cache_length, own.limit), which)
            for which, table in enumerate(self._tables(step))
            if table is not None and own is not None
        }

    def _kv_heads(self, step: StepShape) -> int:
        return self.heads.layout(step.ranks).kv_heads_of_rank
