"""What single tokens of all sequences through `ssd` share: rows, with the sequences on the partitions.

`recurrent/ssd_step.py` uses it for launches with one token of each sequence. A panel is a range of
neighbouring columns of the states, of whole heads. It consists of packs: heads of one group with up to 512
columns. A line is the row of a panel of one sequence, copied to one partition. What is read of a state comes
back as columns, which transposes turn to rows of y.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.slots import load_column
from nki_kernels.recurrent.ssd_chunk import load_aside
from nki_kernels.recurrent.ssd_heads import compute_exponential, scale_heads
from nki_kernels.recurrent.ssd_sizes import Inputs, Sizes
from nki_kernels.recurrent.ssd_times import compute_time_steps, load_decay_rates
from nki_kernels.tiles import BANK, PARTITIONS, broadcast_row, filled, load, ranges


def split_panels(sizes, most):
    """Return a list of panels of neighbouring columns, each a list of packs (first, end) of local heads of one group.

    A pack has up to 512 columns, and a panel up to `most`; it has more only if its single pack has.
    """
    panel_packs = []
    for pack in sizes.split_heads(BANK // sizes.depth):
        last = len(panel_packs) - 1
        if last >= 0 and (pack[1] - panel_packs[last][0][0]) * sizes.depth <= most:
            panel_packs[last].append(pack)
        else:
            panel_packs.append([pack])
    return panel_packs


@dataclass
class Sequences(nl.NKIObject):
    """Up to 32 sequences (start, end): what all panels of their states need; tiles are None until `prepare`.

    count: their number. weights: the weights that write and read states, [sequence, side and group and n].
    times, decays, skip: time steps, decays and d of the local heads, [sequence, head] float32. ones: [1,
    128]. zero: [128, 1].
    """

    inputs: Inputs
    group: tuple
    count: int
    sizes: Sizes
    weights: nl.NkiTensor | None = None
    times: nl.NkiTensor | None = None
    decays: nl.NkiTensor | None = None
    skip: nl.NkiTensor | None = None
    ones: nl.NkiTensor | None = None
    zero: nl.NkiTensor | None = None

    def prepare(self):
        """Load and compute weights, time steps, decays and skips of up to 32 sequences, one on each partition, in SBUF.

        Does nothing if they are computed.
        """
        if self.zero is not None:
            return
        inputs, u = self.inputs, self.inputs.u
        sizes = self.sizes
        start, end = self.group
        heads = slice(sizes.first_head, sizes.first_head + sizes.local_heads)
        rows = load(
            inputs.steps[start:end, sizes.steps_first : sizes.steps_first + sizes.local_heads], u.dtype
        )
        count = load_column(inputs.table.counts, start, end)
        self.weights = load(u[start:end, sizes.inner :], u.dtype)
        bias = broadcast_row(inputs.dt_bias[:, heads], self.count, nl.float32, 0.0)
        times = compute_time_steps(rows, bias, sizes.dt_limits)
        live = nl.ndarray(count.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=live, data=count, op0=nl.greater_equal, operand0=1.0)
        # A time step of 0 has a decay of 1 and no input: padding leaves the state as it is.
        nisa.tensor_scalar(dst=times, data=times, op0=nl.multiply, operand0=live)
        logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
        rates = load_decay_rates(inputs.a_log[:, heads])
        nisa.tensor_tensor(dst=logs, data1=times, data2=rates[0 : self.count, :], op=nl.multiply)
        self.times = times
        self.decays = compute_exponential(logs)
        self.skip = broadcast_row(inputs.d[:, heads], self.count, nl.float32, 0.0)
        self.ones = filled((1, PARTITIONS), 1.0)
        self.zero = filled((PARTITIONS, 1), 0.0)


@dataclass
class Panel(nl.NKIObject):
    """Heads (first, end) of a group of up to 32 sequences; tiles are None until `prepare`.

    packs: (first, end) of the heads of each. left: the panel's first column among the columns of the local
    heads; width: their number. What is read of a state comes in blocks of up to 128 columns: `blocks` has a
    list of (index, first column, end column) for each pack. `runs` has (first block, end block, columns) of
    neighbouring blocks with equally many columns. x, gates: rows [sequence, column]. rows: x times time
    steps, weights, and decays, side by side, [sequence, .] float32. sums: what is read of the states, [column
    of block, block, sequence] float32; units write it.
    """

    y: nl.NkiTensor
    sequences: Sequences
    packs: list
    heads: tuple
    left: int
    width: int
    blocks: list
    runs: list
    x: nl.NkiTensor | None = None
    gates: nl.NkiTensor | None = None
    rows: nl.NkiTensor | None = None
    sums: nl.NkiTensor | None = None

    def find_columns(self, number):
        """Return (first, end) of the columns of pack `number`, counted from the panel's first column."""
        (first, last), depth = self.packs[number], self.sequences.sizes.depth
        return first * depth - self.left, last * depth - self.left

    def prepare(self):
        """Load x and gates of the panel's columns, compute `rows`, and allocate `sums`: new SBUF tiles.

        Does nothing if that is done. Calls `Sequences.prepare`.
        """
        if self.sums is not None:
            return
        sequences, sizes, inputs = self.sequences, self.sequences.sizes, self.sequences.inputs
        start, end = sequences.group
        column = sizes.left + self.left
        self.x = load_aside(inputs.u[start:end, column : column + self.width])
        column = sizes.gate_first + self.left
        self.gates = load_aside(inputs.gate[start:end, column : column + self.width])
        sequences.prepare()
        first, last = self.heads
        weights = self.width + sequences.weights.shape[1]
        shape = (sequences.count, weights + last - first)
        self.rows = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        scale_heads(self.rows[:, 0 : self.width], self.x, sequences.times[:, first:last], sizes.depth)
        nisa.tensor_copy(dst=self.rows[:, self.width : weights], src=sequences.weights)
        nisa.tensor_copy(dst=self.rows[:, weights:], src=sequences.decays[:, first:last])
        # The sequence is the last dim, so that one transpose makes rows of a block of all sequences.
        shape = (PARTITIONS, self.runs[-1][1], sequences.count)
        self.sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)

    def finish(self):
        """Store the panel's columns of y to HBM: (sums + skip * x) * silu(gates).

        `sums` [column of block, block, sequence] are first transposed to rows, by way of PSUM.
        """
        sequences, sizes = self.sequences, self.sequences.sizes
        first, last = self.heads
        shape = (sequences.count, self.width)
        skip = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        scale_heads(skip, self.x, sequences.skip[:, first:last], sizes.depth)
        active = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=active, op=nl.silu, data=self.gates)
        result = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        for number in range(len(self.packs)):
            left, right = self.find_columns(number)
            bank = nl.ndarray((sequences.count, right - left), dtype=nl.float32, buffer=nl.psum)
            for index, begin, end in self.blocks[number]:
                data = self.sums[0 : end - begin, index, :]
                nisa.nc_transpose(dst=bank[:, begin - left : end - left], data=data)
            columns = skip[:, left:right]
            nisa.tensor_tensor(dst=columns, data1=columns, data2=bank, op=nl.add)
            # Both operands lie in SBUF, so GpSimd gates them while the Vector engine adds the next bank.
            nisa.tensor_tensor(
                dst=result[:, left:right],
                data1=columns,
                data2=active[:, left:right],
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
        start, end = sequences.group
        left = sizes.left + self.left
        nisa.dma_copy(dst=self.y[start:end, left : left + self.width], src=result)


def plan_panel(y, sequences, packs):
    """Return a Panel for some packs, which are ranges (first, end) of neighbouring heads; allocates no tile.

    Also divides its columns into blocks of up to 128, and lists the runs of equally wide blocks.
    """
    depth = sequences.sizes.depth
    first, end = packs[0][0], packs[len(packs) - 1][1]
    panel = Panel(y, sequences, packs, (first, end), first * depth, (end - first) * depth, [], [])
    count, runs = 0, panel.runs
    for number in range(len(packs)):
        left, right = panel.find_columns(number)
        pack_blocks = []
        for begin, stop in ranges(left, right):
            pack_blocks.append((count, begin, stop))
            if len(runs) == 0 or runs[-1][2] != stop - begin:
                runs.append((count, count, stop - begin))
            runs[-1] = (runs[-1][0], count + 1, stop - begin)
            count += 1
        panel.blocks.append(pack_blocks)
    return panel
