"""Regions: parts of a tensor that an index expression names; their bounds are checked after a mask has cut them.

An index is affine in the positions on the axes of the access (`simulate.beta1.indices`), so it may reach beyond the
tensor where a mask excludes elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nkw.errors import OutOfBounds, RuleViolation, rule
from simulate.beta1.indices import Index, broadcast
from simulate.beta1.masks import Box
from simulate.memory import Dynamic, NkiTensor, views
from simulate.memory.view_rules import index_within_tensor


@dataclass(frozen=True, slots=True)
class Limit:
    """Bound of an index on one dim of a tensor: 0 <= offset + sum of steps[j] * (position on axis j) < extent."""

    steps: tuple[int, ...]
    offset: int
    extent: int
    dim: int


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a tensor: `shape`, `strides` and `offset` in elements of the tensor's storage.

    limits: what the indices must not exceed, checked by `view`. dynamic: the run-time index, or None.
    """

    tensor: NkiTensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    limits: tuple[Limit, ...] = ()
    dynamic: Dynamic | None = None

    @staticmethod
    def from_tensor(tensor: NkiTensor, shape: tuple[int, ...] | None = None) -> Region:
        """Return the region of a whole tensor; `shape` is another shape for a contiguous tensor."""
        if shape is not None and shape != tensor.shape:
            return Region(tensor, shape, views.row_major(shape), tensor.offset)
        return Region(tensor, tensor.shape, tensor.strides, tensor.offset, (), tensor.dynamic)

    def view(self) -> NkiTensor:
        """Return the region as a tensor. Raises OutOfBounds if an index exceeds its dim."""
        for limit in self.limits:
            reaches = [(size - 1) * step for size, step in zip(self.shape, limit.steps)]
            low = limit.offset + sum(min(reach, 0) for reach in reaches)
            high = limit.offset + sum(max(reach, 0) for reach in reaches)
            if low < 0 or high >= limit.extent:
                raise OutOfBounds(
                    index_within_tensor,
                    f"indices {low} to {high} on dim {limit.dim} of size {limit.extent} "
                    f"of {self.tensor.describe()}",
                    hint="mask the access: mask=(index < size)",
                )
        return NkiTensor.from_storage(
            self.shape, self.tensor.dtype, self.tensor.storage, self.strides, self.offset, self.dynamic
        )

    def cut(self, box: Box) -> Region:
        """Return the part of the region inside a box: (start, end) on each axis.

        An axis of size 1 stays whole, since it stands for one element that is repeated along the box.
        """
        if all(size == 1 or bounds == (0, size) for size, bounds in zip(self.shape, box)):
            return self
        starts = [0 if size == 1 else start for size, (start, _) in zip(self.shape, box)]
        shape = tuple(1 if size == 1 else end - start for size, (start, end) in zip(self.shape, box))
        limits = tuple(
            replace(limit, offset=limit.offset + sum(s * step for s, step in zip(starts, limit.steps)))
            for limit in self.limits
        )
        offset = self.offset + sum(start * stride for start, stride in zip(starts, self.strides))
        dynamic = self.dynamic
        if dynamic is not None and dynamic.per_partition and shape[0] != self.shape[0]:
            rows = dynamic.index[starts[0] : starts[0] + shape[0]]
            dynamic = replace(dynamic, index=rows)
        return replace(self, shape=shape, offset=offset, limits=limits, dynamic=dynamic)

    def select(self, axis: int, position: int) -> Region:
        """Return the region at one position of an axis, without that axis."""
        box = tuple((position, position + 1) if j == axis else (0, s) for j, s in enumerate(self.shape))
        one = self.cut(box)

        def drop(values: tuple[int, ...]) -> tuple[int, ...]:
            return values[:axis] + values[axis + 1 :]

        limits = tuple(replace(limit, steps=drop(limit.steps)) for limit in one.limits)
        return replace(one, shape=drop(one.shape), strides=drop(one.strides), limits=limits)

    def repeated(self, shape: tuple[int, ...]) -> Region:
        """Return the region with axes of size 1 repeated, by stride 0, to `shape`.

        Missing axes are added after the partition axis; in HBM they come first. Raises RuleViolation if other sizes
        differ, or on chip the number of partitions.
        """
        if shape == self.shape and 1 not in shape:
            return self
        added = len(shape) - len(self.shape)
        on_chip = self.tensor.buffer.on_chip
        axis = 1 if on_chip else 0
        sizes = self.shape[:axis] + (1,) * added + self.shape[axis:]
        strides = self.strides[:axis] + (0,) * added + self.strides[axis:]
        widths = tuple(zip(sizes, shape))
        wrong = added < 0 or any(size not in (1, wanted) for size, wanted in widths)
        if wrong or (on_chip and sizes[0] != shape[0]):
            raise RuleViolation(
                repeats_free_dims,
                f"{self.shape} to {shape}",
                hint="t.broadcast_to(shape) also repeats over partitions",
            )
        limits = tuple(
            replace(limit, steps=limit.steps[:axis] + (0,) * added + limit.steps[axis:])
            for limit in self.limits
        )
        repeated = tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides))
        return replace(self, shape=shape, strides=repeated, limits=limits)

    def reshaped(self, shape: tuple[int, ...]) -> Region | None:
        """Return the same elements in another shape, or None if strides cannot express it.

        On chip the number of partitions must stay, else None. Raises OutOfBounds if an index exceeds its dim.
        """
        if shape == self.shape:
            return self
        view = self.view()
        first = 1 if view.buffer.on_chip else 0
        if views.count(shape) != view.size or shape[:first] != view.shape[:first]:
            return None
        free = views.regroup(view.shape[first:], view.strides[first:], shape[first:])
        if free is None:
            return None
        return replace(self, shape=shape, strides=view.strides[:first] + free, limits=())

    def permuted(self, order: tuple[int, ...]) -> Region:
        """Return the region with its axes in another order: axis i is the former axis order[i]."""
        limits = tuple(replace(limit, steps=tuple(limit.steps[a] for a in order)) for limit in self.limits)
        return replace(
            self,
            shape=tuple(self.shape[a] for a in order),
            strides=tuple(self.strides[a] for a in order),
            limits=limits,
        )

    def covers(self, other: Region) -> bool:
        """Return whether another region has the same elements of the same storage in the same order."""
        return (
            self.tensor.storage is other.tensor.storage
            and (self.shape, self.strides, self.offset) == (other.shape, other.strides, other.offset)
            and self.dynamic is other.dynamic
        )


def cut_pieces(regions: tuple[Region, ...], dims_max: int) -> Iterator[tuple[Region, ...]]:
    """Cut regions of one shape into parts of at most `dims_max` dims and yield them, one tuple per part.

    The first free axes are taken position by position until the dims suffice.
    """
    if len(regions[0].shape) <= dims_max:
        yield regions
        return
    for position in range(regions[0].shape[1]):
        yield from cut_pieces(tuple(region.select(1, position) for region in regions), dims_max)


def select_by_index(tensor: NkiTensor, keys: tuple[Any, ...]) -> Region:
    """Return the region `tensor[keys]`, with an Index or a tile of row numbers among the keys.

    A tile of row numbers, (P, 1) or (1, 1), becomes the region's run-time index.

    Args:
        tensor: The tensor.
        keys: One Index, integer or tile per dim; no slices.

    Raises:
        RuleViolation: The keys are of another form. On chip the partition index must run over the first axis in steps
            of one, and no other index over that axis, because every partition has the same access pattern.
    """
    shape: tuple[int, ...] = ()
    for key in keys:
        one_index_per_dim(tensor, keys, key)
        if isinstance(key, Index):
            two_axes(key)
        if isinstance(key, (Index, NkiTensor)):
            shape = broadcast(shape, key.shape)
    rank = len(shape)
    offset, strides = tensor.offset, (0,) * rank
    limits: list[Limit] = []
    dynamic = None
    for dim, (key, stride, extent) in enumerate(zip(keys, tensor.strides, tensor.shape)):
        if isinstance(key, NkiTensor):
            one_dynamic_index(tensor, dim, key, dynamic)
            dynamic = Dynamic(key, stride, extent, key.size > 1)
            continue
        index = key if isinstance(key, Index) else Index((1,), (0,), key if key >= 0 else key + extent)
        steps = tuple(s if size > 1 else 0 for s, size in zip(index.aligned(rank), shape))
        if tensor.buffer.on_chip:
            same_pattern_in_all_partitions(tensor, dim, steps, shape)
        offset += index.offset * stride
        strides = tuple(total + step * stride for total, step in zip(strides, steps))
        limits.append(Limit(steps, index.offset, extent, dim))
    if tensor.buffer.on_chip and shape[0] == 1:
        strides = (tensor.strides[0], *strides[1:])
    return Region(tensor, shape, strides, offset, tuple(limits), dynamic)


def select_by_slices(tensor: NkiTensor, keys: tuple[Any, ...]) -> Region | None:
    """Return the region `tensor[keys]` if a slice ends beyond its dim, which a mask has to cut.

    Returns None if no slice does, and for slices that the caller's ordinary indexing refuses or reduces to one dim.
    """
    if not any(
        isinstance(k, slice) and isinstance(k.stop, int) and k.stop > n for k, n in zip(keys, tensor.shape)
    ):
        return None
    bounds = []
    for key, extent in zip(keys, tensor.shape):
        key_slice = key if isinstance(key, slice) else slice(key, key + 1)
        start, stop, step = (
            key_slice.start or 0,
            extent if key_slice.stop is None else key_slice.stop,
            key_slice.step or 1,
        )
        if start < 0 or stop <= start or step < 1:
            return None
        bounds.append((start, (stop - start + step - 1) // step, step, not isinstance(key, slice)))
    bounds += [(0, extent, 1, False) for extent in tensor.shape[len(keys) :]]
    kept = [
        dim for dim, (_, _, _, one) in enumerate(bounds) if not one or (dim == 0 and tensor.buffer.on_chip)
    ]
    if len(kept) < 2:
        return None
    limits = tuple(
        Limit(tuple(step if dim == k else 0 for k in kept), start, tensor.shape[dim], dim)
        for dim, (start, _, step, _) in enumerate(bounds)
    )
    return Region(
        tensor,
        tuple(bounds[dim][1] for dim in kept),
        tuple(bounds[dim][2] * tensor.strides[dim] for dim in kept),
        tensor.offset + sum(start * stride for (start, _, _, _), stride in zip(bounds, tensor.strides)),
        limits,
        tensor.dynamic,
    )


@rule("NKW-INDEX-MIXED")
def one_index_per_dim(tensor: NkiTensor, keys: tuple[Any, ...], key: Any) -> None:
    """Index expressions and integers name one position per dim; slices cannot be mixed with them.

    Raises RuleViolation if the number of `keys` is not that of the dims, or `key` is no Index, tensor or integer.
    """
    if len(keys) != tensor.ndim or not (
        isinstance(key, (Index, NkiTensor)) or (isinstance(key, int) and not isinstance(key, bool))
    ):
        raise RuleViolation(
            one_index_per_dim,
            f"{len(keys)} indices, among them {type(key).__name__}, for {tensor.describe()}",
            hint="use nl.arange or nl.mgrid for every dim, or slices for every dim",
        )


@rule("NKW-INDEX-1D")
def two_axes(index: Index) -> None:
    """An index expression has a partition axis and at least one free axis.

    Raises RuleViolation for an index of fewer axes.
    """
    if len(index.shape) < 2:
        raise RuleViolation(
            two_axes,
            f"an index of shape {index.shape}",
            hint="nl.arange(n)[:, None] or nl.arange(n)[None, :]",
        )


@rule("NKW-INDEX-PARTITION")
def same_pattern_in_all_partitions(
    tensor: NkiTensor, dim: int, steps: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """On chip the first axis of an access walks over consecutive partitions, and no other axis does.

    Raises RuleViolation if `steps`, those of the index of dim `dim` along the axes of an access of `shape`, differ
    from that.
    """
    wanted = (1 if shape[0] > 1 else 0,) if dim == 0 else (0,)
    walks = steps[:1] == wanted and (dim > 0 or not any(steps[1:]))
    if not walks:
        raise RuleViolation(
            same_pattern_in_all_partitions,
            f"steps {steps} on dim {dim} of {tensor.describe()}",
            hint="index the partition dim with nl.arange(p)[:, None], the others with later axes",
        )


@rule("NKW-INDEX-DYNAMIC")
def one_dynamic_index(tensor: NkiTensor, dim: int, index: NkiTensor, before: Dynamic | None) -> None:
    """A tile as an index holds one number for each partition of an access to HBM, or one for all of it.

    Raises RuleViolation for another tile, and if `before`, the run-time index of an earlier dim, is not None.
    """
    if before is not None or (index.size > 1 and (tensor.buffer.on_chip or index.size > index.shape[0])):
        raise RuleViolation(
            one_dynamic_index,
            f"a {index.shape} tile as the index of dim {dim} of {tensor.describe()}",
            hint="one tile index per access; load rows with x[rows[i_p, 0], i_f]",
        )


@rule("NKW-REPEAT")
def repeats_free_dims() -> None:
    """An operand is repeated along free dims of size 1 only.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """
