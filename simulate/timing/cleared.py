"""Cleared accumulators: memsets of zero in PSUM that matmuls take over, and that therefore cost nothing.

A compiler tells the first matmul of an accumulation to overwrite its bank, and omits the memset before it. Published
products that clear their banks so take 240 us on gen3, as products without a memset do. With the memset on an engine,
after the copies of the tile before, they would take 620. A memset is omitted if a matmul writes over it, and if every
byte that is read before it is written again was written by a matmul since. The stream alone decides.

A box is (first partition, end partition, first byte, end byte) of a tensor, with both ends exclusive.
"""

from __future__ import annotations

from collections import defaultdict

from simulate.isa.enums import Engine
from simulate.memory import MemoryRegion
from simulate.run.stream import READ, Stream

_Box = tuple[int, int, int, int]


def find_omitted_memsets(stream: Stream) -> list[int]:
    """Return the events of a stream that are memsets which a compiler omits, ascending; empty if there are none."""
    clears = [cost.clears for cost in stream.costs]
    if not any(clears):
        return []
    in_psum = [record.buffer is MemoryRegion.psum for record in stream.tensors]
    tensor_engine = Engine.tensor.value
    omitted: list[int] = []
    pending: dict[int, list[_Clear]] = defaultdict(list)  # by tensor, oldest first
    rows, start = stream.rows, 0
    for event, (engine, cost, end) in enumerate(zip(stream.engines, stream.cost_ids, stream.row_ends)):
        if clears[cost] and in_psum[rows[start] >> 2]:
            box = (rows[start + 1], rows[start + 2], rows[start + 3], rows[start + 4])
            tensor = rows[start] >> 2
            settled = [clear for clear in pending[tensor] if _within(clear.box, box)]
            omitted += [clear.event for clear in settled if clear.taken]
            pending[tensor] = [
                *(clear for clear in pending[tensor] if clear not in settled),
                _Clear(event, box),
            ]
        else:
            for row in range(start, end, 5):
                known = pending.get(rows[row] >> 2)
                if known:
                    box = (rows[row + 1], rows[row + 2], rows[row + 3], rows[row + 4])
                    by_matmul = engine == tensor_engine and rows[row] & 3 != READ
                    pending[rows[row] >> 2] = [clear for clear in known if clear.survives(box, by_matmul)]
        start = end
    for clears_at_end in pending.values():
        omitted += [clear.event for clear in clears_at_end if clear.taken]
    return sorted(omitted)


class _Clear:
    """Memset of zero that may still turn out to be omitted, and the boxes that matmuls have written over it.

    `taken` is empty until a matmul writes to a byte of the memset; such a memset is not omitted.
    """

    def __init__(self, event: int, box: _Box) -> None:
        self.event = event
        self.taken: list[_Box] = []
        self.box = box

    def survives(self, box: _Box, by_matmul: bool) -> bool:
        """Return whether the memset may still be omitted after an access to `box` of its tensor.

        A write of a matmul is recorded in `taken`. Any other access is allowed if one box of `taken` contains all of
        its bytes that the memset cleared.

        Args:
            box: The box that is read or written.
            by_matmul: Whether a matmul writes it.
        """
        if not _overlap(self.box, box):
            return True
        if by_matmul:
            self._take(box)
            return True
        return any(_within(_common(self.box, box), taken) for taken in self.taken)

    def _take(self, box: _Box) -> None:
        """Add a box to `taken`, merged with the boxes of the same partitions whose byte ranges meet its range."""
        first_row, end_row, first, end = box
        separate = []
        for taken in self.taken:
            if taken[:2] == box[:2] and taken[2] <= end and first <= taken[3]:
                first, end = min(first, taken[2]), max(end, taken[3])
            else:
                separate.append(taken)
        self.taken = [*separate, (first_row, end_row, first, end)]


def _overlap(one: _Box, other: _Box) -> bool:
    """Return whether two boxes have a byte in common."""
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _within(one: _Box, other: _Box) -> bool:
    """Return whether the second box contains the first."""
    return other[0] <= one[0] and one[1] <= other[1] and other[2] <= one[2] and one[3] <= other[3]


def _common(one: _Box, other: _Box) -> _Box:
    """Return the intersection of two overlapping boxes."""
    return max(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2]), min(one[3], other[3])
