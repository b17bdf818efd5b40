"""Prompts of `ssd`: chunks of 128 tokens of each sequence, packs of heads.

Between chunks a state [n, column] in float32 stays in SBUF, and in bfloat16 steps a rounded copy of it for products.
Packs of all chunks follow one another through the stages of `Chunk`, so that no engine waits at the end of a chunk.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import on_every_row
from nki_kernels.recurrent.slots import load_row, row, slots_or_none
from nki_kernels.recurrent.ssd_between import IN_TURN, Differences
from nki_kernels.recurrent.ssd_chunk import Chunk, Constants, Pack
from nki_kernels.recurrent.ssd_heads import by_head, filled
from nki_kernels.recurrent.ssd_shared import PHASES, SUMMED, open_gates
from nki_kernels.recurrent.ssd_states import SequenceState, StateSlots
from nki_kernels.recurrent.ssd_times import STEPS, Steps, decay_rates
from nki_kernels.tiles import PARTITIONS, identity, ranges

PREPARED = 16
"""Packs before its first one with which the first phase of a chunk comes."""

AT_ONCE = 320
"""Time steps on a partition that are worked out together, for several chunks."""

FIRST = 3
"""Chunks whose time steps are worked out before all else."""

SCALED = 2
"""Packs whose inputs are scaled before those of the first of them are multiplied."""

AHEAD = 5
"""Packs whose decays are computed before those of the first of them are used."""

PAUSE = 3
"""Packs without new decays while the Scalar engine opens the gates of a chunk, for which it loads another table."""

MASKS = (nisa.engine.vector, nisa.engine.gpsimd)
"""The engines that mask packs, in turn."""

ROUNDS = (True, False)
"""Whether the Scalar engine rounds the states of packs, in turn."""


def ssd_prompts(y, inputs, state, places, sequences, sizes):
    """Compute y of all tokens of all sequences, and their states, for the local heads."""
    heads = slice(sizes.first_head, sizes.first_head + sizes.local_heads)
    bias = on_every_row(inputs.dt_bias[:, heads], PARTITIONS, nl.float32, 0.0)
    constants = Constants(bias, decay_rates(inputs.a_log[:, heads]))
    counts = row(places[2], PARTITIONS)
    read = slots_or_none(row(places[0], 1), row(places[1], 1), state.shape[0])
    slots = StateSlots(state, read, load_row(places[0]))
    tokens = y.shape[0] // sequences
    chunks = []
    for sequence in range(sequences):
        sequence_state = SequenceState(slots, sequence, sizes)
        for first, last in ranges(0, tokens):
            rows = (sequence * tokens + first, sequence * tokens + last)
            count = counts[:, sequence : sequence + 1]
            ends = last == tokens
            chunks.append(Chunk(y, inputs, constants, sizes, rows, sequence_state, first, count, ends))
    groups = [Steps(chunks[0:FIRST])]
    for start, end in ranges(FIRST, len(chunks), max(1, AT_ONCE // sizes.local_heads)):
        groups.append(Steps(chunks[start:end]))
    for phase in STEPS:
        phase(groups[0])
        if phase == STEPS[0]:
            PHASES[0](chunks[0])
    fill(constants, inputs.d[:, heads], sizes)
    for phase in PHASES[1:]:
        phase(chunks[0])
    chunks[0].phases = len(PHASES)
    if sizes.narrow:
        constants.differences = Differences()
        fill_skips(constants, sizes)
    pass_packs(chunks, sizes.packs(), groups[1:])


def fill(constants, d, sizes):
    """Allocate the constants that chunks share, except those of time steps and `differences`."""
    constants.before = triangle(-1, 0)
    constants.after = triangle(1, 1)
    constants.ones = filled((PARTITIONS, PARTITIONS), 1.0)
    constants.identity = identity(PARTITIONS, sizes.dtype)
    constants.skip = on_every_row(d, PARTITIONS, nl.float32, 0.0)
    if sizes.narrow:
        constants.wide_identity = identity(PARTITIONS, nl.float32)
        shape = (PARTITIONS, sizes.local_heads, PARTITIONS)
        constants.skips = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)


def fill_skips(constants, sizes):
    """The identity times the skip of each head: [token, head, token]."""
    skips, one = constants.skips, constants.identity.expand_dim(1)
    packs = ranges(0, sizes.local_heads, sizes.most)
    for number in range(len(packs)):
        first, last = packs[number]
        nisa.tensor_tensor(
            dst=skips[:, first:last, :],
            data1=one.broadcast(1, last - first),
            data2=by_head(constants.skip[:, first:last], PARTITIONS),
            op=nl.multiply,
            engine=nisa.engine.vector if number % 2 == 0 else nisa.engine.gpsimd,
        )


class Phases(nl.NKIObject):
    """What packs share, chunk after chunk, in the order in which it is worked out."""

    def __init__(self, chunks, groups):
        self.chunks = chunks
        self.groups = groups
        self.prepared = 1
        self.waiting = []
        self.pause = 0

    def prepare(self, end):
        """Let the phases of all chunks before `end` wait for their turn."""
        while self.prepared < min(end, len(self.chunks)):
            chunk = self.chunks[self.prepared]
            if len(self.groups) > 0 and chunk == self.groups[0].chunks[0]:
                for phase in STEPS:
                    self.waiting.append((phase, self.groups[0]))
                self.groups = self.groups[1:]
            for phase in PHASES:
                self.waiting.append((phase, chunk))
            self.prepared += 1

    def work(self, count):
        """The next phases."""
        for phase, shared in self.waiting[0:count]:
            phase(shared)
            shared.phases += 1
            if phase == open_gates:
                self.pause = PAUSE
        self.waiting = self.waiting[count:]

    def work_until(self, chunk, phase):
        """All phases of a chunk up to one of them, if they did not come yet."""
        while chunk.phases < phase:
            self.work(1)


def pass_packs(chunks, head_ranges, groups):
    """Issue the stages of all packs of all chunks. Each stage runs some packs ahead of the next one."""
    packs = []
    for chunk in chunks:
        for heads in head_ranges:
            packs.append(Pack(chunk, heads))
    phases = Phases(chunks, groups)
    # The next pack of a single range of heads has the same states.
    back = min(1, len(head_ranges) - 1)
    fetched, scaled, looked, decayed, masked = 0, 0, 0, 0, 0
    for number in range(len(packs)):
        if number > 0:
            packs[number - 1].chunk.keep(packs[number - 1], ROUNDS[number % len(ROUNDS)])
            packs[number - 1] = None
        phases.prepare(1 + (number + PREPARED) // len(head_ranges))
        phases.work(-(-len(phases.waiting) // max(1, len(head_ranges) - 1)))
        for pack in packs[fetched : decayed + IN_TURN]:
            phases.work_until(pack.chunk, SUMMED)
            pack.chunk.fetch(pack)
            fetched += 1
        for pack in packs[scaled : number + SCALED]:
            phases.work_until(pack.chunk, len(PHASES))
            pack.chunk.scale(pack)
            scaled += 1
        if number == 0:
            for pack in packs[0:2]:
                pack.chunk.decay(pack)
                decayed += 1
        for pack in packs[looked : number + 1 + back]:
            pack.chunk.look_back(pack)
            looked += 1
        for pack in packs[masked : number + 2]:
            pack.chunk.mask(pack, MASKS[masked % len(MASKS)])
            masked += 1
        packs[number].chunk.sum_up(packs[number])
        packs[number].chunk.move_on(packs[number])
        most = number + (3 if phases.pause > 0 else AHEAD)
        for pack in packs[decayed : min(most, decayed + 2)]:
            pack.chunk.decay(pack)
            decayed += 1
        phases.pause = max(0, phases.pause - 1)
        if number + 1 == len(packs):
            packs[number].chunk.keep(packs[number], False)


def triangle(multiplier, offset):
    """1 where multiplier * (partition - column) is offset or more, else 0: [128, 128] in float32."""
    result = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=[[-multiplier, PARTITIONS]],
        offset=-offset,
        channel_multiplier=multiplier,
        on_true_tile=filled((PARTITIONS, PARTITIONS), 1.0),
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    return result
