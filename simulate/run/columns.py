"""Columns of a stream that follow from its templates, computed when a reader first needs them.

A column has one value for each event, or is a table that such values index. A template has what equal calls share:
the plan with engine and cost, and a box for each operand (`simulate.isa.template`). `Stream` has an attribute for
each column.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from simulate.isa.plan import Cost, State
from simulate.isa.template import Template

_ROW = 5  # tensor * 4 + access kind, first row, end row, first byte, end byte


class Columns:
    """Columns of the first `events` events of a stream."""

    def __init__(
        self, templates: Sequence[Template], template_ids: Sequence[int], operands: Sequence[int]
    ) -> None:
        """Set the data of a stream from which columns are computed.

        Args:
            templates: The distinct templates.
            template_ids: The index in `templates` of every event.
            operands: The serial numbers of the tensors of all operands, event by event.
        """
        self.events = len(template_ids)
        self._templates = templates
        self._numbers = template_ids
        self._operands = operands

    def _expand_column(self, code: str, values: Sequence[int]) -> array[int]:
        """Return an array of typecode `code`: for each event, the value in `values` of its template."""
        return array(code, [values[number] for number in self._numbers])

    @cached_property
    def op_names(self) -> list[str]:
        """Distinct names of the instructions, in the order of the templates."""
        return list(dict.fromkeys(template.op for template in self._templates))

    @cached_property
    def ops(self) -> array[int]:
        """Index in `op_names` of every event."""
        numbers = {name: number for number, name in enumerate(self.op_names)}
        return self._expand_column("H", [numbers[template.op] for template in self._templates])

    @cached_property
    def engines(self) -> array[int]:
        """Number (`Engine.number`) of the engine that executes the event, for every event."""
        return self._expand_column("B", [template.plan.engine.number for template in self._templates])

    @cached_property
    def triggers(self) -> array[int]:
        """Number of the engine whose instruction stream starts the event: a DMA's trigger, else the event's engine."""
        plans = [template.plan for template in self._templates]
        return self._expand_column("B", [(plan.trigger or plan.engine).number for plan in plans])

    @cached_property
    def costs(self) -> list[Cost]:
        """Distinct costs of the templates, which `cost_ids` indexes."""
        return list({id(template.plan.cost): template.plan.cost for template in self._templates}.values())

    @cached_property
    def cost_ids(self) -> array[int]:
        """Index in `costs` of every event."""
        numbers = {id(cost): number for number, cost in enumerate(self.costs)}
        return self._expand_column("I", [numbers[id(template.plan.cost)] for template in self._templates])

    @cached_property
    def states(self) -> dict[int, State]:
        """State that an event uses, such as a random generator of the core, by event; other events are missing."""
        states = [template.plan.state for template in self._templates]
        if not any(states):
            return {}
        event_states = ((event, states[number]) for event, number in enumerate(self._numbers))
        return {event: state for event, state in event_states if state is not None}

    @cached_property
    def operand_ends(self) -> list[int]:
        """End of each event's operands in the stream's `operands`."""
        counts = [len(template.boxes) for template in self._templates]
        return list(accumulate([counts[number] for number in self._numbers]))

    @cached_property
    def row_ends(self) -> array[int]:
        """End of each event's numbers in `rows`."""
        return array("Q", [end * _ROW for end in self.operand_ends])

    @cached_property
    def rows(self) -> array[int]:
        """Five numbers for each operand, flat: tensor * 4 + access kind, first row, end row, first byte, end byte.

        The access kind is READ, WRITE or ACCUMULATE. Rows are partitions on chip, and in HBM all dims but the last.
        The box encloses what an access pattern touches.
        """
        numbers = np.array(self._numbers, np.int64)
        ends = np.array(self.operand_ends, np.int64)
        if not len(self._operands):
            return array("q")
        counts = np.array([len(template.boxes) for template in self._templates], np.int64)
        starts = (np.cumsum(counts) - counts)[numbers]
        counts = counts[numbers]
        box_indices = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
        boxes = np.array([box for template in self._templates for box in template.boxes], np.int64)
        rows = boxes[box_indices]
        rows[:, 0] += np.array(self._operands, np.int64) * 4
        return array("q", rows.tobytes())

    @cached_property
    def first_use(self) -> dict[int, int]:
        """First event that uses a tensor, by the tensor's serial number, in the order of these events."""
        first: dict[int, int] = {}
        for event, start, end in self._list_operand_ranges():
            for serial in self._operands[start:end]:
                if serial not in first:
                    first[serial] = event
        return first

    @cached_property
    def last_use(self) -> dict[int, int]:
        """Last event that uses a tensor, by the tensor's serial number."""
        return {
            serial: event for event, a, b in self._list_operand_ranges() for serial in self._operands[a:b]
        }

    def _list_operand_ranges(self) -> zip[tuple[int, int, int]]:
        """Return (event, start, end of its operands in the stream's `operands`) for every event."""
        ends = self.operand_ends
        return zip(range(self.events), [0, *ends], ends)
