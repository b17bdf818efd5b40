"""Where the rows of a prompt go that are sorted by expert, found on the chip.

Rows of one expert take whole *blocks*, one expert after the other; the last block of an expert may be padded. So there
are at most `block_count` blocks, whatever tokens choose. Numbers of rows stay below 2^24, where float32 holds them.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.experts.weights import load_numbers
from nki_kernels.tiles import PARTITIONS, blocks, cast, ranges

BYTES_PER_NS = 358.0
"""What a trn2 core moves from HBM while all do; with OPERATIONS_PER_NS it tells which blocks take least time."""

OPERATIONS_PER_NS = 78600.0
"""Those of its Tensor engine in bfloat16; float32 takes four times as long."""

SIZES = (128, 192, 256, 384)
"""Rows that a block may have."""

MOST_ROW_BYTES = 16384
"""Of a partition, for the transposed rows of a block."""


def block_count(choices, experts, size):
    """Blocks of `size` rows that any distribution of choices over experts fits in."""
    begun = min(choices, experts)
    return begun + (choices - begun) // size


def block_size(choices, experts, hidden, inner, item_bytes):
    """Rows of a block that make the launch shortest: longer ones load weights less often, and are padded more.

    The two times of a block are added. For one shape their sum follows the predicted times of blocks of 128 to 384 rows
    within a tenth, up to a factor; their maximum does not.
    """
    best = None
    least = None
    for size in SIZES:
        moved = item_bytes * hidden * (3.0 * inner + 2.0 * size)
        # The last product takes as long for a short tile of rows as for a full one.
        rows = (2.0 * size + PARTITIONS * blocks(size)) / 3.0
        operations = 6.0 * hidden * inner * rows * (4.0 if item_bytes == 4 else 1.0)
        time = block_count(choices, experts, size) * (moved / BYTES_PER_NS + operations / OPERATIONS_PER_NS)
        fits = size == SIZES[0] or blocks(hidden) * size * item_bytes <= MOST_ROW_BYTES
        if fits and (least is None or time < least):
            best, least = size, time
    return best


def find_places(ids, experts, size, nowhere=None):
    """The place [128, tile, K] int32 of each choice among the rows of all blocks, and the first block after those of
    each expert, [128, E] float32, the same on every partition.

    nowhere: None, or the place of choices `experts`, which are nobody's here.
    """
    tokens, each = ids.shape
    tiles = ranges(0, tokens)
    order = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=order, pattern=[[1, experts]])
    before = earlier_rows()
    ones = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    counts = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=counts, value=0.0)
    ranks = nl.ndarray((PARTITIONS, len(tiles), each), dtype=nl.float32, buffer=nl.sbuf)
    found = []
    for tile in range(len(tiles)):
        first, last = tiles[tile]
        rows = last - first
        numbers = load_numbers(ids[first:last, :])
        known = numbers
        if nowhere is not None:
            known = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=known, data=numbers, op0=nl.minimum, operand0=float(experts - 1))
        found.append((cast(known, nl.uint32), numbers))
        chosen = chosen_experts(order, cast(numbers, nl.float32))
        ahead = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=ahead, stationary=before[0:rows, 0:rows], moving=chosen, accumulate=False)
        rank = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=rank, data1=ahead, data2=counts[0:rows, :], op=nl.add)
        nisa.nc_n_gather(dst=ranks[0:rows, tile, :], data=rank, indices=found[tile][0])
        total = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=ones[0:rows, :], moving=chosen, accumulate=False)
        nisa.tensor_tensor(dst=counts, data1=counts, data2=total, op=nl.add)
    starts, ends = block_ranges(counts, tokens, size)
    places = nl.ndarray((PARTITIONS, len(tiles), each), dtype=nl.int32, buffer=nl.sbuf)
    for tile in range(len(tiles)):
        known, numbers = found[tile]
        rows = known.shape[0]
        start = nl.ndarray((rows, each), dtype=nl.float32, buffer=nl.sbuf)
        nisa.nc_n_gather(dst=start, data=starts[0:rows, :], indices=known)
        nisa.scalar_tensor_tensor(
            dst=places[0:rows, tile, :],
            data=start,
            op0=nl.multiply,
            operand0=float(size),
            op1=nl.add,
            operand1=ranks[0:rows, tile, :],
        )
        if nowhere is not None:
            put_nowhere(places[0:rows, tile, :], numbers, experts, nowhere)
    return places, ends


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
    """Which experts each row has chosen by numbers [rows, K] float32: ones in [rows, E]."""
    rows, each = numbers.shape
    result = nl.ndarray((rows, order.shape[1]), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=order[0:rows, :], op0=nl.equal, operand0=numbers[:, 0:1])
    for k in range(1, each):
        nisa.scalar_tensor_tensor(
            dst=result,
            data=order[0:rows, :],
            op0=nl.equal,
            operand0=numbers[:, k : k + 1],
            op1=nl.add,
            operand1=result,
        )
    return result


def block_ranges(counts, most, size):
    """The first block of each expert, and the first one after its blocks, of so many rows each: [128, E] float32.

    counts: the rows of each expert, at most `most`.
    """
    own = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=own, data=counts, op0=nl.greater, operand0=0.0)
    for filled in range(size, most, size):
        nisa.scalar_tensor_tensor(
            dst=own, data=counts, op0=nl.greater, operand0=float(filled), op1=nl.add, operand1=own
        )
    ones = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    ends = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor_scan(dst=ends, data0=ones, data1=own, initial=0.0, op0=nl.multiply, op1=nl.add)
    starts = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=starts, data1=ends, data2=own, op=nl.subtract)
    return starts, ends


def expert_of_blocks(ends, count):
    """The expert of each of `count` blocks, [1, count] int32: how many experts end before it.

    Blocks behind the last one that is used get an expert too, whose weights nobody needs.
    """
    experts = ends.shape[1]
    table = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf)
    for first, last in ranges(0, count):
        number = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=number, pattern=[[0, 1]], offset=first, channel_multiplier=1)
        ended = nl.ndarray(ends.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=ended, data=ends, op0=nl.less_equal, operand0=number)
        total = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total, op=nl.add, data=ended, axis=1)
        bank = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=total)
        nisa.tensor_scalar(
            dst=table[:, first:last],
            data=bank[:, 0 : last - first],
            op0=nl.minimum,
            operand0=float(experts - 1),
        )
    return table


def out_of_range(absent):
    """What a DMA does at places behind all rows: nothing, where choices may be `absent`."""
    return nisa.oob_mode.skip if absent else nisa.oob_mode.error


def sorted_tokens(places, tokens, count, size, absent):
    """The tokens of `count` blocks of so many rows, for each row tile of a block [row, block] int32.

    Padding has token 0. absent: places may lie behind all rows.
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
    by_block = numbers.reshape((count, size)).permute((1, 0))
    found = []
    for first, last in ranges(0, size):
        found.append(load_numbers(by_block[first:last, :]))
    return found
