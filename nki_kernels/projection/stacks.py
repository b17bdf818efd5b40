"""Products of few rows and weights of 4 bits with scales of groups of rows: sums are scaled as they leave PSUM.

    y[t, n] = sum over scale groups g of scales[g, n] * sum over k in g of x[t, k] * (nibble[k, n] - zeros[g, n]) * 2^-9

x is stationary in groups of columns of the PE array, as in `grouped_gate` and `grouped_product`. The columns of such a
group are *slots* of x's rows: column row * slots + s multiplies the row by the s-th scale group of some K blocks, a
*stack*. For this x is *spread*: the stationary tile of a K block has a row of x in the slots of its scale groups, and
zeros in the other slots. So the sums of a stack's scale groups lie on partitions of their own. One instruction
subtracts the zero points 8 from a bank of sums and multiplies it by scales. Stored zero points are one more block of a
stack's contraction instead. A product with ones then adds the slots of each row, and all stacks, in the accumulators.
The scaled sums are rounded to x's dtype for this product.

The last stack ends with the last scale group. Where groups are no multiple of slots, it begins inside the stack before:
its first slots have the scales of groups that x leaves out there.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC, transfer
from nki_kernels.nibbles import UNIT
from nki_kernels.scale_groups import SYMMETRIC_ZERO
from nki_kernels.tiles import BANK, PARTITIONS, blocks, count_block_partitions, filled, ranges
from nki_kernels.weights import choose_operand_dtype


@dataclass
class StackLayout(nl.NKIObject):
    """How the sums of scale groups lie on the partitions.

    width: columns of the PE array of a group of columns. rows: rows with slots, at least those of x. slots: slots of a
    row. group_rows: rows of the weight in a scale group. groups: number of scale groups. stack_blocks: K blocks of a
    stack; the last stack may have fewer.
    """

    width: int
    rows: int
    slots: int
    group_rows: int
    groups: int
    stack_blocks: int

    def count_stacks(self):
        """Return the number of stacks."""
        return blocks(self.groups * self.group_rows, self.stack_blocks * PARTITIONS)

    def count_overlap(self):
        """Return how many slots of the last stack have scale groups of the stack before."""
        return self.count_stacks() * self.slots - self.groups

    def list_spans(self):
        """Return the ranges (first, end) of partitions with sums: one if all partitions have some."""
        columns = self.rows * self.slots
        if columns == self.width:
            return [(0, PARTITIONS)]
        spans = []
        for first in range(0, PARTITIONS, self.width):
            spans.append((first, first + columns))
        return spans


@dataclass
class SpreadRows(nl.NKIObject):
    """Rows of x as stacks multiply them, in SBUF.

    layout: StackLayout. tile: [k in block, block, row * slots + slot] in x's dtype. zero_terms: float32 [partition,
    stack], what zero points of 8 add to each sum; None with stored ones. zero_rows: result of `spread_zero_rows` with
    stored ones, else None. adder: [partition, partition] in x's dtype, 1 where the first partition has a slot of the
    row on the second one, else 0.
    """

    layout: StackLayout
    tile: nl.NkiTensor
    zero_terms: nl.NkiTensor | None
    zero_rows: nl.NkiTensor | None
    adder: nl.NkiTensor


@dataclass
class StackedSums(nl.NKIObject):
    """Sums of the scale groups of one weight or several of equal shape, on their way to accumulators.

    rows: SpreadRows. scales: for each weight the views of `load_stack_rows`. zeros: for each weight its zero points
    [groups, column] @ HBM, or None. banks: PSUM tiles [partition,
    column] of the present stack, one for each weight. scaled: SBUF tiles of the stack before, which are not in the
    accumulators yet; empty for none. loaded: scales and, last, zero points of stacks in SBUF, a list for each stack
    that is not scaled yet. added: number of stacks in the accumulators.
    """

    rows: SpreadRows
    scales: list
    zeros: list
    banks: list
    scaled: list
    loaded: list
    added: int

    def load_rows(self, first_block, end_block):
        """Load the scales and zero points of the stacks that begin in some K blocks."""
        layout = self.rows.layout
        for stack in range(layout.count_stacks()):
            if first_block <= stack * layout.stack_blocks < end_block:
                tiles = []
                for side in range(len(self.scales)):
                    tiles.append(load_stack_rows(self.scales[side], layout, stack))
                tiles.append(load_zero_block(self.zeros, layout, stack))
                self.loaded.append(tiles)

    def begin_block(self, block, columns):
        """Return whether a K block begins a stack; if so, allocate banks of `columns` columns."""
        begins = block % self.rows.layout.stack_blocks == 0
        if begins:
            self.banks = []
            for _ in range(len(self.scales)):
                self.banks.append(nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.psum))
        return begins

    def ends_stack(self, block):
        """Return whether a K block ends a stack."""
        return (block + 1) % self.rows.layout.stack_blocks == 0 or block + 1 == self.rows.tile.shape[1]

    def find_zero_block(self, block):
        """Return the operands of stored zero points if a K block ends a stack; None if not, or if all of them are 8.

        They are x [slot, row * slots + slot] and weights [slot, weight, column] in SBUF, with slots twice.
        """
        if self.rows.zero_rows is None or not self.ends_stack(block):
            return None
        tiles = self.loaded[0]
        return self.rows.zero_rows[:, block // self.rows.layout.stack_blocks, :], tiles[len(tiles) - 1]

    def end_block(self, block, accumulators, add):
        """Scale the sums of a stack if a K block ends it; add the stack before to the accumulators.

        Args:
            block: the K block.
            accumulators: PSUM tiles [partition, column], one for each weight.
            add: whether the accumulators have other sums already.
        """
        layout = self.rows.layout
        stack = block // layout.stack_blocks
        if not self.ends_stack(block):
            return
        # The product of the stack before comes after this stack's: the Tensor engine does not wait for the scaling.
        self.add_scaled(accumulators, add)
        tiles = self.loaded.pop(0)
        for side in range(len(self.banks)):
            tile = nl.ndarray(self.banks[side].shape, dtype=self.rows.tile.dtype, buffer=nl.sbuf)
            for first, last in layout.list_spans():
                span = slice(first, last)
                dst, sums, scales = tile[span, :], self.banks[side][span, :], tiles[side][span, :]
                if self.rows.zero_terms is None:
                    nisa.tensor_tensor(dst=dst, data1=sums, data2=scales, op=nl.multiply)
                    continue
                nisa.scalar_tensor_tensor(
                    dst=dst,
                    data=sums,
                    op0=nl.add,
                    operand0=self.rows.zero_terms[span, stack : stack + 1],
                    op1=nl.multiply,
                    operand1=scales,
                )
            self.scaled.append(tile)

    def add_scaled(self, accumulators, add):
        """Add the scaled sums to accumulators, which hold sums already if `add`; do nothing if there are none."""
        for side in range(len(self.scaled)):
            for first, end in self.rows.layout.list_spans():
                width = PARTITIONS if end - first == PARTITIONS else self.rows.layout.width
                columns = slice(first, first + width)
                nisa.nc_matmul(
                    dst=accumulators[side][columns, :],
                    stationary=self.rows.adder[first:end, columns],
                    moving=self.scaled[side][first:end, :],
                    accumulate=add or self.added > 0,
                    tile_position=(first, first),
                    tile_size=(width, width),
                )
        self.added += min(1, len(self.scaled))
        self.scaled = []


def count_columns_of_rows(rows, weight):
    """Return the columns of the PE array that `rows` rows need at least: with scales of groups, slots for a K block."""
    if weight.nibbles is None or weight.nibbles.scales is None:
        return rows
    return rows * (PARTITIONS // weight.nibbles.count_group_rows())


def choose_nibble_dtype(weights, dtype):
    """Return the dtype of a list of WeightMatrix in products with x of `dtype`: stacks take nibbles without scales."""
    if weights[0].nibbles is not None and weights[0].nibbles.scales is not None:
        return nl.float8_e4m3
    return choose_operand_dtype(weights, dtype)


def can_stack(gated, matrices, layout, dtype):
    """Return whether both products of a feed-forward block scale the sums of groups where their scales are of groups.

    Products without such scales do not count.

    Args:
        gated: GatedProduct, with its layout in groups of columns of the PE array or None.
        matrices: list of WeightMatrix of the down product.
        layout: its GroupLayout, or None.
        dtype: dtype of x.
    """
    for weights, groups in ((gated.weights, gated.layout), (matrices, layout)):
        nibbles = weights[0].nibbles
        scales_groups = nibbles is not None and nibbles.scales is not None
        if scales_groups and (groups is None or not nibbles.as_fp8 or dtype == nl.float32):
            return False
    return True


def plan_stacks(rows, width, nibbles):
    """Return the StackLayout of `rows` rows in groups of `width` columns of the PE array, for a NibbleMatrix.

    A group of columns has slots for the scale groups of one K block at least.
    """
    group_rows, groups = nibbles.count_group_rows(), nibbles.scales.shape[0]
    per_block = PARTITIONS // group_rows
    stack_blocks = 1
    while 2 * stack_blocks * per_block * rows <= width:
        stack_blocks = 2 * stack_blocks
    if stack_blocks * per_block >= groups:
        return StackLayout(width, rows, groups, group_rows, groups, blocks(nibbles.depth))
    slots = stack_blocks * per_block
    return StackLayout(width, width // slots, slots, group_rows, groups, stack_blocks)


def spread_rows(x, rows, width, nibbles):
    """Return the SpreadRows of the first `rows` rows of x for weights with a NibbleMatrix.

    x: SBUF tile [k in block, block, row]. width: columns of the PE array of a group of columns.
    """
    layout = plan_stacks(rows, width, nibbles)
    slots, dtype = layout.slots, x.dtype
    depth = layout.groups * layout.group_rows
    tile = nl.ndarray((x.shape[0], blocks(depth), layout.rows * slots), dtype=dtype, buffer=nl.sbuf)
    if rows < layout.rows:
        nisa.memset(dst=tile[:, :, rows * slots :], value=0.0, engine=nisa.engine.vector)
    mask = mark_slots(x.shape[0], layout, dtype)
    for first, end in ranges(0, blocks(depth), layout.stack_blocks):
        is_last = end == blocks(depth)
        shift = 0 if is_last else layout.count_overlap()
        full = end if depth % PARTITIONS == 0 or not is_last else end - 1
        for start, stop in ((first, full), (full, end)):
            if start < stop:
                used = count_block_partitions(depth, start, False)
                factors = mask[0:used, start - first : stop - first, shift : shift + slots]
                nisa.tensor_tensor(
                    dst=tile[0:used, start:stop, 0 : rows * slots].reshape_dim(2, (rows, slots)),
                    data1=x[0:used, start:stop, 0:rows].expand_dim(3).broadcast(3, slots),
                    data2=factors.expand_dim(2).broadcast(2, rows),
                    op=nl.multiply,
                )
    adder = build_adder(layout, dtype)
    if nibbles.zeros is None:
        return SpreadRows(layout, tile, sum_groups(tile, layout), None, adder)
    return SpreadRows(layout, tile, None, spread_zero_rows(tile, layout), adder)


def mark_slots(height, layout, dtype):
    """Return an SBUF tile [k in block, block of a stack, slot] with 1 where a row of the weight has its slot, else 0.

    The slots of the last stack come first, and those of other stacks `layout.count_overlap()` later.
    """
    per_block, overlap = PARTITIONS // layout.group_rows, layout.count_overlap()
    shape = (height, layout.stack_blocks, layout.slots + overlap)
    mask, ones = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf), filled(shape, 1.0, dtype)
    for first, end in ranges(0, height, layout.group_rows):
        nisa.affine_select(
            dst=mask[first:end, :, :],
            pattern=[[per_block, shape[1]], [-1, shape[2]]],
            channel_multiplier=0,
            on_true_tile=ones[first:end, :, :],
            on_false_value=0.0,
            cmp_op=nl.equal,
            offset=first // layout.group_rows + overlap,
        )
    return mask


def sum_groups(tile, layout):
    """Return the zero terms of spread rows, float32 [partition, stack] in SBUF, see `SpreadRows`."""
    column = filled((tile.shape[0], 1), -SYMMETRIC_ZERO * UNIT, tile.dtype)
    columns, depth = tile.shape[2], layout.groups * layout.group_rows
    bank = nl.ndarray((PARTITIONS, layout.count_stacks()), dtype=nl.float32, buffer=nl.psum)
    terms = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    for block in range(tile.shape[1]):
        used, stack = count_block_partitions(depth, block, False), block // layout.stack_blocks
        for first in range(0, PARTITIONS, layout.width):
            nisa.nc_matmul(
                dst=bank[first : first + columns, stack : stack + 1],
                stationary=tile[0:used, block, :],
                moving=column[0:used, :],
                accumulate=block % layout.stack_blocks > 0,
                tile_position=(0, first),
                tile_size=(PARTITIONS, layout.width),
            )
    for first, end in layout.list_spans():
        nisa.activation(dst=terms[first:end, :], op=nl.copy, data=bank[first:end, :])
    return terms


def spread_zero_rows(tile, layout):
    """Return the stationary operand that multiplies stored zero points, [slot, stack, row * slots + slot] in SBUF.

    It has minus the sum of a row of x over the scale group of a slot where both slots are the same, else zeros.
    Slots lie on the partitions twice: a sum in float32 is split into two numbers of 16 bits.
    """
    columns, depth, slots = tile.shape[2], layout.groups * layout.group_rows, layout.slots
    shape = (2 * slots, layout.count_stacks(), columns)
    zero_rows = nl.ndarray(shape, dtype=tile.dtype, buffer=nl.sbuf)
    minus_ones = filled((tile.shape[0], 2 * slots), -1.0, tile.dtype)
    masks = []
    for first in (0, slots):
        mask = nl.ndarray((2 * slots, 1, columns), dtype=tile.dtype, buffer=nl.sbuf)
        nisa.affine_select(
            dst=mask,
            pattern=[[0, layout.rows], [-1, slots]],
            channel_multiplier=1,
            on_true_tile=filled(mask.shape, 1.0, tile.dtype),
            on_false_value=0.0,
            cmp_op=nl.equal,
            offset=-first,
        )
        masks.append(mask)
    for first, end in ranges(0, shape[1], BANK // columns):  # stacks whose sums fit in a PSUM bank
        bank = nl.ndarray((2 * slots, end - first, columns), dtype=nl.float32, buffer=nl.psum)
        for block in range(first * layout.stack_blocks, min(tile.shape[1], end * layout.stack_blocks)):
            used = count_block_partitions(depth, block, False)
            nisa.nc_matmul(
                dst=bank[:, block // layout.stack_blocks - first, :],
                stationary=minus_ones[0:used, :],
                moving=tile[0:used, block, :],
                accumulate=block % layout.stack_blocks > 0,
            )
        high = nl.ndarray(bank.shape, dtype=tile.dtype, buffer=nl.sbuf)
        low = nl.ndarray(bank.shape, dtype=tile.dtype, buffer=nl.sbuf)
        nisa.activation(dst=high, op=nl.copy, data=bank)
        nisa.tensor_tensor(dst=low, data1=bank, data2=high, op=nl.subtract)
        for number, mask in ((high, masks[0]), (low, masks[1])):
            factor = mask.broadcast(1, end - first)
            nisa.tensor_tensor(dst=number, data1=number, data2=factor, op=nl.multiply)
        nisa.tensor_tensor(dst=zero_rows[:, first:end, :], data1=high, data2=low, op=nl.add)
    return zero_rows


def build_adder(layout, dtype):
    """Return the adder of `SpreadRows`, [partition, partition] in SBUF: it adds the slots of each row."""
    shape = (PARTITIONS, PARTITIONS // layout.width, layout.width)
    above, adder = (
        nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf),
        nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf),
    )
    # The slot of a partition p is p - first partition of the group of columns - row * slots: from 0 to slots - 1.
    nisa.affine_select(
        dst=above,
        pattern=[[-layout.width, shape[1]], [-layout.slots, layout.width]],
        channel_multiplier=1,
        on_true_tile=filled(shape, 1.0, dtype),
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    nisa.affine_select(
        dst=adder,
        pattern=[[layout.width, shape[1]], [layout.slots, layout.width]],
        channel_multiplier=-1,
        on_true_tile=above,
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
        offset=layout.slots - 1,
    )
    return adder.reshape((PARTITIONS, PARTITIONS))


def load_stack_rows(views, layout, stack):
    """Load scales of a stack's scale groups for all slots; return an SBUF tile [partition, column].

    views: for each group of columns of the PE array the scales [groups, column] or [groups, piece, column] @ HBM of its
    columns, in a list.
    """
    columns = 1
    for size in views[0].shape[1:]:
        columns = columns * size
    first_group = min(stack * layout.slots, layout.groups - layout.slots)
    tile = nl.ndarray((PARTITIONS, columns), dtype=views[0].dtype, buffer=nl.sbuf)
    for index in range(len(views)):
        first = index * layout.width
        rows = views[index][first_group : first_group + layout.slots].expand_dim(0).broadcast(0, layout.rows)
        transfer(tile[first : first + layout.rows * layout.slots, :], rows, STATIC)
    return tile


def load_zero_block(zeros, layout, stack):
    """Load zero points of a stack's scale groups; return an SBUF tile [slot, weight, column], None for zeros of None.

    zeros: for each weight its zero points [groups, column] @ HBM. Slots are loaded twice, see `spread_zero_rows`.
    """
    if zeros[0] is None:
        return None
    first_group = min(stack * layout.slots, layout.groups - layout.slots)
    shape = (2 * layout.slots, len(zeros), zeros[0].shape[1])
    tile = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    for side in range(len(zeros)):
        rows = zeros[side][first_group : first_group + layout.slots, :].expand_dim(0).broadcast(0, 2)
        transfer(tile[:, side, :], rows, STATIC)
    return tile.view(nl.float8_e4m3)
