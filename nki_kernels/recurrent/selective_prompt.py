"""Prompts of the selective scan: chunks of tokens of each sequence, tiles of 128 channels.

`selective_scan` calls `scan_prompts` for sequences with several tokens each. A *chunk* is a sequence's tokens
that one scan instruction takes: its weights are spread over the partitions once for all tiles of channels.
The states that a chunk leaves are those the next one begins with. A *unit* is a chunk and a tile of channels:
its tokens pass through one scan for each element of the states. Units follow one another without a break: the
Vector engine does nothing but scan.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.projection.block_loads import load_rows_into, store_rows_from
from nki_kernels.projection.products import transpose_block_range
from nki_kernels.projection.row_groups import allocate_transposed, item_bytes
from nki_kernels.recurrent.diagonal import build_diagonals, load_columns
from nki_kernels.recurrent.selective_feed import multiply_inputs
from nki_kernels.recurrent.selective_parts import (
    Chunk,
    ScanWeights,
    Unit,
    build_ones,
    compute_decays,
    list_used_slices,
    load_decay_rates,
    load_rows,
    load_states,
    prepare_operands,
    store_states,
)
from nki_kernels.recurrent.slots import choose_product_dtype, load_repeated_row, load_row, mask_slots
from nki_kernels.tiles import BANK, PARTITIONS, identity, load, ranges, transpose_rows
from nki_kernels.weights import WeightMatrix, load_blocks

LEAD = 8
"""Scans for which decays are computed ahead, while the Scalar engine prepares units."""

FED = 3
"""Scans for which inputs are computed ahead; the inputs of each are in a PSUM bank."""

GROUP = 4
"""Elements of the states that GpSimd weighs with one instruction."""

PREPARED = 2
"""Units that are prepared together, for which the Scalar engine loads three tables; one where a chunk has fewer than
twice as many."""

STAGES = 8
"""Stages that prepare units: products of time steps, functions, inputs (two stages of each unit), and loads."""

BEFORE = 4
"""Units between preparing what a chunk's units share and its first one."""

SPREAD_BYTES = 16384
"""Bytes of a partition for the output weights of a chunk on all partitions."""


def scan_prompts(y, arguments, channels):
    """Run the selective scan over all tokens of all sequences for a range of channels: store y and the states to HBM.

    Args:
        y: the kernel's result, [T, C] in HBM.
        channels: (first, end) of this core.
    """
    u, w_dt, table, states = arguments.u, arguments.w_dt, arguments.table, arguments.a_log.shape[1]
    begin, end = channels
    weights = ScanWeights(
        rank=w_dt.shape[0],
        w_dt=load_blocks(WeightMatrix(w_dt[:, begin:end]), choose_product_dtype(u, w_dt), STATIC),
        dt_bias=load_columns((arguments.dt_bias,), channels, nl.float32),
        d=load_columns((arguments.d,), channels, u.dtype),
        rates=load_decay_rates(arguments.a_log, channels),
        ones=build_ones(choose_product_dtype(u, w_dt)),
        identity=identity(min(PARTITIONS, end - begin), u.dtype),
        selector=identity(states, u.dtype),
    )
    slots = mask_slots(
        load_repeated_row(table.state_slots, 1), load_repeated_row(table.starts, 1), arguments.state.shape[0]
    )
    written = load_row(table.state_slots)
    scans = Scans(y, arguments, weights, slots, written, load_repeated_row(table.counts, 1), channels)
    for number in range(scans.count):
        scans.scan_unit(number)
    scans.end()


def plan_chunks(tokens, sequences, dtype, states):
    """Return a list of (sequence, first token, end token) of all chunks.

    Tokens count from the sequence's first new one.

    Args:
        tokens: of each sequence.
        dtype: of u, which bounds the tokens of a chunk together with `states`, the elements of a channel's
            state.
    """
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

    No engine waits for another one's last instruction. Decays are computed LEAD scans ahead and inputs FED;
    sums a group of scans behind. One stage of what prepares the next units is issued behind each group.

    plan: the chunks. tiles: the ranges of channels. count: the number of units; unit i is tile i % len(tiles)
    of chunk i // len(tiles). together: units prepared together. raw, chunks, units: what is loaded so far, in
    order; entries that are used up become None. stepped, multiplied: the units whose time steps, and whose
    inputs, are ready. decays, inputs: tiles by index of the scan, unit * states + state. unsummed: (unit,
    weighed elements) that are not in its sums yet. unfinished: the unit whose sums are not gated yet.
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
        self.load_units(self.together)
        # Behind the diagonals of the first chunk, which GpSimd makes too.
        self.skips = build_diagonals(weights.d, self.u.dtype)
        for stage in range(STAGES):
            self.prepare(0, stage)

    def scan_unit(self, number):
        """Issue the scans of unit `number` (a chunk and a tile of channels), one for each element of a channel's state.

        Stages that prepare later units are issued among them. After the last unit of a sequence, store the
        sequence's states to its slot in HBM.
        """
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
            self.add_weighed()
            self.unsummed = (unit, weighed)
            if i == min(1, len(groups) - 1):
                self.finish_unit()
            self.issue_stages(number, i, len(groups))
        self.unfinished = unit
        sequence = self.plan[number // len(self.tiles)][0]
        if number + 1 == self.count or self.plan[(number + 1) // len(self.tiles)][0] > sequence:
            slot = self.written[0:1, sequence : sequence + 1]
            store_states(self.arguments.state, slot, unit.chunk.carried, self.channels)
        self.units[number] = None

    def issue_stages(self, number, group, groups):
        """Issue stages of the next units behind a group of scans of unit `number`.

        One stage, or more if there are few groups; none after the last stage.

        Args:
            group: the index of the group of scans.
            groups: the number of groups of each unit.
        """
        slot, slots = (number % self.together) * groups + group, self.together * groups
        begin, end = max(slot, STAGES * slot // slots), max(slot + 1, STAGES * (slot + 1) // slots)
        for stage in range(begin, min(STAGES, end)):
            self.prepare((number // self.together + 1) * self.together, stage)

    def end(self):
        """Sum the last elements, multiply by the gates, and store y of the last unit; its scans must be issued."""
        self.add_weighed()
        self.finish_unit()

    def work_ahead(self, index):
        """Compute the decays of the next LEAD scans from scan `index` on, and the inputs of the next FED ones.

        Appends the tiles to `decays` and `inputs`. Stops where units are not prepared.
        """
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
        """Return a group of scanned elements times their output weights: a new SBUF tile [c, element, token].

        GpSimd multiplies. Also writes the last token's elements to `carried` of the chunk: the states that
        the next chunk begins with.

        Args:
            scanned: [c, element, token] float32 in SBUF, the states after each token.
            group: (first, end) of the elements among the states.
        """
        first, last = group
        height, _, tokens = scanned.shape
        result = nl.ndarray(scanned.shape, dtype=self.u.dtype, buffer=nl.sbuf)
        out = unit.chunk.operands.out[0:height, first:last, :]
        carried = unit.chunk.carried[0:height, unit.tile, first:last]
        nisa.tensor_copy(dst=carried, src=scanned[:, :, tokens - 1], engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(dst=result, data1=scanned, data2=out, op=nl.multiply, engine=nisa.engine.gpsimd)
        return result

    def add_weighed(self):
        """Add the elements that `weigh` returned last to the `sums` of their unit in PSUM.

        To be called once for each call of `weigh`. Does nothing before the first one.
        """
        if self.unsummed is None:
            return
        unit, weighed = self.unsummed
        height = weighed.shape[0]
        for element in range(weighed.shape[1]):
            unit.add_rows(weighed[:, element, :], self.weights.identity[0:height, 0:height], True)

    def finish_unit(self):
        """Multiply the `sums` of the unit before by its gates, and store them as rows of y to HBM.

        Does nothing if there is no unfinished unit.
        """
        if self.unfinished is None:
            return
        unit = self.unfinished
        result = nl.ndarray(unit.gates.shape, dtype=self.y.dtype, buffer=nl.sbuf)
        copied = nl.ndarray(unit.gates.shape, dtype=nl.float32, buffer=nl.sbuf)
        start, end = unit.chunk.rows
        for used in list_used_slices(end - start):
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
        """Issue stage `stage` (0 … STAGES - 1) of the up to `together` units from `first` on.

        Stage 0 projects time steps, stage 1 applies softplus and silu, stages 2 to 6 scale and transpose
        inputs. The last stage loads what later units need.
        """
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
                unit.activate_gates()
            self.stepped = max(self.stepped, last)
        for i in range(len(units)):  # i: unit
            if stage == 2 + 2 * i:
                units[i].scale_inputs(self.u.dtype)
            if stage == 4 + 2 * i:
                units[i].transpose_inputs(self.u.dtype)
                self.multiplied = first + i + 1
        if stage + 1 == STAGES:
            loaded = min(last + self.together, self.count)
            self.load_units(loaded)
            self.prepare_chunks(self.count_chunk_units(loaded, BEFORE))
            self.load_chunk_rows(self.count_chunk_units(loaded, BEFORE + self.together))

    def count_chunk_units(self, number, more):
        """Return the number of all units of the chunks that contain the first `number` + `more` units.

        At most one chunk beyond the chunk of unit number - 1 is counted, as SBUF holds few.
        """
        chunk, following = (number - 1) // len(self.tiles), (number - 1 + more) // len(self.tiles)
        return (min(chunk + 1, following) + 1) * len(self.tiles)

    def load_chunk_rows(self, number):
        """Load the rows of `projected` (time steps and weights) of the chunks that have units before index `number`.

        Appends the tiles in SBUF to `raw`, as far as they are missing.
        """
        while len(self.raw) * len(self.tiles) < min(number, self.count):
            rows = self.find_chunk_rows(len(self.raw))
            self.raw.append(load_rows(self.arguments.projected, rows, self.states))

    def find_chunk_rows(self, index):
        """Return the rows (start, end) of chunk `index` in u, whose rows are the tokens of all sequences."""
        sequence, first, last = self.plan[index]
        return sequence * self.tokens + first, sequence * self.tokens + last

    def prepare_chunks(self, number):
        """Append the missing chunks that have units before index `number` to `chunks`.

        Computes the operands that all units of a chunk share.
        """
        self.load_chunk_rows(number)
        while len(self.chunks) * len(self.tiles) < min(number, self.count):
            index = len(self.chunks)
            sequence, first, _ = self.plan[index]
            low, out, into = self.raw[index]
            count = self.counts[0:1, sequence : sequence + 1]
            operands = prepare_operands(low, out, into, first, count, self.weights)
            self.raw[index] = None
            self.chunks.append(Chunk(self.find_chunk_rows(index), operands))

    def load_units(self, number):
        """Append the units before index `number`, with their u and gates loaded to SBUF, as far as they are missing.

        Prepares the operands of their chunks first, and then loads the states that the chunks begin with.
        """
        self.prepare_chunks(number)
        while len(self.units) < min(number, self.count):
            chunk, tile = self.chunks[len(self.units) // len(self.tiles)], len(self.units) % len(self.tiles)
            start, end = chunk.rows
            left, right = self.tiles[tile]
            across = allocate_transposed(right - left, end - start, self.u.dtype)
            if self.u.dtype == nl.float32:
                for begin, stop in ranges(start, end):
                    rows = load(self.u[begin:stop, left:right], self.u.dtype)
                    transpose_rows(across[:, :, begin - start : stop - start], 0, rows, 0)
            else:
                transpose_block_range(across, self.u[start:end, left:right], 0)
            gates = allocate_transposed(end - start, right - left, self.u.dtype)
            first = self.arguments.gate_first
            load_rows_into(gates, self.arguments.gate[start:end, first + left : first + right], STATIC)
            self.units.append(Unit(chunk, tile, (left, right), across[:, 0, :], gates))
        self.load_carried_states()

    def load_carried_states(self):
        """Give each chunk that has none the states it begins with.

        They are loaded from the slot for the first chunk of a sequence; else the tile is that of the chunk
        before. This comes behind the first rows, because the DMA of states has many descriptors.
        """
        for i in range(len(self.chunks)):  # i: chunk
            sequence, first, _ = self.plan[i]
            if self.chunks[i].carried is None and first == 0:
                slot = self.read[0:1, sequence : sequence + 1]
                self.chunks[i].carry(load_states(self.arguments.state, slot, self.channels))
            elif self.chunks[i].carried is None:
                self.chunks[i].carry(self.chunks[i - 1].carried)
