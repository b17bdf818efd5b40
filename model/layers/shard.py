"""Sharding of weights for tensor parallelism.

Layers name a `Cut` for each of their checkpoint tensors; `Tensor` and `Weight` in `weight.py` apply it to a `Shard`,
which is the place of a rank among the ranks.

Checkpoints have projections as [out, in]. Kernels contract over the partitions, so they need [in, out]. A cut takes the
whole [out, in] weight, selects the part of one rank, and returns it transposed and contiguous in the checkpoint's
dtype. This happens once, when weights are loaded.

- Column parallel (gate, up): a rank has some of the outputs. No exchange follows.
- Row parallel (output and down projection): a rank has some of the inputs; partial sums are all-reduced.
- Heads: queries, keys and values are column parallel, the output projection is row parallel, by whole heads as
  `HeadLayout` divides them. Padding heads are zeros.
- Vocabulary parallel (the head): if the ranks do not divide the vocabulary, the first ranks have one token more. A
  padded token would need masking, because its logit of 0 can be the largest.

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
"""Rows that are transposed together; 16 to 256 rows measured alike, four times as fast as NumPy's transpose."""


@dataclass(frozen=True)
class Shard:
    """Tensor-parallel rank of `ranks`, expert-parallel rank of `expert_ranks`, and Ulysses rank of `ulysses_ranks`.

    Ulysses ranks hold the same weights, and divide the rows of the same sequences.
    """

    rank: int
    ranks: int
    expert_rank: int = 0
    expert_ranks: int = 1
    ulysses_rank: int = 0
    ulysses_ranks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}"
        assert 0 <= self.expert_rank < self.expert_ranks, f"{self.expert_rank} of {self.expert_ranks}"
        assert 0 <= self.ulysses_rank < self.ulysses_ranks, f"{self.ulysses_rank} of {self.ulysses_ranks}"

    @property
    def flattened(self) -> Shard:
        """Shard of the rank where all Ulysses ranks of each tensor-parallel rank are tensor-parallel ranks too."""
        rank = self.rank * self.ulysses_ranks + self.ulysses_rank
        return Shard(rank, self.ranks * self.ulysses_ranks, self.expert_rank, self.expert_ranks)

    def slice_ulysses_rows(self, rows: int) -> slice:
        """Return the slice of the `rows` rows of a sequence that a rank has; Ulysses ranks must divide the rows."""
        assert rows % self.ulysses_ranks == 0, f"{rows} rows over {self.ulysses_ranks} ranks"
        count = rows // self.ulysses_ranks
        return slice(self.ulysses_rank * count, (self.ulysses_rank + 1) * count)


def slice_evenly(size: int, shard: Shard) -> slice:
    """Return a rank's slice of `size` elements: ceil(size / ranks) elements, and fewer or none on the last ranks."""
    size_of_rank = -(-size // shard.ranks)
    return slice(min(size, shard.rank * size_of_rank), min(size, (shard.rank + 1) * size_of_rank))


def slice_vocabulary(size: int, shard: Shard) -> slice:
    """Return the slice of `size` tokens that a rank holds.

    These are floor(size / ranks) tokens, and one more on the first size % ranks ranks.
    """
    size_of_rank, more = divmod(size, shard.ranks)
    first = shard.rank * size_of_rank + min(shard.rank, more)
    return slice(first, first + size_of_rank + (shard.rank < more))


def slice_query_heads(heads: int, kv_heads: int, size: int, shard: Shard) -> slice:
    """Return the slice of `size` elements with the query heads of a rank, as `HeadLayout` divides them.

    The elements are `heads` heads of equal size, in `kv_heads` groups that each share a key/value head. The slice has
    no padding, so ranks may have slices of different lengths.
    """
    local_heads = HeadLayout(heads, kv_heads, shard.ranks).queries(shard.rank)
    return slice(local_heads.start * size // heads, local_heads.stop * size // heads)


def slice_kv_heads(heads: int, kv_heads: int, size: int, shard: Shard) -> slice:
    """Return the slice of `size` elements with the key/value heads of a rank, as `HeadLayout` divides them.

    The elements are `kv_heads` heads of equal size. Several ranks may hold the same head. The slice has no padding.
    """
    local_heads = HeadLayout(heads, kv_heads, shard.ranks).keys(shard.rank)
    return slice(local_heads.start * size // kv_heads, local_heads.stop * size // kv_heads)


@dataclass(frozen=True)
class Selection:
    """Part of a weight [out, in] on a rank, and its layout.

    `outputs` and `inputs` are indices of the weight in the order of the result. `shape` is the shape of the result,
    [in, out] if it `is_transposed`, otherwise [out, in]; zeros fill the end of both axes.
    """

    outputs: range | tuple[int, ...]
    inputs: range
    shape: Shape
    is_transposed: bool = True

    def take(self, weight: Weight) -> np.ndarray:
        """Return a copy of the selected part of `weight`, with the shape `shape`; a vector [out] is read as [out, 1].

        Only the selected part of a quantised weight is widened.
        """
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
            return _transpose(selected, self.shape)
        if selected.shape == self.shape:
            return np.array(selected)
        result = np.zeros(self.shape, selected.dtype)
        result[: selected.shape[0], : selected.shape[1]] = selected
        return result

    def to_entries(self, block: tuple[int, int]) -> Selection:
        """Return the same selection of a stored tensor, such as scales, with one entry for each block of the weight.

        Args:
            block: (rows, columns) of a block: outputs and inputs of the weight.

        Raises:
            ModelError: The selected elements of an axis neither are whole blocks nor lie inside one block. Outputs may
                be in any order inside their block.
        """
        rows, columns = block
        outputs = self.outputs if rows == 1 else _order_blocks(self.outputs, rows)
        inputs = _find_blocks(self.inputs, columns)
        sizes = self.shape[::-1] if self.is_transposed else self.shape
        shape = (-(-sizes[0] // rows), -(-sizes[1] // columns))
        return Selection(outputs, inputs, shape[::-1] if self.is_transposed else shape, self.is_transposed)


def _order_blocks(elements: range | tuple[int, ...], block: int) -> range | tuple[int, ...]:
    """Return the index of the block that contains each `block` elements of a selection in turn.

    Raises:
        ModelError: Some of these elements are in different blocks.
    """
    if isinstance(elements, range):
        return _find_blocks(elements, block)
    indices: list[int] = []
    for first in range(0, len(elements), block):
        chosen = {element // block for element in elements[first : first + block]}
        if len(chosen) > 1:
            return _find_blocks(elements, block)  # raises the error
        indices += chosen
    return tuple(indices)


def _find_blocks(elements: range | tuple[int, ...], block: int) -> range:
    """Return the indices of the blocks of `block` elements that contain `elements`, indices along one axis.

    Raises:
        ModelError: The elements are not contiguous, or begin within a block and end in another one.
    """
    if not elements:
        return range(0)
    first, last = elements[0] // block, elements[-1] // block
    contiguous = range(elements[0], elements[-1] + 1)
    if tuple(elements) != tuple(contiguous) or (elements[0] % block and first != last):
        raise ModelError(
            f"a rank's part of a quantised weight, elements {elements[0]} to {elements[-1]}, does not consist of whole "
            f"blocks of {block} elements that share a scale; use fewer tensor-parallel ranks"
        )
    return range(first, last + 1)


class Cut(Protocol):
    """Part of a checkpoint's tensor on a rank, and its layout."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the shape of what `take` returns for a tensor of `tensor_shape`."""

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of the part of a checkpoint's tensor that a rank holds, in the layout of this cut."""


class MatrixCut(Cut):
    """Cut of a weight [out, in], or of a vector [out], which is used as [out, 1]."""

    @abstractmethod
    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return which outputs and inputs of a weight of `tensor_shape` a rank holds, and their layout on the rank."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the shape of what `take` returns for a weight of `tensor_shape`, with padding and transposition."""
        return self.select(tensor_shape, shard).shape

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of the part of a weight that `select` describes, padded with zeros where it says so."""
        return self.select(tensor.shape, shard).take(tensor)


class Whole(Cut):
    """Cut that keeps the whole tensor on every rank."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the tensor's shape."""
        return tensor_shape

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of the whole tensor; a quantised weight is widened."""
        return np.array(tensor)


class Row(Cut):
    """Cut of a vector [n] that keeps it as [1, n] on every rank."""

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return (1, n) for a vector of shape (n,)."""
        return (1, *tensor_shape)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of the vector as [1, n]."""
        return np.array(tensor).reshape(1, -1)


@dataclass(frozen=True)
class Taps(Cut):
    """Cut of a convolution [out, in, taps] or [out, in, rows, columns] that keeps it whole as [..., in, out].

    The result has `single` more axes of size 1 in front: a projection [out, in] is a window of one element.
    """

    single: int = 0

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return (taps, in, out) for a weight of shape (out, in, taps), (rows, columns, in, out) for one of images."""
        return (*(1,) * self.single, *tensor_shape[2:], tensor_shape[1], tensor_shape[0])

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a contiguous copy of the weight in the layout of `shape`."""
        weight = np.asarray(tensor).transpose(*range(2, tensor.ndim), 1, 0)
        return np.ascontiguousarray(weight).reshape(self.shape(tensor.shape, shard))


class Transposed(MatrixCut):
    """Cut of a projection [out, in] that keeps it whole as [in, out] on every rank; of a vector [out] as [1, out]."""

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the selection of all outputs and inputs, transposed to [in, out]."""
        outputs, inputs = tensor_shape if len(tensor_shape) == 2 else (*tensor_shape, 1)
        return Selection(range(outputs), range(inputs), (inputs, outputs))


@dataclass(frozen=True)
class Divided(MatrixCut):
    """Cut that divides one axis of a projection [out, in] and keeps it as [in, out]; of a vector [out] as [1, out].

    `axis` is 0 for outputs and 1 for inputs. `span` returns a rank's part of an axis from its size and the shard. With
    `padded`, zeros fill the part of every rank to the length of the first rank's part.
    """

    axis: int
    span: Callable[[int, Shard], slice]
    padded: bool = False

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the selection of the rank's outputs or inputs, as `axis` says, with all elements of the other axis."""
        outputs, inputs = tensor_shape if len(tensor_shape) == 2 else (*tensor_shape, 1)
        size = (outputs, inputs)[self.axis]
        local_range = _range(self.span(size, shard))
        length = len(_range(self.span(size, Shard(0, shard.ranks)))) if self.padded else len(local_range)
        if self.axis == 0:
            return Selection(local_range, range(inputs), (inputs, length))
        return Selection(range(outputs), local_range, (length, outputs))

    def count_elements(self, size: int, ranks: int) -> int:
        """Return the sum over all ranks of the elements of an axis that a rank holds, without padding.

        An axis has `size` elements; one that several ranks hold counts several times.
        """
        spans = (self.span(size, Shard(rank, ranks)) for rank in range(ranks))
        return sum(span.stop - span.start for span in spans)


@dataclass(frozen=True)
class Rows(Cut):
    """Cut that divides the rows of a tensor [rows, n] and pads them to the length of the first rank's part."""

    span: Callable[[int, Shard], slice]

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return (rows, n): the first rank's number of rows, to which all ranks pad theirs, and the tensor's width."""
        return (len(_range(self.span(tensor_shape[0], Shard(0, shard.ranks)))), *tensor_shape[1:])

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of a rank's rows, with zero rows at the end up to the length of the first rank's part."""
        result = np.zeros(self.shape(tensor.shape, shard), tensor.dtype)
        local_rows = tensor[self.span(len(tensor), shard)]
        result[: len(local_rows)] = local_rows
        return result


@dataclass(frozen=True)
class Reordered(MatrixCut):
    """Cut that permutes outputs: `order` are indices within each run of len(order) outputs."""

    cut: MatrixCut
    order: tuple[int, ...]

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the shape of a rank's part under `cut`, which an order does not change."""
        return self.cut.shape(tensor_shape, shard)

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the selection of `cut` with the outputs of each run of len(order) outputs in the order of `order`.

        A run that `cut` divides raises ValueError.
        """
        selection = self.cut.select(tensor_shape, shard)
        runs = np.reshape(selection.outputs, (-1, len(self.order)))
        outputs = runs[:, list(self.order)].ravel()
        return replace(selection, outputs=tuple(outputs.tolist()))


@dataclass(frozen=True)
class HeadPart(MatrixCut):
    """Cut that selects the rows first … end of each of a rank's heads from a projection [heads * n, in].

    `rows_of_head` is (first, end). `span` returns a rank's heads from their number and the shard. With `keeps_layout`
    the result is [out, in], otherwise [in, out]. Zeros fill it to the length of the first rank's part.
    """

    span: Callable[[int, Shard], slice]
    heads: int
    rows_of_head: tuple[int, int]
    keeps_layout: bool

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return [selected rows of the first rank's heads, in] with `keeps_layout`, otherwise [in, selected rows]."""
        first, end = self.rows_of_head
        count = len(_range(self.span(self.heads, Shard(0, shard.ranks)))) * (end - first)
        return (count, tensor_shape[1]) if self.keeps_layout else (tensor_shape[1], count)

    def select(self, tensor_shape: Shape, shard: Shard) -> Selection:
        """Return the selection of the rows `rows_of_head` of each of a rank's heads, with all inputs."""
        height, (first, end) = tensor_shape[0] // self.heads, self.rows_of_head
        heads = _range(self.span(self.heads, shard))
        outputs = tuple(head * height + row for head in heads for row in range(first, end))
        shape = self.shape(tensor_shape, shard)
        return Selection(outputs, range(tensor_shape[1]), shape, is_transposed=not self.keeps_layout)


@dataclass(frozen=True)
class Depthwise(Cut):
    """Cut of the weight [channels, 1, taps] of a depthwise convolution; `cut` applies to [channels, taps]."""

    cut: Cut

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return (taps, channels of a rank) for a weight of shape (channels, 1, taps)."""
        return self.cut.shape((tensor_shape[0], tensor_shape[2]), shard)

    def take(self, tensor: Weight, shard: Shard) -> np.ndarray:
        """Return a copy of a rank's channels, [taps, channels of a rank]."""
        return self.cut.take(np.asarray(tensor)[:, 0, :], shard)


WHOLE = Whole()
ROW = Row()
TRANSPOSED = Transposed()
TAPS = Taps()
COLUMN_PARALLEL = Divided(0, slice_evenly, padded=True)
ROW_PARALLEL = Divided(1, slice_evenly, padded=True)
ROWS_PARALLEL = Rows(slice_evenly)
VOCABULARY_PARALLEL = Divided(0, slice_vocabulary)


def by_query_heads(heads: int, kv_heads: int, axis: int = 0) -> Divided:
    """Return the cut of a projection by query heads, padded with zeros to the first rank's number of heads.

    The heads are the outputs of the projection for axis 0, and its inputs for axis 1.
    """
    return Divided(axis, partial(slice_query_heads, heads, kv_heads), padded=True)


def by_kv_heads(heads: int, kv_heads: int) -> Divided:
    """Return the cut of a projection whose outputs are key/value heads, padded to the first rank's number of heads.

    Several ranks may get copies of the same key/value head (`HeadLayout`).
    """
    return Divided(0, partial(slice_kv_heads, heads, kv_heads), padded=True)


def _range(span: slice) -> range:
    return range(span.start, span.stop)


def _transpose(weight: Weight, shape: Shape) -> np.ndarray:
    """Transpose a weight [out, in] to a contiguous array of `shape`, with zeros at the end of both axes.

    A few rows are transposed at a time, because NumPy's order of copying misses the CPU's caches.
    """
    weight = np.asarray(weight)
    outputs, inputs = weight.shape
    result = (np.empty if shape == (inputs, outputs) else np.zeros)(shape, weight.dtype)
    words, columns = (array.view(f"u{array.itemsize}") for array in (weight, result))
    for first in range(0, outputs, _ROWS_AT_ONCE):
        last = min(outputs, first + _ROWS_AT_ONCE)
        columns[:inputs, first:last] = words[first:last].T
    return result
