"""Assignment of the choices of a prompt to rows of blocks, found on the chip: see `experts.block_layout`.

A *choice* is a token and one of its K experts. Each gets a row in a block of its expert, behind the rows of earlier
tokens that chose the expert. Tokens are in tiles of 128, one on each partition. `experts_prefill` calls these
functions.

Row numbers stay below 2^24: float32 holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.experts.block_layout import (
    count_blocks,
    count_group_blocks,
    count_reserved_rows,
    count_static_groups,
)
from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, filled, ranges
from nki_kernels.weights import ExpertIndex


@dataclass
class Choices(nl.NKIObject):
    """Experts of each of `tokens` tokens in SBUF.

    ids: [128, tile, K] int32, E after the last token. one_hot: [128, tile, E] bfloat16, 1 if a token chose an expert.
    """

    tokens: int
    ids: nl.NkiTensor
    one_hot: nl.NkiTensor


@dataclass
class RowAssignment(nl.NKIObject):
    """Rows of blocks that choices are assigned to.

    rows: row of each choice, [128, tile, K] int32. dealt_ends: first dealt block after those of each expert, [128, E]
    float32, the same on every partition.
    """

    rows: nl.NkiTensor
    dealt_ends: nl.NkiTensor


@dataclass
class DealtBlocks(nl.NKIObject):
    """Dealt blocks in SBUF.

    experts: expert of each, [1, block] int32. turns: number of dealt blocks of the same expert before it, [1, block]
    int32.
    """

    experts: nl.NkiTensor
    turns: nl.NkiTensor


@dataclass
class TokenOrder(nl.NKIObject):
    """Tokens in the order of the rows of blocks, [n, 1] int32 @ HBM.

    group_pitch: elements from one group of blocks to the next, see `count_static_groups`. dealt_start: first element of
    the dealt blocks; dealt_pitch: 0 if they follow one another, else the elements from an expert's to the next one's.
    """

    tokens: nl.NkiTensor
    group_pitch: int
    dealt_start: int
    dealt_pitch: int


@dataclass
class CountedSums(nl.NKIObject):
    """PSUM bank [128, tile, E] float32 for tiles first … end - 1 of tokens: how often each token chose each expert."""

    bank: nl.NkiTensor
    first: int
    end: int


def load_choices(ids, experts, identity):
    """Load ids [T, K] int32 @ HBM, and return the `Choices`: the ids and a one-hot mask in SBUF.

    Args:
        experts: number of experts, E.
        identity: [128, 128] bfloat16 @ SBUF.
    """
    numbers = load_ids(ids, experts)
    values = cast(numbers, nl.float32)
    order = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=order, pattern=[[1, experts]])
    tiles = numbers.shape[1]
    # Zeros and ones are exact in bfloat16, whose matmuls take one pass where float32 takes four.
    one_hot = nl.ndarray((PARTITIONS, tiles, experts), dtype=nl.bfloat16, buffer=nl.sbuf)
    previous = None
    for first, end in ranges(0, tiles, max(1, BANK // experts)):
        bank = nl.ndarray((PARTITIONS, end - first, experts), dtype=nl.float32, buffer=nl.psum)
        for m in range(first, end):  # m: tile of tokens
            sum_choices(bank[:, m - first, :], identity, compare_with_experts(order, values[:, m, :]))
        # The range before is evicted behind the comparisons of this one, so Vector does not wait for products.
        if previous is not None:
            count_once(one_hot, previous)
        previous = CountedSums(bank, first, end)
    count_once(one_hot, previous)
    return Choices(ids.shape[0], numbers, one_hot)


def load_ids(ids, experts):
    """Load ids [T, K] @ HBM as [128, tile, K] int32 @ SBUF; rows after the last token become `experts`."""
    tokens, count = ids.shape
    full = tokens // PARTITIONS
    result = nl.ndarray((PARTITIONS, blocks(tokens), count), dtype=nl.int32, buffer=nl.sbuf)
    if tokens > full * PARTITIONS:
        nisa.memset(dst=result[:, full, :], value=experts)
        short = tokens - full * PARTITIONS
        nisa.dma_copy(dst=result[0:short, full, :], src=ids[full * PARTITIONS : tokens, :])
    if full > 0:
        pattern = [[count, PARTITIONS], [PARTITIONS * count, full], [1, count]]
        nisa.dma_copy(dst=result[:, 0:full, :], src=ids.ap(pattern=pattern))
    return result


def compare_with_experts(order, values):
    """Return ones where a choice [128, K] float32 names an expert, else 0: [128, K, E] bfloat16 @ SBUF.

    order: the numbers 0 … E - 1 on every partition, [128, E] float32.
    """
    rows, count = values.shape
    experts = order.shape[1]
    result = nl.ndarray((rows, count, experts), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=result,
        data1=order.expand_dim(1).broadcast(1, count),
        data2=values.expand_dim(2).broadcast(2, experts),
        op=nl.equal,
    )
    return result


def sum_choices(sums, identity, choices):
    """Write the sum over k of `choices` [128, K, E] @ SBUF to `sums` [128, E] @ PSUM.

    The Tensor engine sums, with `identity` [128, 128] bfloat16.
    """
    for k in range(choices.shape[1]):
        nisa.nc_matmul(dst=sums, stationary=identity, moving=choices[:, k, :], accumulate=k > 0)


def count_once(one_hot, sums):
    """Copy the counts of a `CountedSums` to its tiles of `one_hot` [128, tile, E] @ SBUF, each at most 1.

    A token whose scores are NaN may choose an expert twice, which counts once.
    """
    target = one_hot[:, sums.first : sums.end, :]
    nisa.tensor_scalar(dst=target, data=sums.bank, op0=nl.minimum, operand0=1.0)


def assign_rows(choices, layout, absent):
    """Return the `RowAssignment` of choices: the row of each, and where the dealt blocks of each expert end.

    An expert's rows fill its reserved blocks first, then its dealt blocks, tokens ascending. absent: whether ids may be
    E, for experts of other ranks; such choices get the first row after all blocks.
    """
    experts = layout.experts
    valid = nl.ndarray(choices.ids.shape, dtype=nl.uint32, buffer=nl.sbuf)
    # nc_n_gather refuses an index of E, the number of an absent choice.
    nisa.tensor_scalar(dst=valid, data=choices.ids, op0=nl.minimum, operand0=float(experts - 1))
    values = cast(choices.ids, nl.float32)
    order = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=order, pattern=[[1, experts]])
    ranks, counts = rank_choices(choices, valid)
    starts, ends = find_dealt_ranges(counts, layout, choices.tokens)
    rows = nl.ndarray(choices.ids.shape, dtype=nl.int32, buffer=nl.sbuf)
    # Row r of expert e: reserved rows begin at e * reserved rows, dealt ones where its first dealt block does.
    size, reserved = float(layout.rows), float(count_reserved_rows(layout))
    among_reserved = nl.ndarray(choices.ids.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=among_reserved, data=values, op0=nl.multiply, operand0=reserved, op1=nl.add, operand1=ranks
    )
    shifts = nl.ndarray(starts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=shifts,
        data=starts,
        op0=nl.multiply,
        operand0=size,
        op1=nl.add,
        operand1=reserved * (experts - 1),
    )
    nisa.scalar_tensor_tensor(
        dst=shifts, data=order, op0=nl.multiply, operand0=-reserved, op1=nl.add, operand1=shifts
    )
    shift = nl.ndarray(choices.ids.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=shift, data=shifts, indices=valid)
    nisa.scalar_tensor_tensor(
        dst=shift, data=ranks, op0=nl.greater_equal, operand0=reserved, op1=nl.multiply, operand1=shift
    )
    nisa.tensor_tensor(dst=rows, data1=among_reserved, data2=shift, op=nl.add)
    if absent:
        move_absent(rows, choices.ids, experts, count_blocks(layout) * layout.rows)
    return RowAssignment(rows, ends)


def rank_choices(choices, valid):
    """Return how many tokens before each choice chose the same expert, and how many choose each expert.

    The first are [128, tile, K] float32, the second [128, E] float32, the same on every partition; both in SBUF. valid:
    the ids as uint32 below E, [128, tile, K].
    """
    one_hot = choices.one_hot
    tiles, experts = one_hot.shape[1], one_hot.shape[2]
    earlier = create_earlier_mask()
    # A stationary tile of ones puts the totals on every partition, where each token adds them to its rank.
    ones = filled((PARTITIONS, PARTITIONS), 1.0, nl.bfloat16)
    counts = filled((PARTITIONS, experts), 0.0)
    ranks = nl.ndarray(valid.shape, dtype=nl.float32, buffer=nl.sbuf)
    for first, end in ranges(0, tiles, max(1, BANK // experts)):
        shape = (PARTITIONS, end - first, experts)
        before = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        totals = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        for m in range(first, end):  # m: tile of tokens
            # No product needs `counts`, so those of all tiles of a bank come before the sums, which do.
            for sums, stationary in ((before, earlier), (totals, ones)):
                nisa.nc_matmul(
                    dst=sums[:, m - first, :],
                    stationary=stationary,
                    moving=one_hot[:, m, :],
                    accumulate=False,
                )
        for m in range(first, end):
            rank = nl.ndarray((PARTITIONS, experts), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=rank, data1=before[:, m - first, :], data2=counts, op=nl.add)
            nisa.nc_n_gather(dst=ranks[:, m, :], data=rank, indices=valid[:, m, :])
            nisa.tensor_tensor(dst=counts, data1=counts, data2=totals[:, m - first, :], op=nl.add)
    return ranks, counts


def create_earlier_mask():
    """Return ones where the partition's token comes before the column's, else 0: [128, 128] bfloat16 @ SBUF."""
    result = filled((PARTITIONS, PARTITIONS), 1.0, nl.bfloat16)
    nisa.affine_select(
        dst=result,
        pattern=[[1, PARTITIONS]],
        channel_multiplier=-1,
        on_true_tile=result,
        on_false_value=0.0,
        cmp_op=nl.greater,
    )
    return result


def move_absent(rows, ids, experts, row):
    """Write `row` to `rows` [128, tile, K] int32 where the id is `experts`, the number of an absent expert."""
    mask = nl.ndarray(rows.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mask, data=ids, op0=nl.equal, operand0=float(experts))
    absent_rows = filled(rows.shape, row, nl.int32)
    nisa.tensor_copy_predicated(dst=rows, src=absent_rows, predicate=mask)


def find_dealt_ranges(counts, layout, most):
    """Return two tiles [128, E] float32 @ SBUF: the first dealt block of each expert, and the first one after.

    counts: the rows of each expert, at most `most`, [128, E] float32; rows beyond its reserved blocks need dealt
    blocks.
    """
    dealt = filled(counts.shape, 0.0)
    # Comparisons count the begun blocks exactly, where a division would have to round.
    for full_rows in range(count_reserved_rows(layout), most, layout.rows):
        nisa.scalar_tensor_tensor(
            dst=dealt, data=counts, op0=nl.greater, operand0=float(full_rows), op1=nl.add, operand1=dealt
        )
    ones = filled(counts.shape, 1.0)
    ends = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    # With factors of 1 the scan is a running sum over experts.
    nisa.tensor_tensor_scan(dst=ends, data0=ones, data1=dealt, initial=0.0, op0=nl.multiply, op1=nl.add)
    starts = nl.ndarray(counts.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=starts, data1=ends, data2=dealt, op=nl.subtract)
    return starts, ends


def find_dealt_blocks(dealt_ends, count):
    """Return the `DealtBlocks`: for each of `count` dealt blocks its expert and the number of its blocks before it.

    Both are [1, count] int32 @ SBUF. dealt_ends: the first dealt block after those of each expert, [128, E] float32.
    Blocks after the last one that is used get an expert too, whose results are never read.
    """
    experts = dealt_ends.shape[1]
    result = DealtBlocks(
        nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf),
        nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf),
    )
    for first, end in ranges(0, count):
        number = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=number, pattern=[[0, 1]], offset=first, channel_multiplier=1)
        ended = nl.ndarray(dealt_ends.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=ended, data=dealt_ends, op0=nl.less_equal, operand0=number)
        expert = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=expert, op=nl.add, data=ended, axis=1)
        nisa.tensor_scalar(dst=expert, data=expert, op0=nl.minimum, operand0=float(experts - 1))
        starts = nl.ndarray(dealt_ends.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=starts, data1=ended, data2=dealt_ends, op=nl.multiply)
        turn = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=turn, op=nl.maximum, data=starts, axis=1)
        nisa.tensor_tensor(dst=turn, data1=number, data2=turn, op=nl.subtract)
        for column, row in ((expert, result.experts), (turn, result.turns)):
            # Addresses are read from one partition, so the numbers of blocks, one on each, become a row.
            bank = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_transpose(dst=bank, data=column)
            nisa.tensor_copy(dst=row[:, first:end], src=bank[:, 0 : end - first])
    return result


def index_static_experts(layout, assignment):
    """Return the `ExpertIndex` of each block that is computed outside the loop, in order.

    Those of reserved blocks are known at compile time, and `assignment` may be None; those of dealt blocks are read at
    run time.
    """
    indices = []
    if layout.reserved > 0:
        for block in range(layout.experts * layout.reserved):
            indices.append(ExpertIndex(block // layout.reserved, None))
        return indices
    dealt = find_dealt_blocks(assignment.dealt_ends, layout.dealt)
    for block in range(layout.dealt):
        indices.append(ExpertIndex(0, dealt.experts[:, block : block + 1]))
    return indices


def choose_oob_mode(absent):
    """Return the mode of a DMA whose row numbers may be past all blocks: skip if `absent`, else error."""
    return nisa.oob_mode.skip if absent else nisa.oob_mode.error


def sort_tokens(assignment, layout, tokens, absent):
    """Write the token of each assigned row to HBM, and return the `TokenOrder`; padding has token 0.

    Args:
        tokens: number of tokens, T.
        absent: whether choices of experts of other ranks have a row past all blocks, which is skipped.
    """
    count, size = count_blocks(layout), layout.rows
    rows = assignment.rows
    sorted_tokens = nl.ndarray((count * size, 1), dtype=nl.int32, buffer=nl.private_hbm, name="sorted_tokens")
    # Padding gathers token 0, a valid row, and no choice reads its result.
    zeros = filled((size // 4, 4 * count), 0, nl.int32)
    nisa.dma_copy(dst=sorted_tokens.reshape((size // 4, 4 * count)), src=zeros)
    tiles = ranges(0, tokens)
    for m in range(len(tiles)):  # m: tile of tokens
        first, end = tiles[m]
        numbers = nl.ndarray((end - first, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(dst=numbers, pattern=[[0, 1]], offset=first, channel_multiplier=1)
        for k in range(rows.shape[2]):
            target = sorted_tokens.ap(
                pattern=[[1, end - first], [1, 1]], vector_offset=rows[0 : end - first, m, k : k + 1]
            )
            nisa.dma_copy(dst=target, src=numbers, oob_mode=choose_oob_mode(absent))
    group_pitch = count_group_blocks(layout) * size
    return TokenOrder(sorted_tokens, group_pitch, count_static_groups(layout) * group_pitch, 0)


def load_block_tokens(order, layout):
    """Load the tokens of all blocks outside the loop: a list with [row, block] int32 @ SBUF for each tile of 128 rows.

    The last tile of a block may have fewer rows.
    """
    groups, count = count_static_groups(layout), count_group_blocks(layout)
    tiles = []
    for first, end in ranges(0, layout.rows):
        tile = nl.ndarray((end - first, groups, count), dtype=nl.int32, buffer=nl.sbuf)
        pattern = [[1, end - first], [order.group_pitch, groups], [layout.rows, count]]
        nisa.dma_copy(dst=tile, src=order.tokens.ap(pattern=pattern, offset=first))
        tiles.append(tile.reshape((end - first, groups * count)))
    return tiles
