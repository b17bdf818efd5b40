"""local_gather: every GpSimd core gathers from its 16 partitions by one list of offsets."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import OutOfBounds, RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor

_RUNS = (1, 2, 4, 8, 16, 32)
_INDICES_MAX = 4096
_BATCH = 4  # indices handled together, the `t` of the cost formula


@instruction
def local_gather(
    hardware: Hardware,
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> Plan:
    """Gather dst[p, j, e] = src_buffer[p, list[j] + e] for e < num_elem_per_idx, on GpSimd; bits are kept.

    src_buffer: [P, ...] @ SBUF, free dims flattened, P a multiple of 16. index: [P, ...] uint16 @ SBUF. dst:
    [P, ...] @ SBUF, src_buffer's dtype, num_valid_indices * num_elem_per_idx elements per partition. The list
    of a core is the 16 rows of index that belong to it, flattened with the partition fastest and cut to
    num_valid_indices (default: all, at most 4096). Offsets count elements: published examples multiply row
    numbers by num_elem_per_idx.

    An offset out of range is documented as undefined and refused here when the instruction runs. Release 0.6
    lists as a known issue that it ignores num_elem_per_idx unless dst has just this size; dst must have it
    here.

    Raises RuleViolation, OutOfBounds. Cost: the formula of release 2.26, 150 cycles plus C per element with C
    = (28 + 4 e) / (4 e) / min(4 / itemsize, e). It is printed as a division by C, but C is by construction
    the cycles per element, so it multiplies here.
    """
    for operand, tile in (("dst", dst), ("src_buffer", src_buffer), ("index", index)):
        rules.check_tile(hardware, operand, tile, MemoryRegion.sbuf)
    rules.dtype_among("index", index, "uint16")
    rules.same_dtype("dst", dst, "src_buffer", src_buffer)
    rules.same_partitions("src_buffer", src_buffer, "index", index)
    rules.same_partitions("dst", dst, "src_buffer", src_buffer)
    lanes = hardware.partitions_per_gpsimd_core
    whole_cores(hardware, src_buffer)
    starts = {rules.first_partition(tile) for tile in (dst, src_buffer, index)}
    same_cores(starts)
    run_length(num_elem_per_idx)
    available = index.free_size * lanes
    count = available if num_valid_indices is None else num_valid_indices
    indices_per_core(count, available)
    gathered_elements(dst, count * num_elem_per_idx)
    cores, elements = src_buffer.shape[0] // lanes, src_buffer.free_size

    def compute(data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray]:
        lists = (
            offsets.reshape(cores, lanes, -1)
            .transpose(0, 2, 1)
            .reshape(cores, -1)[:, :count]
            .astype(np.int64)
        )
        offsets_inside(lists.max() + num_elem_per_idx - 1, elements)
        positions = (lists[:, :, None] + np.arange(num_elem_per_idx)).reshape(cores, 1, -1)
        rows = data.reshape(cores, lanes, elements)
        return (
            np.take_along_axis(rows, np.broadcast_to(positions, (cores, lanes, positions.shape[2])), axis=2),
        )

    read_together = min(4 / src_buffer.dtype.itemsize, num_elem_per_idx)
    batch = _BATCH * num_elem_per_idx
    return Plan(
        engine=Engine.gpsimd,
        reads=(src_buffer, index),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.gpsimd(hardware, count * num_elem_per_idx * (28 + batch) / batch / read_together),
        name=name,
        propagate=propagation.by_partition,
    )


@rule("NKW-GATHER-CORES", hint="pass 16, 32, … partitions")
def whole_cores(hardware: Hardware, src_buffer: NkiTensor) -> None:
    """Operands cover whole GpSimd cores: a multiple of 16 partitions.

    Raises RuleViolation if src_buffer covers another number of partitions.
    """
    if src_buffer.shape[0] % hardware.partitions_per_gpsimd_core:
        raise RuleViolation(
            whole_cores,
            f"src_buffer has {src_buffer.shape[0]} partitions",
            limit=f"a multiple of {hardware.partitions_per_gpsimd_core}",
        )


@rule("NKW-GATHER-SAME-CORES", hint="move one with a DMA")
def same_cores(starts: set[int]) -> None:
    """A GpSimd core gathers within its own 16 partitions, so all operands start at the same partition.

    Raises RuleViolation otherwise.
    """
    if len(starts) > 1:
        raise RuleViolation(same_cores, f"operands start at partitions {sorted(starts)}")


@rule("NKW-GATHER-RUN", hint="gather shorter runs of consecutive elements in several instructions")
def run_length(num_elem_per_idx: Any) -> None:
    """num_elem_per_idx is 1, 2, 4, 8, 16 or 32.

    Raises RuleViolation otherwise.
    """
    if num_elem_per_idx not in _RUNS:
        raise RuleViolation(
            run_length, f"num_elem_per_idx={num_elem_per_idx!r:.40}", limit=", ".join(map(str, _RUNS))
        )


@rule("NKW-GATHER-COUNT", hint="gather in several instructions")
def indices_per_core(count: Any, available: int) -> None:
    """Each core has 1 to 4096 indices, and no more than its 16 partitions of index hold.

    Raises RuleViolation otherwise.
    """
    limit = min(available, _INDICES_MAX)
    if not isinstance(count, (int, np.integer)) or not 1 <= count <= limit:
        raise RuleViolation(indices_per_core, f"{count!r:.40} indices per core", limit=f"{limit}")


@rule("NKW-GATHER-OUTPUT", hint="allocate or slice dst with so many elements per partition")
def gathered_elements(dst: NkiTensor, elements: int) -> None:
    """dst has num_valid_indices * num_elem_per_idx elements per partition.

    Raises RuleViolation otherwise.
    """
    if dst.free_size != elements:
        raise RuleViolation(
            gathered_elements, f"dst has {dst.free_size} elements per partition", limit=f"{elements}"
        )


@rule(
    "NKW-GATHER-OFFSET",
    hint="correct the index: offsets count elements, and num_elem_per_idx elements must follow",
)
def offsets_inside(last: int, elements: int) -> None:
    """Every offset, and the run that follows it, lies inside a partition of src_buffer.

    Raises OutOfBounds otherwise.
    """
    if last >= elements:
        raise OutOfBounds(offsets_inside, f"an index reaches element {last}", limit=f"0 to {elements - 1}")
