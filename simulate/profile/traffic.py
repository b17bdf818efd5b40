"""Bytes that a launch moves to and from HBM, tensor by tensor, and how often it moves them again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simulate.isa.plan import Synchronization
from simulate.isa.template import Template
from simulate.memory import MemoryRegion
from simulate.profile.moments import tensor_label
from simulate.run.stream import Stream

_IN_HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


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

    An instruction moves every element of an operand's access pattern in the operand's dtype, rows found at run time and
    the repetitions of a broadcast included. A barrier names a tensor and moves nothing.
    """
    read: dict[tuple[int, int], int] = {}
    written: dict[tuple[int, int], int] = {}
    for stream in streams:
        moved = [list(_moved(template)) for template in stream.templates]
        starts = [0, *stream.operand_ends]
        for event, number in enumerate(stream.template_ids):
            for place, writes, nbytes in moved[number]:
                tensor = stream.rank, stream.operands[starts[event] + place]
                into = written if writes else read
                into[tensor] = into.get(tensor, 0) + nbytes
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


def _moved(template: Template) -> Iterator[tuple[int, bool, int]]:
    """(place among the operands, whether it is written, bytes) for every operand in HBM."""
    if template.plan.effects.synchronization is Synchronization.barrier:
        return
    for place, operand in enumerate(template.operands):
        if operand.buffer in _IN_HBM:
            nbytes = math.prod(operand.shape) * operand.dtype.itemsize
            yield place, place in template.writes, nbytes
