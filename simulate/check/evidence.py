"""Evidence: facts about the values of a launch, observed while it runs, because streams do not store values.

A stream is the record of one core: an event is the index of an instruction in it. It stores the exact layout
of every operand, and the effect of each instruction on the state of its core. Run-time addresses, digests of
written bytes and ranges of operands are values, which `Evidence` observes. The detectors of this package read
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from simulate.check.findings import Finding
from simulate.check.flow import Flow, trace_flow
from simulate.check.footprint import (
    Footprint,
    indexed_footprint,
    may_fold,
    resolve_element_ids,
    resolve_footprint,
    static_footprint,
    written_footprint,
)
from simulate.check.integer_sums import SumsOfLaunch
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
    """Facts about one core's stream: observed while the core ran, or derived from the stream on first use."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.shared: dict[int, tuple[tuple[Footprint, bool], ...]] = {}
        """Accesses of shared HBM by event: the footprint, and whether the access writes."""
        self.written: dict[int, Footprint] = {}
        """Footprints with digests of what DMAs and matmuls wrote, by event."""
        self.addresses: dict[tuple[int, int], np.ndarray] = {}
        """Element ids that run-time addresses of DMAs selected, by event and operand index in the template."""
        self.values = Values()
        self.arithmetic = Arithmetic()
        self.leftovers = Leftovers()
        self.stores = Stores()

    @cached_property
    def accesses(self) -> list[tuple[Access, ...]]:
        """Accesses of every event, one for each operand of its template; computed once for all detectors."""
        return [self._stream.accesses(index) for index in range(len(self._stream))]

    @cached_property
    def flow(self) -> Flow:
        """Data flow between the events through tiles on chip, computed once for all detectors."""
        return trace_flow(self._stream, self.accesses)

    @cached_property
    def registers(self) -> dict[int, Registers]:
        """How each event uses the accumulator registers of its engine, by event; events without a use are absent."""
        uses = self._map_templates(lambda plan: plan.registers)
        return {event: registers for event, registers in uses if registers is not None}

    @cached_property
    def generators(self) -> dict[int, State]:
        """Random generator that an event seeds or draws from, by event; other events are absent."""
        states = self._map_templates(lambda plan: plan.state if plan.registers is None else None)
        return {event: state for event, state in states if state is not None}

    @cached_property
    def automatic(self) -> set[int]:
        """Events that are matmuls with accumulate=None."""
        modes = self._map_templates(lambda plan: plan.accumulate is Accumulate.first_write_overwrites)
        return {event for event, automatic in modes if automatic}

    def _map_templates(self, fact: Callable[[Plan], _Fact]) -> Iterator[tuple[int, _Fact]]:
        """Yield every event with a fact about its plan; the fact is computed once for each template of the stream."""
        facts = [fact(template.plan) for template in self._stream.templates]
        return ((event, facts[number]) for event, number in enumerate(self._stream.template_ids))

    @cached_property
    def transfers(self) -> Transfers:
        """DMAs that read and write one tensor, or that write an element more than once."""
        return Transfers(self._stream, self.addresses)


class Transfers:
    """DMAs that read and write one tensor, and DMAs that write an element more than once, by their exact elements."""

    def __init__(self, stream: Stream, element_ids: dict[tuple[int, int], np.ndarray]) -> None:
        self.onto_themselves: set[int] = set()
        """Events that copy bytes onto themselves."""
        self.overlapping: list[tuple[int, int]] = []
        """Events, with the tensor, whose source and destination overlap without being equal."""
        self.repeated_rows: list[Note] = []
        self._addresses = element_ids
        moves = [self._is_transfer(template) for template in stream.templates]
        folding = [
            moved and self._has_folding_write(template) for moved, template in zip(moves, stream.templates)
        ]
        ends = stream.operand_ends
        for event, number in enumerate(stream.template_ids):
            if not moves[number]:
                continue
            template = stream.templates[number]
            serials = stream.operands[ends[event - 1] if event else 0 : ends[event]]
            if folding[number]:
                self._note_repeated(event, template, serials)
            for source in template.reads:
                for target in template.writes:
                    if serials[source] == serials[target]:
                        self._note_transfer(event, template, serials, source, target)

    @staticmethod
    def _is_transfer(template: Template) -> bool:
        return template.plan.engine is Engine.dma and template.plan.rendezvous is None

    @staticmethod
    def _has_folding_write(template: Template) -> bool:
        operands = [template.operands[index] for index in template.writes]
        return any(operand.dynamic is not None or may_fold(operand.layout) for operand in operands)

    def _build_footprint(
        self, event: int, template: Template, serials: Sequence[int], operand_index: int
    ) -> Footprint:
        layout, element_ids = (
            template.operands[operand_index].layout,
            self._addresses.get((event, operand_index)),
        )
        if element_ids is None:
            return static_footprint(serials[operand_index], layout)
        return indexed_footprint(serials[operand_index], layout, element_ids)

    def _note_repeated(self, event: int, template: Template, serials: Sequence[int]) -> None:
        """Append a note to `repeated_rows` for each result of a DMA with elements that it writes more than once."""
        for target in template.writes:
            touched = self._build_footprint(event, template, serials, target)
            size = touched.ordered_ids().size
            repeated = size - touched.unique_ids().size
            if repeated:
                seen = f"{repeated} of {size} elements are written more than once"
                self.repeated_rows.append(Note(event, serials[target], seen))

    def _note_transfer(
        self, event: int, template: Template, serials: Sequence[int], source: int, target: int
    ) -> None:
        """Add a DMA within one tensor to `onto_themselves` or `overlapping`; disjoint elements are added to neither.

        Args:
            event: The event of the DMA.
            template: Its template.
            serials: The tensors of its operands, by operand index.
            source: Operand index of the view that it reads.
            target: Operand index of the view that it writes, of the same tensor.
        """
        reads, writes = (self._build_footprint(event, template, serials, index) for index in (source, target))
        operand, result = template.operands[source], template.operands[target]
        same = reads == writes if reads.elements is None else operand is result
        if same and operand.dtype == result.dtype and len(template.reads) == 1:
            self.onto_themselves.add(event)
        if not same and reads.meets(writes):
            self.overlapping.append((event, serials[target]))


@dataclass(frozen=True, slots=True)
class Returned:
    """Tensor that a rank's kernel returned, with the number of its bytes that no instruction wrote."""

    rank: int
    tensor: int
    unwritten_bytes: int


class Evidence:
    """Facts about one launch, gathered by an observer of its instructions; detectors read them afterwards.

    `returned` and the arrivals of `nonfinite` are filled when the launch ends.
    """

    def __init__(self) -> None:
        self._cores: dict[int, CoreEvidence] = {}
        self._streams: list[Stream] = []
        self.returned: list[Returned] = []
        self.nonfinite = NonFinite()
        self.integer_sums = SumsOfLaunch()
        """Accumulation groups of matmuls of proven integers; the detector `integer_products` fills them."""
        self.varied: list[Finding] = []
        """Findings of repetitions of the launch, in other orders or under other core schedules."""

    def get_core(self, stream: Stream) -> CoreEvidence:
        """Return the facts about a core's stream; they are created empty, and kept, on the first call for a stream.

        A stream that ran unobserved has no facts about its values.
        """
        core_evidence = self._cores.get(id(stream))
        if core_evidence is None:
            core_evidence = self._cores[id(stream)] = CoreEvidence(stream)
            self._streams.append(stream)  # keeps the stream alive, so that no other object gets its id
        return core_evidence

    def issuing(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Observe the operands of an instruction before it executes; a dry core has no values, so less is observed."""
        core_evidence = self.get_core(core.stream)
        event = len(core.stream)
        core_evidence.leftovers.before(event, kernel_line(), issue, operands)
        if not core.dry:
            core_evidence.values.before(event, issue, operands)
            core_evidence.stores.before(core, issue)
            core_evidence.arithmetic.before(event, issue, operands)
            self.nonfinite.before(core, issue)

    def issued(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Observe the elements that an executed instruction touched, and the results that it wrote."""
        plan, reads, writes = issue
        core_evidence, event = self.get_core(core.stream), len(core.stream)
        by_dma = plan.engine is Engine.dma and plan.rendezvous is None
        # A gather that skips rows may leave elements of the view unchanged, so it counts as no overwrite.
        may_skip = plan.skip_out_of_range and any(tile.dynamic is not None for tile in reads)
        overwrites = by_dma or plan.accumulate not in (None, Accumulate.add)
        if overwrites and not may_skip and len(writes) == 1 and writes[0].dynamic is None:
            core_evidence.written[event] = written_footprint(writes[0], plan)
        if by_dma and any(tile.dynamic is not None for tile in (*reads, *writes)):
            self._addresses(core_evidence, event, plan, reads, writes)
        if core.rank.logical_core_size > 1 and plan.rendezvous is None:
            touched = [
                (
                    written_footprint(tile, plan, keep=True)
                    if writes
                    else resolve_footprint(tile, plan.skip_out_of_range),
                    writes,
                )
                for tiles, writes in ((reads, False), (writes, True))
                for tile in tiles
                if tile.buffer is MemoryRegion.shared_hbm
            ]
            if touched:
                core_evidence.shared[event] = tuple(touched)
        core_evidence.leftovers.after(event, kernel_line(), issue, event in core.stream.masked)
        if not core.dry:
            core_evidence.values.after(event, issue, operands)
            core_evidence.stores.after(core, event, issue)
            core_evidence.arithmetic.after(event, issue, operands)
            self.nonfinite.after(core, issue, operands)

    @staticmethod
    def _addresses(core: CoreEvidence, event: int, plan: Plan, reads: Tensors, writes: Tensors) -> None:
        operand_index = 0
        for tile in (*reads, *writes):
            if tile.dynamic is not None:
                core.addresses[event, operand_index] = resolve_element_ids(tile, plan.skip_out_of_range)
                operand_index += 1  # the index tile is an operand too
            operand_index += 1

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Fill `returned` with the returned tensors and their unwritten bytes; note the NaN and infinities in them.

        Args:
            launch: The launch that has ended.
            returned: What the kernel returned on each rank.
        """
        self.nonfinite.ended(
            (rank, tensor) for rank, value in enumerate(returned) for tensor in find_tensors(value)
        )
        for rank, value in enumerate(returned):
            for tensor in find_tensors(value):
                _, shape, strides, offset, width = tensor.byte_view()
                states = tensor.storage.validity.states(shape, strides, offset, width)
                if isinstance(states, int):
                    missing = 0 if states else tensor.size * width
                else:
                    missing = int(np.count_nonzero(states == 0)) * width
                self.returned.append(Returned(rank, tensor.storage.serial, missing))


def find_tensors(value: Any) -> Iterator[NkiTensor]:
    """Yield the tensors in the return value of a kernel, looking into tuples, lists and dicts."""
    if isinstance(value, NkiTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from find_tensors(element)
    elif isinstance(value, dict):
        yield from find_tensors(list(value.values()))
