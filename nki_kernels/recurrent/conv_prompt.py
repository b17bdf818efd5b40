"""Prompts of the causal convolution: panels of channels, the row tiles of all sequences behind one another in each.

Channels lie on the partitions, so that a tap is a shift along the free dim; see `causal_conv1d`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.products import transpose_block_range
from nki_kernels.projection.row_groups import blocks_tile, item_bytes
from nki_kernels.recurrent.diagonal import columns_of, diagonals
from nki_kernels.recurrent.slots import (
    SequenceTable,
    below,
    column,
    row,
    sequence_groups,
    slots_or_none,
    state_rows,
    total,
)
from nki_kernels.tiles import (
    BANK,
    PARTITIONS,
    filled,
    load,
    on_every_row,
    ranges,
    transpose_into,
    transpose_rows,
)

PANEL_BYTES = 8192
"""Of a row of a panel, at most."""

DIAGONAL_BYTES = 32768
"""Of a partition, for the diagonals of a panel; those of the next one lie in SBUF as well."""


@dataclass
class ConvArguments(nl.NKIObject):
    """The arguments of `causal_conv1d`, which describes them; function: of the activation."""

    x: nl.NkiTensor
    weight: nl.NkiTensor
    bias: nl.NkiTensor | None
    state: nl.NkiTensor
    table: SequenceTable
    first: int
    function: object


def convolve_prompts(y, arguments, channels):
    """Compute all tokens of all sequences for channels (first, end), and the states that they leave."""
    x, state, sequences = arguments.x, arguments.state, arguments.table.counts.shape[0]
    context = context_rows(state, arguments.table)
    panels = ranges(channels[0], channels[1], panel_columns(arguments.weight.shape[0], x.dtype))
    # Loaded before GpSimd, which starts this DMA, makes diagonals.
    rows = load_context(state, context, 0, panels[0])
    products, bias = panel_factors(arguments, panels[0])
    moves = []
    tiles = row_tiles(x.shape[0] // sequences, sequences)
    # All contexts of a panel are loaded, and the Tensor engine has work for some time yet.
    late = len(tiles) - 1 - (len(tiles) // sequences) // 2
    for number in range(len(panels)):
        panel = Panel(y, arguments, panels[number], products, bias, tiles, panel_buffers())
        panel.load(0)
        for index in range(len(tiles)):
            sequence = tiles[index][0]
            if index == 0 or tiles[index - 1][0] < sequence:
                panel.begin(rows)
                if sequence + 1 < sequences:
                    rows = load_context(state, context, sequence + 1, panels[number])
            panel.convolve(index)
            if index == late:
                if number == 0:
                    for group in sequence_groups(sequences):
                        moves.append(plan_move(arguments, group))
                for move in moves:
                    move.update(panels[number])
                if number + 1 < len(panels):
                    rows = load_context(state, context, 0, panels[number + 1])
                    products, bias = panel_factors(arguments, panels[number + 1])
        panel.finish()


def panel_columns(taps, dtype):
    """Return how many channels a panel has, whole blocks of them."""
    most = min(PANEL_BYTES, DIAGONAL_BYTES // taps) // item_bytes(dtype)
    return most // PARTITIONS * PARTITIONS


def row_tiles(tokens, sequences):
    """Return (sequence, first row, end) of up to 128 tokens of each sequence, one after another."""
    tiles = []
    for sequence in range(sequences):
        for start, end in ranges(sequence * tokens, (sequence + 1) * tokens):
            tiles.append((sequence, start, end))
    return tiles


def panel_factors(arguments, panel):
    """Return the weights of a panel of channels as diagonals, and its bias on every row, or None."""
    dtype, bias = arguments.x.dtype, arguments.bias
    products = diagonals(columns_of((arguments.weight,), panel, dtype), dtype)
    if bias is None:
        return products, None
    return products, on_every_row(bias[:, panel[0] : panel[1]], PARTITIONS, nl.float32, 0.0)


def panel_buffers():
    """Return two tiles that are used in turn, so that the Vector engine need not wait for the Scalar engine."""
    first = nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.sbuf)
    return [first, nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.sbuf)]


def context_rows(state, table):
    """Return the numbers of the rows of each sequence's state among those of all slots: [K - 1, B] int32."""
    height = state.shape[1]
    numbers = row(table.state_slots, height)
    scaled = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    within = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, numbers.shape[1]]], channel_multiplier=1)
    nisa.scalar_tensor_tensor(
        dst=scaled, data=numbers, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=within
    )
    return slots_or_none(scaled, row(table.starts, height), state.shape[0] * height)


def load_context(state, context, sequence, panel):
    """Load a panel of the state of a sequence, one row on each partition: [K - 1, columns]."""
    slots, height, channels = state.shape
    left, right = panel
    tile = filled((height, right - left), 0.0, state.dtype)
    source = state.reshape((slots * height, channels)).ap(
        pattern=[[channels, height], [1, right - left]],
        offset=left,
        vector_offset=context[:, sequence : sequence + 1],
    )
    nisa.dma_copy(dst=tile, src=source, oob_mode=nisa.oob_mode.skip)
    return tile


@dataclass
class Panel(nl.NKIObject):
    """A panel of channels, through which all row tiles pass; each is loaded while the one before is multiplied.

    channels: (first, end). products: weights as diagonals. bias: on every row, or None. buffers: tiles used in turn.
    ahead: the tile that is loaded, transposed, behind room for the rows before it. waiting: sums in PSUM, the rows of y
    that they belong to, (first, end) of the tokens, and (first, end) of the columns.
    """

    y: nl.NkiTensor
    arguments: ConvArguments
    channels: tuple
    products: nl.NkiTensor
    bias: nl.NkiTensor | None
    tiles: list
    buffers: list
    ahead: nl.NkiTensor | None = None
    waiting: tuple | None = None

    def load(self, index):
        """Load a row tile to `ahead`."""
        _, start, end = self.tiles[index]
        first, (left, right) = self.arguments.first, self.channels
        rows = self.arguments.x[start:end, first + left : first + right]
        self.ahead = load_across(rows, self.products.shape[2] - 1)

    def begin(self, rows):
        """Write the rows of a sequence's state, [K - 1, columns], before the tile that is loaded."""
        height, columns = rows.shape
        before = blocks_tile(columns, height, rows.dtype)
        transpose_into(before, 0, 0, rows)
        self.put_before(before)

    def put_before(self, rows):
        """Write rows before the tile that is loaded; not by the fast mode of the Vector engine, which GpSimd stops."""
        nisa.activation(dst=self.ahead[:, :, 0 : rows.shape[2]], op=nl.copy, data=rows)

    def convolve(self, index):
        """Multiply a row tile, while the next one is loaded."""
        sequence, start, end = self.tiles[index]
        columns, height = self.channels[1] - self.channels[0], self.products.shape[2] - 1
        tile, has_next = self.ahead, index + 1 < len(self.tiles)
        if has_next:
            self.load(index + 1)
        result = nl.ndarray((end - start, columns), dtype=self.y.dtype, buffer=nl.sbuf)
        for first, last in ranges(0, columns, BANK):
            bank = multiply_taps(tile, self.products, (first, last), end - start)
            if last == columns and has_next and self.tiles[index + 1][0] == sequence:
                self.put_before(tile[:, :, end - start : end - start + height])
            self.finish()
            self.waiting = (bank, result, (start, end), (first, last))

    def finish(self):
        """Add the bias to columns in PSUM and activate them, while the next ones are multiplied; last store them."""
        if self.waiting is None:
            return
        bank, result, rows, (first, last) = self.waiting
        sums = bank
        if self.bias is not None:
            self.buffers.reverse()
            sums = self.buffers[0][0 : bank.shape[0], 0 : last - first]
            bias = self.bias[0 : bank.shape[0], first:last]
            nisa.tensor_tensor(dst=sums, data1=bank, data2=bias, op=nl.add)
        nisa.activation(dst=result[:, first:last], op=self.arguments.function, data=sums)
        if last == result.shape[1]:
            nisa.dma_copy(dst=self.y[rows[0] : rows[1], self.channels[0] : self.channels[1]], src=result)


def load_across(rows, height):
    """Load rows [row, column], transposed, behind room for `height` more: [c in block, block, row]."""
    across = blocks_tile(rows.shape[1], height + rows.shape[0], rows.dtype)
    target = across[:, :, height : height + rows.shape[0]]
    if rows.dtype == nl.float32:
        transpose_rows(target, 0, load(rows, rows.dtype), 2)
    else:
        transpose_block_range(target, rows, 0)
    return across


def multiply_taps(across, products, columns, rows):
    """Return the sum of K products of each block of columns (first, end) of the panel: [row, column] @ PSUM."""
    first, last = columns
    bank = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
    for start, end in ranges(first, last):
        block, used = start // PARTITIONS, end - start
        for tap in range(products.shape[2]):
            nisa.nc_matmul(
                dst=bank[:, start - first : end - first],
                stationary=across[0:used, block, tap : tap + rows],
                moving=products[0:used, block, tap, 0:used],
                accumulate=tap > 0,
            )
    return bank


@dataclass
class Move(nl.NKIObject):
    """How the states of a group of sequences move on: to the last K - 1 rows of state and tokens, without padding.

    from_state, from_tokens: where the rows of new states come from, see `plan_move`. written: the slots, [sequence, 1].
    """

    arguments: ConvArguments
    from_state: nl.NkiTensor
    from_tokens: nl.NkiTensor
    written: nl.NkiTensor

    def update(self, panel):
        """Move a panel of the states on. Those of its contexts have been read before."""
        (left, right), state, first = panel, self.arguments.state, self.arguments.first
        slots, height, channels = state.shape
        shape = (self.written.shape[0], height, right - left)
        moved = nl.ndarray(shape, dtype=state.dtype, buffer=nl.sbuf)
        nisa.memset(dst=moved, value=0.0, engine=nisa.engine.gpsimd)
        state_table = state.reshape((slots * height, channels))
        # A row comes from the state or from the tokens: the number of the other one is beyond all, and is skipped.
        for tap in range(height):
            row = moved[:, tap, :]
            source = numbered_rows(state_table, self.from_state[:, tap : tap + 1], left, right)
            nisa.dma_copy(dst=row, src=source, oob_mode=nisa.oob_mode.skip)
            numbers = self.from_tokens[:, tap : tap + 1]
            source = numbered_rows(self.arguments.x, numbers, first + left, first + right)
            nisa.dma_copy(dst=row, src=source, oob_mode=nisa.oob_mode.skip)
        target = state_rows(state, self.written, 0, height, panel)
        nisa.dma_copy(dst=target, src=moved, oob_mode=nisa.oob_mode.skip)


def numbered_rows(table, numbers, left, right):
    """Return a view of the columns left … right of the rows of some numbers: [N, columns] in HBM."""
    pattern = [[table.shape[1], numbers.shape[0]], [1, right - left]]
    return table.ap(pattern=pattern, offset=left, vector_offset=numbers)


def plan_move(arguments, group):
    """Return the Move of sequences (start, end): numbers [sequence, row] int32 of rows of all states, and of x.

    Row j is row j + count of state and tokens together. One of the two numbers is beyond all rows; both are where the
    row is one of zeros.
    """
    (start, end), table = group, arguments.table
    slots, height, _ = arguments.state.shape
    rows = arguments.x.shape[0]
    tokens = rows // table.counts.shape[0]
    shape = (end - start, height)
    index = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=index, pattern=[[1, height]])
    nisa.tensor_scalar(dst=index, data=index, op0=nl.add, operand0=column(table.counts, start, end))
    base = nl.ndarray((end - start, 1), dtype=nl.float32, buffer=nl.sbuf)
    numbers = column(table.state_slots, start, end)
    fresh = below(column(table.starts, start, end), 1.0, slots * height)
    nisa.scalar_tensor_tensor(
        dst=base, data=numbers, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=fresh
    )
    beyond = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=beyond,
        data=index,
        op0=nl.greater_equal,
        operand0=float(height),
        op1=nl.multiply,
        operand1=2.0**23,
    )
    old = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=old, data=index, op0=nl.add, operand0=base)
    token = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=token, pattern=[[0, height]], offset=start * tokens - height, channel_multiplier=tokens)
    token = total(token, index, nl.float32)
    from_state = total(old, beyond, nl.int32)
    from_tokens = total(token, below(index, float(height), rows + height), nl.int32)
    numbers, counts = column(table.state_slots, start, end), column(table.counts, start, end)
    return Move(arguments, from_state, from_tokens, slots_or_none(numbers, counts, slots))
