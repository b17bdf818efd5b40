"""Confidence of a predicted length: which hardware numbers it is computed from, and how well these are known.

A phase of the critical path consists of the terms of its instruction's cost. Each term counts with the
weakest confidence among its numbers.
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
"""Words that reports use for each confidence."""

_ROUNDING = 1e-9
"""Share of the length. It exceeds the rounding error of the few additions per event and is below any phase."""

# Numbers that decide the phases between instructions; no instruction's cost contains these phases.
_BETWEEN = {
    Phase.semaphore: ("semaphore_ns", "same_engine_wait_ns"),
    Phase.table_load: ("activation_table_load_ns",),
}


@dataclass(frozen=True, slots=True)
class Basis:
    """Parts of a critical path in ns, once by confidence, and once by the hardware number that decides them.

    `by_confidence` has (confidence, ns) from documented to guessed, `by_number` (name, confidence, ns) in
    descending order of ns.
    """

    by_confidence: tuple[tuple[Confidence, float], ...]
    by_number: tuple[tuple[str, Confidence, float], ...]


def compute_basis(moments: Moments, path: Sequence[Stretch], hardware: Hardware) -> Basis:
    """Attribute the length of a critical path to hardware numbers and their confidence.

    A term of several numbers counts for the one with the weakest confidence.

    Returns:
        Sums in ns by confidence, and by number in descending order of ns. Numbers of 0 ns are left out.
    """
    ns_by_number: dict[str, float] = {}
    for stretch in path:
        stream, index = moments.stream_of(stretch.event)
        for phase, length in stretch.phases:
            if phase in _BETWEEN:
                most_ns = max(getattr(hardware, name) for name in _BETWEEN[phase])
                assert length <= most_ns + _ROUNDING * stretch.end_ns, f"{phase.value} of {length} ns"
            for numbers, term_ns in _split_phase(stream.costs[stream.cost_ids[index]], phase, length):
                weakest = max(numbers, key=lambda name: _WEAKNESS.index(hardware.provenance[name].confidence))
                ns_by_number[weakest] = ns_by_number.get(weakest, 0.0) + term_ns
    known = [
        (name, hardware.provenance[name].confidence, number_ns)
        for name, number_ns in ns_by_number.items()
        if number_ns
    ]
    sums = {
        confidence: sum(
            number_ns for _, number_confidence, number_ns in known if number_confidence is confidence
        )
        for confidence in _WEAKNESS
    }
    return Basis(tuple(sums.items()), tuple(sorted(known, key=lambda row: (-row[2], row[0]))))


def _split_phase(cost: Cost, phase: Phase, length_ns: float) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (names of hardware numbers, ns) for the terms of one phase of an event, in order.

    The ns add up to `length_ns`. Each term takes its ns until `length_ns` is used up. The last term takes all
    that remains, including delays that the schedule adds. A DMA's data phase that is no longer than its use
    of the DMA engines counts with the numbers that limit that use.

    Args:
        cost: Cost of the event, whose terms are the phase's parts.
        length_ns: Length of the phase on the critical path.
    """
    if phase in _BETWEEN:
        yield _BETWEEN[phase], length_ns
        return
    terms = [term for term in cost.terms if term.phase is phase] or list(cost.terms[-1:])
    if phase is Phase.data and cost.dma is not None and length_ns <= cost.dma.busy_ns * (1.0 + _ROUNDING):
        if cost.dma.hbm_bound:
            yield ("hbm_gb_per_s_per_core",), length_ns
            return
        terms = [term for term in terms if term.grows] or terms
    *leading, last = terms
    for term in leading:
        yield term.numbers, min(term.ns, length_ns)
        length_ns -= min(term.ns, length_ns)
    yield last.numbers, length_ns
