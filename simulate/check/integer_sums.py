"""Sums of products of integers: accumulation groups of matmuls whose float32 sums are exact by the ranges of operands.

An operand is a proven integer if each of its possible values (`value_flow`) is a small integer times one power of two.
Every product of two such operands, and every sum of products whose magnitudes add up to at most 2**24 of their common
unit, is a float32. So the sum is exact in any order. Operands that are not proven integers give no statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simulate.check.possible_values import Codes, Integers, Possible
from simulate.check.value_flow import follow_values
from simulate.isa.template import Template
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.layout import Layout
from simulate.run import Launch
from simulate.run.stream import ACCUMULATE, Line, Stream

LARGEST_FACTOR = 1 << 12
"""Largest magnitude of an operand's integers. Numbers of all 8-bit floats in units of their smallest are larger: they
are no integers that somebody multiplies as such."""
_SMALLEST_EXPONENT = -126  # of normal float32 numbers

Box = tuple[int, int, int, int]
"""First and end row, first and end byte, of a region of a PSUM tensor."""


@dataclass(frozen=True, eq=False)
class IntegerSum:
    """Accumulation group of matmuls of proven integers, up to one of its matmuls.

    Attributes:
        stream: The stream of the core.
        event: The latest matmul of the group.
        depth: Number of products of each element of the sum, K.
        factors: Largest magnitudes of the integers of the latest matmul's operands.
        bound: Largest magnitude of the sum, in units of 2**exponent.
        exponent: Exponent of the unit of all products.
    """

    stream: Stream
    event: int
    depth: int
    factors: tuple[int, int]
    bound: int
    exponent: int

    def is_exact(self, limit: int) -> bool:
        """Return whether float32 represents every integer up to the bound; `limit` is the largest exact integer."""
        return self.bound <= limit and self.exponent >= _SMALLEST_EXPONENT

    @property
    def line(self) -> Line:
        """Kernel line of the latest matmul."""
        return self.stream.lines[self.stream.line_ids[self.event]]


@dataclass
class SumsOfLaunch:
    """Accumulation groups of a launch: those of proven integers, and the lines of matmuls without a proof."""

    sums: list[IntegerSum] = field(default_factory=list)
    unproven_lines: dict[Line, int] = field(default_factory=dict)
    """Number of matmuls by kernel line whose operands are not proven integers."""


def find_integer_sums(launch: Launch) -> SumsOfLaunch:
    """Return the accumulation groups of a launch whose operands are proven integers, in the order of their ends."""
    groups = _Groups()
    follow_values(launch, groups.visit)
    groups.gathered.sums.extend(sorted(groups.live.values(), key=lambda group: group.event))
    return groups.gathered


class _Region(NamedTuple):
    """Region of a PSUM tensor that one instruction wrote: its enclosing box, its layout, and what it sums.

    `group` is None for values that are no sum of proven integers.
    """

    box: Box
    layout: Layout
    group: IntegerSum | None


class _Groups:
    """Accumulation groups by region of PSUM, while a launch is followed."""

    def __init__(self) -> None:
        self.gathered = SumsOfLaunch()
        self.live: dict[int, IntegerSum] = {}
        self._regions: dict[tuple[int, int], list[_Region]] = {}

    def visit(
        self,
        stream: Stream,
        event: int,
        template: Template,
        tensors: Sequence[int],
        operands: Sequence[Possible],
    ) -> None:
        """Update the groups with the writes of an event to PSUM."""
        for index in template.writes:
            tile = template.operands[index]
            if tile.buffer is not MemoryRegion.psum:
                continue
            box = template.boxes[index][1:]
            regions = self._regions.get((id(stream), tensors[index]), [])
            group = None
            if template.plan.effects.sums_products:
                group = _multiply(stream, event, template, operands)
                adds = template.boxes[index][0] == ACCUMULATE
                if adds and stream.accumulated.get(event, True) is not False:
                    group = self._add([region.group for region in regions if _meet(region.box, box)], group)
                if group is None:
                    line = stream.lines[stream.line_ids[event]]
                    self.gathered.unproven_lines[line] = self.gathered.unproven_lines.get(line, 0) + 1
                else:
                    self.live[id(group)] = group
            covers = template.direct and event not in stream.masked
            is_dense = covers and _is_dense(tile, box)
            remaining = [
                region
                for region in regions
                if not (covers and region.layout is tile.layout)
                and not (is_dense and _contains(box, region.box))
            ]
            self._regions[id(stream), tensors[index]] = [*remaining, _Region(box, tile.layout, group)]

    def _add(self, earlier: Sequence[IntegerSum | None], group: IntegerSum | None) -> IntegerSum | None:
        """Return the group that continues earlier ones, which it replaces; None if one of them is not proven."""
        if group is None or not earlier or None in earlier:
            for group_before in earlier:
                if group_before is not None:
                    self.live.pop(id(group_before), None)
            return None
        proven = [group_before for group_before in earlier if group_before is not None]
        exponent = min(summand.exponent for summand in (*proven, group))
        bounds = [summand.bound << summand.exponent - exponent for summand in proven]
        for summand in proven:
            self.live.pop(id(summand), None)
        return IntegerSum(
            group.stream,
            group.event,
            group.depth + max(summand.depth for summand in proven),
            group.factors,
            (group.bound << group.exponent - exponent) + max(bounds),
            exponent,
        )


def _multiply(
    stream: Stream, event: int, template: Template, operands: Sequence[Possible]
) -> IntegerSum | None:
    """Return the group of one matmul; None if an operand is no proven integer or the result is not float32."""
    plan = template.plan
    factors = [_get_integers(possible) for possible in operands]
    if len(factors) != 2 or None in factors or plan.writes[0].dtype != "float32":
        return None
    first, second = (factor for factor in factors if factor is not None)
    depth = plan.reads[0].size // plan.writes[0].shape[0]
    return IntegerSum(
        stream,
        event,
        depth,
        (first.largest, second.largest),
        depth * first.largest * second.largest,
        first.exponent + second.exponent,
    )


def _get_integers(possible: Possible) -> Integers | None:
    integers = possible.integers if isinstance(possible, Codes) else None
    return integers if integers is not None and integers.largest <= LARGEST_FACTOR else None


def _is_dense(tile: NkiTensor, box: Box) -> bool:
    """Return whether a view contains every byte of its enclosing box once."""
    nbytes = (box[1] - box[0]) * (box[3] - box[2])
    return tile.layout.boxes[0] is not None and nbytes == tile.size * tile.dtype.itemsize


def _meet(first: Box, second: Box) -> bool:
    return first[0] < second[1] and second[0] < first[1] and first[2] < second[3] and second[2] < first[3]


def _contains(outer: Box, inner: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] >= inner[1] and outer[2] <= inner[2] and outer[3] >= inner[3]
