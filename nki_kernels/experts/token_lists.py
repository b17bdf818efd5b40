"""The tokens of each expert as a list in HBM, found by GpSimd's search for nonzero elements. Of gen3 on.

Writing the token of each choice to its row takes a DMA for 128 choices, one after the other. Here a row for each expert
says which tokens chose it; GpSimd turns eight such rows at a time into lists, one on each of its cores.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.experts.block_layout import count_reserved_rows
from nki_kernels.experts.row_assignment import TokenOrder
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

CORES = 8
"""GpSimd cores, each of which searches the first of its 16 partitions."""

PITCH = 16
"""Partitions of each core."""

SEARCHED = PITCH * (CORES - 1) + 1
"""Partitions of a tile that reaches the first one of the last core."""

MOST_TOKENS = 8192
"""Tokens whose rows and lists, [., T] float32 and int32, have room in SBUF twice."""


def can_list(tokens, layout):
    """Return whether `list_tokens` takes so many tokens and the experts of a layout.

    E is a multiple of 8, and of 128 if it is above 128. The tokens, rounded up to whole tiles, are at most MOST_TOKENS.
    The reserved rows of an expert do not exceed them, as they are read from a list at once.
    """
    per_core = layout.experts // CORES
    divides = layout.experts % CORES == 0 and (per_core <= PITCH or per_core % PITCH == 0)
    room = PARTITIONS * blocks(tokens)
    return divides and room <= MOST_TOKENS and count_reserved_rows(layout) <= room


def list_tokens(one_hot, layout, identity):
    """Write a list of the tokens that chose each expert, ascending, to HBM, and return the lists as a `TokenOrder`.

    The lists are [E * room + rows of a block, 1] int32, where room is T rounded up to a multiple of 128. After the last
    token of an expert comes token 0.

    Args:
        one_hot: [128, tile, E] bfloat16 @ SBUF, 1 if a token chose an expert.
        identity: [128, 128] bfloat16 @ SBUF.
    """
    tiles, experts = one_hot.shape[1], one_hot.shape[2]
    per_core = experts // CORES
    room, padding = PARTITIONS * tiles, layout.rows
    lists = nl.ndarray(
        (experts * room + padding, 1), dtype=nl.int32, buffer=nl.private_hbm, name="token_lists"
    )
    zeros = nl.ndarray((1, padding), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=lists[experts * room : experts * room + padding, :].reshape((1, padding)), src=zeros)
    by_core = spread_over_cores(one_hot, per_core)
    for first in range(0, per_core, PITCH):
        for slot in range(first, min(per_core, first + PITCH)):
            tokens = nl.ndarray((SEARCHED, room + 1), dtype=nl.int32, buffer=nl.sbuf)
            columns = by_core[:, :, first // PITCH, slot - first : slot - first + SEARCHED]
            rows = transpose_columns(columns, identity, slot % 2 == 0)
            nisa.nonzero_with_count(dst=tokens, src=rows, padding_val=0)
            # The list of expert core * per_core + slot is on the first partition of that core.
            target = lists.ap(pattern=[[per_core * room, CORES], [1, room]], offset=slot * room)
            transfer(target, tokens[0:SEARCHED:PITCH, 0:room], COMPILER)
    return TokenOrder(lists, room, count_reserved_rows(layout), room)


def spread_over_cores(one_hot, per_core):
    """Copy the columns of experts so that those which the cores search together lie PITCH columns apart.

    Core c searches `per_core` experts, from expert c * per_core on, one *slot* after the other. The result is [128,
    tile, run of PITCH slots, 128] @ SBUF: its column c * PITCH + s belongs to core c and slot s of the run. Columns
    without an expert are zeros.
    """
    tiles = one_hot.shape[1]
    runs = blocks(per_core, PITCH)
    result = nl.ndarray((PARTITIONS, tiles, runs, CORES * PITCH), dtype=one_hot.dtype, buffer=nl.sbuf)
    if per_core % PITCH > 0:
        nisa.memset(dst=result, value=0.0, engine=nisa.engine.gpsimd)
    split = result.reshape_dim(3, (CORES, PITCH))
    by_core = one_hot.reshape_dim(2, (CORES, per_core))
    for run in range(runs):
        first, end = run * PITCH, min(per_core, (run + 1) * PITCH)
        nisa.tensor_copy(dst=split[:, :, run, :, 0 : end - first], src=by_core[:, :, :, first:end])
    return result


def transpose_columns(columns, identity, by_vector):
    """Transpose columns [128, tile, column] @ SBUF to a new tile [column, token] float32 @ SBUF.

    by_vector: whether the Vector engine reads PSUM, else the Scalar engine.
    """
    tiles, count = columns.shape[1], columns.shape[2]
    result = nl.ndarray((count, tiles * PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    for first, end in ranges(0, tiles, BANK // PARTITIONS):
        bank = nl.ndarray((count, (end - first) * PARTITIONS), dtype=nl.float32, buffer=nl.psum)
        for tile in range(first, end):
            start = (tile - first) * PARTITIONS
            # An ordinary matmul by the identity transposes, so that PSUM has float32, as the search takes it.
            nisa.nc_matmul(
                dst=bank[:, start : start + PARTITIONS],
                stationary=columns[:, tile, :],
                moving=identity,
                accumulate=False,
            )
        target = result[:, first * PARTITIONS : end * PARTITIONS]
        if by_vector:
            nisa.tensor_copy(dst=target, src=bank)
        else:
            nisa.activation(dst=target, op=nl.copy, data=bank)
    return result
