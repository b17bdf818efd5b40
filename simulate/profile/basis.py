"""The basis of a predicted length: published, derived or assumed numbers of the hardware record.

Every phase of the critical path is made of the terms of its instruction's cost; each term counts with the weakest
confidence among its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simulate.hardware import Confidence, Hardware
from simulate.isa.plan import Cost
from simulate.profile.critical_path import Phase, Stretch
from simulate.profile.moments import Moments

_WEAKNESS = (Confidence.documented, Confidence.derived, Confidence.guessed)
CALLED = {
    Confidence.documented: "published",
    Confidence.derived: "derived",
    Confidence.guessed: "assumed",
}

_ROUNDING = 1e-9
"""Of the length: more than the rounding of the few sums per event that moments are, less than any phase."""

# The phases between instructions, which no instruction's cost holds.
_BETWEEN = {
    Phase.semaphore: ("semaphore_ns", "same_engine_wait_ns"),
    Phase.table_load: ("activation_table_load_ns",),
}


@dataclass(frozen=True, slots=True)
class Basis:
    """Nanoseconds of the critical path by confidence, and by the number that decides each."""

    by_confidence: tuple[tuple[Confidence, float], ...]
    by_number: tuple[tuple[str, Confidence, float], ...]


def basis(moments: Moments, path: Sequence[Stretch], hardware: Hardware) -> Basis:
    """The basis of a critical path's length; the numbers that decide most of it come first."""
    found: dict[str, float] = {}
    for stretch in path:
        stream, index = moments.stream_of(stretch.event)
        for phase, length in stretch.phases:
            if phase in _BETWEEN:
                most_ns = max(getattr(hardware, name) for name in _BETWEEN[phase])
                assert length <= most_ns + _ROUNDING * stretch.end_ns, f"{phase.value} of {length} ns"
            for numbers, part in _parts(stream.costs[stream.cost_ids[index]], phase, length):
                weakest = max(numbers, key=lambda name: _WEAKNESS.index(hardware.provenance[name].confidence))
                found[weakest] = found.get(weakest, 0.0) + part
    known = [(name, hardware.provenance[name].confidence, part) for name, part in found.items() if part]
    sums = {each: sum(part for _, has, part in known if has is each) for each in _WEAKNESS}
    return Basis(tuple(sums.items()), tuple(sorted(known, key=lambda entry: (-entry[2], entry[0]))))


def _parts(cost: Cost, phase: Phase, length: float) -> Iterator[tuple[tuple[str, ...], float]]:
    """(numbers, nanoseconds) that a phase of an event is made of: its terms one after another, as long as they last.

    What a schedule adds to a phase counts with its last term. Where the DMA engines are waited for, a DMA's data phase
    is no longer than it holds them, which rests on what limits them.
    """
    if phase in _BETWEEN:
        yield _BETWEEN[phase], length
        return
    terms = [term for term in cost.terms if term.phase is phase] or list(cost.terms[-1:])
    if phase is Phase.data and cost.dma is not None and length <= cost.dma.busy_ns * (1.0 + _ROUNDING):
        if cost.dma.hbm_bound:
            yield ("hbm_gb_per_s_per_core",), length
            return
        terms = [term for term in terms if term.grows] or terms
    *before, last = terms
    for term in before:
        yield term.numbers, min(term.ns, length)
        length -= min(term.ns, length)
    yield last.numbers, length
