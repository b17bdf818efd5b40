"""Call stacks of the kernel, recorded on request: the loop around an instruction may be in a calling function.

A stream has only the innermost kernel line of an event. `recorded(calls=True)` records the lines of the callers as
well, for every instruction and every allocation. Other launches have ordinary streams and pay nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from simulate.isa.template import Template
from simulate.memory import NkiTensor, Storage
from simulate.run.location import running_lines
from simulate.run.stream import Line, NkiInstruction, Stream, TensorTable

Chain = tuple[Line, ...]
"""Lines of a kernel, outermost caller first."""


class Calls:
    """The distinct call stacks of a launch, numbered."""

    def __init__(self) -> None:
        self.chains: list[Chain] = []
        self._numbers: dict[
            tuple[int, ...], int
        ] = {}  # by ids of code objects, which take long to hash, and lines

    def here(self, line: Line) -> int:
        """The number of the running call stack; that of `line` alone if the stack does not end there."""
        chain = running_lines()
        if not chain or chain[-1] != line:
            chain = (line,)
        key = tuple([part for code, number in chain for part in (id(code), number)])
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.chains)
            self.chains.append(chain)
        return number


class TracedTable(TensorTable):
    """A tensor table that keeps the callers of every allocation."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def add(self, storage: Storage) -> None:
        """Give a storage its serial number, and record it with the lines of its callers."""
        super().add(storage)
        if storage.line is not None:
            chain = self.calls.chains[self.calls.here(storage.line)]
            self.records[-1] = self.records[-1]._replace(callers=chain[:-1])

    def stream(self, rank: int, core: int) -> Stream:
        """An empty stream of a core that uses these tensors."""
        return TracedStream(rank, core, self)


class TracedStream(Stream):
    """A stream that keeps the callers of every event."""

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
        """Record one instruction with the lines of its callers."""
        self._chain_ids.append(self._calls.here(line))
        return super().append(template, reads, writes, line, rendezvous)

    def chains(self) -> tuple[Sequence[int], Sequence[Chain]]:
        """The number of every event's chain, and the chains."""
        return self._chain_ids, self._calls.chains
