"""One token of each sequence through `ssd`: the state of a sequence with n on the partitions, in panels of columns.

`ssd` calls `ssd_step` if there is one token of each sequence. A panel is a range of neighbouring columns of
the states, of whole heads; a pack is heads of one group with up to 512 columns of it. A unit is a panel of
the state of one sequence.

What a unit needs is a line, [1, column] on one partition: its inputs times time steps, its weights, its
decays. Products over that one partition spread the decays over n, turn the weights that read a state into a
column, and make the outer product of the weights that write a state and the inputs. A state is the stationary
operand of the product that reads it. Nothing of a sequence meets another.

A store to slots known at run time waits for every load and store of states before it, and a load for every
store. So the states of a batch of units are loaded together while those of the batch before are advanced, and
then stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, SYNC, transfer
from nki_kernels.recurrent.slots import load_repeated_row, load_row, mask_slots
from nki_kernels.recurrent.ssd_heads import repeat_for_elements, view_heads
from nki_kernels.recurrent.ssd_panel import Panel, Sequences, plan_panel, split_panels
from nki_kernels.recurrent.ssd_sizes import Sizes
from nki_kernels.tiles import PARTITIONS, ranges

SEQUENCES = 32
"""Sequences whose rows are computed together, on a quarter of the partitions."""

PANEL = 5120
"""Columns of a state that are in SBUF together: 20 KiB of a partition."""

FEW = 2
"""So many sequences have panels half as wide, so that a state is advanced while the rest of it arrives."""

STATE_BYTES = 122880
"""Bytes of a partition for the states of two batches: one is loaded while the other one is advanced and stored."""

LINES = 2
"""Units whose lines are copied before they are used."""

READ = 3
"""Packs whose outer products are computed before the state of the first of them is read."""


def ssd_step(y, inputs, sizes):
    """Run the recurrence for one token of each sequence and the local heads: store y and the states to HBM.

    Args:
        y: the kernel's result, [B, H P] in HBM.
        sizes: which heads are local, and where their columns begin.
    """
    table, count = inputs.table, inputs.table.counts.shape[0]
    read = mask_slots(
        load_repeated_row(table.state_slots, 1), load_repeated_row(table.starts, 1), inputs.state.shape[0]
    )
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
    """Advance the states of all units by a token, pack after pack, and write what the token reads of them.

    The states of `together` units are loaded, and then stored, together. y is stored with the last unit of
    each panel.
    """
    turns = []
    for number in range(len(units)):
        for pack in range(len(units[number].panel.packs)):
            turns.append((number, pack))
    units[0].panel.prepare()
    # Two batches have room: the second one arrives while the first one is advanced by a token.
    load_batch(units, 0, together)
    load_batch(units, together, together)
    lined = 0
    for number in range(len(turns) + READ):
        if number < len(turns):
            unit, pack = turns[number]
            while lined < min(len(units), unit + 1 + LINES):
                units[lined].panel.prepare()
                units[lined].copy_line()
                lined += 1
            if number == 0:
                units[0].prepare_factors()
            units[unit].multiply_pack(pack)
            # A unit's decays are made a turn before its first pack is multiplied by them.
            if number + 1 < len(turns) and turns[number + 1][1] == 0:
                units[unit + 1].prepare_factors()
        if 0 <= number - 1 < len(turns):
            unit, pack = turns[number - 1]
            units[unit].advance_pack(pack)
        if number >= READ:
            unit, pack = turns[number - READ]
            units[unit].read_pack(pack)
            if pack == len(units[unit].panel.packs) - 1 and (unit + 1) % together == 0:
                load_batch(units, unit + 1 + together, together)


def load_batch(units, first, together):
    """Load the states of the units first … first + together - 1, or as many of them as there are, to SBUF."""
    for unit in units[first : first + together]:
        unit.load()


@dataclass
class Unit(nl.NKIObject):
    """A panel of the state of one sequence, [n, column]; tiles are None until the method that computes them.

    read, written: slots of all sequences, [1, B] int32. sequence: its index in the panel's group of
    sequences. banks: outer products of packs so far, [n, column of pack] in PSUM. state: float32 in SBUF.
    line: the sequence's row of the panel's rows, [1, .]. decays: of the panel's heads, [n, head] with equal
    rows. out: the weights that read the state, [n, group]. sums: what is read, [column of block, block]
    float32 in PSUM.
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
        """Return a view of the unit's columns of the state in its sequence's slot: [n, column] in HBM.

        Args:
            slots: the slots of all sequences, [1, B] int32 in SBUF, read at run time.
        """
        sizes, panel = self.sizes, self.panel
        sequence = panel.sequences.group[0] + self.sequence
        return panel.sequences.inputs.state.ap(
            pattern=[[sizes.inner, sizes.states], [1, panel.width]],
            offset=sizes.left + panel.left,
            scalar_offset=slots[:, sequence : sequence + 1],
            indirect_dim=0,
        )

    def load(self):
        """Load the state from its slot to a new SBUF tile, `state`; zeros if the slot's number is beyond all slots.

        Prepares the panel's sequences first, if that is not done.
        """
        sequences = self.panel.sequences
        sequences.prepare()
        shape = (self.sizes.states, self.panel.width)
        self.state = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        zeros = sequences.zero[0 : shape[0], :].broadcast(1, shape[1])
        # The Scalar engine makes the zeros: memset runs on Vector or GpSimd, which have the states to move on.
        nisa.activation(dst=self.state, op=nl.copy, data=zeros)
        transfer(self.state, self.view_slot(self.read), SYNC, nisa.oob_mode.skip)

    def copy_line(self):
        """Set `line` to the sequence's row of the panel: a new float32 SBUF tile on one partition, [1, .].

        It has inputs times time steps, weights and decays side by side.
        """
        rows = self.panel.rows
        self.line = nl.ndarray((1, rows.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
        transfer(self.line, rows[self.sequence : self.sequence + 1, :], SCALAR)

    def view_weights(self, group, side):
        """Return a view of a group's weights in `line`, [1, n].

        side 0: those that write the state. side 1: those that read it.
        """
        sizes = self.sizes
        first = self.panel.width + (side * sizes.groups + group) * sizes.states
        return self.line[:, first : first + sizes.states]

    def prepare_factors(self):
        """Spread the sequence's decays and reading weights from `line` over the partitions: set `decays` and `out`.

        `decays` is [n, head] with equal rows, `out` [n, group], new float32 SBUF tiles. Also allocate `sums`
        in PSUM.
        """
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
                stationary=self.view_weights(group, 1),
                moving=ones[:, 0:1],
                accumulate=False,
            )
        self.out = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=self.out, op=nl.copy, data=bank)
        self.sums = nl.ndarray((PARTITIONS, self.panel.runs[-1][1]), dtype=nl.float32, buffer=nl.psum)

    def multiply_pack(self, number):
        """Append the outer product of pack `number` to `banks`, and decay the pack's columns of the state in SBUF.

        The outer product, [n, column] float32 in PSUM, is that of the weights that write the state and the
        inputs times time steps.
        """
        sizes, panel = self.sizes, self.panel
        left, right = panel.find_columns(number)
        first, last = panel.packs[number]
        bank = nl.ndarray((sizes.states, right - left), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=bank,
            stationary=self.view_weights(sizes.find_group(first), 0),
            moving=self.line[:, left:right],
            accumulate=False,
        )
        self.banks.append(bank)
        columns = view_heads(self.state[:, left:right], sizes.depth)
        # GpSimd decays while the Vector engine, which reads PSUM, adds the outer products of the pack before.
        nisa.tensor_tensor(
            dst=columns,
            data1=columns,
            data2=repeat_for_elements(
                self.decays[:, first - panel.heads[0] : last - panel.heads[0]], sizes.depth
            ),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )

    def advance_pack(self, number):
        """Add the outer product of pack `number` to its columns of the state in SBUF.

        After the last pack store the state to its slot in HBM.
        """
        left, right = self.panel.find_columns(number)
        columns = self.state[:, left:right]
        nisa.tensor_tensor(dst=columns, data1=columns, data2=self.banks[number], op=nl.add)
        if number == len(self.panel.packs) - 1:
            transfer(self.view_slot(self.written), self.state, SYNC)

    def read_pack(self, number):
        """Write what the token reads of the state's columns of pack `number` to `sums` in PSUM.

        After the last pack copy `sums` to the panel's `sums` in SBUF. After the panel's last sequence call
        `Panel.finish`, which stores y.
        """
        panel = self.panel
        group = self.sizes.find_group(panel.packs[number][0])
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
