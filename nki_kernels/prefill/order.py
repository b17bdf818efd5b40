"""The order in which attention_prefill issues the steps of its tiles, so that all engines work at the same time.

A *span* is a range of keys whose scores lie in SBUF at one time, for up to 128 rows of one tile of queries. Time is
counted in keys: the scores of one key for 128 rows take each engine about a nanosecond. While the scores of a span are
computed, later steps of the spans before are issued between them, as many keys later as it takes until their operands
are there. Nothing here depends on data.
"""

from __future__ import annotations

import nki.language as nl

from nki_kernels.prefill.span_steps import (
    exponentiate,
    exponentiate_by_key,
    finish,
    multiply,
    score,
    score_by_key,
    store,
)
from nki_kernels.prefill.spans import Chunk
from nki_kernels.tiles import PARTITIONS, allocate_aligned_tile, blocks, ranges

SLOT = 128
"""Keys between two times of the agenda."""


class Agenda(nl.NKIObject):
    """Steps that are due later, by the time at which they are issued, in keys; ties keep the order of notes.

    `slots` has a list of (step, operand) for every SLOT keys. The first `done` slots are issued.
    """

    def __init__(self, launch):
        self.launch = launch
        self.slots = []
        self.done = 0

    def note(self, time, step, operand):
        """Schedule `step(launch, operand)` for `time`, in keys, or for the next call of `issue` if that time is past.

        `operand` is a `Chunk`, a `Span` or a `BlockLoad`.
        """
        slot = max(time // SLOT, self.done)
        while len(self.slots) <= slot:
            self.slots.append([])
        self.slots[slot].append((step, operand))

    def issue(self, time):
        """Issue all scheduled steps whose time is at most `time`, in keys; None issues all that remain."""
        while self.done < len(self.slots) and (time is None or self.done * SLOT <= time):
            for step, operand in self.slots[self.done]:
                step(self.launch, operand)
            self.done += 1

    def issue_all(self, time):
        """Issue all scheduled steps, and return the later of `time` and the first time that the agenda has not passed.

        Steps that are noted for the returned time or later are issued at their time, not before.
        """
        self.issue(None)
        return max(time, self.done * SLOT)


def score_span(agenda, span, first_time):
    """Issue the scores of a `Span`, with the scheduled steps that become due meanwhile; return the time at their end.

    The later steps of the span are scheduled first: exp and products of each chunk of keys, then those of keys whose
    scores are computed again, joining the product with that of the span before, and the store of a last span.

    Args:
        first_time: time of the span's first score, in keys.
    """
    launch, tuning = agenda.launch, agenda.launch.tuning
    dtype = launch.prompts.dtype
    # While the pipeline fills, the Scalar engine waits for the first maxima anyway.
    lag = min(tuning.exponents_after, tuning.exponents_first + first_time // tuning.ramp)
    time = first_time + span.end - span.start + lag
    for start, end in ranges(span.split, span.end, tuning.exponents):
        # DMA transposes write these weights, so the tile's partitions lie a multiple of 32 bytes apart.
        weights = allocate_aligned_tile((PARTITIONS, blocks(end - start), span.rows), dtype)
        chunk = Chunk(span, start, end, weights)
        agenda.note(time, exponentiate, chunk)
        time += end - start
        agenda.note(time + tuning.multiply_after, multiply, chunk)
    for start, end in ranges(span.start, span.split, tuning.recomputed):
        chunk = create_chunk_by_key(launch, span, start, end)
        agenda.note(time + tuning.recompute_after, score_by_key, chunk)
        agenda.note(time + tuning.by_key_after, exponentiate_by_key, chunk)
        time += end - start
        agenda.note(time + tuning.multiply_after, multiply, chunk)
    note_end(agenda, span, time)
    time = first_time
    for start, end in ranges(span.start, span.end, tuning.scores):
        score(launch, span, start, end)
        time += end - start
        agenda.issue(time)
    return time


def score_bounded_span(agenda, span, time):
    """Issue scores and exp of a `Span` of bounded scores, which need no maximum; return the time at their end.

    Products, and steps of spans before that become due meanwhile, are issued between, as many keys later as it takes
    until exp is computed.

    Args:
        time: time of the span's first score, in keys.
    """
    launch, tuning = agenda.launch, agenda.launch.tuning
    for start, end in ranges(span.start, span.end, tuning.recomputed):
        chunk = create_chunk_by_key(launch, span, start, end)
        score_by_key(launch, chunk)
        exponentiate_by_key(launch, chunk)
        time += end - start
        agenda.note(time + tuning.multiply_after, multiply, chunk)
        agenda.issue(time)
    note_end(agenda, span, time)
    return time


def create_chunk_by_key(launch, span, start, end):
    """Return the `Chunk` of keys start … end - 1 of a `Span`, with tiles for scores and weights by key."""
    count = blocks(end - start)
    # Each block has a quarter of a PSUM bank, however few rows it has, because a matmul writes into one bank.
    scores = nl.ndarray((PARTITIONS, count, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    weights = nl.ndarray((PARTITIONS, count, span.rows), dtype=launch.prompts.dtype, buffer=nl.sbuf)
    return Chunk(span, start, end, weights, scores)


def note_end(agenda, span, time):
    """Schedule `finish` of a `Span` whose last exp is issued at `time`, in keys, and the store of a last one."""
    tuning = agenda.launch.tuning
    time += tuning.multiply_after + tuning.finish_after
    agenda.note(time, finish, span)
    if span.last:
        agenda.note(time + tuning.store_after, store, span)
