"""The kernels of a Llama's layer as one rank launches them: arguments by their shapes only, and the work in them.

Activations, weights and cache share one dtype, as with `nkw generate --dtype auto`; float16, which the kernels do not
take, is planned as bfloat16, of the same width. All ranks carry out the same instructions, so one of them stands for
all, except where they meet: `all_reduce` is launched by every rank, with float32 sums as in the kernels. `lm_head` is
launched by every rank too, but only the first has its real shape; the others hold the fewest columns that let them
exchange candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from model.cache import bucket_length
from model.device import nki_dtype
from model.plan.memory import DTYPE_BYTES, kv_ranks
from model.plan.parameters import LlamaLayer, Model
from model.plan.roofline import Work

_CANDIDATES = 8
"""The fewest candidates that lm_head picks."""


@dataclass(frozen=True)
class Call:
    """One launch: a kernel of `nki_kernels`, the arguments of each rank that takes part, and the work of one rank."""

    kernel: str
    arguments: tuple[tuple[Any, ...], ...]
    work: Work


RowCall = Callable[[int], Call]


class RankCalls:
    """What one of `tp` ranks launches, for sequences of at most `context` positions."""

    def __init__(
        self,
        model: Model,
        layer: LlamaLayer,
        tp: int,
        dtype: str,
        context: int,
        replica_group: Any,
        columns_searched: int,
    ) -> None:
        self._layer = layer
        self._tp = tp
        self._hidden = model.hidden
        self._vocabulary = model.vocabulary
        self._dtype = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        self._bytes = DTYPE_BYTES[dtype]
        self._capacity = bucket_length(context, context)
        self._group = replica_group
        self._columns_searched = columns_searched
        self.heads = model.divided_heads // tp
        self.kv_heads = model.divided_kv_heads // kv_ranks(model, tp)

    def embedding(self, rows: int) -> Call:
        """Rows of the table."""
        table = self._shaped(self._vocabulary, self._hidden)
        arguments = (_int32(rows, 1), table, nki_dtype(self._dtype.name))
        return Call("embedding", (arguments,), self._moved(2 * rows * self._hidden))

    def qkv_projection(self, rows: int) -> Call:
        """Queries, keys and values."""
        q, kv = self.heads * self._layer.head_dim, self.kv_heads * self._layer.head_dim
        weight = self._shaped(self._hidden, q + 2 * kv)
        arguments = (self._x(rows), self._shaped(1, self._hidden), weight, self._layer.eps, q, kv)
        return Call("qkv_projection", (arguments,), self._product(rows, self._hidden, q + 2 * kv))

    def head_norm(self, heads: int) -> RowCall:
        """The norm of every head by itself: its rows are those of the heads."""
        dim = self._layer.head_dim

        def call(rows: int) -> Call:
            arguments = (self._shaped(rows * heads, dim), self._shaped(1, dim), self._layer.eps)
            return Call("rmsnorm", (arguments,), self._moved(2 * rows * heads * dim))

        return call

    def rope(self, heads: int) -> RowCall:
        """The rotary embedding of so many heads."""
        dim = self._layer.head_dim
        table = _shaped((self._capacity, dim // 2), np.float32)

        def call(rows: int) -> Call:
            arguments = (self._shaped(rows, heads * dim), _int32(rows, 1), table, table, heads)
            return Call("rope", (arguments,), self._moved(2 * rows * heads * dim))

        return call

    def attention_prefill(self, tokens: int) -> Call:
        """The prompt with itself."""
        q, kv = self.heads * self._layer.head_dim, self.kv_heads * self._layer.head_dim
        key, caches = self._shaped(tokens, kv), self._caches()
        arguments = (self._shaped(tokens, q), key, key, *caches, self._layer.head_dim**-0.5)
        work = Work(2.0 * q * tokens * (tokens + 1), 0.0, self._bytes * tokens * (2.0 * q + 4.0 * kv))
        return Call("attention_prefill", (arguments,), work)

    def attention_decode(self) -> Call:
        """One token of one sequence with its cache."""
        q, kv = self.heads * self._layer.head_dim, self.kv_heads * self._layer.head_dim
        key, caches = self._shaped(1, kv), self._caches()
        arguments = (self._shaped(1, q), key, key, *caches, _int32(1, 1), self._layer.head_dim**-0.5)
        work = Work(4.0 * q * self._capacity, 0.0, self._bytes * 2.0 * kv * self._capacity)
        return Call("attention_decode", (arguments,), work)

    def output_projection(self, rows: int) -> Call:
        """The heads' outputs back to the hidden size; this rank's part of the sum."""
        width = self.heads * self._layer.head_dim
        weight = self._shaped(width, self._hidden)
        arguments = (self._shaped(rows, width), weight, self._x(rows), None)
        return Call("output_projection", (arguments,), self._product(rows, width, self._hidden))

    def mlp(self, rows: int) -> Call:
        """The feed-forward block; this rank's part of the sum."""
        width = -(-self._layer.intermediate // self._tp)
        up, down = self._shaped(self._hidden, width), self._shaped(width, self._hidden)
        arguments = (self._x(rows), self._shaped(1, self._hidden), up, up, down, self._layer.eps, None)
        return Call("mlp", (arguments,), self._product(rows, self._hidden, 3 * width))

    def all_reduce(self, rows: int) -> Call:
        """The sum of rows over all ranks."""
        partial = _shaped((rows, self._hidden), np.float32)
        work = Work(0.0, 0.0, 2.0 * partial.itemsize * partial.size)
        return Call("all_reduce", ((partial, self._group),) * self._tp, work)

    def lm_head(self, rows: int) -> Call:
        """Logits of this rank's part of the vocabulary, and the largest of all ranks."""
        columns = -(-self._vocabulary // self._tp)
        searches_before = (columns - 1) // self._columns_searched
        fewest = min(columns, searches_before * self._columns_searched + _CANDIDATES)
        own = self._head(rows, self._hidden, columns)
        others = (self._head(rows, 1, fewest),) * (self._tp - 1)
        return Call("lm_head", (own, *others), self._product(rows, self._hidden, columns))

    def _head(self, rows: int, hidden: int, columns: int) -> tuple[Any, ...]:
        x, norm, weight = self._shaped(rows, hidden), self._shaped(1, hidden), self._shaped(hidden, columns)
        return x, norm, weight, self._layer.eps, _CANDIDATES, _int32(1, 1), self._group, self._tp

    def _caches(self) -> tuple[np.ndarray, np.ndarray]:
        dim = self._layer.head_dim
        return (
            self._shaped(self.kv_heads, dim, self._capacity),
            self._shaped(self.kv_heads, self._capacity, dim),
        )

    def _x(self, rows: int) -> np.ndarray:
        return self._shaped(rows, self._hidden)

    def _shaped(self, *shape: int) -> np.ndarray:
        return _shaped(shape, self._dtype)

    def _product(self, rows: int, depth: int, columns: int) -> Work:
        return Work(2.0 * rows * depth * columns, float(self._bytes * depth * columns), 0.0)

    def _moved(self, elements: int) -> Work:
        return Work(0.0, 0.0, float(self._bytes * elements))


def _shaped(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of one element seen as many: a dry run looks at shape and dtype only."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _int32(*shape: int) -> np.ndarray:
    return _shaped(shape, np.int32)
