"""Call stacks of the kernel, recorded on request: the loop around an instruction may be in a calling function.

A stream has only the innermost kernel line of an event. `recorded(calls=True)` records the lines of the callers as
well, for every instruction and every allocation. Other launches have ordinary streams, at no extra cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from simulate.isa.template import Template
from simulate.memory import NkiTensor, Storage
from simulate.run.location import list_running_lines
from simulate.run.stream import Line, NkiInstruction, Stream, TensorTable

Chain = tuple[Line, ...]
"""Kernel lines of a call stack, outermost caller first."""


class Calls:
    """Distinct call stacks of a launch; `chains[number]` has the kernel lines of one, outermost caller first."""

    def __init__(self) -> None:
        self.chains: list[Chain] = []
        # The keys have ids of code objects, because code objects take long to hash.
        self._numbers: dict[tuple[int, ...], int] = {}

    def number_running_stack(self, line: Line) -> int:
        """Return the number of the call stack that is running; a new stack is added to `chains`.

        Args:
            line: The kernel line of the event. If the running stack does not end with it, the stack is this line
                alone.
        """
        chain = list_running_lines()
        if not chain or chain[-1] != line:
            chain = (line,)
        key = tuple([key_item for code, number in chain for key_item in (id(code), number)])
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.chains)
            self.chains.append(chain)
        return number


class TracedTable(TensorTable):
    """Tensor table that records the callers' lines of every allocation."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def add(self, storage: Storage) -> None:
        """Give a storage its serial number and append its record, with the lines of its callers."""
        super().add(storage)
        if storage.line is not None:
            chain = self.calls.chains[self.calls.number_running_stack(storage.line)]
            self.records[-1] = self.records[-1]._replace(callers=chain[:-1])

    def stream(self, rank: int, core: int) -> Stream:
        """Return an empty stream of a core, which uses this table and records call stacks (`TracedStream`)."""
        return TracedStream(rank, core, self)


class TracedStream(Stream):
    """Stream that records the call stack of every event."""

    def __init__(self, rank: int, core: int, tensors: TracedTable) -> None:
        super().__init__(rank, core, tensors)
        self._calls = tensors.calls
        self._chain_ids = array("I")

    def append(
        self,
        template: Template,
        reads: Sequence[NkiTensor],
        writes: Sequence[NkiTensor],
        line: Line,
        rendezvous: int | None = None,
    ) -> NkiInstruction:
        """Record one instruction with its call stack as the next event and return its handle; only `issue` calls this.

        Args:
            template: The planned instruction.
            reads: The tensors that it reads.
            writes: The tensors that it writes.
            line: The kernel line.
            rendezvous: The serial number of its rendezvous, if any.
        """
        self._chain_ids.append(self._calls.number_running_stack(line))
        return super().append(template, reads, writes, line, rendezvous)

    def chains(self) -> tuple[Sequence[int], Sequence[Chain]]:
        """Return the index of every event's call stack, and the call stacks: kernel lines, outermost caller first."""
        return self._chain_ids, self._calls.chains
