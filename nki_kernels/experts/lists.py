"""The tokens of each expert as a list in HBM, found by GpSimd's search for nonzero elements. Of gen3 on.

Writing the number of each choice to its place takes a DMA for 128 choices, one behind the other. Here a row for each
expert says which tokens chose it; GpSimd turns eight such rows at a time into lists, one on each of its cores.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

CORES = 8
"""GpSimd cores, each of which searches the first of its 16 partitions."""

PITCH = 16
"""Partitions of each."""

SEARCHED = PITCH * (CORES - 1) + 1
"""Partitions of a tile that reaches the first one of the last core."""

MOST_TOKENS = 8192
"""Whose rows and lists, [., T] float32 and int32, have room in SBUF twice."""


def can_list(tokens, experts, own_rows):
    """Whether `token_lists` takes so many; `own_rows` of each list are read at once."""
    each = experts // CORES
    whole = experts % CORES == 0 and (each <= PITCH or each % PITCH == 0)
    room = PARTITIONS * blocks(tokens)
    return whole and room <= MOST_TOKENS and own_rows <= room


def token_lists(chosen, tail, identity):
    """The tokens that chose each expert, ascending, [E * room + tail, 1] int32 @ HBM, and the room of each.

    Behind the last token of an expert comes token 0. chosen: [128, tile, E] bfloat16, not 0 where the token did;
    `tail` elements, 0, follow the last list. identity: [128, 128] bfloat16.
    """
    tiles, experts = chosen.shape[1], chosen.shape[2]
    each = experts // CORES
    room = PARTITIONS * tiles
    lists = nl.ndarray((experts * room + tail, 1), dtype=nl.int32, buffer=nl.private_hbm, name="token_lists")
    behind = nl.ndarray((1, tail), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=behind, value=0, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=lists[experts * room : experts * room + tail, :].reshape((1, tail)), src=behind)
    by_core = for_cores(chosen, each)
    for first in range(0, each, PITCH):
        for slot in range(first, min(each, first + PITCH)):
            found = nl.ndarray((SEARCHED, room + 1), dtype=nl.int32, buffer=nl.sbuf)
            columns = by_core[:, :, first // PITCH, slot - first : slot - first + SEARCHED]
            nisa.nonzero_with_count(dst=found, src=across(columns, identity, slot), padding_val=0)
            # The list of expert core * each + slot lies on the first partition of that core.
            target = lists.ap(pattern=[[each * room, CORES], [1, room]], offset=slot * room)
            transfer(target, found[0:SEARCHED:PITCH, 0:room], COMPILER)
    return lists, room


def for_cores(chosen, each):
    """Columns of experts so that those of one slot of all cores are PITCH apart: [128, tile, run of slots, 128]."""
    tiles = chosen.shape[1]
    runs = blocks(each, PITCH)
    result = nl.ndarray((PARTITIONS, tiles, runs, CORES * PITCH), dtype=chosen.dtype, buffer=nl.sbuf)
    if each % PITCH > 0:
        nisa.memset(dst=result, value=0.0, engine=nisa.engine.gpsimd)
    split = result.reshape_dim(3, (CORES, PITCH))
    by_core = chosen.reshape_dim(2, (CORES, each))
    for run in range(runs):
        first, last = run * PITCH, min(each, (run + 1) * PITCH)
        nisa.tensor_copy(dst=split[:, :, run, :, 0 : last - first], src=by_core[:, :, :, first:last])
    return result


def across(columns, identity, number):
    """Columns [128, tile, column] with the columns on the partitions: [column, token] float32."""
    tiles, count = columns.shape[1], columns.shape[2]
    result = nl.ndarray((count, tiles * PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    for first, last in ranges(0, tiles, BANK // PARTITIONS):
        bank = nl.ndarray((count, (last - first) * PARTITIONS), dtype=nl.float32, buffer=nl.psum)
        for tile in range(first, last):
            at = (tile - first) * PARTITIONS
            nisa.nc_matmul(
                dst=bank[:, at : at + PARTITIONS],
                stationary=columns[:, tile, :],
                moving=identity,
                accumulate=False,
            )
        target = result[:, first * PARTITIONS : last * PARTITIONS]
        if number % 2 == 0:
            nisa.tensor_copy(dst=target, src=bank)
        else:
            nisa.activation(dst=target, op=nl.copy, data=bank)
    return result
