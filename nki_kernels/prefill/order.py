"""The order in which attention_prefill issues the steps of its tiles, so that all engines work at the same time.

Time is counted in keys: the scores of one key for 128 rows take each engine about a nanosecond. While the scores of a
span are computed, later steps of the spans before are issued between them, as many keys later as it takes until their
operands are there. Nothing here depends on data.
"""

from __future__ import annotations

import nki.language as nl

from nki_kernels.prefill.tiles import (
    exponents,
    exponents_by_key,
    finish,
    multiply,
    recompute,
    score,
    store,
)
from nki_kernels.tiles import PARTITIONS

SLOT = 128
"""Keys between two times of the agenda."""


class Agenda(nl.NKIObject):
    """Steps by the time at which they are issued; those of one time in the order in which they were noted."""

    def __init__(self):
        self.slots = []
        self.done = 0


def note(agenda, time, step, span, start, end):
    """Issue `step` of a span for keys start … end at a time, or with the next steps if that is past."""
    slot = max(time // SLOT, agenda.done)
    while len(agenda.slots) <= slot:
        agenda.slots.append([])
    agenda.slots[slot].append((step, span, start, end))


def issue(agenda, case, time):
    """Issue all steps up to a time; None: all that are left."""
    while agenda.done < len(agenda.slots) and (time is None or agenda.done * SLOT <= time):
        for step, span, start, end in agenda.slots[agenda.done]:
            step(case, span, start, end)
        agenda.done = agenda.done + 1


def issue_all(agenda, case, time):
    """Issue all steps that are left; returns the time from which on steps are issued when they are due."""
    issue(agenda, case, None)
    return max(time, agenda.done * SLOT)


def note_span(agenda, case, span, begin):
    """Note the steps of a span whose scores begin at time `begin`."""
    tuning = case.tuning
    # While the pipeline fills, the Scalar engine waits for the first maxima anyway.
    lag = min(tuning.exponents_after, tuning.exponents_first + begin // tuning.ramp)
    ready = begin + span.end - span.start + lag
    passed = 0
    split = span.start + span.recomputed * PARTITIONS
    for start in range(split, span.end, tuning.exponents):
        end = min(span.end, start + tuning.exponents)
        note(agenda, ready + passed, exponents, span, start, end)
        passed = passed + end - start
        note_products(agenda, span, start, end, ready + passed + tuning.multiply_after)
    for start in range(span.start, split, tuning.recomputed):
        end = min(split, start + tuning.recomputed)
        note(agenda, ready + passed + tuning.recompute_after, recompute, span, start, end)
        note(agenda, ready + passed + tuning.by_key_after, exponents_by_key, span, start, end)
        passed = passed + end - start
        note_products(agenda, span, start, end, ready + passed + tuning.multiply_after)
    done = ready + passed + tuning.multiply_after + tuning.finish_after
    note(agenda, done, finish, span, span.start, span.end)
    if span.last:
        note(agenda, done + tuning.store_after, store, span, span.start, span.end)


def note_products(agenda, span, start, end, time):
    """Note the products of the blocks of keys start … end."""
    for first in range(start, end, PARTITIONS):
        note(agenda, time, multiply, span, first, min(end, first + PARTITIONS))


def score_span(agenda, case, span, begin):
    """Compute the scores of a span from time `begin` on, with what is due between; returns the time at their end."""
    note_span(agenda, case, span, begin)
    time = begin
    for start in range(span.start, span.end, case.tuning.scores):
        end = min(span.end, start + case.tuning.scores)
        score(case, span, start, end)
        time = time + end - start
        issue(agenda, case, time)
    return time
