"""The blocks of rows of `experts_prefill`: each is gathered, transposed, passes its expert, and is stored.

A *job* is what all blocks of a launch share.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.experts.places import expert_of_blocks
from nki_kernels.experts.products import add_down, gated, groups, products
from nki_kernels.experts.weights import load_chunk, load_down, load_numbers, rows_at
from nki_kernels.projection.rows import BANK_BYTES, in_block, spread_into
from nki_kernels.tiles import PARTITIONS, blocks, cast, psum_slots, ranges, slot_width


def begun(job, gathered, loaded):
    """Where the blocks begin, as `some_blocks` leaves it: (what waits for the last product of a chunk, or None; the
    transposed rows of the next block; the first chunk of its expert, which is `loaded`)."""
    return None, transposed(gathered, job["size"], job["identity"]), loaded


def some_blocks(job, experts, first, last, state):
    """The results of blocks first … last, but for what the last chunk adds; `experts` are those of all blocks.

    The rows of the next block are gathered and transposed while a block is computed, and the next chunk is loaded.
    state: see `begun`.
    """
    waiting, following, loaded = state
    for number in range(first, last):
        across = following
        gathered = None
        if number + 1 < len(experts):
            gathered = gather(job["n"], columns_at(job["tokens"], number + 1))
        totals = []
        pieces = job["chunks"]
        for piece in range(len(pieces)):
            target = targets_of(job, number) if piece + 1 == len(pieces) else None
            chunk = loaded
            result = first_products(job, across, chunk)
            if gathered is not None:
                # The last product of the chunk before takes the time until these are in SBUF.
                following = transposed(gathered, job["size"], job["identity"])
                gathered = None
            if waiting is not None:
                finish(job, waiting)
            load_down(chunk, job["n"].dtype)
            waiting = (totals, target, result, chunk)
            if piece + 1 < len(pieces):
                loaded = chunk_of(job, experts[number], pieces[piece + 1])
            elif number + 1 < len(experts):
                loaded = chunk_of(job, experts[number + 1], pieces[0])
    return waiting, following, loaded


def chunk_of(job, expert, columns):
    """A chunk of an expert's weights without its rows of down."""
    return load_chunk(job["matrices"], job["biases"], expert, columns, job["n"].dtype)


def first_products(job, across, chunk):
    """The intermediate of a block with a chunk of its expert's weights."""
    n, size = job["n"], job["size"]
    shape = (min(PARTITIONS, chunk["width"]), blocks(chunk["width"]), size)
    result = nl.ndarray(shape, dtype=n.dtype, buffer=nl.sbuf)
    for group in groups(chunk["width"], size):
        sums = products(across, chunk, group, n.shape[1])
        gated(result, sums, group, chunk["width"], job["activation"])
    return result


def starts_of_dealt(table, turns, first, size):
    """Where the tokens of each dealt block begin, [1, count] int32.

    first: where they would of expert 0, and how much further on for each expert after it; 0 where all dealt blocks
    follow one another.
    """
    begin, pitch = first
    result = nl.ndarray(table.shape, dtype=nl.float32, buffer=nl.sbuf)
    if pitch == 0:
        nisa.iota(dst=result, pattern=[[size, table.shape[1]]], offset=begin)
        return cast(result, nl.int32)
    nisa.tensor_scalar(
        dst=result, data=turns, op0=nl.multiply, operand0=float(size), op1=nl.add, operand1=float(begin)
    )
    starts = nl.ndarray(table.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=starts, data=table, op0=nl.multiply, operand0=float(pitch), op1=nl.add, operand1=result
    )
    return starts


def dealt_blocks(ends, count, first, size):
    """What the loop over `count` dealt blocks reads: their experts and where their tokens begin, [1, count] int32 @ HBM
    each, and how many have rows, [1, 1] int32.

    ends: see `find_places`; first: see `starts_of_dealt`.
    """
    table, turns = expert_of_blocks(ends, count)
    rows = (("experts_of_blocks", table), ("starts_of_blocks", starts_of_dealt(table, turns, first, size)))
    kept = []
    for name, row in rows:
        held = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.private_hbm, name=name)
        nisa.dma_copy(dst=held, src=row)
        kept.append(held)
    last = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=last, src=ends[0:1, ends.shape[1] - 1 : ends.shape[1]])
    return kept[0], kept[1], last


def further_blocks(job, first, ordered, table):
    """The results of blocks behind the `first` ones, as many as were dealt: a loop that the chip counts.

    table: as `dealt_blocks` gives it.
    """
    size, n = job["size"], job["n"]
    experts, starts, used = table
    count = experts.shape[1]
    dealt = nisa.register_alloc()
    nisa.register_load(dealt, used)
    by_block = job["results"].reshape((first + count, size * n.shape[1]))

    def body(block):
        one = [[1, 1], [1, 1]]
        expert = load_numbers(experts.ap(pattern=one, scalar_offset=block, indirect_dim=1))
        start = load_numbers(starts.ap(pattern=one, scalar_offset=block, indirect_dim=1))
        numbers = []
        targets = []
        for at, end in ranges(0, size):
            numbers.append(load_numbers(ordered.ap([[1, end - at], [1, 1]], offset=at, scalar_offset=start)))
            pattern = [[n.shape[1], end - at], [1, n.shape[1]]]
            offset = (first * size + at) * n.shape[1]
            targets.append(by_block.ap(pattern, offset=offset, scalar_offset=block))
        across = transposed(gather(n, numbers), size, job["identity"])
        totals = []
        pieces = job["chunks"]
        for piece in range(len(pieces)):
            chunk = chunk_of(job, (0, expert), pieces[piece])
            result = first_products(job, across, chunk)
            load_down(chunk, n.dtype)
            finish(job, (totals, targets if piece + 1 == len(pieces) else None, result, chunk))

    nl.fori_loop(0, dealt, body)


def columns_at(tokens, number):
    """The tokens of a block, tiles [row, 1] of up to 128."""
    found = []
    for tile in tokens:
        found.append(tile[:, number : number + 1])
    return found


def targets_of(job, number):
    """Where the results of a block go, tiles of up to 128 rows."""
    found = []
    for first, last in ranges(number * job["size"], (number + 1) * job["size"]):
        found.append(job["results"][first:last, :])
    return found


def gather(n, numbers):
    """The rows of a block by their tokens, tiles of up to 128."""
    tiles = []
    for tokens in numbers:
        rows = nl.ndarray((tokens.shape[0], n.shape[1]), dtype=n.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=rows_at(n, tokens))
        tiles.append(rows)
    return tiles


def transposed(tiles, size, identity):
    """The rows of a block as [h in run, block, row]."""
    hidden = tiles[0].shape[1]
    shape = (in_block(hidden, 0, True), blocks(hidden), size)
    result = nl.ndarray(shape, dtype=tiles[0].dtype, buffer=nl.sbuf)
    first = 0
    for tile in tiles:
        last = first + tile.shape[0]
        if tile.shape[0] < PARTITIONS and identity is not None:
            spread_few_into(result[:, :, first:last], tile, identity)
        else:
            spread_into(result[:, :, first:last], tile, True, shared=True)
        first = last
    return result


def spread_few_into(result, rows, identity):
    """Few rows [rows, H] transposed to `result` [h in run, block, row]: they are stationary, so that few columns move.

    identity: [128, 128] of the rows' dtype.
    """
    count, hidden = rows.shape
    number = blocks(hidden)
    per_bank = BANK_BYTES // 2 // slot_width(count, rows.dtype)
    first = 0
    while first < number:
        used = in_block(hidden, first, True)
        end = first + 1
        while end < min(number, first + per_bank) and in_block(hidden, end, True) == used:
            end += 1
        bank = psum_slots(used, end - first, count, rows.dtype)
        for block in range(first, end):
            nisa.nc_matmul(
                dst=bank[:, block - first, :],
                stationary=rows[:, block:hidden:number],
                moving=identity[0:count, 0:count],
                is_transpose=True,
            )
        nisa.activation(dst=result[0:used, first:end, :], op=nl.copy, data=bank)
        first = end


def finish(job, waiting):
    """The last product of a chunk, added to the sums of its block; those of the last chunk are stored."""
    totals, targets, inner, chunk = waiting
    hidden = job["n"].shape[1]
    tiles = ranges(0, job["size"])
    for tile in range(len(tiles)):
        first, last = tiles[tile]
        before = totals[tile] if tile < len(totals) else None
        result = before
        if before is None or targets is not None:
            dtype = nl.float32 if targets is None else job["n"].dtype
            result = nl.ndarray((last - first, hidden), dtype=dtype, buffer=nl.sbuf)
        add_down(result, before, inner, first, chunk)
        if targets is not None:
            # Not by Sync, which loads the next weights.
            transfer(targets[tile], result, SCALAR)
        elif before is None:
            totals.append(result)
