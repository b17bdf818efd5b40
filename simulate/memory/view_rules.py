"""Rules of views: what an index, a reshape or an access pattern may do."""

from __future__ import annotations

from nkw.errors import RuleViolation, rule


@rule("NKW-INDEX", hint="index dims by 0 to size - 1, or by -size to -1 from the end")
def index_within_tensor() -> None:
    """An index or slice stays inside the dim it names.

    Carries the rule's sentence and does nothing when called; callers raise OutOfBounds with it.
    """


@rule(
    "NKW-BOUNDS",
    hint="reduce counts or offset of the pattern; in a last, partial tile with min(tile, elements left)",
)
def view_within_storage() -> None:
    """An access pattern stays inside the tensor's storage.

    Carries the rule's sentence and does nothing when called; callers raise OutOfBounds with it.
    """


@rule("NKW-MUTATION")
def tensors_are_assigned() -> None:
    """Memory is written by instructions only; an assignment copies one tensor to a part of another.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-TENSOR-OPERATOR")
def no_python_on_tensors() -> None:
    """Python operators and conversions are not supported on tensors; use nki.isa instructions.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-PARTITION-FIRST", hint="change free dims only; move partitions with nisa.nc_transpose or a DMA")
def partition_dim_stays_first() -> None:
    """On chip, dim 0 is the partition dim and keeps its position and size in every view.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-BROADCAST")
def broadcast_free_unit_dim() -> None:
    """Only a dim of size 1 can be broadcast, and on chip never the partition dim.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-SQUEEZE", hint="select an index of the dim with .select(dim, index), or keep the dim")
def squeeze_unit_dim() -> None:
    """Only a dim of size 1 can be squeezed; on chip two dims remain and the partition dim stays.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-RESHAPE-SIZE", hint="give sizes of the same product, on chip the same first size; one may be -1")
def reshape_keeps_elements() -> None:
    """A reshape keeps the number of elements.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-RESHAPE-LAYOUT", hint="copy the view to a contiguous tile with nisa.tensor_copy or a DMA first")
def reshape_is_a_view() -> None:
    """A reshape copies nothing, so strides must be able to express the new shape.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule(
    "NKW-VIEW-DTYPE",
    hint="slice a last dim whose bytes divide by the new size, or view the whole tile and then slice",
)
def view_needs_contiguous_bytes() -> None:
    """A view in another dtype needs a contiguous last dim whose bytes, and the offset, divide by the new size.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-AP-PARTITION")
def ap_steps_one_partition() -> None:
    """On chip, the first pair of an access pattern steps over partitions by the storage's free size.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule(
    "NKW-VECTOR-OFFSET",
    hint="use indirect_dim=0 of an HBM tensor; on chip gather with nisa.nc_n_gather or .indirect",
)
def vector_select_in_hbm() -> None:
    """Row numbers in a (P, 1) tile index dim 0 of a tensor in HBM.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-DYNAMIC-PARTITION", hint="indirect_dim=1 or more, or .select(1, …)")
def dynamic_free_dim(tensor: str) -> None:
    """On chip, an index that is read at run time addresses a free dim, never the partition dim.

    Raises RuleViolation at every call: the caller has found that the rule is broken.
    """
    raise RuleViolation(dynamic_free_dim, f"dim 0 of {tensor}")


@rule("NKW-ONE-DYNAMIC", hint="use one run-time offset for each access; copy the view of the first to a tile")
def one_dynamic_offset() -> None:
    """An access has at most one part that is read at run time.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-INDIRECT-DIM", hint="indirect_dim counts from 0 to the number of dims minus 1")
def indirect_dim_exists(dim: int, tensor: str) -> None:
    """indirect_dim of an access pattern names a dim of the tensor that it is taken of.

    Raises RuleViolation at every call: the caller has found that the rule is broken.
    """
    raise RuleViolation(indirect_dim_exists, f"indirect_dim {dim} of {tensor}")


@rule("NKW-SCALAR-OFFSET")
def on_chip_offset_is_32_bit() -> None:
    """A run-time offset in SBUF or PSUM has 32 bits; one of 64 bits is for HBM.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """
