"""One token of each sequence through `ssd`: the state of a sequence with n on the partitions, in panels of columns.

What a sequence needs is a line, [1, column] on one partition: its inputs times time steps, its weights, its decays.
Products over that one partition spread the decays over n, turn the weights that read a state into a column, and make
the outer product. A state is the stationary operand of the product that reads it. Nothing of a sequence meets another.

A store to a slot known at run time waits for every load and store of states before it, and a load for every store. So
the states of a batch are loaded together while those of the batch before are moved on, and then stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, SYNC, transfer
from nki_kernels.recurrent.slots import load_row, row, slots_or_none
from nki_kernels.recurrent.ssd_heads import by_head, in_heads
from nki_kernels.recurrent.ssd_panel import Panel, Sequences, plan_panel, split_panels
from nki_kernels.recurrent.ssd_sizes import Sizes
from nki_kernels.tiles import PARTITIONS, ranges

SEQUENCES = 32
"""Sequences whose rows are worked out together, on a quarter of the partitions."""

PANEL = 5120
"""Columns of a state that lie in SBUF together: 20 KiB of a partition."""

FEW = 2
"""So many sequences have panels half as wide, so that a state is moved on while the rest of it arrives."""

STATE_BYTES = 122880
"""Of a partition, for the states of two batches: one is loaded while the other one is moved on and stored."""

LINES = 2
"""Units whose lines are made before they are used."""

READ = 3
"""Packs whose outer products are made before the state of the first of them is read."""


def ssd_step(y, inputs, sizes):
    """Compute y of the token of each sequence, and the states, for the local heads."""
    table, count = inputs.table, inputs.table.counts.shape[0]
    read = slots_or_none(row(table.state_slots, 1), row(table.starts, 1), inputs.state.shape[0])
    written = load_row(table.state_slots)
    units = []
    widest = 0
    for group in ranges(0, count, SEQUENCES):
        sequences = Sequences(inputs, group, group[1] - group[0], sizes)
        for packs in split_panels(sizes, PANEL if count > FEW else PANEL // 2):
            panel = plan_panel(y, sequences, packs)
            widest = max(widest, panel.width)
            for sequence in range(sequences.count):
                units.append(Unit(panel, sizes, read, written, sequence, []))
    pass_units(units, max(1, STATE_BYTES // (8 * widest)))


def pass_units(units, together):
    """Issue packs of all units one after the other; the states of so many units are loaded and stored together."""
    turns = []
    for number in range(len(units)):
        for pack in range(len(units[number].panel.packs)):
            turns.append((number, pack))
    units[0].panel.prepare()
    # Two batches have room: the second one arrives while the first one is moved on.
    load_batch(units, 0, together)
    load_batch(units, together, together)
    lined = 0
    for number in range(len(turns) + READ):
        if number < len(turns):
            unit, pack = turns[number]
            while lined < min(len(units), unit + 1 + LINES):
                units[lined].panel.prepare()
                units[lined].line_up()
                lined += 1
            if number == 0:
                units[0].begin()
            units[unit].multiply(pack)
            # A unit's decays are made a turn before its first pack is multiplied by them.
            if number + 1 < len(turns) and turns[number + 1][1] == 0:
                units[unit + 1].begin()
        if 0 <= number - 1 < len(turns):
            unit, pack = turns[number - 1]
            units[unit].move_on(pack)
        if number >= READ:
            unit, pack = turns[number - READ]
            units[unit].read_pack(pack)
            if pack == len(units[unit].panel.packs) - 1 and (unit + 1) % together == 0:
                load_batch(units, unit + 1 + together, together)


def load_batch(units, first, together):
    """Load the states of a batch of units."""
    for unit in units[first : first + together]:
        unit.load()


@dataclass
class Unit(nl.NKIObject):
    """A panel of the state of one sequence, [n, column]; tiles are None until the method that computes them.

    read, written: slots of all sequences, [1, B] int32. sequence: in the panel's group. banks: outer products of packs,
    in PSUM. state: float32. line: rows of the panel for the sequence, [1, column]. decays: [n, head]. out: the weights
    that read the state, [n, group]. sums: what is read, [row of block, block] in PSUM.
    """

    panel: Panel
    sizes: Sizes
    read: nl.NkiTensor
    written: nl.NkiTensor
    sequence: int
    banks: list
    state: nl.NkiTensor | None = None
    line: nl.NkiTensor | None = None
    decays: nl.NkiTensor | None = None
    out: nl.NkiTensor | None = None
    sums: nl.NkiTensor | None = None

    def view_slot(self, slots):
        """Return the panel of the state in its slot, in HBM: [n, column]. slots: [1, B] int32."""
        sizes, panel = self.sizes, self.panel
        sequence = panel.sequences.group[0] + self.sequence
        return panel.sequences.inputs.state.ap(
            pattern=[[sizes.inner, sizes.states], [1, panel.width]],
            offset=sizes.left + panel.left,
            scalar_offset=slots[:, sequence : sequence + 1],
            indirect_dim=0,
        )

    def load(self):
        """Load the state; zeros for a slot beyond all."""
        sequences = self.panel.sequences
        sequences.prepare()
        shape = (self.sizes.states, self.panel.width)
        self.state = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        zeros = sequences.zero[0 : shape[0], :].broadcast(1, shape[1])
        # The Scalar engine makes the zeros: memset runs on Vector or GpSimd, which have the states to move on.
        nisa.activation(dst=self.state, op=nl.copy, data=zeros)
        transfer(self.state, self.view_slot(self.read), SYNC, nisa.oob_mode.skip)

    def line_up(self):
        """Copy the sequence's row of the panel to one partition, `line`."""
        rows = self.panel.rows
        self.line = nl.ndarray((1, rows.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
        transfer(self.line, rows[self.sequence : self.sequence + 1, :], SCALAR)

    def weights(self, group, side):
        """Return the weights of a group that write the state (side 0) or read it (side 1), [1, n]."""
        sizes = self.sizes
        first = self.panel.width + (side * sizes.groups + group) * sizes.states
        return self.line[:, first : first + sizes.states]

    def begin(self):
        """Compute `decays` and `out`, and allocate `sums`."""
        sizes, ones = self.sizes, self.panel.sequences.ones
        decays = self.line[:, self.panel.width + 2 * sizes.groups * sizes.states :]
        bank = nl.ndarray((sizes.states, decays.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=ones[:, 0 : sizes.states], moving=decays, accumulate=False)
        self.decays = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=self.decays, op=nl.copy, data=bank)
        bank = nl.ndarray((sizes.states, sizes.groups), dtype=nl.float32, buffer=nl.psum)
        for group in range(sizes.groups):
            nisa.nc_matmul(
                dst=bank[:, group : group + 1],
                stationary=self.weights(group, 1),
                moving=ones[:, 0:1],
                accumulate=False,
            )
        self.out = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=self.out, op=nl.copy, data=bank)
        self.sums = nl.ndarray((PARTITIONS, self.panel.runs[-1][1]), dtype=nl.float32, buffer=nl.psum)

    def multiply(self, number):
        """Compute the outer product of weights and inputs of a pack, and decay its columns."""
        sizes, panel = self.sizes, self.panel
        left, right = panel.columns(number)
        first, last = panel.packs[number]
        bank = nl.ndarray((sizes.states, right - left), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=bank,
            stationary=self.weights(sizes.group_of(first), 0),
            moving=self.line[:, left:right],
            accumulate=False,
        )
        self.banks.append(bank)
        columns = in_heads(self.state[:, left:right], sizes.depth)
        # GpSimd decays while the Vector engine, which reads PSUM, adds the outer products of the pack before.
        nisa.tensor_tensor(
            dst=columns,
            data1=columns,
            data2=by_head(self.decays[:, first - panel.heads[0] : last - panel.heads[0]], sizes.depth),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )

    def move_on(self, number):
        """Add the outer product to the columns of a pack; after the last one store the state."""
        left, right = self.panel.columns(number)
        columns = self.state[:, left:right]
        nisa.tensor_tensor(dst=columns, data1=columns, data2=self.banks[number], op=nl.add)
        if number == len(self.panel.packs) - 1:
            transfer(self.view_slot(self.written), self.state, SYNC)

    def read_pack(self, number):
        """Read the columns of a pack; after the last one keep what was read, and finish the panel's last sequence."""
        panel = self.panel
        group = self.sizes.group_of(panel.packs[number][0])
        for column, first, last in panel.blocks[number]:
            nisa.nc_matmul(
                dst=self.sums[0 : last - first, column : column + 1],
                stationary=self.state[:, first:last],
                moving=self.out[:, group : group + 1],
                accumulate=False,
            )
        if number == len(panel.packs) - 1:
            for first, last, height in panel.runs:
                nisa.activation(
                    dst=panel.sums[0:height, first:last, self.sequence],
                    op=nl.copy,
                    data=self.sums[0:height, first:last],
                )
            if self.sequence == panel.sequences.count - 1:
                panel.finish()
