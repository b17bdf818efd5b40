"""Where the rows of a prompt go that are sorted by expert, found on the chip.

Rows of one expert take whole *blocks*; the last one may be padded. There are two ways to give experts blocks. Either
all blocks are *dealt* at run time, one expert after the other, as many as the worst distribution of choices needs. Or
every expert has blocks of its *own*, the same number each, and only rows beyond them get dealt blocks; then a loop runs
over those dealt blocks that have rows. Own blocks come first. Numbers of rows stay below 2^24: float32 holds them.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, ranges

BYTES_PER_NS = 358.0
"""What a trn2 core moves from HBM while all do; with OPERATIONS_PER_NS it tells which blocks take least time."""

OPERATIONS_PER_NS = 78600.0
"""Those of its Tensor engine in bfloat16; float32 takes four times as long."""

SIZES = (128, 192, 256, 384)
"""Rows that a block may have where all blocks are dealt."""

OWN_SIZES = tuple(range(32, BANK + 1, 32))
"""Rows that a block may have where experts have their own."""

LOOP_NS = 25000.0
"""What own blocks have to save: the loop over dealt ones begins and ends, and nothing overlaps it."""

MOST_ROW_BYTES = 16384
"""Of a partition, for the transposed rows of a block."""


def division(choices, experts, hidden, inner, item_bytes, loops):
    """(rows of a block, own blocks of each expert, blocks that may be dealt) that make the launch shortest.

    Own blocks have room for the mean of choices and two standard deviations of choices at random. loops: whether the
    chip has loops over registers; without them all blocks are dealt.
    """
    size = block_size(choices, experts, hidden, inner, item_bytes)
    count = block_count(choices, experts, size)
    least = count * block_time(size, hidden, inner, item_bytes)
    found = (size, 0, count)
    mean = choices / experts
    room = mean + 2.0 * mean**0.5
    for own_size in OWN_SIZES:
        own = int(-(-room // own_size))
        beyond = max(0, choices - own * own_size + own_size - 1) // own_size
        time = experts * own * block_time(own_size, hidden, inner, item_bytes)
        if beyond > 0:
            time += LOOP_NS
        possible = (loops or beyond == 0) and fits(own_size, hidden, item_bytes)
        if possible and time < least:
            # One expert with all choices needs most: another one with a dealt block has its own blocks full.
            found = (own_size, own, beyond)
            least = time
    return found


def block_count(choices, experts, size):
    """Blocks of `size` rows that any distribution of choices over experts fits in."""
    begun = min(choices, experts)
    return begun + (choices - begun) // size


def block_size(choices, experts, hidden, inner, item_bytes):
    """Rows of a dealt block that make the launch shortest: longer ones load weights less often, and are padded more."""
    best = None
    least = None
    for size in SIZES:
        time = block_count(choices, experts, size) * block_time(size, hidden, inner, item_bytes)
        if (size == SIZES[0] or fits(size, hidden, item_bytes)) and (least is None or time < least):
            best, least = size, time
    return best


def fits(size, hidden, item_bytes):
    """Whether the transposed rows of a block have room."""
    return blocks(hidden) * size * item_bytes <= MOST_ROW_BYTES


def block_time(size, hidden, inner, item_bytes):
    """A measure of the time of a block in ns: what it takes to move it, plus what it takes to compute it.

    For one shape the sum over blocks follows the predicted times of blocks of 128 to 384 rows within a tenth, up to a
    factor; the maximum of the two does not.
    """
    moved = item_bytes * hidden * (3.0 * inner + 2.0 * size)
    # The last product takes as long for a short tile of rows as for a full one.
    rows = (2.0 * size + PARTITIONS * blocks(size)) / 3.0
    operations = 6.0 * hidden * inner * rows * (4.0 if item_bytes == 4 else 1.0)
    return moved / BYTES_PER_NS + operations / OPERATIONS_PER_NS


def find_chosen(ids, experts, identity):
    """The choices [T, K] of HBM as numbers [128, tile, K] int32, `experts` behind the last token, and who chose whom:
    ones in [128, tile, E] bfloat16. identity: [128, 128] bfloat16."""
    numbers = all_numbers(ids, experts)
    values = cast(numbers, nl.float32)
    order = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=order, pattern=[[1, experts]])
    tiles = numbers.shape[1]
    chosen = nl.ndarray((PARTITIONS, tiles, experts), dtype=nl.bfloat16, buffer=nl.sbuf)
    waiting = None
    for first, last in ranges(0, tiles, max(1, BANK // experts)):
        bank = nl.ndarray((PARTITIONS, last - first, experts), dtype=nl.float32, buffer=nl.psum)
        for tile in range(first, last):
            sum_of_choices(bank[:, tile - first, :], identity, chosen_experts(order, values[:, tile, :]))
        if waiting is not None:
            counted_once(chosen, waiting)
        waiting = (bank, first, last)
    counted_once(chosen, waiting)
    return numbers, chosen


def find_places(numbers, chosen, tokens, size, own=0, nowhere=None):
    """The place [128, tile, K] int32 of each choice among the rows of all blocks, and the first dealt block after those
    of each expert, [128, E] float32, the same on every partition.

    numbers, chosen: see `find_chosen`. size: rows of a block; own: blocks of each expert before the dealt ones.
    nowhere: None, or the place of choices `experts`, which are nobody's here.
    """
    tiles, experts = chosen.shape[1], chosen.shape[2]
    known = nl.ndarray(numbers.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=known, data=numbers, op0=nl.minimum, operand0=float(experts - 1))
    values = cast(numbers, nl.float32)
    order = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=order, pattern=[[1, experts]])
    before = earlier_rows()
    ones = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    counts = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=counts, value=0.0)
    ranks = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    for first, last in ranges(0, tiles, max(1, BANK // experts)):
        shape = (PARTITIONS, last - first, experts)
        ahead = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        totals = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        for tile in range(first, last):
            for sums, stationary in ((ahead, before), (totals, ones)):
                nisa.nc_matmul(
                    dst=sums[:, tile - first, :],
                    stationary=stationary,
                    moving=chosen[:, tile, :],
                    accumulate=False,
                )
        for tile in range(first, last):
            rank = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=rank, data1=ahead[:, tile - first, :], data2=counts, op=nl.add)
            nisa.nc_n_gather(dst=ranks[:, tile, :], data=rank, indices=known[:, tile, :])
            nisa.tensor_tensor(dst=counts, data1=counts, data2=totals[:, tile - first, :], op=nl.add)
    starts, ends = block_ranges(counts, own * size, tokens, size)
    places = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
    # Row r of expert e: own rows begin at e * own rows, dealt ones where its first dealt block does.
    among_own = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=among_own, data=values, op0=nl.multiply, operand0=float(own * size), op1=nl.add, operand1=ranks
    )
    further = nl.ndarray(starts.shape, dtype=nl.float32, buffer=nl.sbuf)
    rows = float(own * size)
    nisa.tensor_scalar(
        dst=further,
        data=starts,
        op0=nl.multiply,
        operand0=float(size),
        op1=nl.add,
        operand1=rows * (experts - 1),
    )
    nisa.scalar_tensor_tensor(
        dst=further, data=order, op0=nl.multiply, operand0=-rows, op1=nl.add, operand1=further
    )
    moved = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=moved, data=further, indices=known)
    nisa.scalar_tensor_tensor(
        dst=moved, data=ranks, op0=nl.greater_equal, operand0=rows, op1=nl.multiply, operand1=moved
    )
    nisa.tensor_tensor(dst=places, data1=among_own, data2=moved, op=nl.add)
    if nowhere is not None:
        put_nowhere(places, numbers, experts, nowhere)
    return places, ends


def all_numbers(ids, experts):
    """The choices [T, K] of HBM as [128, tile, K] int32, with `experts` behind the last token."""
    tokens, each = ids.shape
    full = tokens // PARTITIONS
    numbers = nl.ndarray((PARTITIONS, blocks(tokens), each), dtype=nl.int32, buffer=nl.sbuf)
    if tokens > full * PARTITIONS:
        nisa.memset(dst=numbers[:, full, :], value=experts)
        rest = tokens - full * PARTITIONS
        nisa.dma_copy(dst=numbers[0:rest, full, :], src=ids[full * PARTITIONS : tokens, :])
    if full > 0:
        pattern = [[each, PARTITIONS], [PARTITIONS * each, full], [1, each]]
        nisa.dma_copy(dst=numbers[:, 0:full, :], src=ids.ap(pattern=pattern))
    return numbers


def sum_of_choices(sums, identity, choices):
    """The sum over k of choices [128, k, E] to a part [128, E] of a PSUM bank."""
    each = choices.shape[1]
    for k in range(each):
        nisa.nc_matmul(dst=sums, stationary=identity, moving=choices[:, k, :], accumulate=k > 0)


def counted_once(chosen, sums):
    """Sums of choices (bank, first tile, end) to tiles of `chosen`. A row of NaN may name an expert twice, which
    counts once."""
    bank, first, last = sums
    nisa.tensor_scalar(dst=chosen[:, first:last, :], data=bank, op0=nl.minimum, operand0=1.0)


def put_nowhere(places, numbers, experts, nowhere):
    """Give choices of number `experts` the place `nowhere`."""
    mask = nl.ndarray(places.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mask, data=numbers, op0=nl.equal, operand0=float(experts))
    behind = nl.ndarray(places.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=behind, value=nowhere)
    nisa.tensor_copy_predicated(dst=places, src=behind, predicate=mask)


def earlier_rows():
    """For each row (column) the rows before it, as ones: [128, 128]."""
    result = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=result, value=1.0)
    nisa.affine_select(
        dst=result,
        pattern=[[1, PARTITIONS]],
        channel_multiplier=-1,
        on_true_tile=result,
        on_false_value=0.0,
        cmp_op=nl.greater,
    )
    return result


def chosen_experts(order, numbers):
    """Which expert each choice [128, K] float32 names: ones in [128, K, E]."""
    rows, each = numbers.shape
    experts = order.shape[1]
    result = nl.ndarray((rows, each, experts), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=result,
        data1=order.expand_dim(1).broadcast(1, each),
        data2=numbers.expand_dim(2).broadcast(2, experts),
        op=nl.equal,
    )
    return result


def block_ranges(counts, own, most, size):
    """The first dealt block of each expert, and the first one after its dealt blocks: [128, E] float32.

    counts: the rows of each expert, at most `most`, of which `own` need no dealt block; size: rows of a block.
    """
    dealt = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=dealt, value=0.0)
    for filled in range(own, most, size):
        nisa.scalar_tensor_tensor(
            dst=dealt, data=counts, op0=nl.greater, operand0=float(filled), op1=nl.add, operand1=dealt
        )
    ones = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    ends = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor_scan(dst=ends, data0=ones, data1=dealt, initial=0.0, op0=nl.multiply, op1=nl.add)
    starts = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=starts, data1=ends, data2=dealt, op=nl.subtract)
    return starts, ends


def expert_of_blocks(ends, count):
    """The expert of each of `count` dealt blocks, and which of its dealt blocks it is: [1, count] int32 each.

    Blocks behind the last one that is used get an expert too, whose weights nobody needs.
    """
    experts = ends.shape[1]
    table = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf)
    turns = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf)
    for first, last in ranges(0, count):
        number = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=number, pattern=[[0, 1]], offset=first, channel_multiplier=1)
        ended = nl.ndarray(ends.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=ended, data=ends, op0=nl.less_equal, operand0=number)
        expert = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=expert, op=nl.add, data=ended, axis=1)
        nisa.tensor_scalar(dst=expert, data=expert, op0=nl.minimum, operand0=float(experts - 1))
        ended_at = nl.ndarray(ends.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=ended_at, data1=ended, data2=ends, op=nl.multiply)
        turn = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=turn, op=nl.maximum, data=ended_at, axis=1)
        nisa.tensor_tensor(dst=turn, data1=number, data2=turn, op=nl.subtract)
        for column, row in ((expert, table), (turn, turns)):
            bank = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_transpose(dst=bank, data=column)
            nisa.tensor_copy(dst=row[:, first:last], src=bank[:, 0 : last - first])
    return table, turns


def out_of_range(absent):
    """What a DMA does at places behind all rows: nothing, where choices may be `absent`."""
    return nisa.oob_mode.skip if absent else nisa.oob_mode.error


def sorted_tokens(places, tokens, count, size, absent):
    """The tokens of `count` blocks of so many rows, [count * size, 1] int32 @ HBM. Padding has token 0.

    absent: places may lie behind all rows.
    """
    numbers = nl.ndarray((count * size, 1), dtype=nl.int32, buffer=nl.private_hbm, name="sorted_tokens")
    zeros = nl.ndarray((size // 4, 4 * count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0)
    nisa.dma_copy(dst=numbers.reshape((size // 4, 4 * count)), src=zeros)
    tiles = ranges(0, tokens)
    for tile in range(len(tiles)):
        first, last = tiles[tile]
        own = nl.ndarray((last - first, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(dst=own, pattern=[[0, 1]], offset=first, channel_multiplier=1)
        for k in range(places.shape[2]):
            target = numbers.ap(
                pattern=[[1, last - first], [1, 1]], vector_offset=places[0 : last - first, tile, k : k + 1]
            )
            nisa.dma_copy(dst=target, src=own, oob_mode=out_of_range(absent))
    return numbers


def tokens_of_blocks(numbers, groups, pitch, own, size):
    """The tokens of `own` blocks of each of some groups, for each row tile of a block [row, group * own] int32.

    numbers: tokens in HBM, those of a group `pitch` behind those of the one before.
    """
    found = []
    for first, last in ranges(0, size):
        tile = nl.ndarray((last - first, groups, own), dtype=nl.int32, buffer=nl.sbuf)
        pattern = [[1, last - first], [pitch, groups], [size, own]]
        nisa.dma_copy(dst=tile, src=numbers.ap(pattern=pattern, offset=first))
        found.append(tile.reshape((last - first, groups * own)))
    return found
