"""sequence_bounds: where the segment of each element starts and ends."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor


@instruction
def sequence_bounds(
    hardware: Hardware, dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None
) -> Plan:
    """Find bounds of element i's segment: first index in dst[0, 0, i], one past its last in dst[0, 1, i], on GpSimd.

    segment_ids: [1, n] @ SBUF, non-negative. dst: [1, 2, n] @ SBUF. Both float32 or int32. A segment is a run
    of equal adjacent ids, as in the published test; id 0 is padding with start n and end -1. Negative ids are
    refused when the instruction runs.

    Raises RuleViolation. Cost: none is published; one pass in each direction is assumed.
    """
    for operand, tile in (("dst", dst), ("segment_ids", segment_ids)):
        rules.check_tile(hardware, operand, tile, MemoryRegion.sbuf)
        rules.dtype_among(operand, tile, "float32", "int32")
    bounds_shape(dst, segment_ids)
    return Plan(
        engine=Engine.gpsimd,
        reads=(segment_ids,),
        writes=(dst,),
        domain=Domain.bits,
        compute=lambda ids: (_bounds(ids[0]).astype(dst.dtype.storage),),
        cost=costs.gpsimd(hardware, 2 * segment_ids.free_size),
        name=name,
    )


def _bounds(ids: np.ndarray) -> np.ndarray:
    ids_not_negative(ids)
    count = ids.size
    edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    starts, ends = np.concatenate(([0], edges)), np.concatenate((edges, [count]))
    lengths = ends - starts
    bounds = np.stack((np.repeat(starts, lengths), np.repeat(ends, lengths)))
    return np.where(ids == 0, np.array([[count], [-1]]), bounds)


@rule("NKW-SEQUENCE-SHAPE", hint="allocate segment_ids as (1, n) and dst as (1, 2, n)")
def bounds_shape(dst: NkiTensor, segment_ids: NkiTensor) -> None:
    """segment_ids is (1, n) and dst (1, 2, n).

    Raises RuleViolation otherwise.
    """
    if segment_ids.ndim != 2 or segment_ids.shape[0] != 1 or dst.shape != (1, 2, segment_ids.shape[1]):
        raise RuleViolation(bounds_shape, f"dst {dst.shape}, segment_ids {segment_ids.shape}")


@rule("NKW-SEQUENCE-IDS", hint="id 0 marks padding")
def ids_not_negative(ids: np.ndarray) -> None:
    """Segment ids are non-negative.

    Raises RuleViolation otherwise.
    """
    if not (ids >= 0).all():
        raise RuleViolation(ids_not_negative, f"id {ids[~(ids >= 0)][0]}")
