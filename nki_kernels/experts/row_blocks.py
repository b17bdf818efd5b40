"""Blocks of rows of `experts_prefill`: each is gathered, transposed, multiplied by its expert's weights, and stored.

A block holds rows of tokens that chose one expert (`experts.block_layout`); its rows are taken in *row tiles* of up to
128. The weights are taken in chunks of columns of the intermediate (`experts.weight_chunks`). *Dealt* blocks of a loop
have a number that is known at run time only.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.experts.block_layout import BlockLayout
from nki_kernels.experts.chunk_products import (
    GatedChunk,
    activate,
    add_down,
    allocate_intermediate,
    multiply_gate_and_up,
    split_blocks,
)
from nki_kernels.experts.column_lines import repeat_down_lines
from nki_kernels.experts.indices import view_rows
from nki_kernels.experts.row_assignment import find_dealt_blocks
from nki_kernels.experts.weight_chunks import ExpertLayer, WeightChunk
from nki_kernels.projection.rows import spread_into
from nki_kernels.tiles import (
    BANK_BYTES,
    PARTITIONS,
    allocate_psum_slots,
    blocks,
    cast,
    count_block_partitions,
    count_slot_columns,
    load,
    ranges,
)


@dataclass
class RowBlocks(nl.NKIObject):
    """What all blocks of a launch share.

    n: rows of tokens [T, H] @ HBM. results: rows of all blocks [row, H] @ HBM. experts: ExpertIndex of each block that
    is computed outside the loop; tokens: for each row tile of a block the tokens of its rows, [row, block] int32.
    identity: [128, 128] @ SBUF, or None if few rows are transposed like many.
    """

    n: nl.NkiTensor
    results: nl.NkiTensor
    layout: BlockLayout
    layer: ExpertLayer
    experts: list
    tokens: list
    identity: nl.NkiTensor | None


@dataclass
class PendingDown(nl.NKIObject):
    """Chunk of a block whose down product is due.

    sums: for each row tile of the block the float32 sum [row, H] @ SBUF over its chunks so far, not multiplied by
    scales; empty before the first chunk. targets: for each row tile its results @ HBM, if this is the last chunk; else
    empty.
    """

    gated: GatedChunk
    sums: list
    targets: list


@dataclass
class BlockPipeline(nl.NKIObject):
    """State between two blocks.

    x: transposed rows of the next block [h in run, block of H, row] @ SBUF. chunk: the first chunk of its expert's
    weights. pending: the last chunk of the block before, or None.
    """

    x: nl.NkiTensor
    chunk: WeightChunk
    pending: PendingDown | None


@dataclass
class DealtTable(nl.NKIObject):
    """What the loop over dealt blocks reads.

    experts, starts: expert of each block, and the position of its first token, [1, block] int32 @ HBM. used: number of
    blocks that have rows, [1, 1] int32 in SBUF.
    """

    experts: nl.NkiTensor
    starts: nl.NkiTensor
    used: nl.NkiTensor


def gate_block(row_blocks, x, chunk):
    """Compute the intermediate of a block for one chunk of its expert's weights, and return both as a `GatedChunk`.

    x: transposed rows of the block, see `transpose_block`.
    """
    layer, n, rows = row_blocks.layer, row_blocks.n, row_blocks.layout.rows
    intermediate = allocate_intermediate(chunk, rows, n.dtype)
    for group in split_blocks(chunk, rows):
        sums = multiply_gate_and_up(x, chunk, group, n.shape[1], layer)
        activate(intermediate, sums, chunk, layer, None)
    return GatedChunk(chunk, intermediate)


def finish_down(row_blocks, pending):
    """Add the down product of a pending chunk to the sums of its block, or store the sums if the chunk is the last one.

    The sums of a first chunk are appended to `pending.sums`, float32 @ SBUF; later ones are added in place. After the
    last chunk the sums are rounded to n's dtype and stored to `pending.targets` @ HBM.
    """
    n, weights = row_blocks.n, pending.gated.weights
    tiles = ranges(0, row_blocks.layout.rows)
    # Sums over chunks are multiplied once, when the last chunk is added.
    scales = None
    if len(weights.down_lines) > 0:
        scales = repeat_down_lines(weights.down_lines, n.shape[1])
    for m in range(len(tiles)):  # m: row tile
        first, end = tiles[m]
        total = pending.sums[m] if m < len(pending.sums) else None
        result = total
        if total is None or len(pending.targets) > 0:
            # Sums between chunks stay in float32; the last chunk's are rounded once, for the store.
            dtype = nl.float32 if len(pending.targets) == 0 else n.dtype
            result = nl.ndarray((end - first, n.shape[1]), dtype=dtype, buffer=nl.sbuf)
        add_down(result, total, pending.gated, first, scales)
        if len(pending.targets) > 0:
            # Not by Sync, which loads the next weights.
            transfer(pending.targets[m], result, SCALAR)
        elif total is None:
            pending.sums.append(result)


def view_block_tokens(tokens, block):
    """View the tokens of block number `block`, outside the loop: a list with [row, 1] int32 @ SBUF for each row tile.

    `tokens` are those of all such blocks, see `load_block_tokens`.
    """
    columns = []
    for tile in tokens:
        columns.append(tile[:, block : block + 1])
    return columns


def view_block_targets(row_blocks, block):
    """View the results of block number `block`, outside the loop: a list with [row, H] @ HBM for each row tile."""
    rows = row_blocks.layout.rows
    targets = []
    for first, end in ranges(block * rows, (block + 1) * rows):
        targets.append(row_blocks.results[first:end, :])
    return targets


def gather_rows(n, tokens):
    """Load the rows of n [T, H] @ HBM that `tokens` name: a list with [row, H] @ SBUF for each row tile.

    tokens: a list with [row, 1] int32 @ SBUF for each row tile.
    """
    tiles = []
    for indices in tokens:
        tile = load(view_rows(n, indices), n.dtype)
        tiles.append(tile)
    return tiles


def transpose_block(tiles, row_blocks):
    """Transpose the row tiles of a block of rows into a new tile [h in run or block, block of H, row] @ SBUF.

    In runs partition p of block c has element p * ceil(H / 128) + c of a row, in blocks element 128 * c + p. With the
    identity of `row_blocks`, tiles of fewer than 128 rows are transposed by `transpose_few_rows`.
    """
    rows, identity, in_runs = row_blocks.layout.rows, row_blocks.identity, row_blocks.layer.in_runs
    hidden = tiles[0].shape[1]
    shape = (count_block_partitions(hidden, 0, in_runs), blocks(hidden), rows)
    result = nl.ndarray(shape, dtype=tiles[0].dtype, buffer=nl.sbuf)
    first = 0
    for tile in tiles:
        end = first + tile.shape[0]
        if tile.shape[0] < PARTITIONS and identity is not None:
            transpose_few_rows(result[:, :, first:end], tile, identity, in_runs)
        else:
            spread_into(result[:, :, first:end], tile, in_runs, shared=True)
        first = end
    return result


def transpose_few_rows(result, rows, identity, in_runs):
    """Transpose few rows [row, H] @ SBUF into `result` [h in run or block, block of H, row] @ SBUF.

    The rows are stationary, so that few columns move. identity: [128, 128] of the rows' dtype. in_runs: see
    `transpose_block`.
    """
    count, hidden = rows.shape
    number = blocks(hidden)
    per_bank = BANK_BYTES // 2 // count_slot_columns(count, rows.dtype)
    first = 0
    while first < number:
        used = count_block_partitions(hidden, first, in_runs)
        end = first + 1
        while end < min(number, first + per_bank) and count_block_partitions(hidden, end, in_runs) == used:
            end += 1
        bank = allocate_psum_slots(used, end - first, count, rows.dtype)
        for block in range(first, end):
            start = block * PARTITIONS
            columns = rows[:, block:hidden:number] if in_runs else rows[:, start : start + used]
            nisa.nc_matmul(
                dst=bank[:, block - first, :],
                stationary=columns,
                moving=identity[0:count, 0:count],
                is_transpose=True,
            )
        nisa.activation(dst=result[0:used, first:end, :], op=nl.copy, data=bank)
        first = end


def make_dealt_table(assignment, order, layout):
    """Write the expert and the first token's position of each dealt block to HBM, and return the `DealtTable`.

    order: `TokenOrder`.
    """
    dealt = find_dealt_blocks(assignment.dealt_ends, layout.dealt)
    starts = compute_dealt_starts(dealt, order, layout.rows)
    ends = assignment.dealt_ends
    table = DealtTable(
        nl.ndarray((1, layout.dealt), dtype=nl.int32, buffer=nl.private_hbm, name="experts_of_blocks"),
        nl.ndarray((1, layout.dealt), dtype=nl.int32, buffer=nl.private_hbm, name="starts_of_blocks"),
        nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf),
    )
    nisa.dma_copy(dst=table.experts, src=dealt.experts)
    nisa.dma_copy(dst=table.starts, src=starts)
    nisa.tensor_copy(dst=table.used, src=ends[0:1, ends.shape[1] - 1 : ends.shape[1]])
    return table


def compute_dealt_starts(dealt, order, rows):
    """Return the position in `order.tokens` of the first token of each dealt block, [1, block] int32 @ SBUF.

    Args:
        dealt: `DealtBlocks`.
        order: `TokenOrder`.
        rows: rows of a block.
    """
    shape = dealt.experts.shape
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    if order.dealt_pitch == 0:
        nisa.iota(dst=result, pattern=[[rows, shape[1]]], offset=order.dealt_start)
        return cast(result, nl.int32)
    nisa.tensor_scalar(
        dst=result,
        data=dealt.turns,
        op0=nl.multiply,
        operand0=float(rows),
        op1=nl.add,
        operand1=float(order.dealt_start),
    )
    starts = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=starts,
        data=dealt.experts,
        op0=nl.multiply,
        operand0=float(order.dealt_pitch),
        op1=nl.add,
        operand1=result,
    )
    return starts


def load_dealt_tokens(order, start, rows):
    """Load the tokens of a dealt block of `rows` rows: a list with [row, 1] int32 @ SBUF for each row tile.

    start: position of the first one in `order.tokens`, [1, 1] int32 @ SBUF.
    """
    tokens = []
    for first, end in ranges(0, rows):
        tokens.append(
            load(order.tokens.ap([[1, end - first], [1, 1]], offset=first, scalar_offset=start), nl.int32)
        )
    return tokens


def view_dealt_targets(row_blocks, block):
    """View the results of a dealt block: a list with [row, H] @ HBM for each row tile.

    block: register with the index of the block among the dealt ones.
    """
    rows, hidden = row_blocks.layout.rows, row_blocks.n.shape[1]
    by_block = row_blocks.results.reshape((row_blocks.results.shape[0] // rows, rows * hidden))
    targets = []
    for first, end in ranges(0, rows):
        offset = (len(row_blocks.experts) * rows + first) * hidden
        pattern = [[hidden, end - first], [1, hidden]]
        targets.append(by_block.ap(pattern, offset=offset, scalar_offset=block))
    return targets
