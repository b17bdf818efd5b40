"""Prompts of `ssd`: chunks of 128 tokens of each sequence, packs of heads.

`ssd` calls `ssd_prompts` for sequences with several tokens each. A pack is up to eight heads of one group.
Between chunks a state [n, column] in float32 stays in SBUF, and in bfloat16 launches a rounded copy of it for
products. Packs of all chunks follow one another through the stages of `Pack`, so that no engine waits at the
end of a chunk. What the packs of a chunk share is computed in phases, which are issued among the packs of
earlier chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.slots import load_repeated_row, load_row, mask_slots
from nki_kernels.recurrent.ssd_between import IN_TURN
from nki_kernels.recurrent.ssd_chunk import PHASES, SUMMED, Chunk, ChunkTiles, Constants
from nki_kernels.recurrent.ssd_pack import Pack
from nki_kernels.recurrent.ssd_states import SequenceState
from nki_kernels.recurrent.ssd_times import STEP_PHASES, TimeSteps, load_decay_rates
from nki_kernels.tiles import PARTITIONS, broadcast_row, ranges

PREPARED = 16
"""Packs before a chunk's first pack with which the chunk's first phase comes."""

AT_ONCE = 320
"""Time steps on a partition that are computed together, for several chunks."""

FIRST = 3
"""Chunks whose time steps are computed before all else."""

SCALED = 2
"""Packs whose inputs are scaled before those of the first of them are multiplied."""

AHEAD = 5
"""Packs whose decays are computed before those of the first of them are used."""

PAUSE = 3
"""Packs without new decays while the Scalar engine activates the gates of a chunk, for which it loads another table."""

MASKS = (nisa.engine.vector, nisa.engine.gpsimd)
"""The engines that mask packs, in turn."""

ROUNDS = (True, False)
"""Whether the Scalar engine rounds the states of packs, in turn."""


def ssd_prompts(y, inputs, sizes):
    """Run the recurrence over all tokens of all sequences for the local heads: store y and the states to HBM.

    Args:
        y: the kernel's result, [T, H P] in HBM.
        sizes: which heads are local, and where their columns begin.
    """
    heads = slice(sizes.first_head, sizes.first_head + sizes.local_heads)
    bias = broadcast_row(inputs.dt_bias[:, heads], PARTITIONS, nl.float32, 0.0)
    rates = load_decay_rates(inputs.a_log[:, heads])
    constants, table = Constants(), inputs.table
    counts = load_repeated_row(table.counts, PARTITIONS)
    read = mask_slots(
        load_repeated_row(table.state_slots, 1), load_repeated_row(table.starts, 1), inputs.state.shape[0]
    )
    written = load_row(table.state_slots)
    sequences = table.counts.shape[0]
    tokens = y.shape[0] // sequences
    together = max(1, AT_ONCE // sizes.local_heads)
    chunks = []
    for sequence in range(sequences):
        state = SequenceState(
            inputs.state,
            read[0:1, sequence : sequence + 1],
            written[0:1, sequence : sequence + 1],
            sizes,
        )
        for first, last in ranges(0, tokens):
            if len(chunks) == 0 or (len(chunks) >= FIRST and (len(chunks) - FIRST) % together == 0):
                steps = TimeSteps(sizes, bias, rates, [])
            chunk = Chunk(
                y=y,
                inputs=inputs,
                constants=constants,
                sizes=sizes,
                rows=(sequence * tokens + first, sequence * tokens + last),
                tokens=last - first,
                state=state,
                first=first,
                count=counts[:, sequence : sequence + 1],
                is_last=last == tokens,
                time_steps=steps,
                index=len(steps.chunks),
            )
            steps.chunks.append(chunk)
            chunks.append(ChunkTiles(chunk))
    # The rows of the first chunk are loaded behind those of its time steps.
    for phase in range(len(STEP_PHASES)):
        chunks[0].chunk.time_steps.work()
        if phase == 0:
            chunks[0].work()
    constants.fill(inputs.d[:, heads], sizes)
    while chunks[0].phases < len(PHASES):
        chunks[0].work()
    if sizes.narrow:
        constants.fill_narrow(sizes)
    pass_packs(chunks, sizes.list_packs())


@dataclass
class Phases(nl.NKIObject):
    """What packs share, chunk after chunk, in the order in which it is computed.

    chunks: ChunkTiles of all chunks. waiting: a list with the ChunkTiles or TimeSteps of each phase that is
    not issued. prepared: the number of chunks whose phases are issued or wait. pause: the number of packs
    without new decays, while the Scalar engine activates gates.
    """

    chunks: list
    waiting: list
    prepared: int = 1
    pause: int = 0

    def prepare(self, end):
        """Append the phases of chunks that wait for none yet to `waiting`, up to chunk `end` - 1.

        The phases of time steps come before those of the first chunk that has them.
        """
        while self.prepared < min(end, len(self.chunks)):
            tiles = self.chunks[self.prepared]
            if tiles.chunk.index == 0:
                self.waiting.extend([tiles.chunk.time_steps] * len(STEP_PHASES))
            self.waiting.extend([tiles] * len(PHASES))
            self.prepared += 1

    def work(self, count):
        """Issue the next `count` phases, or all that wait if there are fewer, and remove them from `waiting`.

        Sets `pause` if one of them activates gates.
        """
        for target in self.waiting[0:count]:
            if target.work() == ChunkTiles.activate_gates:
                self.pause = PAUSE
        self.waiting = self.waiting[count:]

    def work_until(self, tiles, phase):
        """Issue waiting phases until so many phases of a chunk are issued.

        Args:
            tiles: the ChunkTiles of the chunk.
            phase: the number of its phases.
        """
        while tiles.phases < phase:
            self.work(1)

    def end_turn(self):
        """Subtract 1 from `pause`, the number of packs without new decays, unless it is 0."""
        self.pause = max(0, self.pause - 1)


def pass_packs(chunks, head_ranges):
    """Issue the stages of all packs of all chunks. Each stage runs some packs ahead of the next one.

    Args:
        chunks: ChunkTiles in the order of sequences and tokens; all phases of the first one are issued.
        head_ranges: the heads (first, end) of each pack.
    """
    packs = []
    for tiles in chunks:
        for heads in head_ranges:
            packs.append(Pack(tiles, heads, []))
    phases = Phases(chunks, [])
    # The next pack of a single range of heads has the same states.
    back = min(1, len(head_ranges) - 1)
    fetched, scaled, looked, decayed, masked = 0, 0, 0, 0, 0
    for number in range(len(packs)):
        if number > 0:
            packs[number - 1].keep_states(ROUNDS[number % len(ROUNDS)])
            packs[number - 1] = None
        phases.prepare(1 + (number + PREPARED) // len(head_ranges))
        phases.work(-(-len(phases.waiting) // max(1, len(head_ranges) - 1)))
        for pack in packs[fetched : decayed + IN_TURN]:
            # `load_sums` reads rows of HBM that the phases up to SUMMED store.
            phases.work_until(pack.tiles, SUMMED)
            pack.load_sums()
            fetched += 1
        for pack in packs[scaled : number + SCALED]:
            phases.work_until(pack.tiles, len(PHASES))
            pack.scale_inputs()
            scaled += 1
        # Decays come at the end of an earlier turn, and the first two packs have none.
        if number == 0:
            for pack in packs[0:2]:
                pack.compute_decays()
                decayed += 1
        for pack in packs[looked : number + 1 + back]:
            pack.read_states()
            looked += 1
        for pack in packs[masked : number + 2]:
            pack.mask_scores(MASKS[masked % len(MASKS)])
            masked += 1
        packs[number].sum_outputs()
        packs[number].advance_states()
        most = number + (3 if phases.pause > 0 else AHEAD)
        for pack in packs[decayed : min(most, decayed + 2)]:
            pack.compute_decays()
            decayed += 1
        phases.end_turn()
    packs[len(packs) - 1].keep_states(False)
