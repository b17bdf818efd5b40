"""Comparison of two measured runs: which lines, engines, phases and tensors cause the difference.

A run is one or more kernel launches; the baseline is the earlier run. The critical path of each run adds up
to its length. So the differences of its parts, in any grouping, add up to the difference of the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fractions import Fraction
from functools import cached_property
from typing import TypeVar

from simulate.profile.comparison.measured import Measured, PathPart, SourceLine

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Cause:
    """Amount of a line, an engine, a phase or a tensor in both runs: ns of the critical path, or bytes of HBM.

    `against` is the amount in the baseline, `now` in the run that is compared. `source_line` is the line in
    that run, `earlier` the line in the baseline. Each is None if that run lacks the line, and for causes that
    are no lines.
    """

    name: str
    against: float
    now: float
    source_line: SourceLine | None = None
    earlier: SourceLine | None = None

    @property
    def change(self) -> float:
        """Increase over the baseline, in ns or bytes; below 0 if the run has less."""
        return self.now - self.against


@dataclass(frozen=True)
class Comparison:
    """The run `now` against the baseline `against`."""

    now: Measured
    against: Measured

    @property
    def change_ns(self) -> float:
        """Increase of the length over the baseline in ns; below 0 if `now` is faster."""
        return self.now.length_ns - self.against.length_ns

    def slower_by_more_than(self, share: Fraction) -> bool:
        """Return whether the length of `now` exceeds `1 + share` times the length of `against`."""
        return Fraction(self.now.length_ns) > Fraction(self.against.length_ns) * (1 + share)

    @cached_property
    def lines(self) -> tuple[Cause, ...]:
        """Critical path in ns by line and instruction, largest change first, whether increase or decrease."""
        pairs = match_lines(_list_lines(self.against), _list_lines(self.now))
        index_of_now = {
            source_line: index for index, (_, source_line) in enumerate(pairs) if source_line is not None
        }
        index_of_against = {
            source_line: index for index, (source_line, _) in enumerate(pairs) if source_line is not None
        }
        causes = _rank_causes(
            _sum_path(
                self.against.path, lambda path_part: (index_of_against[path_part.source_line], path_part.op)
            ),
            _sum_path(self.now.path, lambda path_part: (index_of_now[path_part.source_line], path_part.op)),
        )
        return tuple(
            Cause(op, against_ns, now_ns, pairs[index][1], pairs[index][0])
            for (index, op), against_ns, now_ns in causes
        )

    @cached_property
    def engines(self) -> tuple[Cause, ...]:
        """Critical path in ns by engine or DMA queue, largest change first, whether increase or decrease."""
        return self._sum_by(lambda path_part: path_part.engine)

    @cached_property
    def phases(self) -> tuple[Cause, ...]:
        """Critical path in ns by phase, largest change first, whether increase or decrease."""
        return self._sum_by(lambda path_part: path_part.phase)

    @cached_property
    def tensors(self) -> tuple[Cause, ...]:
        """Bytes to and from HBM by the tensors' names, largest change first, whether increase or decrease."""
        causes = _rank_causes(_sum_bytes_by_tensor(self.against), _sum_bytes_by_tensor(self.now))
        return tuple(Cause(name, against_bytes, now_bytes) for name, against_bytes, now_bytes in causes)

    def _sum_by(self, key: Callable[[PathPart], str]) -> tuple[Cause, ...]:
        """Return the ns of both critical paths by a key of their parts, largest change first."""
        causes = _rank_causes(_sum_path(self.against.path, key), _sum_path(self.now.path, key))
        return tuple(Cause(name, against_ns, now_ns) for name, against_ns, now_ns in causes)


def match_lines(
    against: Sequence[SourceLine], now: Sequence[SourceLine]
) -> list[tuple[SourceLine | None, SourceLine | None]]:
    """Return every line of either run as a pair (baseline line, compared line), with None for a line of one run only.

    Lines of unchanged files are paired by number. A file is unchanged if no line that both runs have differs
    in text. Remaining lines are paired by text: first those in the same order, then moved lines with equal
    texts. A line without text is identified by its function.

    Args:
        against: Lines of the baseline.
        now: Lines of the compared run.
    """
    pairs: list[tuple[SourceLine | None, SourceLine | None]] = []
    texts = {(source_line.file, source_line.line): source_line.text for source_line in against}
    edited = {
        source_line.file
        for source_line in now
        if texts.get((source_line.file, source_line.line), source_line.text) != source_line.text
    }
    numbered = {
        (source_line.file, source_line.line, source_line.function): source_line
        for source_line in against
        if source_line.file not in edited
    }
    unmatched_now = []
    for source_line in now:
        earlier = numbered.pop((source_line.file, source_line.line, source_line.function), None)
        if earlier is None:
            unmatched_now.append(source_line)
        else:
            pairs.append((earlier, source_line))
    taken = {earlier for earlier, _ in pairs}
    unmatched_against = [source_line for source_line in against if source_line not in taken]
    blocks = SequenceMatcher(
        None, [*map(_identify_line, unmatched_against)], [*map(_identify_line, unmatched_now)], autojunk=False
    )
    aligned = [
        (unmatched_against[block.a + step], unmatched_now[block.b + step])
        for block in blocks.get_matching_blocks()
        for step in range(block.size)
    ]
    pairs += aligned
    aligned_against = {earlier for earlier, _ in aligned}
    aligned_now = {source_line for _, source_line in aligned}
    moved: dict[str, list[SourceLine]] = {}
    for source_line in unmatched_against:
        if source_line not in aligned_against:
            moved.setdefault(_identify_line(source_line), []).append(source_line)
    for source_line in unmatched_now:
        if source_line not in aligned_now:
            same = moved.get(_identify_line(source_line))
            pairs.append((same.pop(0) if same else None, source_line))
    return pairs + [(source_line, None) for source_lines in moved.values() for source_line in source_lines]


def _identify_line(source_line: SourceLine) -> str:
    """Return the text of a line, or "in FUNCTION" if the text is unknown: equal strings mean the same line."""
    return source_line.text or f"in {source_line.function}"


def _list_lines(run: Measured) -> list[SourceLine]:
    """Return the distinct lines of a run's critical path, by file and number."""
    return sorted(
        {path_part.source_line for path_part in run.path},
        key=lambda source_line: (source_line.file, source_line.line, source_line.function),
    )


def _sum_path(path: Iterable[PathPart], key: Callable[[PathPart], Key]) -> dict[Key, float]:
    """Sum the ns of a critical path by a key of its parts; each sum is rounded once."""
    ns_by_key: dict[Key, list[float]] = {}
    for path_part in path:
        ns_by_key.setdefault(key(path_part), []).append(path_part.ns)
    return {path_key: math.fsum(ns_list) for path_key, ns_list in ns_by_key.items()}


def _sum_bytes_by_tensor(run: Measured) -> dict[str, float]:
    """Return the bytes of HBM that a run reads and writes, by tensor name."""
    sums: dict[str, float] = {}
    for name, read, written in run.traffic:
        sums[name] = sums.get(name, 0) + read + written
    return sums


def _rank_causes(against: dict[Key, float], now: dict[Key, float]) -> list[tuple[Key, float, float]]:
    """Return rows of (key, amount of the baseline, amount now), in descending order of the absolute change.

    A key that one run lacks has the amount 0 there.
    """
    rows = [(key, against.get(key, 0), now.get(key, 0)) for key in dict.fromkeys([*against, *now])]
    return sorted(rows, key=lambda row: (-abs(row[2] - row[1]), -max(row[1:]), str(row[0])))
