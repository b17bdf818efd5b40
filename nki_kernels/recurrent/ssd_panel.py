"""What single tokens of all sequences through `ssd` share: rows, with the sequences on the partitions.

Of these rows lines are taken, one for each sequence and panel of columns; what is read of its state comes back as
columns, which transposes turn to rows of y.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import on_every_row
from nki_kernels.recurrent.slots import column
from nki_kernels.recurrent.ssd_chunk import load_aside
from nki_kernels.recurrent.ssd_heads import by_head, exponential, filled, in_heads
from nki_kernels.recurrent.ssd_times import decay_rates, time_steps
from nki_kernels.tiles import BANK, PARTITIONS, load, ranges


def panels(sizes, most):
    """Lists of packs that lie side by side, of up to `most` columns each."""
    panel_packs = []
    for pack in sizes.split_heads(BANK // sizes.depth):
        last = len(panel_packs) - 1
        if last >= 0 and (pack[1] - panel_packs[last][0][0]) * sizes.depth <= most:
            panel_packs[last].append(pack)
        else:
            panel_packs.append([pack])
    return panel_packs


class Sequences(nl.NKIObject):
    """Up to 32 sequences: what all panels of their states need."""

    def __init__(self, inputs, group, sizes):
        self.inputs = inputs
        self.group = group
        self.count = group[1] - group[0]
        self.sizes = sizes
        self.ready = False

    def prepare(self):
        """Time steps, decays, weights and skips, with the sequences on the partitions; and constants."""
        if self.ready:
            return
        self.ready = True
        inputs, u = self.inputs, self.inputs.u
        sizes = self.sizes
        start, end = self.group
        heads = slice(sizes.first_head, sizes.first_head + sizes.local_heads)
        rows = load(
            inputs.steps[start:end, sizes.steps_first : sizes.steps_first + sizes.local_heads], u.dtype
        )
        count = column(inputs.table.counts, start, end)
        self.weights = load(u[start:end, sizes.inner :], u.dtype)
        bias = on_every_row(inputs.dt_bias[:, heads], self.count, nl.float32, 0.0)
        times = time_steps(rows, bias, sizes.dt_limits)
        live = nl.ndarray(count.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=live, data=count, op0=nl.greater_equal, operand0=1.0)
        nisa.tensor_scalar(dst=times, data=times, op0=nl.multiply, operand0=live)
        logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
        rates = decay_rates(inputs.a_log[:, heads])
        nisa.tensor_tensor(dst=logs, data1=times, data2=rates[0 : self.count, :], op=nl.multiply)
        self.times = times
        self.decays = exponential(logs)
        self.skip = on_every_row(inputs.d[:, heads], self.count, nl.float32, 0.0)
        self.ones = filled((1, PARTITIONS), 1.0)
        self.zero = filled((PARTITIONS, 1), 0.0)


class Panel(nl.NKIObject):
    """Some own heads of a group of sequences.

    What is read of a state comes in blocks of up to 128 columns: `blocks` (column, first, end) of each pack. `runs` are
    the columns (first, end, height) of blocks side by side with as many columns.
    """

    def __init__(self, y, sequences, packs):
        sizes = sequences.sizes
        self.y = y
        self.sequences = sequences
        self.packs = packs
        self.sizes = sizes
        self.heads = (packs[0][0], packs[len(packs) - 1][1])
        self.left = self.heads[0] * sizes.depth
        self.width = (self.heads[1] - self.heads[0]) * sizes.depth
        self.ready = False
        self.blocks = []
        self.runs = []
        count = 0
        for number in range(len(packs)):
            left, right = self.columns(number)
            pack_blocks = []
            for first, last in ranges(left, right):
                pack_blocks.append((count, first, last))
                if len(self.runs) == 0 or self.runs[-1][2] != last - first:
                    self.runs.append((count, count, last - first))
                self.runs[-1] = (self.runs[-1][0], count + 1, last - first)
                count += 1
            self.blocks.append(pack_blocks)

    def columns(self, number):
        """The range of columns of the panel that a pack has."""
        first, last = self.packs[number]
        return first * self.sizes.depth - self.left, last * self.sizes.depth - self.left

    def prepare(self):
        """Rows [sequence, column] that lines are taken of: inputs times time steps, weights, decays."""
        if self.ready:
            return
        self.ready = True
        sequences, sizes = self.sequences, self.sizes
        inputs = sequences.inputs
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
        shape = (PARTITIONS, self.runs[-1][1], sequences.count)
        self.sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)

    def finish(self):
        """Turn the sums to rows, add the skip, gate, and store the rows of y."""
        sequences, sizes = self.sequences, self.sizes
        first, last = self.heads
        shape = (sequences.count, self.width)
        skip = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        scale_heads(skip, self.x, sequences.skip[:, first:last], sizes.depth)
        active = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=active, op=nl.silu, data=self.gates)
        result = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        for number in range(len(self.packs)):
            left, right = self.columns(number)
            bank = nl.ndarray((sequences.count, right - left), dtype=nl.float32, buffer=nl.psum)
            for index, begin, end in self.blocks[number]:
                data = self.sums[0 : end - begin, index, :]
                nisa.nc_transpose(dst=bank[:, begin - left : end - left], data=data)
            columns = skip[:, left:right]
            nisa.tensor_tensor(dst=columns, data1=columns, data2=bank, op=nl.add)
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


def scale_heads(dst, rows, factors, depth):
    """dst = each head of rows [row, head * element] times its factor [row, head], on GpSimd."""
    nisa.tensor_tensor(
        dst=in_heads(dst, depth),
        data1=in_heads(rows, depth),
        data2=by_head(factors, depth),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )
