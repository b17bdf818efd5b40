"""all_gather_v and all_to_all_v: exchanges of flat buffers whose counts are known at run time only.

A uint32 metadata tensor, (rows, R) in HBM or (1, rows, R) in SBUF, has a column per rank of the group, in the order of
its list. Rows: 0 send counts, 1 send displacements, 2 received counts (written, unless recv_counts_known), 3 receive
displacements (only with has_rdispls). Counts and displacements are elements. The chunk from rank s lands in slot s of
dst. A chunk that does not lie inside src, or overruns its slot or dst, is refused when the collective runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.book import collective
from simulate.isa.collective_plan import (
    check_in_hbm,
    list_signatures,
    members,
    plan_collective,
    single_tensors,
)
from simulate.isa.plan import Masked, Plan
from simulate.isa.replica_group import ReplicaGroup
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import cast

_GATHER_RANKS = 4


@collective
def all_gather_v(
    hardware: Hardware,
    rank: int,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Send src[displ : displ + count] to all ranks, by column 0 of the metadata; slot s of dst gets rank s's chunk.

    srcs and dsts have one tensor each, in HBM. Slots are equally long: dst's elements over the number of ranks.
    Elements of dst behind a chunk are not changed. Exactly 4 ranks per list, no has_rdispls. The required logical core
    size of 2 belongs to the launch and is not checked.

    Raises RuleViolation, also when it runs.
    """
    group = members(hardware, rank, "all_gather_v", srcs, dsts, replica_group, priority)
    gathers_four(group, has_rdispls)
    flags = rules.flags(recv_counts_known=recv_counts_known, has_rdispls=has_rdispls)
    return _plan(
        *(hardware, "all_gather_v", group, srcs, dsts, metadata_tensor, recv_counts_known, False, True, name),
        undocumented=rules.violations(*flags),
    )


@collective
def all_to_all_v(
    hardware: Hardware,
    rank: int,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Send src[displs[r] : displs[r] + counts[r]] to rank r, by rows 0 and 1 of the metadata.

    The chunk of rank s starts in dst at slot s, or with has_rdispls at element s of row 3. Slots are equally long;
    elements of dst behind a chunk are not changed. srcs and dsts have one tensor each, in HBM, of different sizes if
    need be; dst is of one size on all ranks. Which ranks may form a list depends on the wiring of the machine, which is
    not simulated.

    Raises RuleViolation, also when it runs.
    """
    group = members(hardware, rank, "all_to_all_v", srcs, dsts, replica_group, priority)
    return _plan(
        hardware,
        "all_to_all_v",
        group,
        srcs,
        dsts,
        metadata_tensor,
        recv_counts_known,
        has_rdispls,
        False,
        name,
        rules.violations(
            *rules.flags(recv_counts_known=recv_counts_known, has_rdispls=has_rdispls),
            (displacements_on_chip, hardware, has_rdispls),
        ),
    )


def _plan(
    hardware: Hardware,
    operation: str,
    group: tuple[int, ...],
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    metadata: NkiTensor,
    counts_known: bool,
    has_rdispls: bool,
    to_all: bool,
    name: str | None,
    undocumented: tuple[RuleViolation, ...],
) -> Plan:
    single_tensors(operation, srcs, dsts)
    check_in_hbm(operation, srcs, dsts)
    metadata_shape(metadata, 4 if has_rdispls else 3, len(group))
    src, dst = srcs[0], dsts[0]
    rows = [metadata[..., row : row + 1, :] for row in range(metadata.shape[-2])]
    sends = metadata[..., 0:2, :]
    spaced = np.arange(len(group)) * (dst.size // len(group))

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray | Masked]]:
        sent = []
        for position, (data, table, *_) in enumerate(operands):
            counts, displacements = table.reshape(2, -1).astype(np.int64)
            if to_all:
                counts, displacements = (
                    np.full_like(counts, counts[0]),
                    np.full_like(counts, displacements[0]),
                )
            sent.append(_chunks(data.reshape(-1), counts, displacements, group[position]))
        results: list[list[np.ndarray | Masked]] = []
        for position, operand in enumerate(operands):
            received = [chunks[position] for chunks in sent]
            if has_rdispls:
                slots, ends = operand[2].reshape(-1).astype(np.int64), np.full(len(group), dst.size)
            else:
                slots, ends = spaced, np.append(spaced[1:], dst.size)
            landed = _landed(received, slots, ends, dst.size, group[position])
            values = cast(landed.values, src.dtype, dst.dtype)
            counts = np.array([chunk.size for chunk in received], np.uint32)
            results.append([Masked(values, landed.chosen)] + ([] if counts_known else [counts]))
        return results

    reads = (src, sends, rows[3]) if has_rdispls else (src, sends)
    writes = (dst,) if counts_known else (dst, rows[2])
    return plan_collective(
        *(hardware, operation, group, reads, writes, exchange, name),
        recv_counts_known=counts_known,
        has_rdispls=has_rdispls,
        src_dtype=str(src.dtype),
        undocumented=undocumented,
        **list_signatures(dsts=dsts),
    )


def _chunks(data: np.ndarray, counts: np.ndarray, displacements: np.ndarray, rank: int) -> list[np.ndarray]:
    for count, start in zip(counts, displacements):
        chunk_inside_source(rank, int(start), int(count), data.size)
    return [data[start : start + count] for count, start in zip(counts, displacements)]


def _landed(
    received: list[np.ndarray], slots: np.ndarray, ends: np.ndarray, elements: int, rank: int
) -> Masked:
    values = np.zeros(elements, received[0].dtype)
    chosen = np.zeros(elements, bool)
    for chunk, start, end in zip(received, slots, ends):
        chunk_inside_slot(rank, int(start), chunk.size, int(end))
        values[start : start + chunk.size] = chunk
        chosen[start : start + chunk.size] = True
    return Masked(values, chosen)


@rule("NKW-METADATA", hint="allocate the metadata with one column per rank of the group and these rows")
def metadata_shape(metadata: Any, rows: int, ranks: int) -> None:
    """The metadata tensor is uint32, (rows, R) in HBM or (1, rows, R) in SBUF, of 3 rows or 4 (has_rdispls).

    Raises RuleViolation unless it has this dtype and memory, and `rows` rows and a column per rank.
    """
    rules.is_tensor("metadata_tensor", metadata)
    in_sbuf = metadata.buffer is MemoryRegion.sbuf
    wanted = (1, rows, ranks) if in_sbuf else (rows, ranks)
    if metadata.buffer is MemoryRegion.psum or metadata.dtype != "uint32" or metadata.shape != wanted:
        raise RuleViolation(
            metadata_shape, f"metadata_tensor is {metadata.describe()}", limit=f"{wanted} uint32"
        )


@rule("NKW-METADATA-DISPLACEMENTS", hint="leave has_rdispls out: chunks lie in equal slots")
def displacements_on_chip(hardware: Hardware, has_rdispls: bool) -> None:
    """Receive displacements of all_to_all_v are supported on instances with a NeuronSwitch only (trn3).

    Raises RuleViolation if has_rdispls is True and the chip does not support it.
    """
    if has_rdispls and not hardware.receive_displacements:
        raise RuleViolation(displacements_on_chip, f"has_rdispls=True on {hardware.name}")


@rule("NKW-GATHER-V-RANKS", hint="nki.collectives.all_gather")
def gathers_four(group: tuple[int, ...], has_rdispls: bool) -> None:
    """all_gather_v takes exactly 4 ranks per list and no receive displacements.

    Raises RuleViolation otherwise.
    """
    if len(group) != _GATHER_RANKS or has_rdispls:
        raise RuleViolation(gathers_four, f"{len(group)} ranks, has_rdispls={has_rdispls}")


@rule("NKW-METADATA-SEND", hint="make count and displacement in the metadata end inside src")
def chunk_inside_source(rank: int, start: int, count: int, elements: int) -> None:
    """Every chunk that is sent lies inside src.

    Raises RuleViolation otherwise.
    """
    if start + count > elements:
        raise RuleViolation(
            chunk_inside_source,
            f"rank {rank} sends elements {start} to {start + count - 1}",
            limit=f"{elements} elements",
        )


@rule("NKW-METADATA-RECEIVE", hint="make dst larger, or place chunks with has_rdispls")
def chunk_inside_slot(rank: int, start: int, count: int, end: int) -> None:
    """Every chunk that is received fits its slot in dst.

    Raises RuleViolation otherwise.
    """
    if start + count > end:
        raise RuleViolation(
            chunk_inside_slot,
            f"rank {rank} receives elements {start} to {start + count - 1}",
            limit=f"up to {end - 1}",
        )
