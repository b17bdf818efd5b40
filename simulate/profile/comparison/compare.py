"""One measured run against another: which lines, engines, phases and tensors make the difference.

The critical path of either run adds up to its length. So the differences of the parts, whichever way these are
grouped, add up to the difference of the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fractions import Fraction
from functools import cached_property
from typing import TypeVar

from simulate.profile.comparison.measured import Measured, PathPart, Place

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Cause:
    """What a line, an engine, a phase or a tensor takes in either run: ns of the critical path, or bytes of HBM.

    `place` is the line in the run that is compared, `earlier` the line in the run that it is compared with; None where
    a run has no such line, and for all that is no line.
    """

    name: str
    against: float
    now: float
    place: Place | None = None
    earlier: Place | None = None

    @property
    def change(self) -> float:
        """What the cause adds to the difference; below 0 for a gain."""
        return self.now - self.against


@dataclass(frozen=True)
class Comparison:
    """The run `now` against the run `against`."""

    now: Measured
    against: Measured

    @property
    def change_ns(self) -> float:
        """How much longer `now` takes; below 0 where it is faster."""
        return self.now.length_ns - self.against.length_ns

    def slower_by_more_than(self, share: Fraction) -> bool:
        """Whether `now` takes longer than `against` and this share of it on top; equal is not longer."""
        return Fraction(self.now.length_ns) > Fraction(self.against.length_ns) * (1 + share)

    @cached_property
    def lines(self) -> tuple[Cause, ...]:
        """The critical path by line and instruction, the largest change first."""
        pairs = matched(_places(self.against), _places(self.now))
        number = {place: at for at, (_, place) in enumerate(pairs) if place is not None}
        earlier = {place: at for at, (place, _) in enumerate(pairs) if place is not None}
        found = _causes(
            _sums(self.against.path, lambda part: (earlier[part.place], part.op)),
            _sums(self.now.path, lambda part: (number[part.place], part.op)),
        )
        return tuple(
            Cause(op, before, after, pairs[at][1], pairs[at][0]) for (at, op), before, after in found
        )

    @cached_property
    def engines(self) -> tuple[Cause, ...]:
        """The critical path by engine or DMA queue, the largest change first."""
        return self._by(lambda part: part.engine)

    @cached_property
    def phases(self) -> tuple[Cause, ...]:
        """The critical path by phase, the largest change first."""
        return self._by(lambda part: part.phase)

    @cached_property
    def tensors(self) -> tuple[Cause, ...]:
        """Bytes to and from HBM by the tensors' names, the largest change first."""
        found = _causes(_bytes(self.against), _bytes(self.now))
        return tuple(Cause(name, before, after) for name, before, after in found)

    def _by(self, key: Callable[[PathPart], str]) -> tuple[Cause, ...]:
        found = _causes(_sums(self.against.path, key), _sums(self.now.path, key))
        return tuple(Cause(name, before, after) for name, before, after in found)


def matched(against: Sequence[Place], now: Sequence[Place]) -> list[tuple[Place | None, Place | None]]:
    """Every line of either run once, with the line of the other run that it is compared with, or None.

    Lines of one number match where the file is the same: where no line that both runs have has another text. Of the
    others, lines match whose texts are in the same order, then lines with equal texts; a line whose text is not known
    is known by its function.
    """
    pairs: list[tuple[Place | None, Place | None]] = []
    texts = {(each.file, each.line): each.text for each in against}
    edited = {each.file for each in now if texts.get((each.file, each.line), each.text) != each.text}
    numbered = {(each.file, each.line, each.function): each for each in against if each.file not in edited}
    rest = []
    for each in now:
        earlier = numbered.pop((each.file, each.line, each.function), None)
        if earlier is None:
            rest.append(each)
        else:
            pairs.append((earlier, each))
    taken = {earlier for earlier, _ in pairs}
    old = [each for each in against if each not in taken]
    blocks = SequenceMatcher(None, [*map(_known_by, old)], [*map(_known_by, rest)], autojunk=False)
    aligned = [
        (old[block.a + step], rest[block.b + step])
        for block in blocks.get_matching_blocks()
        for step in range(block.size)
    ]
    pairs += aligned
    left = {earlier for earlier, _ in aligned}
    placed = {each for _, each in aligned}
    moved: dict[str, list[Place]] = {}
    for each in old:
        if each not in left:
            moved.setdefault(_known_by(each), []).append(each)
    for each in rest:
        if each not in placed:
            same = moved.get(_known_by(each))
            pairs.append((same.pop(0) if same else None, each))
    return pairs + [(each, None) for others in moved.values() for each in others]


def _known_by(place: Place) -> str:
    return place.text or f"in {place.function}"


def _places(run: Measured) -> list[Place]:
    """The lines of a run by file and number."""
    return sorted({part.place for part in run.path}, key=lambda each: (each.file, each.line, each.function))


def _sums(path: Iterable[PathPart], key: Callable[[PathPart], Key]) -> dict[Key, float]:
    parts: dict[Key, list[float]] = {}
    for part in path:
        parts.setdefault(key(part), []).append(part.ns)
    return {each: math.fsum(found) for each, found in parts.items()}


def _bytes(run: Measured) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, read, written in run.traffic:
        sums[name] = sums.get(name, 0) + read + written
    return sums


def _causes(against: dict[Key, float], now: dict[Key, float]) -> list[tuple[Key, float, float]]:
    """What either run has under each key, the largest change first."""
    found = [(key, against.get(key, 0), now.get(key, 0)) for key in dict.fromkeys([*against, *now])]
    return sorted(found, key=lambda each: (-abs(each[2] - each[1]), -max(each[1:]), str(each[0])))
