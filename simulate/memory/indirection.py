"""Tensor indirection: views whose free-dim offsets are read from an index tile, for each group of partitions."""

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
    """Return the number of elements of each partition of `tensor.indirect(index, num_elem)`.

    Raises:
        RuleViolation: The tensor, the index or the count breaks a rule of tensor indirection.
    """
    data_on_chip(tensor)
    index_of_offsets(tensor, index)
    count = index.size if num_elem is None else operator.index(num_elem)
    # The engine that reads the view decides which group counts.
    offsets_in_index(
        count, max(offsets_per_group(index, GROUP), offsets_per_group(index, TENSOR_ENGINE_GROUP)), index
    )
    return count


def offsets_per_group(index: TensorBytes, group: int) -> int:
    """Return the number of offsets that every group of an index tile has.

    Offset i is in row i % group, column i // group.
    """
    last = index.shape[0] % group
    return last if last else group * (index.size // index.shape[0])


@rule(
    "NKW-INDIRECT-DATA", hint="index the whole tile; rows of an HBM tensor are gathered with .vector_select"
)
def data_on_chip(tensor: TensorBytes) -> None:
    """Tensor indirection addresses a tile in SBUF or PSUM whose free dims lie one after another."""
    if not tensor.buffer.on_chip or not tensor.is_contiguous():
        raise RuleViolation(data_on_chip, f"{tensor.describe()}, strides {tensor.strides}")


@rule("NKW-INDIRECT-INDEX")
def index_of_offsets(tensor: TensorBytes, index: Any) -> None:
    """The offsets are an integer SBUF tile with as many partitions as the tensor.

    Their dtype is not documented; uint16, as local_gather has it, uint32 and int32 are taken.
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
    """Each group of partitions finds num_elem offsets in its own rows of the index; the default is index.size."""
    if not 1 <= count <= available:
        raise RuleViolation(
            offsets_in_index, f"{count} offsets, index {index.describe()}", limit=f"1 to {available}"
        )


@rule("NKW-INDIRECT-FINAL", hint="slice before .indirect")
def indirect_view_is_final(tensor: TensorBytes) -> None:
    """A view made by .indirect is final: its free dim cannot be sliced, reshaped or indexed again."""
    raise RuleViolation(indirect_view_is_final, f"a view of {tensor.describe()}")
