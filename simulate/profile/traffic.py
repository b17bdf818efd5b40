"""Bytes that a launch moves to and from HBM, tensor by tensor, and how often it moves them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simulate.isa.enums import Engine
from simulate.memory import MemoryRegion
from simulate.numerics import DTYPES
from simulate.profile.moments import tensor_label
from simulate.run.stream import READ, Access, Stream

_IN_HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
_INDEX_DTYPES = ("int32", "uint32")


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """One tensor in HBM, over all ranks that have it: `nbytes` of storage, bytes read and written by the launch.

    `argument` tells a tensor given to the kernel from one that the kernel allocates.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    argument: bool
    nbytes: int
    read_bytes: int
    written_bytes: int

    @property
    def reads(self) -> float:
        """Bytes read over bytes of storage: above 1, something is read again."""
        return self.read_bytes / self.nbytes if self.nbytes else 0.0

    @property
    def writes(self) -> float:
        """Bytes written over bytes of storage."""
        return self.written_bytes / self.nbytes if self.nbytes else 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def needed_bytes(self) -> int:
        """What any kernel with these arguments and results has to move: each byte at most once each way.

        What a kernel allocates, writes and reads again is its own affair and counts nothing.
        """
        needed = min(self.written_bytes, self.nbytes) if self.argument or not self.read_bytes else 0
        return needed + (min(self.read_bytes, self.nbytes) if self.argument else 0)


def traffic(streams: Sequence[Stream]) -> tuple[TensorTraffic, ...]:
    """The tensors in HBM that a launch touches, the most bytes first.

    A DMA moves what its cost says, a run-time index or a broadcast included; what it moves at the side of a tensor
    is in that tensor's dtype. Collectives and register loads move the boxes of their operands.
    """
    read: dict[tuple[int, int], int] = {}
    written: dict[tuple[int, int], int] = {}
    for stream in streams:
        sums: dict[tuple[int, bool], int] = {}
        in_hbm = [record.buffer in _IN_HBM for record in stream.tensors]
        for event in range(len(stream)):
            for serial, writes, nbytes in _moved(stream, event, in_hbm):
                sums[serial, writes] = sums.get((serial, writes), 0) + nbytes
        for (serial, writes), nbytes in sums.items():
            into = written if writes else read
            into[stream.rank, serial] = into.get((stream.rank, serial), 0) + nbytes
    first = {stream.rank: number for number, stream in reversed(list(enumerate(streams)))}
    merged: dict[tuple[object, ...], list[int]] = {}
    for rank, serial in sorted({*read, *written}):
        record = streams[first[rank]].tensors[serial]
        name = tensor_label(streams, first[rank], serial)
        key = (serial, name, record.shape, record.dtype, record.line is None)
        entry = merged.setdefault(key, [0, 0, 0])
        entry[0] += record.nbytes
        entry[1] += read.get((rank, serial), 0)
        entry[2] += written.get((rank, serial), 0)
    found = [TensorTraffic(*key[1:], *entry) for key, entry in merged.items()]  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda each: (-each.moved_bytes, each.name)))


def _moved(stream: Stream, event: int, in_hbm: Sequence[bool]) -> Iterator[tuple[int, bool, int]]:
    """(tensor, whether it is written, bytes) for every operand of an event in HBM."""
    if stream.engines[event] != Engine.dma.value and event in stream.rendezvous:
        return  # a barrier names a tensor and moves nothing
    rows = stream.rows
    at, end = stream.row_ends[event - 1] if event else 0, stream.row_ends[event]
    if not any(in_hbm[row >> 2] for row in rows[at:end:5]):
        return
    accesses = stream.accesses(event)
    dma = stream.costs[stream.cost_ids[event]].dma
    sources = _sources(stream, event, accesses)
    widths = [_width(stream, access) for access in sources]
    for access in accesses:
        if not in_hbm[access.tensor]:
            continue
        writes = access.kind != READ
        nbytes = (access.end_row - access.first_row) * (access.end_byte - access.first_byte)
        if dma is not None and (writes or access in sources):
            op = stream.op_names[stream.ops[event]]
            if op == "dma_compute":  # its bytes are those of all sources together
                nbytes = dma.bytes * _width(stream, access) // sum(widths)
            elif op == "dma_transpose":  # sources are the rows it gathers, one after another
                nbytes = dma.bytes if writes else dma.bytes // len(sources)
            else:  # its bytes are counted in the wider dtype of both sides
                widest = max([*widths, *(_width(stream, other) for other in accesses if other.kind != READ)])
                nbytes = dma.bytes * _width(stream, access) // widest
        yield access.tensor, writes, nbytes


def _sources(stream: Stream, event: int, accesses: Sequence[Access]) -> list[Access]:
    """What a DMA reads, without the tensors that hold its run-time indices."""
    reads = []
    for access in accesses:
        if access.kind != READ:
            break
        reads.append(access)
    if stream.op_names[stream.ops[event]] not in ("dma_compute", "dma_transpose"):
        return reads[:1]
    data = [access for access in reads if stream.tensors[access.tensor].dtype not in _INDEX_DTYPES]
    return data or reads


def _width(stream: Stream, access: Access) -> int:
    return DTYPES[stream.tensors[access.tensor].dtype].itemsize
