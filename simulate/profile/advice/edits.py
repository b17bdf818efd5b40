"""A stream as it would be if the kernel were changed: some of its events with other costs, operands or engines."""

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
"""By tensor its events in order, each with whether it writes."""


@dataclass(slots=True)
class Edit:
    """Changes of one stream: by event its new template and the tensors of its operands, and further tensors.

    `about` names tensors of the kernel where the change is about some of several, `detail` says what was counted.
    `order` lists the events in another program order, and `moved` those of them that the change is about.
    """

    stream: Stream
    about: tuple[str, ...] = ()
    detail: str = ""
    order: Sequence[int] | None = None
    moved: Sequence[int] = ()
    events: dict[int, tuple[Template, Sequence[int]]] = field(default_factory=dict)
    tensors: list[TensorRecord] = field(default_factory=list)
    _made: dict[tuple[object, ...], Template] = field(default_factory=dict)

    def now(self, event: int) -> tuple[Template, Sequence[int]]:
        """The template and the operands of an event after the changes so far."""
        known = self.events.get(event)
        return known or (self.stream.template(event), self.stream.tensors_of(event))

    def leave_out(self, event: int) -> None:
        """The event takes no time, and nothing waits for it."""
        template, _ = self.now(event)
        key = (id(template), "left out")
        if key not in self._made:
            plan = template.plan
            stays = replace(
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
            self._made[key] = Template(template.op, stays)
        self.events[event] = self._made[key], ()

    def cost(self, event: int, cost: Cost, **others: Any) -> None:
        """The event has another cost, and other facts of its plan if they are given."""
        template, tensors = self.now(event)
        key = (id(template), cost, *others.items())
        if key not in self._made:
            self._made[key] = _with(template, cost=cost, **others)
        self.events[event] = self._made[key], tensors

    def rename(self, event: int, old: int, new: int, narrower: int = 1) -> None:
        """The event uses tensor `new` for `old`, whose elements are `narrower` times narrower."""
        template, tensors = self.now(event)
        if narrower > 1:
            places = [place for place, tensor in enumerate(tensors) if tensor == old]
            key = (id(template), narrower, *places)
            if key not in self._made:
                boxes = list(template.boxes)
                for place in places:
                    kind, first_row, end_row, first, end = boxes[place]
                    boxes[place] = kind, first_row, end_row, first // narrower, -(-end // narrower)
                self._made[key] = _with(template, boxes)
            template = self._made[key]
        self.events[event] = template, [new if tensor == old else tensor for tensor in tensors]

    def operate(
        self, event: int, operands: Sequence[tuple[tuple[int, ...], int]], cost: Cost, **others: Any
    ) -> None:
        """The event reads and writes other (box, tensor) operands at another cost."""
        ordered = sorted(operands, key=lambda part: part[0][0] != READ)
        template, _ = self.now(event)
        made = _with(template, [box for box, _ in ordered], cost=cost, **others)
        self.events[event] = made, [tensor for _, tensor in ordered]

    def merge(self, members: Sequence[int], at: int, cost: Cost) -> None:
        """One event in place of several, at the place of member `at`."""
        now = [self.now(event) for event in members]
        parts = [part for template, tensors in now for part in zip(template.boxes, tensors)]
        for event in members:
            if event != at:
                self.leave_out(event)
        self.operate(at, parts, cost)

    def done(self, others: Sequence[TensorRecord] = ()) -> Stream:
        """The changed stream; the one it was made of stays. `others`: tensors that changes of other cores add."""
        stream, other = self.stream, copy.copy(self.stream)
        before = len(stream.tensors)
        other.tensors = [*stream.tensors, *others]
        other.tensors += [each._replace(serial=each.serial + len(others)) for each in self.tensors]
        other.templates, numbers = list(stream.templates), array("I", stream.template_ids)
        known: dict[int, int] = {}
        operands, start = array("I"), 0
        for event, end in enumerate(stream.operand_ends):
            change = self.events.get(event)
            if change is None:
                operands.extend(stream.operands[start:end])
            else:
                template, tensors = change
                if id(template) not in known:
                    known[id(template)] = len(other.templates)
                    other.templates.append(template)
                numbers[event] = known[id(template)]
                operands.extend([serial + len(others) * (serial >= before) for serial in tensors])
            start = end
        other.template_ids, other.operands, other._columns = numbers, operands, None
        return other if self.order is None else permute(other, self.order)


def is_permutable(stream: Stream) -> bool:
    """Return whether only operands order the events: no rendezvous, requested order or device loop does."""
    return not (stream.rendezvous or stream.requested or stream.iterations)


def permute(stream: Stream, order: Sequence[int]) -> Stream:
    """Return a stream with the events of a permutable one in another program order."""
    other, ends = copy.copy(stream), stream.operand_ends
    operands = array("I")
    for event in order:
        operands.extend(stream.operands[ends[event - 1] if event else 0 : ends[event]])
    other.template_ids = array("I", [stream.template_ids[event] for event in order])
    other.line_ids = array("I", [stream.line_ids[event] for event in order])
    place = {event: index for index, event in enumerate(order)}
    other.names = {place[event]: name for event, name in stream.names.items()}
    other.accumulated = {place[event]: mask for event, mask in stream.accumulated.items()}
    other.masked = {place[event] for event in stream.masked}
    other.affine = {place[event]: iterations for event, iterations in stream.affine.items()}
    other.operands, other._columns = operands, None
    return other


def joined(costs: Sequence[DmaCost]) -> DmaCost:
    """One DMA for several: it starts and completes once, and moves all their bytes."""
    first = costs[0]
    busy = sum(each.busy_ns for each in costs)
    return replace(
        first,
        bytes=sum(each.bytes for each in costs),
        descriptors=sum(each.descriptors for each in costs),
        busy_ns=busy,
        transfer_ns=busy + max(each.transfer_ns - each.busy_ns for each in costs),
        gpsimd_ns=max(each.gpsimd_ns for each in costs),
    )


def uses(stream: Stream) -> Uses:
    """The uses of every tensor."""
    found: dict[int, list[tuple[int, bool]]] = {}
    for event in range(len(stream)):
        for box, tensor in zip(stream.template(event).boxes, stream.tensors_of(event)):
            found.setdefault(tensor, []).append((event, box[0] != READ))
    return found


def resident_bytes(stream: Stream, buffer: object) -> int:
    """The most bytes of a partition that tiles of a memory take at one time, placed without gaps."""
    steps: dict[int, int] = {}
    last = stream.last_use
    for tensor, first in stream.first_use.items():
        record = stream.tensors[tensor]
        if record.buffer is buffer:
            steps[first] = steps.get(first, 0) + record.row_bytes
            after = last[tensor] + 1
            steps[after] = steps.get(after, 0) - record.row_bytes
    most = now = 0
    for step in sorted(steps):
        now += steps[step]
        most = max(most, now)
    return most


def triggered_on(stream: Stream, event: int) -> Engine:
    """The engine whose instruction stream has the event."""
    plan = stream.template(event).plan
    return plan.trigger or plan.engine


def _with(template: Template, boxes: list[Any] | None = None, **plan: Any) -> Template:
    """A template with other boxes and other facts of its plan."""
    other = copy.copy(template)
    other.boxes = template.boxes if boxes is None else boxes
    other.plan = replace(template.plan, **plan) if plan else template.plan
    return other
