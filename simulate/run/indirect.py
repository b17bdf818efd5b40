"""Run-time addresses: the elements that a view with a run-time index selects, once the index has values.

Such a view has the attribute `dynamic`: the index tile, the extent that bounds indices, and a step in elements.
Element ids count the elements of the storage, in the view's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np

from nkw.errors import OutOfBounds, RuleViolation, rule
from simulate.memory import Dynamic, MemoryRegion, NkiTensor


@dataclass(frozen=True, slots=True)
class Resolved:
    """Elements of a view with a run-time index.

    elements: their ids in the storage, int64 in the view's shape. inside: mask of the ids in bounds, None if all are.
    """

    elements: np.ndarray
    inside: np.ndarray | None


def resolve(view: NkiTensor, skip_out_of_range: bool) -> Resolved:
    """Return the elements that a view with a run-time index selects, by the present values of the index.

    Args:
        view: The view.
        skip_out_of_range: Whether indices out of range are masked in the result instead of refused.

    Raises:
        OutOfBounds: An index is out of range, and the instruction does not skip such indices.
        RuleViolation: The index is no tile of the documented form.
    """
    dynamic = view.dynamic
    assert dynamic is not None
    if dynamic.group:
        return _resolve_groups(view, dynamic, skip_out_of_range)
    index_tile(dynamic, view)
    indices = dynamic.index.uncounted_array.reshape(-1).astype(np.int64)
    inside = (indices >= 0) & (indices < dynamic.extent)
    if not inside.all() and not skip_out_of_range:
        refuse_index(indices, dynamic.extent, view.describe())
    shift = (indices * dynamic.step).reshape(-1, *(1,) * (len(view.shape) - 1))
    elements = get_element_ids(view.shape, view.strides) + (shift + view.offset)
    limit = view.storage.nbytes // view.dtype.storage.itemsize
    within = (elements >= 0) & (elements < limit)
    if dynamic.per_partition or not inside.all():
        within &= inside.reshape(-1, *(1,) * (len(view.shape) - 1))
    if within.all():
        return Resolved(elements, None)
    if not skip_out_of_range:
        refuse_elements(int(elements.min()), int(elements.max()), limit, view.describe())
    return Resolved(elements, within)


def build_element_ids(shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> np.ndarray:
    """Return the ids of a view's elements in its storage, int64 in the view's shape.

    Args:
        shape: The shape of the view.
        strides: Its strides in elements.
        first: The id of its first element.
    """
    ids = np.full((1,) * len(shape), first, np.int64)
    for dim, (extent, stride) in enumerate(zip(shape, strides)):
        steps = np.arange(extent, dtype=np.int64) * stride
        ids = ids + steps.reshape(tuple(extent if d == dim else 1 for d in range(len(shape))))
    return ids


@lru_cache(maxsize=1024)
def get_element_ids(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Return the ids of the elements of a view from element 0, int64 in its shape; do not write to the array."""
    return build_element_ids(shape, strides)


def refuse_elements(first: int, last: int, count: int, view: str) -> NoReturn:
    """Raise OutOfBounds for elements outside of a tensor of `count` elements.

    Args:
        first: The smallest element id of the view.
        last: The largest element id of the view.
        count: The number of elements of the tensor.
        view: The view, for the message.
    """
    raise OutOfBounds(
        run_time_index_inside, f"elements {first} to {last} of {view}", limit=f"0 to {count - 1}"
    )


def refuse_index(indices: np.ndarray, extent: int, view: str) -> NoReturn:
    """Raise OutOfBounds for the first index below 0, or of `extent` or more; the caller knows that there is one.

    Args:
        indices: The indices, flat.
        extent: The size of the dim that they address.
        view: The view, for the message.
    """
    position = int(np.flatnonzero((indices < 0) | (indices >= extent))[0])
    raise OutOfBounds(
        run_time_index_inside,
        f"index {indices[position]} is out of bounds for axis 0 with size {extent} ({view})",
        limit=f"0 to {extent - 1}",
        hint="clip the indices, or pass oob_mode=nisa.oob_mode.skip",
    )


def _resolve_groups(view: NkiTensor, dynamic: Dynamic, skip_out_of_range: bool) -> Resolved:
    """Return the elements that offsets select if each group of partitions shares its offsets.

    A group is `view.dynamic.group` consecutive partitions. Its offsets, which lie in the index tile partition by
    partition, apply to all partitions of the group. Raises OutOfBounds for an offset out of range that is not
    skipped.
    """
    group, (partitions, count) = dynamic.group, view.shape
    rows = dynamic.index.uncounted_array.reshape(partitions, -1).astype(np.int64)
    columns = np.arange(count)
    first = np.arange(partitions)[:, None] // group * group
    offsets = rows[first + columns % group, columns // group]
    inside = (offsets >= 0) & (offsets < dynamic.extent)
    all_inside = bool(inside.all())
    if not all_inside and not skip_out_of_range:
        partition, column = np.argwhere(~inside)[0]
        raise OutOfBounds(
            run_time_index_inside,
            f"offset {offsets[partition, column]} of partition {partition} is out of bounds for a free size of "
            f"{dynamic.extent} ({view.describe()})",
            limit=f"0 to {dynamic.extent - 1}",
            hint="clip the offsets",
        )
    elements = view.offset + np.arange(partitions)[:, None] * view.strides[0] + offsets
    return Resolved(elements, None if all_inside else inside)


@rule("NKW-OOB")
def run_time_index_inside() -> None:
    """An index read at run time stays inside the dim it addresses.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


def _is_scalar(tile: object) -> bool:
    """Return whether an index is a register."""
    return isinstance(tile, NkiTensor) and tile.buffer is MemoryRegion.register


@rule("NKW-INDEX-TILE")
def index_tile(dynamic: Dynamic, view: NkiTensor) -> None:
    """Row numbers are an int32 or uint32 SBUF tile with one element per partition of the view.

    Raises RuleViolation if the index of `dynamic` has another dtype or size for `view`. A register counts as such a
    tile, also of int64.
    """
    tile = dynamic.index
    rows = view.shape[0] if dynamic.per_partition else 1
    dtypes = ("int32", "uint32", "int64") if _is_scalar(tile) else ("int32", "uint32")
    if not (isinstance(tile, NkiTensor) and tile.dtype in dtypes and tile.size == rows):
        seen = tile.describe() if isinstance(tile, NkiTensor) else repr(tile)
        raise RuleViolation(
            index_tile, f"{seen} for {rows} rows", limit=f"({rows}, 1) int32 or uint32 in sbuf"
        )
