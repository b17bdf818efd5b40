"""Prompts of the causal convolution: panels of channels, the row tiles of all sequences behind one another in each.

`causal_conv1d` calls `convolve_prompts` for sequences with several tokens each. A panel is a range of
channels, up to 4096 in bfloat16 and 2048 in float32. A row tile is up to 128 tokens of one sequence. The
input of a sequence is the K - 1 rows of its state (the context), and then its tokens; K is the number of
taps.

Channels lie on the partitions, so that a tap is a shift along the free dim. A matmul with a diagonal of the
tap's weights multiplies a shifted tile and transposes it back to rows; the products of all taps are summed in
PSUM.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.products import transpose_block_range
from nki_kernels.projection.row_groups import allocate_transposed, item_bytes
from nki_kernels.recurrent.diagonal import build_diagonals, load_columns
from nki_kernels.recurrent.slots import (
    SequenceTable,
    add_numbers,
    load_column,
    load_repeated_row,
    mask_slots,
    select_below,
    split_sequences,
    view_state_rows,
)
from nki_kernels.tiles import (
    BANK,
    PARTITIONS,
    broadcast_row,
    filled,
    load,
    ranges,
    transpose_into,
    transpose_rows,
)

PANEL_BYTES = 8192
"""Bytes of a row of a panel, at most."""

DIAGONAL_BYTES = 32768
"""Bytes of a partition for the diagonals of a panel; the diagonals of the next panel are in SBUF as well."""


@dataclass
class ConvArguments(nl.NKIObject):
    """The arguments of `causal_conv1d`, whose file describes them; `function` is the `op` of the activation."""

    x: nl.NkiTensor
    weight: nl.NkiTensor
    bias: nl.NkiTensor | None
    state: nl.NkiTensor
    table: SequenceTable
    first: int
    function: object


def convolve_prompts(y, arguments, channels):
    """Convolve all tokens of all sequences for a range of channels: store y, and the new states, to HBM.

    Args:
        y: the kernel's result, [T, C] in HBM.
        channels: (first, end) among the C channels, those of this core.
    """
    x, state, sequences = arguments.x, arguments.state, arguments.table.counts.shape[0]
    context = compute_context_rows(state, arguments.table)
    panels = ranges(channels[0], channels[1], count_panel_columns(arguments.weight.shape[0], x.dtype))
    # Loaded before GpSimd, which starts this DMA, makes diagonals.
    rows = load_context(state, context, 0, panels[0])
    products, bias = load_panel_factors(arguments, panels[0])
    moves = []
    tiles = list_row_tiles(x.shape[0] // sequences, sequences)
    # All contexts of a panel are loaded, and the Tensor engine has work for some time yet.
    late = len(tiles) - 1 - (len(tiles) // sequences) // 2
    for number in range(len(panels)):
        panel = Panel(y, arguments, panels[number], products, bias, tiles, allocate_panel_buffers())
        panel.load(0)
        for index in range(len(tiles)):
            sequence = tiles[index][0]
            if index == 0 or tiles[index - 1][0] < sequence:
                panel.write_context(rows)
                if sequence + 1 < sequences:
                    rows = load_context(state, context, sequence + 1, panels[number])
            panel.convolve(index)
            if index == late:
                if number == 0:
                    for group in split_sequences(sequences):
                        moves.append(plan_move(arguments, group))
                for move in moves:
                    move.update(panels[number])
                if number + 1 < len(panels):
                    rows = load_context(state, context, 0, panels[number + 1])
                    products, bias = load_panel_factors(arguments, panels[number + 1])
        panel.finish()


def count_panel_columns(taps, dtype):
    """Return how many channels are convolved at a time, a multiple of 128.

    They are as many as PANEL_BYTES and DIAGONAL_BYTES allow.

    Args:
        taps: K, each with a diagonal.
        dtype: of x.
    """
    most = min(PANEL_BYTES, DIAGONAL_BYTES // taps) // item_bytes(dtype)
    return most // PARTITIONS * PARTITIONS


def list_row_tiles(tokens, sequences):
    """Return a list of (sequence, first row, end row) of x: up to 128 tokens each, sequence after sequence.

    Args:
        tokens: the number of tokens of each sequence.
    """
    tiles = []
    for sequence in range(sequences):
        for start, end in ranges(sequence * tokens, (sequence + 1) * tokens):
            tiles.append((sequence, start, end))
    return tiles


def load_panel_factors(arguments, panel):
    """Load the weights and the bias of channels (first, end): return (diagonals, bias), new SBUF tiles.

    The diagonals are [c in block, block, tap, c] in x's dtype. The bias is [128, channel] float32 with equal
    rows, or None if the kernel has no bias.

    Args:
        panel: the channels.
    """
    dtype, bias = arguments.x.dtype, arguments.bias
    products = build_diagonals(load_columns((arguments.weight,), panel, dtype), dtype)
    if bias is None:
        return products, None
    return products, broadcast_row(bias[:, panel[0] : panel[1]], PARTITIONS, nl.float32, 0.0)


def allocate_panel_buffers():
    """Return two float32 SBUF tiles [128, 512] without contents.

    They are used in turn, so that the Vector engine need not wait for the Scalar engine.
    """
    first = nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.sbuf)
    return [first, nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.sbuf)]


def compute_context_rows(state, table):
    """Return the indices of the K - 1 rows of each sequence's state among the rows of all slots.

    They are a new SBUF tile [K - 1, B] int32. Row j of slot s has index s * (K - 1) + j. For a sequence that
    starts at position 0 the indices are beyond all rows, so that a DMA skips them.
    """
    height = state.shape[1]
    numbers = load_repeated_row(table.state_slots, height)
    scaled = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    within = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, numbers.shape[1]]], channel_multiplier=1)
    nisa.scalar_tensor_tensor(
        dst=scaled, data=numbers, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=within
    )
    return mask_slots(scaled, load_repeated_row(table.starts, height), state.shape[0] * height)


def load_context(state, context, sequence, panel):
    """Load channels (first, end) of the K - 1 state rows of a sequence to a new SBUF tile [K - 1, channel].

    A sequence that starts at position 0 gets zeros.

    Args:
        context: the indices of all rows, from `compute_context_rows`.
        panel: the channels.
    """
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

    channels: (first, end). products: the weights as diagonals, [c in block, block, tap, c]. bias: [128,
    channel], or None. tiles: from `list_row_tiles`. buffers: tiles used in turn. ahead: the row tile that was
    loaded last, transposed, [c in block, block, K - 1 + row]; the first K - 1 columns are the rows before it.
    waiting: (sums in PSUM, rows of y in SBUF, (first, end) of the tokens, (first, end) of the columns) that
    `finish` handles next; None before the first.
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
        """Load row tile `index` (up to 128 tokens of a sequence) from HBM to a new SBUF tile, transposed: set `ahead`.

        The tile is [c in block, block, K - 1 + row]. Its first K - 1 columns have no contents until
        `write_context` or `put_before`.
        """
        _, start, end = self.tiles[index]
        first, (left, right) = self.arguments.first, self.channels
        rows = self.arguments.x[start:end, first + left : first + right]
        self.ahead = load_transposed(rows, self.products.shape[2] - 1)

    def write_context(self, rows):
        """Write the state rows of a sequence to the first K - 1 columns of `ahead`, transposed.

        `rows` is [K - 1, channel] in SBUF.
        """
        height, columns = rows.shape
        before = allocate_transposed(columns, height, rows.dtype)
        transpose_into(before, 0, 0, rows)
        self.put_before(before)

    def put_before(self, rows):
        """Copy the rows before the tile, [c in block, block, K - 1], to the first K - 1 columns of `ahead`.

        The Scalar engine copies, since the Vector engine's fast mode would be held up by GpSimd.
        """
        nisa.activation(dst=self.ahead[:, :, 0 : rows.shape[2]], op=nl.copy, data=rows)

    def convolve(self, index):
        """Multiply row tile `index`, which is `ahead`, by the taps, and load the next row tile, if there is one.

        The sums are in PSUM, up to 512 channels at a time, and each time become `waiting`, after `finish` has
        handled the sums that waited before. If the next tile has the same sequence, the last K - 1 rows of
        this one are put before it.
        """
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
        """Add the bias to the sums that are waiting in PSUM, activate them, and write them to their rows of y in SBUF.

        After the last channels of a row tile, store the rows to y in HBM. Does nothing if no sums are
        waiting.
        """
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


def load_transposed(rows, height):
    """Load rows [row, channel] of HBM, transposed, to a new SBUF tile [c in block, block, height + row].

    The first `height` columns have no contents.
    """
    across = allocate_transposed(rows.shape[1], height + rows.shape[0], rows.dtype)
    target = across[:, :, height : height + rows.shape[0]]
    if rows.dtype == nl.float32:
        transpose_rows(target, 0, load(rows, rows.dtype), 2)
    else:
        transpose_block_range(target, rows, 0)
    return across


def multiply_taps(across, products, columns, rows):
    """Return the convolution of columns (first, end) of the panel, without bias: [row, column] float32 in PSUM.

    Args:
        across: [c in block, block, K - 1 + row], the rows and the K - 1 before them.
        products: the weights as diagonals, [c in block, block, tap, c].
        rows: the number of rows of the result.
    """
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
    """The new states of a group of sequences: the last K - 1 rows of state and real tokens together.

    from_state, from_tokens: the rows of all states, and of x, that new rows are copied from, [sequence, row]
    int32, see `plan_move`. written: the slots, [sequence, 1] int32; beyond all for a sequence without real
    tokens, which the DMA skips.
    """

    arguments: ConvArguments
    from_state: nl.NkiTensor
    from_tokens: nl.NkiTensor
    written: nl.NkiTensor

    def update(self, panel):
        """Replace the group's states in HBM, for channels (first, end).

        New are the last K - 1 rows of the old state and the real tokens together. Sequences without real
        tokens are skipped. All sequences' contexts of these channels must have been loaded.

        Args:
            panel: the channels.
        """
        (left, right), state, first = panel, self.arguments.state, self.arguments.first
        slots, height, channels = state.shape
        shape = (self.written.shape[0], height, right - left)
        moved = nl.ndarray(shape, dtype=state.dtype, buffer=nl.sbuf)
        nisa.memset(dst=moved, value=0.0, engine=nisa.engine.gpsimd)
        state_table = state.reshape((slots * height, channels))
        # A row comes from the state or from the tokens: the number of the other one is beyond all, and is skipped.
        for tap in range(height):
            row = moved[:, tap, :]
            source = view_rows(state_table, self.from_state[:, tap : tap + 1], left, right)
            nisa.dma_copy(dst=row, src=source, oob_mode=nisa.oob_mode.skip)
            numbers = self.from_tokens[:, tap : tap + 1]
            source = view_rows(self.arguments.x, numbers, first + left, first + right)
            nisa.dma_copy(dst=row, src=source, oob_mode=nisa.oob_mode.skip)
        target = view_state_rows(state, self.written, 0, height, panel)
        nisa.dma_copy(dst=target, src=moved, oob_mode=nisa.oob_mode.skip)


def view_rows(table, numbers, left, right):
    """Return a view of some rows of an HBM table [rows, W], columns left … right - 1: [N, column].

    `numbers` [N, 1] int32 in SBUF are the indices of the rows.
    """
    pattern = [[table.shape[1], numbers.shape[0]], [1, right - left]]
    return table.ap(pattern=pattern, offset=left, vector_offset=numbers)


def plan_move(arguments, group):
    """Return the Move of sequences (start, end): computes the rows that their new states come from.

    The new row j of a sequence is row j + count of its state and tokens together. `from_state` or
    `from_tokens` has its number; the other one is beyond all rows, so that a DMA skips it. Both are beyond
    all where a sequence that starts at position 0 has a row of zeros.
    """
    (start, end), table = group, arguments.table
    slots, height, _ = arguments.state.shape
    rows = arguments.x.shape[0]
    tokens = rows // table.counts.shape[0]
    shape = (end - start, height)
    index = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=index, pattern=[[1, height]])
    nisa.tensor_scalar(dst=index, data=index, op0=nl.add, operand0=load_column(table.counts, start, end))
    base = nl.ndarray((end - start, 1), dtype=nl.float32, buffer=nl.sbuf)
    numbers = load_column(table.state_slots, start, end)
    fresh = select_below(load_column(table.starts, start, end), 1.0, slots * height)
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
    token = add_numbers(token, index, nl.float32)
    from_state = add_numbers(old, beyond, nl.int32)
    from_tokens = add_numbers(token, select_below(index, float(height), rows + height), nl.int32)
    numbers, counts = load_column(table.state_slots, start, end), load_column(table.counts, start, end)
    return Move(arguments, from_state, from_tokens, mask_slots(numbers, counts, slots))
