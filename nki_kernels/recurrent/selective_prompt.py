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
from nki_kernels.projection.products import transpose_block_range
from nki_kernels.projection.row_groups import blocks_tile, item_bytes
from nki_kernels.recurrent.diagonal import columns_of, diagonals
from nki_kernels.recurrent.selective_feed import multiply_inputs
from nki_kernels.recurrent.selective_parts import (
    Chunk,
    ScanWeights,
    Unit,
    compute_decays,
    decay_rates,
    load_rows,
    load_states,
    prepare_operands,
    row_of_ones,
    store_states,
    used_slices,
)
from nki_kernels.recurrent.slots import load_row, product_dtype, row, slots_or_none
from nki_kernels.tiles import BANK, PARTITIONS, identity, load, ranges, transpose_rows
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


def scan_prompts(y, arguments, channels):
    """Compute y of all tokens of all sequences for channels (first, end), and the states."""
    u, w_dt, table, states = arguments.u, arguments.w_dt, arguments.table, arguments.a_log.shape[1]
    begin, end = channels
    weights = ScanWeights(
        rank=w_dt.shape[0],
        w_dt=load_blocks(WeightMatrix(w_dt[:, begin:end]), product_dtype(u, w_dt), STATIC),
        dt_bias=columns_of((arguments.dt_bias,), channels, nl.float32),
        d=columns_of((arguments.d,), channels, u.dtype),
        rates=decay_rates(arguments.a_log, channels),
        ones=row_of_ones(product_dtype(u, w_dt)),
        identity=identity(min(PARTITIONS, end - begin), u.dtype),
        selector=identity(states, u.dtype),
    )
    slots = slots_or_none(row(table.state_slots, 1), row(table.starts, 1), arguments.state.shape[0])
    written = load_row(table.state_slots)
    scans = Scans(y, arguments, weights, slots, written, row(table.counts, 1), channels)
    for number in range(scans.count):
        scans.scan(number)
    scans.end()


def plan_chunks(tokens, sequences, dtype, states):
    """Return (sequence, its first token here, end) of all chunks."""
    size = min(BANK, SPREAD_BYTES // item_bytes(dtype) // states)
    if dtype == nl.float32:
        size = min(size, BANK // 2)
    chunks = []
    for sequence in range(sequences):
        for first, last in ranges(0, tokens, size):
            chunks.append((sequence, first, last))
    return chunks


class Scans(nl.NKIObject):
    """All units, one after another; what comes before and after the scans of a unit is done among those of others.

    No engine waits for another one's last instruction: decays are LEAD scans ahead, inputs FED, sums a group behind,
    and of what prepares units one stage is issued behind each group of scans.
    """

    def __init__(self, y, arguments, weights, read, written, counts, channels):
        self.y = y
        self.u = arguments.u
        self.arguments = arguments
        self.weights = weights
        self.read, self.written, self.counts = read, written, counts
        self.channels = channels
        self.states = weights.rates.shape[2]
        self.tokens = self.u.shape[0] // counts.shape[1]
        self.plan = plan_chunks(self.tokens, counts.shape[1], self.u.dtype, self.states)
        self.tiles = ranges(channels[0], channels[1])
        self.count = len(self.plan) * len(self.tiles)
        self.together = PREPARED if len(self.tiles) >= 2 * PREPARED else 1
        self.raw = []
        self.chunks = []
        self.units = []
        self.stepped = 0
        self.multiplied = 0
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
        """Issue the scans of a unit, one for each element of its states."""
        unit = self.units[number]
        height, tokens = unit.steps.shape
        unit.begin_sums(self.skips[0:height, unit.tile, 0, 0:height])
        carried = unit.chunk.carried[0:height, unit.tile, :]
        groups = ranges(0, self.states, GROUP)
        for i in range(len(groups)):  # i: group of elements
            first, last = groups[i]
            scanned = nl.ndarray((height, last - first, tokens), dtype=nl.float32, buffer=nl.sbuf)
            for state in range(first, last):
                index = number * self.states + state
                self.work_ahead(index)
                nisa.tensor_tensor_scan(
                    dst=scanned[:, state - first, :],
                    data0=self.decays[index],
                    data1=self.inputs[index],
                    initial=carried[:, state : state + 1],
                    op0=nl.multiply,
                    op1=nl.add,
                )
                self.decays[index], self.inputs[index] = None, None
            weighed = self.weigh(unit, scanned, groups[i])
            self.add_up()
            self.unsummed = (unit, weighed)
            if i == min(1, len(groups) - 1):
                self.finish()
            self.issue_stages(number, i, len(groups))
        self.unfinished = unit
        sequence = self.plan[number // len(self.tiles)][0]
        if number + 1 == self.count or self.plan[(number + 1) // len(self.tiles)][0] > sequence:
            slot = self.written[0:1, sequence : sequence + 1]
            store_states(self.arguments.state, slot, unit.chunk.carried, self.channels)
        self.units[number] = None

    def issue_stages(self, number, group, groups):
        """Issue stages of the next units behind a group of a unit: one, or more where there are few groups."""
        slot, slots = (number % self.together) * groups + group, self.together * groups
        begin, end = max(slot, STAGES * slot // slots), max(slot + 1, STAGES * (slot + 1) // slots)
        for stage in range(begin, min(STAGES, end)):
            self.prepare((number // self.together + 1) * self.together, stage)

    def end(self):
        """Finish the last unit."""
        self.add_up()
        self.finish()

    def work_ahead(self, index):
        """Compute decays and inputs of the scans from an index on, as far ahead as units are prepared."""
        while len(self.decays) < min(self.stepped * self.states, index + LEAD):
            number, state = len(self.decays) // self.states, len(self.decays) % self.states
            unit = self.units[number]
            rate = self.weights.rates[0 : unit.steps.shape[0], unit.tile, state : state + 1]
            self.decays.append(compute_decays(unit.steps, rate))
        while len(self.inputs) < min(self.multiplied * self.states, index + FED):
            number, state = len(self.inputs) // self.states, len(self.inputs) % self.states
            unit = self.units[number]
            into, tokens = unit.chunk.operands.into, unit.steps.shape[1]
            self.inputs.append(multiply_inputs(unit.inputs, into, state, tokens))

    def weigh(self, unit, scanned, group):
        """Return a group of elements [c, element, token], weighed, on GpSimd; keep those of the last token."""
        first, last = group
        height, _, tokens = scanned.shape
        result = nl.ndarray(scanned.shape, dtype=self.u.dtype, buffer=nl.sbuf)
        out = unit.chunk.operands.out[0:height, first:last, :]
        carried = unit.chunk.carried[0:height, unit.tile, first:last]
        nisa.tensor_copy(dst=carried, src=scanned[:, :, tokens - 1], engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(dst=result, data1=scanned, data2=out, op=nl.multiply, engine=nisa.engine.gpsimd)
        return result

    def add_up(self):
        """Add the elements that were weighed last to the sums of their unit."""
        if self.unsummed is None:
            return
        unit, weighed = self.unsummed
        height = weighed.shape[0]
        for element in range(weighed.shape[1]):
            unit.add_rows(weighed[:, element, :], self.weights.identity[0:height, 0:height], True)

    def finish(self):
        """Gate the sums of the unit before, and store them as rows of y."""
        if self.unfinished is None:
            return
        unit = self.unfinished
        result = nl.ndarray(unit.gates.shape, dtype=self.y.dtype, buffer=nl.sbuf)
        copied = nl.ndarray(unit.gates.shape, dtype=nl.float32, buffer=nl.sbuf)
        start, end = unit.chunk.rows
        for used in used_slices(end - start):
            # GpSimd reads no PSUM, so the Scalar engine evicts the sums that GpSimd gates.
            nisa.activation(dst=copied[used], op=nl.copy, data=unit.sums[used])
            nisa.tensor_tensor(
                dst=result[used],
                data1=copied[used],
                data2=unit.gates[used],
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
        left, right = unit.channels
        store_rows_from(self.y[start:end, left:right], result, COMPILER)
        self.unfinished = None

    def prepare(self, first, stage):
        """Issue a stage of the units from `first` on that are prepared together."""
        last = min(first + self.together, self.count)
        units = self.units[first:last]
        if stage == 0:
            for unit in units:
                unit.project_steps(self.weights)
        if stage == 1:
            for unit in units:
                unit.soften_steps(self.weights)
            for unit in units:
                # Functions of one table one after another.
                unit.open_gates()
            self.stepped = max(self.stepped, last)
        for i in range(len(units)):  # i: unit
            if stage == 2 + 2 * i:
                units[i].scale_inputs(self.u.dtype)
            if stage == 4 + 2 * i:
                units[i].transpose_inputs(self.u.dtype)
                self.multiplied = first + i + 1
        if stage + 1 == STAGES:
            loaded = min(last + self.together, self.count)
            self.load(loaded)
            self.share(self.whole_chunks(loaded, BEFORE))
            self.load_shared(self.whole_chunks(loaded, BEFORE + self.together))

    def whole_chunks(self, number, more):
        """Return the units of the chunks of so many `more` units; of one chunk more at most, as SBUF holds few."""
        chunk, following = (number - 1) // len(self.tiles), (number - 1 + more) // len(self.tiles)
        return (min(chunk + 1, following) + 1) * len(self.tiles)

    def load_shared(self, number):
        """Load what the units before `number` share with others of their chunks."""
        while len(self.raw) * len(self.tiles) < min(number, self.count):
            rows = self.chunk_rows(len(self.raw))
            self.raw.append(load_rows(self.arguments.projected, rows, self.states))

    def chunk_rows(self, index):
        """Return the rows (start, end) of a chunk among those of all sequences."""
        sequence, first, last = self.plan[index]
        return sequence * self.tokens + first, sequence * self.tokens + last

    def share(self, number):
        """Prepare the operands that the units before `number` share with other units of their chunks."""
        self.load_shared(number)
        while len(self.chunks) * len(self.tiles) < min(number, self.count):
            index = len(self.chunks)
            sequence, first, _ = self.plan[index]
            low, out, into = self.raw[index]
            count = self.counts[0:1, sequence : sequence + 1]
            operands = prepare_operands(low, out, into, first, count, self.weights)
            self.raw[index] = None
            self.chunks.append(Chunk(self.chunk_rows(index), operands))

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
                transpose_block_range(across, self.u[start:end, left:right], 0)
            gates = blocks_tile(end - start, right - left, self.u.dtype)
            first = self.arguments.gate_first
            load_rows_into(gates, self.arguments.gate[start:end, first + left : first + right], STATIC)
            self.units.append(Unit(chunk, tile, (left, right), across[:, 0, :], gates))
        self.carry()

    def carry(self):
        """Load the states that chunks begin with, behind the first rows, because that DMA has many descriptors."""
        for i in range(len(self.chunks)):  # i: chunk
            sequence, first, _ = self.plan[i]
            if self.chunks[i].carried is None and first == 0:
                slot = self.read[0:1, sequence : sequence + 1]
                self.chunks[i].carry(load_states(self.arguments.state, slot, self.channels))
            elif self.chunks[i].carried is None:
                self.chunks[i].carry(self.chunks[i - 1].carried)
