"""Prompts of the selective scan: chunks of tokens of each sequence, tiles of 128 channels.

A *chunk* is a sequence's tokens that one scan instruction takes: its weights are spread over the partitions once for
all tiles of channels. The states that a chunk leaves are those the next one begins with. A *unit* is a tile of channels
of a chunk: its tokens pass through one scan for each element of the states. Units follow one another without a break:
the Vector engine does nothing but scan.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.projection.block_loads import load_rows_into, store_rows_from
from nki_kernels.projection.normalised_rows import transpose_rows
from nki_kernels.projection.products import transpose_part
from nki_kernels.projection.row_groups import blocks_tile, item_bytes
from nki_kernels.recurrent.diagonal import columns_of, diagonals
from nki_kernels.recurrent.selective_feed import fed_columns, fed_rows, feed
from nki_kernels.recurrent.selective_parts import (
    Chunk,
    ScanWeights,
    Slots,
    Unit,
    activated,
    add_rows,
    decay_rates,
    decayed,
    load_rows,
    load_states,
    projected_steps,
    row_of_ones,
    spread,
    store_states,
    time_steps,
    used_parts,
)
from nki_kernels.recurrent.slots import load_row, product_dtype, row, slots_or_none
from nki_kernels.tiles import BANK, PARTITIONS, identity, load, ranges
from nki_kernels.weights import WeightMatrix, load_blocks

LEAD = 8
"""Decays that are computed ahead of the scans, while the Scalar engine prepares units."""

FED = 3
"""Elements of the states whose inputs lie in PSUM, a bank each."""

GROUP = 4
"""Elements of the states that GpSimd weighs with one instruction."""

PREPARED = 2
"""Units that are prepared together, for which the Scalar engine loads three tables; one where a chunk has fewer than
twice as many."""

STAGES = 8
"""Of what prepares them: products of time steps, functions, two for the inputs of each, of which the second waits for
the first, and loads."""

BEFORE = 4
"""Units between preparing what a chunk's units share and its first one."""

SPREAD_BYTES = 16384
"""Of a partition, for the output weights of a chunk on all partitions."""


def scan_prompts(y, given, state, places, sequences, own):
    """All tokens of all sequences, for the channels `own`."""
    u, _, w_dt, dt_bias, a_log, d, _, _ = given
    begin, end = own
    each = u.shape[0] // sequences
    states = a_log.shape[1]
    weights = ScanWeights(
        rank=w_dt.shape[0],
        w_dt=load_blocks(WeightMatrix(w_dt[:, begin:end]), product_dtype(u, w_dt), STATIC),
        dt_bias=columns_of((dt_bias,), own, nl.float32),
        d=columns_of((d,), own, u.dtype),
        rates=decay_rates(a_log, own),
        ones=row_of_ones(product_dtype(u, w_dt)),
        identity=identity(min(PARTITIONS, end - begin), u.dtype),
        selector=identity(states, u.dtype),
    )
    read = slots_or_none(row(places[0], 1), row(places[1], 1), state.shape[0])
    written = load_row(places[0])
    counts = row(places[2], 1)
    scans = Scans(
        y,
        given,
        weights,
        Slots(state, read, written, counts),
        own,
        chunks_of(each, sequences, u.dtype, states),
    )
    for number in range(scans.count):
        scans.scan(number)
    scans.end()


def chunks_of(each, sequences, dtype, states):
    """(sequence, its first token here, end) of all chunks."""
    size = min(BANK, SPREAD_BYTES // item_bytes(dtype) // states)
    if dtype == nl.float32:
        size = min(size, BANK // 2)
    chunks = []
    for sequence in range(sequences):
        for first, last in ranges(0, each, size):
            chunks.append((sequence, first, last))
    return chunks


class Scans(nl.NKIObject):
    """All units, one after another; what comes before and after the scans of each is done among those of others.

    No engine waits for another one's last instruction: decays are LEAD scans ahead, inputs FED, sums a group behind,
    and of what prepares units one stage is issued behind each group of scans.
    """

    def __init__(self, y, given, weights, slots, own, plan):
        self.y = y
        self.u = given[0]
        self.projected = given[1]
        self.gate = given[6]
        self.gate_first = given[7]
        self.weights = weights
        self.slots = slots
        self.own = own
        self.plan = plan
        self.tiles = ranges(own[0], own[1])
        self.states = weights.rates.shape[2]
        self.count = len(plan) * len(self.tiles)
        self.together = PREPARED if len(self.tiles) >= 2 * PREPARED else 1
        self.raw = []
        self.chunks = []
        self.units = []
        self.stepped = 0
        self.fed = 0
        self.decays = []
        self.inputs = []
        self.unsummed = None
        self.unfinished = None
        self.load(self.together)
        # Behind the diagonals of the first chunk, which GpSimd makes too.
        self.skips = diagonals(weights.d, self.u.dtype)
        for stage in range(STAGES):
            self.prepare(0, stage)

    def scan(self, number):
        """The scans of a unit, one for each element of its states."""
        unit = self.units[number]
        height, tokens = unit.steps.shape
        unit.sums = nl.ndarray(unit.gates.shape, dtype=nl.float32, buffer=nl.psum)
        skip = self.skips[0:height, unit.tile, 0, 0:height]
        add_rows(unit.sums, unit.across, skip, unit.chunk.parts, False)
        held = unit.chunk.carried[0:height, unit.tile, :]
        groups = ranges(0, self.states, GROUP)
        for place in range(len(groups)):
            first, last = groups[place]
            scanned = nl.ndarray((height, last - first, tokens), dtype=nl.float32, buffer=nl.sbuf)
            for state in range(first, last):
                at = number * self.states + state
                self.work_ahead(at)
                nisa.tensor_tensor_scan(
                    dst=scanned[:, state - first, :],
                    data0=self.decays[at],
                    data1=self.inputs[at],
                    initial=held[:, state : state + 1],
                    op0=nl.multiply,
                    op1=nl.add,
                )
                self.decays[at], self.inputs[at] = None, None
            weighed = self.weigh(unit, scanned, groups[place])
            self.add_up()
            self.unsummed = (unit, weighed)
            if place == min(1, len(groups) - 1):
                self.finish()
            self.stages_of(number, place, len(groups))
        self.unfinished = unit
        sequence = self.plan[number // len(self.tiles)][0]
        if number + 1 == self.count or self.plan[(number + 1) // len(self.tiles)][0] > sequence:
            slot = self.slots.written[0:1, sequence : sequence + 1]
            store_states(self.slots.state, slot, unit.chunk.carried, self.own)
        self.units[number] = None

    def stages_of(self, number, place, groups):
        """Stages of the next units behind group `place` of a unit: one, or more where there are few groups."""
        slot, slots = (number % self.together) * groups + place, self.together * groups
        begin, end = max(slot, STAGES * slot // slots), max(slot + 1, STAGES * (slot + 1) // slots)
        for stage in range(begin, min(STAGES, end)):
            self.prepare((number // self.together + 1) * self.together, stage)

    def end(self):
        """The rest of the last unit."""
        self.add_up()
        self.finish()

    def work_ahead(self, at):
        """Decays and inputs of the scans from number `at` on, as far ahead as units are prepared."""
        while len(self.decays) < min(self.stepped * self.states, at + LEAD):
            number, state = len(self.decays) // self.states, len(self.decays) % self.states
            unit = self.units[number]
            rate = self.weights.rates[0 : unit.steps.shape[0], unit.tile, state : state + 1]
            self.decays.append(decayed(unit.steps, rate))
        while len(self.inputs) < min(self.fed * self.states, at + FED):
            number, state = len(self.inputs) // self.states, len(self.inputs) % self.states
            unit = self.units[number]
            self.inputs.append(feed(unit.fed, unit.chunk.operands.into, state, unit.steps.shape[1]))

    def weigh(self, unit, scanned, group):
        """A group of elements [c, element, token], weighed, on GpSimd; those of the last token are kept."""
        first, last = group
        height, _, tokens = scanned.shape
        result = nl.ndarray(scanned.shape, dtype=self.u.dtype, buffer=nl.sbuf)
        out = unit.chunk.operands.out[0:height, first:last, :]
        held = unit.chunk.carried[0:height, unit.tile, first:last]
        nisa.tensor_copy(dst=held, src=scanned[:, :, tokens - 1], engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(dst=result, data1=scanned, data2=out, op=nl.multiply, engine=nisa.engine.gpsimd)
        return result

    def add_up(self):
        """Add the elements that were weighed last to the sums of their unit."""
        if self.unsummed is None:
            return
        unit, weighed = self.unsummed
        height = weighed.shape[0]
        for element in range(weighed.shape[1]):
            factor = self.weights.identity[0:height, 0:height]
            add_rows(unit.sums, weighed[:, element, :], factor, unit.chunk.parts, True)

    def finish(self):
        """Gate the sums of the unit before, and store them as rows of y."""
        if self.unfinished is None:
            return
        unit = self.unfinished
        result = nl.ndarray(unit.gates.shape, dtype=self.y.dtype, buffer=nl.sbuf)
        copied = nl.ndarray(unit.gates.shape, dtype=nl.float32, buffer=nl.sbuf)
        start, end = unit.chunk.rows
        for part in used_parts(end - start):
            nisa.activation(dst=copied[part], op=nl.copy, data=unit.sums[part])
            nisa.tensor_tensor(
                dst=result[part],
                data1=copied[part],
                data2=unit.gates[part],
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
        left, right = unit.channels
        store_rows_from(self.y[start:end, left:right], result, COMPILER)
        self.unfinished = None

    def prepare(self, first, stage):
        """A stage of the units from `first` on that are prepared together."""
        last = min(first + self.together, self.count)
        if stage == 0:
            for number in range(first, last):
                unit = self.units[number]
                unit.steps = projected_steps(
                    self.weights, unit.chunk.operands, unit.tile, unit.across.shape[0]
                )
        if stage == 1:
            for number in range(first, last):
                unit = self.units[number]
                unit.steps = time_steps(
                    unit.steps, self.weights.dt_bias[0 : unit.across.shape[0], unit.tile, :]
                )
            for number in range(first, last):
                # Functions of one table one after another.
                unit = self.units[number]
                unit.gates = activated(unit.gates, unit.chunk.rows)
            self.stepped = max(self.stepped, last)
        for place in range(last - first):
            unit = self.units[first + place]
            if stage == 2 + 2 * place:
                unit.columns = fed_columns(unit.steps, unit.across, self.u.dtype)
            if stage == 4 + 2 * place:
                unit.fed = fed_rows(unit.columns, self.u.dtype)
                self.fed = first + place + 1
        if stage + 1 == STAGES:
            loaded = min(last + self.together, self.count)
            self.load(loaded)
            self.share(self.whole_chunks(loaded, BEFORE))
            self.load_shared(self.whole_chunks(loaded, BEFORE + self.together))

    def whole_chunks(self, number, more):
        """The units of the chunks of so many `more` units; of one chunk more at most, as SBUF holds few."""
        chunk, following = (number - 1) // len(self.tiles), (number - 1 + more) // len(self.tiles)
        return (min(chunk + 1, following) + 1) * len(self.tiles)

    def load_shared(self, number):
        """Load what the units before `number` share with others of their chunks."""
        while len(self.raw) * len(self.tiles) < min(number, self.count):
            self.raw.append(load_rows(self.projected, self.rows_of(len(self.raw)), self.states))

    def rows_of(self, chunk):
        """The rows of a chunk among those of all sequences."""
        sequence, first, last = self.plan[chunk]
        each = self.u.shape[0] // self.slots.read.shape[1]
        return sequence * each + first, sequence * each + last

    def share(self, number):
        """What the units before `number` share with others of their chunks."""
        self.load_shared(number)
        while len(self.chunks) * len(self.tiles) < min(number, self.count):
            place = len(self.chunks)
            sequence, first, _ = self.plan[place]
            own = slice(sequence, sequence + 1)
            operands = spread(self.raw[place], first, self.slots.counts[0:1, own], self.weights)
            self.raw[place] = None
            self.chunks.append(Chunk(self.rows_of(place), operands))

    def load(self, number):
        """Load the rows of the units before `number`: u across, [c, token], and gates [token in part, part, c]."""
        self.share(number)
        while len(self.units) < min(number, self.count):
            chunk, tile = self.chunks[len(self.units) // len(self.tiles)], len(self.units) % len(self.tiles)
            start, end = chunk.rows
            left, right = self.tiles[tile]
            across = blocks_tile(right - left, end - start, self.u.dtype)
            if self.u.dtype == nl.float32:
                for begin, stop in ranges(start, end):
                    rows = load(self.u[begin:stop, left:right], self.u.dtype)
                    transpose_rows(across[:, :, begin - start : stop - start], 0, rows, 0)
            else:
                transpose_part(across, self.u[start:end, left:right], 0)
            gates = blocks_tile(end - start, right - left, self.u.dtype)
            columns = slice(self.gate_first + left, self.gate_first + right)
            load_rows_into(gates, self.gate[start:end, columns], STATIC)
            self.units.append(Unit(chunk, tile, (left, right), across[:, 0, :], gates))
        self.carry()

    def carry(self):
        """The states that chunks begin with; loaded behind the first rows, because that DMA has many descriptors."""
        for place in range(len(self.chunks)):
            sequence, first, _ = self.plan[place]
            if self.chunks[place].carried is None:
                if first == 0:
                    slot = self.slots.read[0:1, sequence : sequence + 1]
                    self.chunks[place].carried = load_states(self.slots.state, slot, self.own)
                else:
                    self.chunks[place].carried = self.chunks[place - 1].carried
