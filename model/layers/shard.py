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

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from model.config.heads import HeadLayout
from model.errors import ModelError
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
    size_of_rank = -(-size // shard.ranks)
    return slice(min(size, shard.rank * size_of_rank), min(size, (shard.rank + 1) * size_of_rank))


def vocabulary_span(size: int, shard: Shard) -> slice:
    """The part of `size` tokens that a rank holds: as many on every rank, and one more on each of the first ones."""
    size_of_rank, more = divmod(size, shard.ranks)
    first = shard.rank * size_of_rank + min(shard.rank, more)
    return slice(first, first + size_of_rank + (shard.rank < more))


def query_span(heads: int, kv_heads: int, size: int, shard: Shard) -> slice:
    """The part of `size` elements, `heads` query heads side by side in `kv_heads` groups, that a rank holds."""
    local_heads = HeadLayout(heads, kv_heads, shard.ranks).queries(shard.rank)
    return slice(local_heads.start * size // heads, local_heads.stop * size // heads)


def kv_span(heads: int, kv_heads: int, size: int, shard: Shard) -> slice:
    """The part of `size` elements, `kv_heads` key/value heads side by side, that a rank holds."""
    local_heads = HeadLayout(heads, kv_heads, shard.ranks).keys(shard.rank)
    return slice(local_heads.start * size // kv_heads, local_heads.stop * size // kv_heads)


@dataclass(frozen=True)
class Selection:
    """The part of a weight [out, in] that a rank holds, and its layout.

    `outputs` and `inputs` are indices of the weight in the order of the result, zeros follow them up to `shape`: [in,
    out] where the result `is_transposed`, else [out, in].
    """

    outputs: range | tuple[int, ...]
    inputs: range
    shape: Shape
    is_transposed: bool = True

    def take(self, weight: Weight) -> np.ndarray:
        """Return a copy of the part; a quantised weight is widened, its other parts are not."""
        selected = weight if weight.ndim == 2 else np.asarray(weight)[:, None]
        selected = selected[:, self.inputs.start : self.inputs.stop]
        if isinstance(self.outputs, range):
            selected = selected[self.outputs.start : self.outputs.stop]
        elif self.outputs:
            first = min(self.outputs)
            selected = np.asarray(selected[first : max(self.outputs) + 1])[np.subtract(self.outputs, first)]
        else:
            selected = selected[:0]
        if self.is_transposed:
            return _transposed(selected, self.shape)
        if selected.shape == self.shape:
            return np.array(selected)
        result = np.zeros(self.shape, selected.dtype)
        result[: selected.shape[0], : selected.shape[1]] = selected
        return result

    def to_entries(self, block: tuple[int, int]) -> Selection:
        """Return the same part of a stored tensor, whose entries stand for blocks (rows, columns) of the weight.

        Raises ModelError where the part does not consist of whole blocks, unless it is inside one.
        """
        rows, columns = block
        outputs = self.outputs if rows == 1 else _entries(self.outputs, rows)
        inputs = _entries(self.inputs, columns)
        sizes = self.shape[::-1] if self.is_transposed else self.shape
        shape = (-(-sizes[0] // rows), -(-sizes[1] // columns))
        return Selection(outputs, inputs, shape[::-1] if self.is_transposed else shape, self.is_transposed)


def _entries(elements: range | tuple[int, ...], block: int) -> range:
    """Return the entries that stand for elements, a block each."""
    if not elements:
        return range(0)
    first, last = elements[0] // block, elements[-1] // block
    contiguous = range(elements[0], elements[-1] + 1)
    if tuple(elements) != tuple(contiguous) or (elements[0] % block and first != last):
        raise ModelError(f"a rank's part of a weight does not consist of whole blocks of {block} elements")
    return range(first, last + 1)


class Cut(Protocol):
    """The part of a checkpoint's tensor that one rank holds, and its layout."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the shape of what a rank holds of a tensor of shape `whole`."""

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of the part of a tensor that a rank holds."""


class MatrixCut(Cut):
    """A cut of a weight [out, in], or of a vector [out], which is taken as [out, 1]."""

    @abstractmethod
    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return what a rank holds of a weight of shape `whole`."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the shape of the selection."""
        return self.select(tensor_shape, shard).shape

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of the selection."""
        return self.select(tensor.shape, shard).take(tensor)


class Whole(Cut):
    """The whole tensor, on every rank."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the unchanged shape."""
        return tensor_shape

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy."""
        return np.array(tensor)


class Row(Cut):
    """A vector [n] as the row of a matrix [1, n], on every rank."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return [1, n]."""
        return (1, *tensor_shape)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy."""
        return np.array(tensor).reshape(1, -1)


class Taps(Cut):
    """A convolution [out, in, taps], kept as [taps, in, out], on every rank."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return [taps, in, out]."""
        return tensor_shape[::-1]

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a contiguous copy."""
        return np.ascontiguousarray(np.asarray(tensor).transpose(2, 1, 0))


class Transposed(MatrixCut):
    """A whole projection [out, in], kept as [in, out], on every rank."""

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the whole weight."""
        return Selection(range(tensor_shape[0]), range(tensor_shape[1]), (tensor_shape[1], tensor_shape[0]))


@dataclass(frozen=True)
class Divided(MatrixCut):
    """A part of a projection [out, in], kept as [in, out]; of a vector [out], such as a bias, kept as a row [1, out].

    `span` gives a rank's part of the divided axis, 0 for outputs and 1 for inputs. Where `padded`, every rank's part is
    as long as the first one's, filled up with zeros.
    """

    axis: int
    span: Callable[[int, Shard], slice]
    padded: bool = False

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the rank's part of one axis."""
        outputs, inputs = tensor_shape if len(tensor_shape) == 2 else (*tensor_shape, 1)
        size = (outputs, inputs)[self.axis]
        local_range = _range(self.span(size, shard))
        length = len(_range(self.span(size, Shard(0, shard.ranks)))) if self.padded else len(local_range)
        if self.axis == 0:
            return Selection(local_range, range(inputs), (inputs, length))
        return Selection(range(outputs), local_range, (length, outputs))

    def held_elements(self, size: int, ranks: int) -> int:
        """Return the elements of an axis of `size` that all ranks hold; copies count as often, padding does not."""
        spans = (self.span(size, Shard(rank, ranks)) for rank in range(ranks))
        return sum(span.stop - span.start for span in spans)


@dataclass(frozen=True)
class Rows(Cut):
    """A rank's part of the rows of a tensor [rows, n], kept as [rows, n]; filled up with zeros to the first one's."""

    span: Callable[[int, Shard], slice]

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return [rows of every rank, n]."""
        return (len(_range(self.span(tensor_shape[0], Shard(0, shard.ranks)))), *tensor_shape[1:])

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of the part."""
        result = np.zeros(self.shape(tensor.shape, shard), tensor.dtype)
        local_rows = tensor[self.span(len(tensor), shard)]
        result[: len(local_rows)] = local_rows
        return result


@dataclass(frozen=True)
class Reordered(MatrixCut):
    """A cut of a projection whose outputs come in another order in each run of as many as `order` names."""

    cut: MatrixCut
    order: tuple[int, ...]

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the shape of the cut, which an order does not change."""
        return self.cut.shape(tensor_shape, shard)

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the part, whose outputs are in whole runs, reordered."""
        selection = self.cut.select(tensor_shape, shard)
        runs = np.reshape(selection.outputs, (-1, len(self.order)))
        outputs = runs[:, list(self.order)].ravel()
        return replace(selection, outputs=tuple(outputs.tolist()))


@dataclass(frozen=True)
class HeadPart(MatrixCut):
    """Of each of a rank's heads of a projection [heads * n, in] the rows `rows_of_head`: kept so, or as [in, out].

    `span` gives a rank's heads. Every rank's part is as long as the first one's, filled up with zeros.
    """

    span: Callable[[int, Shard], slice]
    heads: int
    rows_of_head: tuple[int, int]
    keeps_layout: bool

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return [rows of the first rank's heads, in], or [in, rows]."""
        first, end = self.rows_of_head
        count = len(_range(self.span(self.heads, Shard(0, shard.ranks)))) * (end - first)
        return (count, tensor_shape[1]) if self.keeps_layout else (tensor_shape[1], count)

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the part of each head of a rank."""
        height, (first, end) = tensor_shape[0] // self.heads, self.rows_of_head
        heads = _range(self.span(self.heads, shard))
        outputs = tuple(head * height + row for head in heads for row in range(first, end))
        shape = self.shape(tensor_shape, shard)
        return Selection(outputs, range(tensor_shape[1]), shape, is_transposed=not self.keeps_layout)


@dataclass(frozen=True)
class Depthwise(Cut):
    """The weight of a convolution of every channel by itself, [channels, 1, taps], cut like [channels, taps]."""

    cut: Cut

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return [taps, channels of a rank]."""
        return self.cut.shape((tensor_shape[0], tensor_shape[2]), shard)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return the part, transposed, contiguous."""
        return self.cut.take(np.asarray(tensor)[:, 0, :], shard)


WHOLE = Whole()
ROW = Row()
TRANSPOSED = Transposed()
TAPS = Taps()
COLUMN_PARALLEL = Divided(0, even_span, padded=True)
ROW_PARALLEL = Divided(1, even_span, padded=True)
ROWS_PARALLEL = Rows(even_span)
VOCABULARY_PARALLEL = Divided(0, vocabulary_span)


def by_query_heads(heads: int, kv_heads: int, axis: int = 0) -> Divided:
    """The cut of a projection into query heads; they are its outputs, or its inputs where `axis` is 1."""
    return Divided(axis, partial(query_span, heads, kv_heads), padded=True)


def by_kv_heads(heads: int, kv_heads: int) -> Divided:
    """The cut of a projection into key/value heads."""
    return Divided(0, partial(kv_span, heads, kv_heads), padded=True)


def _range(span: slice) -> range:
    return range(span.start, span.stop)


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
