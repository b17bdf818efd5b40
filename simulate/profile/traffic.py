"""Bytes that a launch moves to and from HBM, by tensor, and how often it moves them again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simulate.isa.plan import Synchronization
from simulate.isa.template import Template
from simulate.memory import MemoryRegion
from simulate.profile.moments import format_tensor
from simulate.run.stream import Stream

_IN_HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """Traffic of a tensor in HBM, summed over the ranks that have it.

    `nbytes` is the tensor's size. `read_bytes` and `written_bytes` are what the launch moves from and to it.
    `argument` is true for a tensor passed to the kernel, false for a tensor that the kernel allocates.
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
        """Bytes read over the tensor's size: above 1, bytes are read again; 0 for an empty tensor."""
        return self.read_bytes / self.nbytes if self.nbytes else 0.0

    @property
    def writes(self) -> float:
        """Bytes written over the tensor's size: above 1, bytes are written again; 0 for an empty tensor."""
        return self.written_bytes / self.nbytes if self.nbytes else 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of this tensor that any kernel with these arguments and outputs must move: each at most once each way.

        A tensor that the kernel allocates, writes and reads again counts 0.
        """
        needed = min(self.written_bytes, self.nbytes) if self.argument or not self.read_bytes else 0
        return needed + (min(self.read_bytes, self.nbytes) if self.argument else 0)


def sum_traffic(streams: Sequence[Stream]) -> tuple[TensorTraffic, ...]:
    """Return the traffic of all tensors in HBM that a launch accesses, in descending order of moved bytes.

    An operand moves all elements of its access pattern, in the operand's dtype. That includes rows selected
    at run time and repetitions of a broadcast. A barrier names a tensor and moves nothing.
    """
    read: dict[tuple[int, int], int] = {}
    written: dict[tuple[int, int], int] = {}
    for stream in streams:
        moved = [list(_list_operand_traffic(template)) for template in stream.templates]
        starts = [0, *stream.operand_ends]
        for event, number in enumerate(stream.template_ids):
            for index, writes, nbytes in moved[number]:
                tensor = stream.rank, stream.operands[starts[event] + index]
                moved_bytes = written if writes else read
                moved_bytes[tensor] = moved_bytes.get(tensor, 0) + nbytes
    first = {stream.rank: number for number, stream in reversed(list(enumerate(streams)))}
    merged: dict[tuple[object, ...], list[int]] = {}
    for rank, serial in sorted({*read, *written}):
        record = streams[first[rank]].tensors[serial]
        name = format_tensor(streams, first[rank], serial)
        key = (serial, name, record.shape, record.dtype, record.line is None)
        totals = merged.setdefault(key, [0, 0, 0])
        totals[0] += record.nbytes
        totals[1] += read.get((rank, serial), 0)
        totals[2] += written.get((rank, serial), 0)
    tensors = [TensorTraffic(*key[1:], *totals) for key, totals in merged.items()]  # type: ignore[arg-type]
    return tuple(sorted(tensors, key=lambda tensor: (-tensor.moved_bytes, tensor.name)))


def _list_operand_traffic(template: Template) -> Iterator[tuple[int, bool, int]]:
    """Yield (operand index, is written, bytes) for every operand in HBM of an instruction.

    Nothing for a barrier.
    """
    if template.plan.effects.synchronization is Synchronization.barrier:
        return
    for index, operand in enumerate(template.operands):
        if operand.buffer in _IN_HBM:
            nbytes = math.prod(operand.shape) * operand.dtype.itemsize
            yield index, index in template.writes, nbytes
