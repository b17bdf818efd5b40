"""Prompts of the causal convolution: panels of channels, the row tiles of all sequences behind one another in each.

Channels lie on the partitions, so that a tap is a shift along the free dim; see `causal_conv1d`.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import on_every_row, transpose_rows
from nki_kernels.projection.products import transpose_part
from nki_kernels.projection.row_groups import blocks_tile, item_bytes
from nki_kernels.recurrent.diagonal import columns_of, diagonals
from nki_kernels.recurrent.slots import (
    below,
    column,
    row,
    sequence_groups,
    slots_or_none,
    state_rows,
    total,
)
from nki_kernels.tiles import BANK, PARTITIONS, load, ranges, transpose_into

PANEL_BYTES = 8192
"""Of a row of a panel, at most."""

DIAGONAL_BYTES = 32768
"""Of a partition, for the diagonals of a panel; those of the next one lie in SBUF as well."""


def prompts(y, given, state, places, own, first, function):
    """All tokens of all sequences, for the channels `own`, and the states that they leave."""
    x, weight, bias = given
    sequences = places[0].shape[0]
    each = x.shape[0] // sequences
    context = context_rows(state, places[0], places[1])
    panels = ranges(own[0], own[1], panel_columns(weight.shape[0], x.dtype))
    # Loaded before GpSimd, which starts this DMA, makes diagonals.
    rows = load_context(state, context, 0, panels[0])
    factors = panel_factors(weight, bias, panels[0], x.dtype)
    moves = []
    tiles = row_tiles(each, sequences)
    # All contexts of a panel are loaded, and the Tensor engine has work for some time yet.
    late = len(tiles) - 1 - (len(tiles) // sequences) // 2
    for number in range(len(panels)):
        panel = Panel(y, x, panels[number], factors, first, function, tiles)
        for place in range(len(tiles)):
            sequence = tiles[place][0]
            if place == 0 or tiles[place - 1][0] < sequence:
                panel.begin(rows)
                if sequence + 1 < sequences:
                    rows = load_context(state, context, sequence + 1, panels[number])
            panel.convolve(place)
            if place == late:
                if number == 0:
                    for group in sequence_groups(sequences):
                        moves.append(Move(x, state, places, group))
                for move in moves:
                    move.update(panels[number], first)
                if number + 1 < len(panels):
                    rows = load_context(state, context, 0, panels[number + 1])
                    factors = panel_factors(weight, bias, panels[number + 1], x.dtype)
        panel.finish()


def panel_columns(taps, dtype):
    """Channels of a panel, whole blocks of them."""
    most = min(PANEL_BYTES, DIAGONAL_BYTES // taps) // item_bytes(dtype)
    return most // PARTITIONS * PARTITIONS


def row_tiles(each, sequences):
    """(sequence, first row, end) of up to 128 tokens of each sequence, one after another."""
    tiles = []
    for sequence in range(sequences):
        for start, end in ranges(sequence * each, (sequence + 1) * each):
            tiles.append((sequence, start, end))
    return tiles


def panel_factors(weight, bias, panel, dtype):
    """Of a panel of channels the weights as diagonals, and the bias on every row, or None."""
    products = diagonals(columns_of((weight,), panel, dtype), dtype)
    if bias is None:
        return products, None
    return products, on_every_row(bias[:, panel[0] : panel[1]], PARTITIONS, nl.float32, 0.0)


def context_rows(state, state_slots, starts):
    """The numbers of the rows of each sequence's state among those of all slots: [K - 1, B] int32."""
    height = state.shape[1]
    numbers = row(state_slots, height)
    scaled = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    within = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, numbers.shape[1]]], channel_multiplier=1)
    nisa.scalar_tensor_tensor(
        dst=scaled, data=numbers, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=within
    )
    return slots_or_none(scaled, row(starts, height), state.shape[0] * height)


def load_context(state, context, sequence, panel):
    """A panel of the state of a sequence, one row on each partition: [K - 1, columns]."""
    slots, height, channels = state.shape
    left, right = panel
    tile = nl.ndarray((height, right - left), dtype=state.dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0)
    source = state.reshape((slots * height, channels)).ap(
        pattern=[[channels, height], [1, right - left]],
        offset=left,
        vector_offset=context[:, sequence : sequence + 1],
    )
    nisa.dma_copy(dst=tile, src=source, oob_mode=nisa.oob_mode.skip)
    return tile


class Panel(nl.NKIObject):
    """A panel of channels, through which all row tiles pass; each is loaded while the one before is multiplied."""

    def __init__(self, y, x, panel, factors, first, function, tiles):
        self.y = y
        self.x = x
        self.panel = panel
        self.products, self.added = factors
        self.first = first
        self.function = function
        self.tiles = tiles
        # Two places in turn, so that the Vector engine need not wait for the Scalar engine.
        self.places = []
        for _ in range(2):
            self.places.append(nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.sbuf))
        self.waiting = None
        self.ahead = self.loaded(0)

    def loaded(self, place):
        """Row tile number `place`, transposed, behind room for the rows before it."""
        _, start, end = self.tiles[place]
        left, right = self.panel
        return load_across(
            self.x[start:end, self.first + left : self.first + right], self.products.shape[2] - 1
        )

    def begin(self, rows):
        """The rows of a sequence's state [K - 1, columns] are those before the tile that is loaded."""
        height, columns = rows.shape
        before = blocks_tile(columns, height, rows.dtype)
        transpose_into(before, 0, 0, rows)
        self.put_before(before)

    def put_before(self, rows):
        """Write rows before the tile that is loaded; not by the fast mode of the Vector engine, which GpSimd stops."""
        nisa.activation(dst=self.ahead[:, :, 0 : rows.shape[2]], op=nl.copy, data=rows)

    def convolve(self, place):
        """Row tile number `place`."""
        sequence, start, end = self.tiles[place]
        columns, height = self.panel[1] - self.panel[0], self.products.shape[2] - 1
        across = self.ahead
        if place + 1 < len(self.tiles):
            self.ahead = self.loaded(place + 1)
        result = nl.ndarray((end - start, columns), dtype=self.x.dtype, buffer=nl.sbuf)
        for part in ranges(0, columns, BANK):
            bank = multiplied(across, self.products, part, end - start)
            if part[1] == columns and place + 1 < len(self.tiles) and self.tiles[place + 1][0] == sequence:
                self.put_before(across[:, :, end - start : end - start + height])
            self.finish()
            self.waiting = (bank, result, (start, end), part)

    def finish(self):
        """Bias and activation of columns that are in PSUM, while the next ones are multiplied; last the store."""
        if self.waiting is None:
            return
        bank, result, rows, (first, last) = self.waiting
        sums = bank
        if self.added is not None:
            self.places.reverse()
            sums = self.places[0][0 : bank.shape[0], 0 : last - first]
            added = self.added[0 : bank.shape[0], first:last]
            nisa.tensor_tensor(dst=sums, data1=bank, data2=added, op=nl.add)
        nisa.activation(dst=result[:, first:last], op=self.function, data=sums)
        if last == result.shape[1]:
            nisa.dma_copy(dst=self.y[rows[0] : rows[1], self.panel[0] : self.panel[1]], src=result)


def load_across(rows, height):
    """Rows [row, column] of HBM, transposed, behind room for `height` others: [c in block, block, row]."""
    across = blocks_tile(rows.shape[1], height + rows.shape[0], rows.dtype)
    own = across[:, :, height : height + rows.shape[0]]
    if rows.dtype == nl.float32:
        transpose_rows(own, 0, load(rows, rows.dtype), 2)
    else:
        transpose_part(own, rows, 0)
    return across


def multiplied(across, products, columns, rows):
    """K products of each block of some columns of the panel: [row, column] @ PSUM."""
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


class Move(nl.NKIObject):
    """How the states of a group of sequences move on: to the last K - 1 rows of state and tokens, without padding."""

    def __init__(self, x, state, places, group):
        start, end = group
        each = x.shape[0] // places[0].shape[0]
        self.x = x
        self.state = state
        self.sources = sources(state, places, group, each, x.shape[0])
        numbers, counts = column(places[0], start, end), column(places[2], start, end)
        self.own = slots_or_none(numbers, counts, state.shape[0])

    def update(self, panel, first):
        """A panel of the states. Those of its contexts have been read before."""
        left, right = panel
        slots, height, channels = self.state.shape
        from_state, from_tokens = self.sources
        moved = nl.ndarray((self.own.shape[0], height, right - left), dtype=self.state.dtype, buffer=nl.sbuf)
        nisa.memset(dst=moved, value=0.0, engine=nisa.engine.gpsimd)
        rows = self.state.reshape((slots * height, channels))
        for place in range(height):
            row = moved[:, place, :]
            kept = numbered_rows(rows, from_state[:, place : place + 1], left, right)
            nisa.dma_copy(dst=row, src=kept, oob_mode=nisa.oob_mode.skip)
            given = numbered_rows(self.x, from_tokens[:, place : place + 1], first + left, first + right)
            nisa.dma_copy(dst=row, src=given, oob_mode=nisa.oob_mode.skip)
        target = state_rows(self.state, self.own, 0, height, panel)
        nisa.dma_copy(dst=target, src=moved, oob_mode=nisa.oob_mode.skip)


def numbered_rows(table, numbers, left, right):
    """The columns left … right of the rows of some numbers: [N, columns] in HBM."""
    pattern = [[table.shape[1], numbers.shape[0]], [1, right - left]]
    return table.ap(pattern=pattern, offset=left, vector_offset=numbers)


def sources(state, places, group, each, tokens):
    """Where the rows of new states come from, [sequence, row] int32: rows of all states, and rows of x.

    Row j is row j + count of state and tokens together. One of the two numbers is beyond all rows; both are where the
    row is one of zeros.
    """
    start, end = group
    slots, height, _ = state.shape
    shape = (end - start, height)
    place = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=place, pattern=[[1, height]])
    nisa.tensor_scalar(dst=place, data=place, op0=nl.add, operand0=column(places[2], start, end))
    base = nl.ndarray((end - start, 1), dtype=nl.float32, buffer=nl.sbuf)
    numbers = column(places[0], start, end)
    fresh = below(column(places[1], start, end), 1.0, slots * height)
    nisa.scalar_tensor_tensor(
        dst=base, data=numbers, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=fresh
    )
    beyond = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=beyond,
        data=place,
        op0=nl.greater_equal,
        operand0=float(height),
        op1=nl.multiply,
        operand1=2.0**23,
    )
    old = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=old, data=place, op0=nl.add, operand0=base)
    token = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=token, pattern=[[0, height]], offset=start * each - height, channel_multiplier=each)
    token = total(token, place, nl.float32)
    return total(old, beyond, nl.int32), total(token, below(place, float(height), tokens + height), nl.int32)
