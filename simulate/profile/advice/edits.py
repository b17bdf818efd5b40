"""Changed copies of a stream: some events with other costs, operands or engines, as if the kernel were changed.

A stream is the recorded instructions of a launch on one core; an event is one of them. A template is what
equal instructions share: operation, operand boxes, cost. The other modules of this package make an `Edit` for
each piece of advice, and `advise` times the changed stream.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulate.isa.enums import Engine
from simulate.isa.plan import PLAIN, Cost, DmaCost
from simulate.isa.template import READ, Template
from simulate.run.stream import Stream, TensorRecord

NO_TIME = Cost(0.0, 0.0)

Uses = Mapping[int, Sequence[tuple[int, bool]]]
"""Events that use each tensor, in order, each with whether it writes the tensor."""


@dataclass(slots=True)
class Edit:
    """Changes of a stream, collected by the methods and made by `apply`.

    `events` has the new template and operand tensors of each changed event, `tensors` additional tensors.
    `about` names tensors of the kernel if the change concerns some of several. `detail` says what was
    counted, for the report. `order` lists all events in the new program order, or is None; `moved` are the
    events that change their position.
    """

    stream: Stream
    about: tuple[str, ...] = ()
    detail: str = ""
    order: Sequence[int] | None = None
    moved: Sequence[int] = ()
    events: dict[int, tuple[Template, Sequence[int]]] = field(default_factory=dict)
    tensors: list[TensorRecord] = field(default_factory=list)
    _made: dict[tuple[object, ...], Template] = field(default_factory=dict)

    def get_current(self, event: int) -> tuple[Template, Sequence[int]]:
        """Return (template, operand tensors) of an event after the changes so far.

        Tensors are indices in the stream.
        """
        changed = self.events.get(event)
        return changed or (self.stream.template(event), self.stream.tensors_of(event))

    def leave_out(self, event: int) -> None:
        """Make an event take no time and access nothing; the event stays in the stream."""
        template, _ = self.get_current(event)
        key = (id(template), "left out")
        if key not in self._made:
            plan = template.plan
            empty_plan = replace(
                plan,
                engine=plan.trigger or plan.engine,
                trigger=None,
                reads=(),
                writes=(),
                cost=NO_TIME,
                accumulate=None,
                state=None,
                effects=PLAIN,
            )
            self._made[key] = Template(template.op, empty_plan)
        self.events[event] = self._made[key], ()

    def set_cost(self, event: int, cost: Cost, **facts: Any) -> None:
        """Give an event another cost, and replace further fields of its plan.

        Args:
            facts: Fields of the plan by name, such as `engine`.
        """
        template, tensors = self.get_current(event)
        key = (id(template), cost, *facts.items())
        if key not in self._made:
            self._made[key] = _replace_template(template, cost=cost, **facts)
        self.events[event] = self._made[key], tensors

    def rename(self, event: int, old: int, new: int, narrower: int = 1) -> None:
        """Make an event access the tensor `new` instead of `old`.

        Args:
            old: Index of the tensor among its operands.
            new: Index of the other tensor in the stream, or after it for an additional tensor.
            narrower: Ratio of the element sizes of `old` and `new`; byte ranges of boxes shrink by it.
        """
        template, tensors = self.get_current(event)
        if narrower > 1:
            indices = [index for index, tensor in enumerate(tensors) if tensor == old]
            key = (id(template), narrower, *indices)
            if key not in self._made:
                boxes = list(template.boxes)
                for index in indices:
                    access_kind, first_row, end_row, first, end = boxes[index]
                    boxes[index] = access_kind, first_row, end_row, first // narrower, -(-end // narrower)
                self._made[key] = _replace_template(template, boxes)
            template = self._made[key]
        self.events[event] = template, [new if tensor == old else tensor for tensor in tensors]

    def set_operands(
        self, event: int, operands: Sequence[tuple[tuple[int, ...], int]], cost: Cost, **facts: Any
    ) -> None:
        """Give an event other operands and another cost, and replace further fields of its plan.

        Args:
            operands: (box, tensor) of each operand, in any order; a box is its kind of access, then first and
                end of rows and bytes.
            facts: Fields of the plan by name, such as `engine`.
        """
        ordered = sorted(operands, key=lambda operand: operand[0][0] != READ)
        template, _ = self.get_current(event)
        changed_template = _replace_template(template, [box for box, _ in ordered], cost=cost, **facts)
        self.events[event] = changed_template, [tensor for _, tensor in ordered]

    def merge(self, members: Sequence[int], target: int, cost: Cost) -> None:
        """Make the event `target` access what all members access, at the given cost, and leave the other members out.

        Args:
            members: The merged events, among them `target`.
        """
        current = [self.get_current(event) for event in members]
        operands = [operand for template, tensors in current for operand in zip(template.boxes, tensors)]
        for event in members:
            if event != target:
                self.leave_out(event)
        self.set_operands(target, operands, cost)

    def apply(self, foreign_tensors: Sequence[TensorRecord] = ()) -> Stream:
        """Return the changed stream; the original stays unchanged.

        Args:
            foreign_tensors: Tensors that the edits of other cores add; they get the indices before the
                tensors of this edit.
        """
        stream, changed_stream = self.stream, copy.copy(self.stream)
        num_tensors = len(stream.tensors)
        changed_stream.tensors = [*stream.tensors, *foreign_tensors]
        changed_stream.tensors += [
            record._replace(serial=record.serial + len(foreign_tensors)) for record in self.tensors
        ]
        changed_stream.templates, numbers = list(stream.templates), array("I", stream.template_ids)
        template_numbers: dict[int, int] = {}
        operands, start = array("I"), 0
        for event, end in enumerate(stream.operand_ends):
            change = self.events.get(event)
            if change is None:
                operands.extend(stream.operands[start:end])
            else:
                template, tensors = change
                if id(template) not in template_numbers:
                    template_numbers[id(template)] = len(changed_stream.templates)
                    changed_stream.templates.append(template)
                numbers[event] = template_numbers[id(template)]
                operands.extend(
                    [serial + len(foreign_tensors) * (serial >= num_tensors) for serial in tensors]
                )
            start = end
        changed_stream.template_ids, changed_stream.operands, changed_stream._columns = (
            numbers,
            operands,
            None,
        )
        return changed_stream if self.order is None else permute(changed_stream, self.order)


def is_permutable(stream: Stream) -> bool:
    """Return whether a stream's events are ordered by their operands alone, so that `permute` may reorder them.

    That excludes streams with a rendezvous, a requested order or a device loop.
    """
    return not (stream.rendezvous or stream.requested or stream.iterations)


def permute(stream: Stream, order: Sequence[int]) -> Stream:
    """Return a copy of a permutable stream with its events in another program order.

    Args:
        order: All events, in the new order.
    """
    permuted, ends = copy.copy(stream), stream.operand_ends
    operands = array("I")
    for event in order:
        operands.extend(stream.operands[ends[event - 1] if event else 0 : ends[event]])
    permuted.template_ids = array("I", [stream.template_ids[event] for event in order])
    permuted.line_ids = array("I", [stream.line_ids[event] for event in order])
    new_index = {event: index for index, event in enumerate(order)}
    permuted.names = {new_index[event]: name for event, name in stream.names.items()}
    permuted.accumulated = {new_index[event]: mask for event, mask in stream.accumulated.items()}
    permuted.masked = {new_index[event] for event in stream.masked}
    permuted.affine = {new_index[event]: iterations for event, iterations in stream.affine.items()}
    permuted.operands, permuted._columns = operands, None
    return permuted


def join_dma_costs(costs: Sequence[DmaCost]) -> DmaCost:
    """Return the cost of one DMA that moves the bytes of several; it starts and completes once."""
    first = costs[0]
    busy = sum(cost.busy_ns for cost in costs)
    return replace(
        first,
        bytes=sum(cost.bytes for cost in costs),
        descriptors=sum(cost.descriptors for cost in costs),
        busy_ns=busy,
        transfer_ns=busy + max(cost.transfer_ns - cost.busy_ns for cost in costs),
        gpsimd_ns=max(cost.gpsimd_ns for cost in costs),
    )


def collect_uses(stream: Stream) -> Uses:
    """Return, for every tensor, the (event, whether it writes) of all accesses, in order of events."""
    uses: dict[int, list[tuple[int, bool]]] = {}
    for event in range(len(stream)):
        for box, tensor in zip(stream.template(event).boxes, stream.tensors_of(event)):
            uses.setdefault(tensor, []).append((event, box[0] != READ))
    return uses


def count_resident_bytes(stream: Stream, buffer: object) -> int:
    """Return the most bytes of a partition that tiles in use at one time occupy in a memory, if placed without gaps.

    A tile is in use from its first to its last event.

    Args:
        buffer: The memory, a `MemoryRegion`.
    """
    steps: dict[int, int] = {}
    last = stream.last_use
    for tensor, first in stream.first_use.items():
        record = stream.tensors[tensor]
        if record.buffer is buffer:
            steps[first] = steps.get(first, 0) + record.row_bytes
            free_from = last[tensor] + 1
            steps[free_from] = steps.get(free_from, 0) - record.row_bytes
    peak = current = 0
    for step in sorted(steps):
        current += steps[step]
        peak = max(peak, current)
    return peak


def find_trigger_engine(stream: Stream, event: int) -> Engine:
    """Return the engine in whose instruction queue the event is; for a DMA, the engine that triggers it."""
    plan = stream.template(event).plan
    return plan.trigger or plan.engine


def _replace_template(template: Template, boxes: list[Any] | None = None, **plan: Any) -> Template:
    """Return a copy of a template with replaced fields of its plan, and with other boxes if they are given."""
    changed = copy.copy(template)
    changed.boxes = template.boxes if boxes is None else boxes
    changed.plan = replace(template.plan, **plan) if plan else template.plan
    return changed
