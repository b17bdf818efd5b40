"""Tensor indirection (gen4), `tensor.indirect(index)`: rules of a view whose free-dim offsets come from an index tile.

Every group of 16 partitions (32 on the Tensor engine) has a list of offsets of its own in the index tile, and all
partitions of the group use that list.
"""

from __future__ import annotations

import operator
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.memory.regions import MemoryRegion
from simulate.memory.tensor_bytes import TensorBytes

GROUP = 16
"""Number of partitions that share a list of offsets on the Vector, Scalar and GpSimd engines."""
TENSOR_ENGINE_GROUP = 32
INDEX_DTYPES = ("uint16", "uint32", "int32")


def count_offsets(tensor: TensorBytes, index: Any, num_elem: int | None) -> int:
    """Return the number of elements per partition that `tensor.indirect(index, num_elem)` has.

    That is num_elem, or index.size if it is None.

    Raises:
        RuleViolation: The tensor is no contiguous tile on chip; or the index is no integer SBUF tile with as many
            partitions; or the index has fewer offsets, both for groups of 16 partitions and for groups of 32.
    """
    data_on_chip(tensor)
    index_of_offsets(tensor, index)
    count = index.size if num_elem is None else operator.index(num_elem)
    # The engine that reads the view decides which group counts.
    offsets_in_index(
        count,
        max(count_offsets_per_group(index, GROUP), count_offsets_per_group(index, TENSOR_ENGINE_GROUP)),
        index,
    )
    return count


def count_offsets_per_group(index: TensorBytes, group: int) -> int:
    """Return the number of offsets that the index tile has for its smallest group of partitions.

    Offset i of a group is in row i % group of its rows, column i // group. A last, partial group of r rows only has the
    offsets 0 to r - 1 without a gap.

    Args:
        index: The index tile, (partitions, columns).
        group: Partitions of a group, 16 or 32.
    """
    last = index.shape[0] % group
    return last if last else group * (index.size // index.shape[0])


@rule(
    "NKW-INDIRECT-DATA", hint="index the whole tile; rows of an HBM tensor are gathered with .vector_select"
)
def data_on_chip(tensor: TensorBytes) -> None:
    """Tensor indirection addresses a tile in SBUF or PSUM whose free dims lie one after another.

    Raises RuleViolation otherwise.
    """
    if not tensor.buffer.on_chip or not tensor.is_contiguous():
        raise RuleViolation(data_on_chip, f"{tensor.describe()}, strides {tensor.strides}")


@rule("NKW-INDIRECT-INDEX", hint="load the offsets to such a tile on the partitions of the data")
def index_of_offsets(tensor: TensorBytes, index: Any) -> None:
    """The offsets are an integer SBUF tile with as many partitions as the tensor.

    Their dtype is not documented; uint16, as local_gather has it, uint32 and int32 are taken.

    Raises RuleViolation otherwise.
    """
    describe = getattr(index, "describe", None)
    fits = (
        describe is not None
        and index.buffer is MemoryRegion.sbuf
        and index.dtype in INDEX_DTYPES
        and index.shape[0] == tensor.shape[0]
        and index.dynamic is None
    )
    if not fits:
        raise RuleViolation(
            index_of_offsets,
            f"{describe() if describe else repr(index)} for {tensor.describe()}",
            limit=f"({tensor.shape[0]}, K) {' or '.join(INDEX_DTYPES)} in sbuf",
        )


@rule("NKW-INDIRECT-COUNT", hint="pass num_elem")
def offsets_in_index(count: int, available: int, index: TensorBytes) -> None:
    """Each group of partitions finds num_elem offsets in its own rows of the index; the default is index.size.

    Raises RuleViolation if `count` is below 1, or above `available`, the offsets of a group.
    """
    if not 1 <= count <= available:
        raise RuleViolation(
            offsets_in_index, f"{count} offsets, index {index.describe()}", limit=f"1 to {available}"
        )


@rule("NKW-INDIRECT-FINAL", hint="slice before .indirect")
def indirect_view_is_final(tensor: TensorBytes) -> None:
    """A view made by .indirect is final: its free dim cannot be sliced, reshaped or indexed again.

    Raises RuleViolation at every call: the caller has found that the rule is broken.
    """
    raise RuleViolation(indirect_view_is_final, f"a view of {tensor.describe()}")
