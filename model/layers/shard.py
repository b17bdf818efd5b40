"""How a weight takes its own shard of a tensor-parallel model.

Checkpoints hold a projection as [out, in]; kernels contract over the partitions and want [in, out]. A cut takes the
whole [out, in] weight, picks what one rank needs, and returns it transposed and contiguous in the checkpoint's dtype.
That happens once, at load.

- Column parallel (gate, up): a rank holds some of the outputs. No exchange follows.
- Row parallel (output and down projection): a rank holds some of the inputs; partial sums are all-reduced.
- Heads: queries, keys and values column parallel, the output projection row parallel, by whole heads as `HeadLayout`
  says; zeros stand for heads that are padding.
- Vocabulary parallel (the head): the first ranks hold one token more where the ranks do not divide the vocabulary. A
  padded token would need masking, since a logit of 0 can win; a smaller shard needs nothing.

An MLP width that the ranks do not divide is padded with zeros: silu(0) * 0 is 0 and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from model.config.heads import HeadLayout
from model.formats import Weight

Shape = tuple[int, ...]

_ROWS_AT_ONCE = 64
"""A cache line of bfloat16 holds 32 and one of float32 16; between 16 and 256 rows measured alike, 4 times numpy's."""


@dataclass(frozen=True)
class Shard:
    """Which of how many tensor-parallel ranks, and which part of how many of the routed experts."""

    rank: int
    ranks: int
    expert_rank: int = 0
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}"
        assert 0 <= self.expert_rank < self.expert_ranks, f"{self.expert_rank} of {self.expert_ranks}"


def even_span(size: int, shard: Shard) -> slice:
    """The part of `size` elements that a rank holds: ceil(size / ranks) of them, and the rest on the last rank."""
    part = -(-size // shard.ranks)
    return slice(min(size, shard.rank * part), min(size, (shard.rank + 1) * part))


def vocabulary_span(size: int, shard: Shard) -> slice:
    """The part of `size` tokens that a rank holds: as many on every rank, and one more on each of the first ones."""
    part, more = divmod(size, shard.ranks)
    first = shard.rank * part + min(shard.rank, more)
    return slice(first, first + part + (shard.rank < more))


def query_span(heads: int, kv_heads: int, size: int, shard: Shard) -> slice:
    """The part of `size` elements, `heads` query heads side by side in `kv_heads` groups, that a rank holds."""
    own = HeadLayout(heads, kv_heads, shard.ranks).queries(shard.rank)
    return slice(own.start * size // heads, own.stop * size // heads)


def kv_span(heads: int, kv_heads: int, size: int, shard: Shard) -> slice:
    """The part of `size` elements, `kv_heads` key/value heads side by side, that a rank holds."""
    own = HeadLayout(heads, kv_heads, shard.ranks).keys(shard.rank)
    return slice(own.start * size // kv_heads, own.stop * size // kv_heads)


class Cut(Protocol):
    """The part of a checkpoint's tensor that one rank holds, and its layout."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """Shape of what a rank holds of a tensor of shape `whole`."""

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """The part of a tensor that a rank holds, copied."""


class Whole:
    """The whole tensor, on every rank."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """The unchanged shape."""
        return whole

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """A copy."""
        return np.array(tensor)


class Row:
    """A vector [n] as the row of a matrix [1, n], on every rank."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """[1, n]."""
        return (1, *whole)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """A copy."""
        return np.array(tensor).reshape(1, -1)


class Transposed:
    """A whole projection [out, in], kept as [in, out], on every rank."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """[in, out]."""
        return whole[::-1]

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """The transpose, contiguous."""
        return _transposed(tensor, tensor.shape[::-1])


class Taps:
    """A convolution [out, in, taps], kept as [taps, in, out], on every rank."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """[taps, in, out]."""
        return whole[::-1]

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """A copy, contiguous."""
        return np.ascontiguousarray(np.asarray(tensor).transpose(2, 1, 0))


@dataclass(frozen=True)
class Divided:
    """A part of a projection [out, in], kept as [in, out]; of a vector [out], such as a bias, kept as a row [1, out].

    `span` gives a rank's part of the divided axis, 0 for outputs and 1 for inputs. Where `padded`, every rank's part is
    as long as the first one's, filled up with zeros.
    """

    axis: int
    span: Callable[[int, Shard], slice]
    padded: bool = False

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """[in, out], one of them divided."""
        outputs, inputs = whole if len(whole) == 2 else (*whole, 1)
        own = self.span((outputs, inputs)[self.axis], Shard(0, shard.ranks) if self.padded else shard)
        length = own.stop - own.start
        return (inputs, length) if self.axis == 0 else (length, outputs)

    def held(self, size: int, ranks: int) -> int:
        """Elements of an axis of `size` that all ranks hold; copies count as often, padding does not."""
        spans = (self.span(size, Shard(rank, ranks)) for rank in range(ranks))
        return sum(own.stop - own.start for own in spans)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """The part, transposed, contiguous."""
        tensor = tensor if tensor.ndim == 2 else np.asarray(tensor)[:, None]
        own = self.span(tensor.shape[self.axis], shard)
        return _transposed(tensor[own] if self.axis == 0 else tensor[:, own], self.shape(tensor.shape, shard))


@dataclass(frozen=True)
class Rows:
    """A rank's part of the rows of a tensor [rows, n], kept as [rows, n]; filled up with zeros to the first one's."""

    span: Callable[[int, Shard], slice]

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """[rows of every rank, n]."""
        own = self.span(whole[0], Shard(0, shard.ranks))
        return (own.stop - own.start, *whole[1:])

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """The part, copied."""
        result = np.zeros(self.shape(tensor.shape, shard), tensor.dtype)
        own = tensor[self.span(len(tensor), shard)]
        result[: len(own)] = own
        return result


@dataclass(frozen=True)
class Reordered:
    """A cut of a projection whose outputs come in another order in each run of as many as `order` names."""

    cut: Cut
    order: tuple[int, ...]

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """That of the cut."""
        return self.cut.shape(whole, shard)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """The part, whose outputs are in whole runs, reordered."""
        own = self.cut.take(tensor, shard)
        return own.reshape(len(own), -1, len(self.order))[:, :, list(self.order)].reshape(own.shape)


@dataclass(frozen=True)
class HeadPart:
    """Of each of a rank's heads of a projection [heads * each, in] the outputs `part`: kept so, or as [in, out].

    `span` gives a rank's heads. Every rank's part is as long as the first one's, filled up with zeros.
    """

    span: Callable[[int, Shard], slice]
    heads: int
    part: tuple[int, int]
    rows: bool

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """[out, in] or [in, out] of a rank's heads."""
        own = self.span(self.heads, Shard(0, shard.ranks))
        outputs = (own.stop - own.start) * (self.part[1] - self.part[0])
        return (outputs, whole[1]) if self.rows else (whole[1], outputs)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """The part, contiguous."""
        each, own_heads = len(tensor) // self.heads, self.span(self.heads, shard)
        of_rank = tensor[own_heads.start * each : own_heads.stop * each]
        own = of_rank.reshape(-1, each, tensor.shape[1])[:, slice(*self.part)].reshape(-1, tensor.shape[1])
        shape = self.shape(tensor.shape, shard)
        if not self.rows:
            return _transposed(own, shape)
        result = np.zeros(shape, tensor.dtype)
        result[: len(own)] = own
        return result


@dataclass(frozen=True)
class Depthwise:
    """The weight of a convolution of every channel by itself, [channels, 1, taps], cut like [channels, taps]."""

    cut: Cut

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        """[taps, channels of a rank]."""
        return self.cut.shape((whole[0], whole[2]), shard)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """The part, transposed, contiguous."""
        return self.cut.take(np.asarray(tensor)[:, 0, :], shard)


WHOLE = Whole()
ROW = Row()
TRANSPOSED = Transposed()
TAPS = Taps()
COLUMN_PARALLEL = Divided(0, even_span, padded=True)
ROW_PARALLEL = Divided(1, even_span, padded=True)
ROWS_PARALLEL = Rows(even_span)
VOCABULARY_PARALLEL = Divided(0, vocabulary_span)


def by_query_heads(heads: int, kv_heads: int, axis: int = 0) -> Cut:
    """The cut of a projection into query heads; they are its outputs, or its inputs where `axis` is 1."""
    return Divided(axis, partial(query_span, heads, kv_heads), padded=True)


def by_kv_heads(heads: int, kv_heads: int) -> Cut:
    """The cut of a projection into key/value heads."""
    return Divided(0, partial(kv_span, heads, kv_heads), padded=True)


def _transposed(weight: Weight, shape: Shape) -> np.ndarray:
    """[out, in] -> [in, out], contiguous, with zeros up to `shape`.

    Some rows at a time, because numpy's own order misses the caches.
    """
    weight = np.asarray(weight)
    inputs, outputs = weight.shape[1], weight.shape[0]
    result = (np.empty if shape == (inputs, outputs) else np.zeros)(shape, weight.dtype)
    words, columns = (array.view(f"u{array.itemsize}") for array in (weight, result))
    for first in range(0, outputs, _ROWS_AT_ONCE):
        last = min(outputs, first + _ROWS_AT_ONCE)
        columns[:inputs, first:last] = words[first:last].T
    return result
