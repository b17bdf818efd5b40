"""Evidence: facts about the values of a launch that its streams do not hold, observed while the launch runs.

A stream has the exact layout of every operand, and the effect of each instruction on the state of its core. It has no
values: no run-time addresses, no digests of written bytes, no ranges of operands. `Evidence` observes those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from simulate.check.findings import Finding
from simulate.check.flow import Flow, follow
from simulate.check.footprint import Footprint, addressed, addresses, folds, footprint, footprint_of, written
from simulate.check.notes import Note
from simulate.check.observed_arithmetic import Arithmetic
from simulate.check.observed_leftovers import Leftovers
from simulate.check.observed_nonfinite import NonFinite
from simulate.check.observed_stores import Stores
from simulate.check.observed_values import Values
from simulate.isa.enums import Engine
from simulate.isa.plan import Accumulate, Plan, Registers, State
from simulate.isa.template import Template
from simulate.memory import MemoryRegion, NkiTensor
from simulate.run import Launch
from simulate.run.location import kernel_line
from simulate.run.machine import Issue, NeuronCore, Tensors
from simulate.run.stream import Access, Stream

_Fact = TypeVar("_Fact")


class CoreEvidence:
    """Facts about one core's stream, observed while it ran or derived from its templates."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # event: (where, writes)
        self.shared: dict[int, tuple[tuple[Footprint, bool], ...]] = {}
        self.written: dict[int, Footprint] = {}  # by DMAs and matmuls, with digests, by event
        self.addresses: dict[tuple[int, int], np.ndarray] = {}
        """Where the run-time address of a DMA's operand led, by event and the operand's place in the template."""
        self.values = Values()
        self.arithmetic = Arithmetic()
        self.leftovers = Leftovers()
        self.stores = Stores()

    @cached_property
    def accesses(self) -> list[tuple[Access, ...]]:
        """The accesses of every event, computed once for all detectors."""
        return [self._stream.accesses(index) for index in range(len(self._stream))]

    @cached_property
    def flow(self) -> Flow:
        """Which events read the results of which, computed once for all detectors."""
        return follow(self._stream, self.accesses)

    @cached_property
    def registers(self) -> dict[int, Registers]:
        """How events use the accumulator registers of their engine, by event."""
        found = self._by_template(lambda plan: plan.registers)
        return {event: registers for event, registers in found if registers is not None}

    @cached_property
    def generators(self) -> dict[int, State]:
        """The random generator that an event seeds or draws from, by event."""
        found = self._by_template(lambda plan: plan.state if plan.registers is None else None)
        return {event: state for event, state in found if state is not None}

    @cached_property
    def automatic(self) -> set[int]:
        """Matmuls with accumulate=None."""
        found = self._by_template(lambda plan: plan.accumulate is Accumulate.first_write_overwrites)
        return {event for event, automatic in found if automatic}

    def _by_template(self, fact: Callable[[Plan], _Fact]) -> Iterator[tuple[int, _Fact]]:
        known = [fact(template.plan) for template in self._stream.templates]
        return ((event, known[number]) for event, number in enumerate(self._stream.template_ids))

    @cached_property
    def transfers(self) -> Transfers:
        """The DMAs that read and write one tensor, or that write an element twice."""
        return Transfers(self._stream, self.addresses)


class Transfers:
    """DMAs that read and write one tensor, and DMAs that write an element twice, by their exact patterns."""

    def __init__(self, stream: Stream, addresses: dict[tuple[int, int], np.ndarray]) -> None:
        self.onto_themselves: set[int] = set()  # from a place to the same place
        self.overlapping: list[tuple[int, int]] = []  # event, tensor
        self.repeated_rows: list[Note] = []
        self._addresses = addresses
        moves = [self._is_transfer(template) for template in stream.templates]
        folding = [moved and self._may_fold(template) for moved, template in zip(moves, stream.templates)]
        ends = stream.operand_ends
        for event, number in enumerate(stream.template_ids):
            if not moves[number]:
                continue
            template = stream.templates[number]
            serials = stream.operands[ends[event - 1] if event else 0 : ends[event]]
            if folding[number]:
                self._repeated(event, template, serials)
            for source in template.reads:
                for to in template.writes:
                    if serials[source] == serials[to]:
                        self._within(event, template, serials, source, to)

    @staticmethod
    def _is_transfer(template: Template) -> bool:
        return template.plan.engine is Engine.dma and template.plan.rendezvous is None

    @staticmethod
    def _may_fold(template: Template) -> bool:
        operands = [template.operands[place] for place in template.writes]
        return any(operand.dynamic is not None or folds(operand.layout) for operand in operands)

    def _where(self, event: int, template: Template, serials: Sequence[int], place: int) -> Footprint:
        layout, led_to = template.operands[place].layout, self._addresses.get((event, place))
        if led_to is None:
            return footprint_of(serials[place], layout)
        return addressed(serials[place], layout, led_to)

    def _repeated(self, event: int, template: Template, serials: Sequence[int]) -> None:
        for to in template.writes:
            touched = self._where(event, template, serials, to)
            size = touched.in_order().size
            repeated = size - touched.numbers().size
            if repeated:
                seen = f"{repeated} of {size} elements are written more than once"
                self.repeated_rows.append(Note(event, serials[to], seen))

    def _within(self, event: int, template: Template, serials: Sequence[int], source: int, to: int) -> None:
        """A transfer that reads and writes one tensor."""
        there, here = (self._where(event, template, serials, place) for place in (source, to))
        one, other = template.operands[source], template.operands[to]
        same = there == here if there.elements is None else one is other
        if same and one.dtype == other.dtype and len(template.reads) == 1:
            self.onto_themselves.add(event)
        if not same and there.meets(here):
            self.overlapping.append((event, serials[to]))


@dataclass(frozen=True, slots=True)
class Returned:
    """One tensor that a rank's kernel returned."""

    rank: int
    tensor: int
    unwritten_bytes: int


class Evidence:
    """Facts about one launch: the launch reports its instructions here, and detectors read the facts afterwards."""

    def __init__(self) -> None:
        self._cores: dict[int, CoreEvidence] = {}
        self._kept: list[Stream] = []
        self.returned: list[Returned] = []
        self.nonfinite = NonFinite()
        self.varied: list[Finding] = []
        """Findings of executing the launch again, in other orders or under other core schedules."""

    def of(self, stream: Stream) -> CoreEvidence:
        """The facts about a stream; none about its values if it ran unobserved."""
        known = self._cores.get(id(stream))
        if known is None:
            known = self._cores[id(stream)] = CoreEvidence(stream)
            self._kept.append(stream)  # so that its id stays its own
        return known

    def issuing(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Observe the values that an instruction is about to read."""
        known = self.of(core.stream)
        event = len(core.stream)
        known.leftovers.before(event, kernel_line(), issue, operands)
        if not core.dry:
            known.values.before(event, issue, operands)
            known.stores.before(core, issue)
            known.arithmetic.before(event, issue, operands)
            self.nonfinite.before(core, issue)

    def issued(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Observe which elements an instruction touched, and what it wrote."""
        plan, reads, writes = issue
        known, event = self.of(core.stream), len(core.stream)
        by_dma = plan.engine is Engine.dma and plan.rendezvous is None
        # A gather that skips rows may leave parts of the view as they were: it overwrites nothing for sure.
        may_skip = plan.skip_out_of_range and any(tile.dynamic is not None for tile in reads)
        overwrites = by_dma or plan.accumulate not in (None, Accumulate.add)
        if overwrites and not may_skip and len(writes) == 1 and writes[0].dynamic is None:
            known.written[event] = written(writes[0], plan)
        if by_dma and any(tile.dynamic is not None for tile in (*reads, *writes)):
            self._addresses(known, event, plan, reads, writes)
        if core.rank.logical_core_size > 1 and plan.rendezvous is None:
            touched = [
                (
                    written(tile, plan, keep=True) if writes else footprint(tile, plan.skip_out_of_range),
                    writes,
                )
                for tiles, writes in ((reads, False), (writes, True))
                for tile in tiles
                if tile.buffer is MemoryRegion.shared_hbm
            ]
            if touched:
                known.shared[event] = tuple(touched)
        known.leftovers.after(event, kernel_line(), issue, event in core.stream.masked)
        if not core.dry:
            known.values.after(event, issue, operands)
            known.stores.after(core, event, issue)
            known.arithmetic.after(event, issue, operands)
            self.nonfinite.after(core, issue, operands)

    @staticmethod
    def _addresses(core: CoreEvidence, event: int, plan: Plan, reads: Tensors, writes: Tensors) -> None:
        place = 0
        for tile in (*reads, *writes):
            if tile.dynamic is not None:
                core.addresses[event, place] = addresses(tile, plan.skip_out_of_range)
                place += 1  # of the index
            place += 1

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Note which tensors were returned, how much of each was written, and which births of NaN reached them."""
        self.nonfinite.ended(
            (rank, each) for rank, value in enumerate(returned) for each in tensors_of(value)
        )
        for rank, value in enumerate(returned):
            for tensor in tensors_of(value):
                _, shape, strides, offset, width = tensor.byte_view()
                states = tensor.storage.validity.states(shape, strides, offset, width)
                if isinstance(states, int):
                    missing = 0 if states else tensor.size * width
                else:
                    missing = int(np.count_nonzero(states == 0)) * width
                self.returned.append(Returned(rank, tensor.storage.serial, missing))


def tensors_of(value: Any) -> Iterator[NkiTensor]:
    """The tensors in the value that a kernel returned."""
    if isinstance(value, NkiTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
