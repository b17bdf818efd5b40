"""dma_compute: add tensors on their way through the DMA engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import dma_costs, indirection, rules
from simulate.isa.book import instruction
from simulate.isa.enums import DgeMode, Engine, OobMode
from simulate.isa.instructions.dma_copy import counts_agree
from simulate.isa.plan import PLAIN, Domain, Effects, Masked, Plan
from simulate.isa.shapes import count_contiguous_bytes
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import AluOperator, alu_operator

_SOURCES_MAX = 16

_UNIQUE_ROWS = Effects(unique_rows=True)


@instruction
def dma_compute(
    hardware: Hardware,
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> Plan:
    """Sum srcs by element into dst, in float32 and with one rounding to dst's dtype.

    dst, srcs: any shapes of one element count @ HBM or SBUF; 1 to 16 sources, added in their order.
    reduce_op: add. scales: None or 1.0 for every source.

    With row numbers (`.ap(vector_offset=...)`) it reads, adds and writes: scatter, where dst and one of two
    sources are the same rows of an HBM tensor and the other lies in SBUF; gather, where one source is rows of
    an HBM tensor and the other is dst, in SBUF. Row numbers must be unique, which the caller promises;
    oob_mode `skip` leaves the elements of a row out of range alone. A single source is copied, as the formula
    has it, although a migration guide shows one as a replacement for read-modify-write.

    Raises RuleViolation, OutOfBounds. Cost: dma_costs.dma over all sources; the result is written at the documented
    fraction of the DMA rate.
    """
    source_list(srcs)
    sources = tuple(srcs)
    for operand, tensor in (("dst", dst), *(("srcs", source) for source in sources)):
        rules.is_tensor(operand, tensor)
        rules.lies_in(operand, tensor, *rules.HBM, rules.SBUF)
        rules.not_packed(operand, tensor)
        if tensor.buffer.on_chip:
            rules.partitions_within_limit(hardware, operand, tensor)
        if indirection.is_indirect(tensor):
            rules.not_indirect(operand, tensor)
        counts_agree(dst, tensor)
    only_adds(alu_operator(reduce_op))
    unit_scales(scales, len(sources))
    by_row = any(tensor.dynamic is not None for tensor in (dst, *sources))
    if by_row:
        read_modify_write(dst, sources)
        promises_unique(unique_indices)
    elif oob_mode is OobMode.skip:
        skip_needs_rows()

    def compute(*operands: np.ndarray | Masked) -> tuple[np.ndarray | Masked]:
        addends = [element.values if isinstance(element, Masked) else element for element in operands]
        total = reduce(np.add, [element.reshape(dst.shape) for element in addends])
        for element in operands:
            if isinstance(element, Masked):
                return (Masked(total, np.broadcast_to(element.chosen, element.values.shape)),)
        return (total,)

    mode = DgeMode.swdge if by_row else DgeMode.none
    trigger = Engine.gpsimd
    total_bytes = sum(source.size * source.dtype.itemsize for source in sources)
    piece = min(count_contiguous_bytes(tensor) for tensor in (dst, *sources))
    result_bytes = dst.size * dst.dtype.itemsize
    hbm_bytes = sum(end.size * end.dtype.itemsize for end in (dst, *sources) if not end.buffer.on_chip)
    cost = dma_costs.dma(
        hardware,
        trigger,
        mode,
        total_bytes,
        piece,
        dst.buffer.on_chip,
        hbm_bytes,
        result_bytes=result_bytes,
        fraction="dma_compute_fraction",
    )
    return Plan(
        engine=Engine.dma,
        reads=sources,
        writes=(dst,),
        domain=Domain.float32,
        compute=compute,
        cost=cost,
        name=name,
        trigger=trigger,
        skip_out_of_range=oob_mode is OobMode.skip,
        effects=_UNIQUE_ROWS if unique_indices else PLAIN,
        undocumented=rules.violations(
            *rules.flags(unique_indices=unique_indices), (addresses_are_known, (dst, *sources))
        ),
    )


@rule("NKW-DMA-COMPUTE-SOURCES", hint="srcs=[a, b]")
def source_list(srcs: Any) -> None:
    """srcs is a list of 1 to 16 tensors.

    Raises RuleViolation otherwise.
    """
    if not isinstance(srcs, (list, tuple)) or not 1 <= len(srcs) <= _SOURCES_MAX:
        seen = f"{len(srcs)} sources" if isinstance(srcs, (list, tuple)) else f"srcs is {type(srcs).__name__}"
        raise RuleViolation(source_list, seen)


@rule("NKW-DMA-COMPUTE-OPERATOR", hint="reduce_op=nl.add")
def only_adds(operator: AluOperator) -> None:
    """dma_compute adds; no other operator is supported.

    Raises RuleViolation otherwise.
    """
    if operator.name != "add":
        raise RuleViolation(only_adds, f"reduce_op={operator.name}")


@rule("NKW-DMA-COMPUTE-SCALES", hint="scales=None")
def unit_scales(scales: Any, sources: int) -> None:
    """scales is None or holds 1.0 for every source.

    Raises RuleViolation otherwise.
    """
    if scales is None:
        return
    if not isinstance(scales, (list, tuple)) or len(scales) != sources or any(scale != 1 for scale in scales):
        raise RuleViolation(unit_scales, f"scales={scales!r:.60} for {sources} sources")


@rule("NKW-DMA-COMPUTE-ROWS", hint="dma_compute(dst, [dst, data], nl.add) with the same view twice")
def read_modify_write(dst: NkiTensor, sources: tuple[NkiTensor, ...]) -> None:
    """With row numbers dst is one of two sources: scatter dst[i] += data, or gather dst += src[i].

    Raises RuleViolation if dst and sources have neither form.
    """
    fits = len(sources) == 2 and any(
        _same_view(dst, source) and (other.dynamic is None) != (dst.dynamic is None) and _in_sbuf(dst, other)
        for source, other in (sources, sources[::-1])
    )
    if not fits:
        raise RuleViolation(
            read_modify_write,
            "; ".join(f"{t.describe()}{' by row' if t.dynamic is not None else ''}" for t in (dst, *sources)),
        )


def _in_sbuf(dst: NkiTensor, other: NkiTensor) -> bool:
    return (other if dst.dynamic is not None else dst).buffer is MemoryRegion.sbuf


def _same_view(first: NkiTensor, second: NkiTensor) -> bool:
    if (first.dynamic is None) != (second.dynamic is None):
        return False
    if first.dynamic is not None and second.dynamic is not None:
        if first.dynamic.per_partition != second.dynamic.per_partition:
            return False
        if not _same_view(first.dynamic.index, second.dynamic.index):
            return False
    return (
        first.storage is second.storage
        and first.dtype == second.dtype
        and (first.shape, first.strides, first.offset) == (second.shape, second.strides, second.offset)
    )


@rule("NKW-DMA-COMPUTE-UNIQUE", hint="add duplicates one after the other")
def promises_unique(unique_indices: bool) -> None:
    """Row numbers must be unique, and unique_indices=True promises it.

    Raises RuleViolation unless unique_indices is True; the planner applies it if there are row numbers.
    """
    if unique_indices is not True:
        raise RuleViolation(promises_unique, f"unique_indices={unique_indices}")


@rule("NKW-DMA-COMPUTE-SKIP", hint="oob_mode=nisa.oob_mode.error")
def skip_needs_rows() -> None:
    """oob_mode skip is for row numbers read at run time.

    Raises RuleViolation at every call: the caller has found that the rule is broken.
    """
    raise RuleViolation(skip_needs_rows, "oob_mode=skip with static addresses")


@rule("NKW-DMA-COMPUTE-ADDRESS", hint="copy the rows with nisa.dma_copy, or give .ap a vector_offset")
def addresses_are_known(tensors: tuple[NkiTensor, ...]) -> None:
    """srcs and dst have addresses that are known at compile time, unless a vector_offset gives row numbers.

    Raises RuleViolation if a tensor has a scalar offset that is read at run time.
    """
    for tensor in tensors:
        if tensor.dynamic is not None and not tensor.dynamic.per_partition:
            raise RuleViolation(addresses_are_known, f"{tensor.describe()} has a scalar_offset")
