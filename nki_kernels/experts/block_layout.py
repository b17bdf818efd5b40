"""Layout of the blocks of rows of a prompt that are sorted by expert: their size and number, known at compile time.

A *choice* is a token and one of its K experts; each choice takes one row. Rows of one expert take whole *blocks*; the
last one may be padded. Experts get blocks in two ways. Either all blocks are *dealt* at run time, one expert after the
other, as many as the worst distribution of choices needs. Or every expert has *reserved* blocks, the same number each,
and only rows beyond them get dealt blocks; then a loop runs over those dealt blocks that have rows. Reserved blocks
come first. `experts_prefill` calls `plan_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.tiles import BANK, PARTITIONS, blocks

BYTES_PER_NS = 358.0
"""HBM bandwidth of a trn2 core while all cores read; with OPERATIONS_PER_NS it ranks layouts by their time."""

OPERATIONS_PER_NS = 78600.0
"""Rate of its Tensor engine in bfloat16; float32 takes four times as long."""

SIZES = (128, 192, 256, 384)
"""Rows that a block may have if all blocks are dealt."""

RESERVED_SIZES = tuple(range(32, BANK + 1, 32))
"""Rows that a block may have if experts have reserved blocks."""

LOOP_NS = 25000.0
"""Time that reserved blocks have to save: the loop over dealt blocks begins and ends, and nothing overlaps it."""

MOST_ROW_BYTES = 16384
"""Bytes per partition of the transposed rows of a block."""


@dataclass
class BlockLayout(nl.NKIObject):
    """Blocks of `rows` rows each: `reserved` blocks of each of `experts` experts, then `dealt` blocks."""

    rows: int
    experts: int
    reserved: int
    dealt: int


def count_blocks(layout):
    """Return the number of all blocks, reserved and dealt."""
    return layout.experts * layout.reserved + layout.dealt


def count_reserved_rows(layout):
    """Return the number of rows in the reserved blocks of one expert."""
    return layout.reserved * layout.rows


def count_static_groups(layout):
    """Return the number of groups of blocks that are computed outside the loop.

    With reserved blocks each expert's are a group. Without them each dealt block is a group, and there is no loop.
    """
    return layout.experts if layout.reserved > 0 else layout.dealt


def count_group_blocks(layout):
    """Return the number of blocks in each group of `count_static_groups`: the reserved blocks of an expert, or one."""
    return max(1, layout.reserved)


def has_loop(layout):
    """Return whether a loop runs over dealt blocks: experts have reserved blocks, and there are dealt ones."""
    return layout.reserved > 0 and layout.dealt > 0


def plan_blocks(choices, experts, hidden, inner, item_bytes, loops, expert_ranks=1):
    """Return the `BlockLayout` that makes the launch shortest.

    Reserved blocks have room for the mean of choices and two standard deviations of random choices, of which as many go
    to each of `expert_ranks`.

    Args:
        choices: number of choices of all tokens.
        experts: number of experts, E.
        hidden: H.
        inner: F, the intermediate size on this rank.
        item_bytes: bytes of an element of the products' operands.
        loops: whether the chip has loops over registers; without them all blocks are dealt before any is computed.
        expert_ranks: ranks that divide the experts.
    """
    rows = choose_block_rows(choices, experts, hidden, inner, item_bytes)
    dealt = count_most_blocks(choices, experts, rows)
    least_ns = dealt * estimate_block_time(rows, hidden, inner, item_bytes)
    layout = BlockLayout(rows, experts, 0, dealt)
    mean = choices / (experts * expert_ranks)
    room = mean + 2.0 * mean**0.5
    for size in RESERVED_SIZES:
        reserved = int(-(-room // size))
        beyond = max(0, choices - reserved * size + size - 1) // size
        time_ns = experts * reserved * estimate_block_time(size, hidden, inner, item_bytes)
        if beyond > 0:
            time_ns += LOOP_NS
        possible = (loops or beyond == 0) and has_room(size, hidden, item_bytes)
        if possible and time_ns < least_ns:
            # One expert with all choices needs most: every other expert with a dealt block fills its reserved blocks.
            layout = BlockLayout(size, experts, reserved, beyond)
            least_ns = time_ns
    return layout


def count_most_blocks(choices, experts, rows):
    """Return the number of blocks of `rows` rows that hold `choices` choices, whichever experts they name."""
    begun = min(choices, experts)
    return begun + (choices - begun) // rows


def choose_block_rows(choices, experts, hidden, inner, item_bytes):
    """Return the rows of a block, one of SIZES, that make the launch shortest if all blocks are dealt.

    Larger blocks load weights less often. For the arguments see `plan_blocks`.
    """
    best, least_ns = None, None
    for rows in SIZES:
        time_ns = count_most_blocks(choices, experts, rows) * estimate_block_time(
            rows, hidden, inner, item_bytes
        )
        if (rows == SIZES[0] or has_room(rows, hidden, item_bytes)) and (
            least_ns is None or time_ns < least_ns
        ):
            best, least_ns = rows, time_ns
    return best


def has_room(rows, hidden, item_bytes):
    """Return whether the transposed rows of a block, [H] x `rows`, take at most MOST_ROW_BYTES of a partition."""
    return blocks(hidden) * rows * item_bytes <= MOST_ROW_BYTES


def estimate_block_time(rows, hidden, inner, item_bytes):
    """Return a measure of the time of a block of `rows` rows in ns: of moving its bytes, plus of computing it.

    For one shape the sum over blocks follows the predicted times of blocks of 128 to 384 rows within a tenth, up to a
    factor; the maximum of the two does not. For the arguments see `plan_blocks`.
    """
    moved_bytes = item_bytes * hidden * (3.0 * inner + 2.0 * rows)
    # The down product takes as long for a short tile of rows as for a full one.
    computed_rows = (2.0 * rows + PARTITIONS * blocks(rows)) / 3.0
    operations = 6.0 * hidden * inner * computed_rows * (4.0 if item_bytes == 4 else 1.0)
    return moved_bytes / BYTES_PER_NS + operations / OPERATIONS_PER_NS
