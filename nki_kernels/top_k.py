"""Largest values of each row and their places: the tile helpers of lm_head.

Equal values come in the order of their places, lowest first, as from a stable sort of the negated row.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, load

MAX_SEARCHED = 16384
"""Elements per partition that max8 and nc_find_index8 search in one instruction."""

_EIGHT = 8
"""Values that the Vector engine finds at a time."""

_REMOVED = -3.0e38
"""Replaces the values that were found: below any score."""


def multiple_of_eight(count):
    """The number of values that are found for a top_k of `count`."""
    return (count + _EIGHT - 1) // _EIGHT * _EIGHT


def take_largest(values, places, scores):
    """The largest of each row of scores [rows, n], descending, in values [rows, k], and their places (uint32).

    Eight are found at a time and removed from `scores`, which is not preserved. Both nc_find_index8 and
    nc_match_replace8 take the first occurrences of a value that a row has more than once.
    """
    for first in range(0, values.shape[1], _EIGHT):
        found = values[:, first : first + _EIGHT]
        nisa.max8(dst=found, src=scores)
        nisa.nc_find_index8(dst=places[:, first : first + _EIGHT], data=scores, vals=found)
        if first + _EIGHT < values.shape[1]:
            nisa.nc_match_replace8(dst=scores, data=scores, vals=found, imm=_REMOVED)


def merge(values, ids, candidates, candidate_ids):
    """The largest of each row of candidates [rows, n] @ SBUF: into values and their ids, both [rows, k] @ HBM.

    The engines cannot pick an element by a number that differs from partition to partition on every chip; a DMA can.
    So the ids go to HBM as a table [rows * n, 1]. Indirect DMAs fetch those at the found places, 128 at a time, one on
    each partition.
    """
    rows, count = candidates.shape
    keep = values.shape[1]
    best = nl.ndarray((rows, keep), dtype=nl.float32, buffer=nl.sbuf)
    places = nl.ndarray((rows, keep), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(best, places, candidates)
    nisa.dma_copy(dst=values, src=best)

    table = nl.ndarray((rows * count, 1), dtype=nl.int32, buffer=nl.private_hbm, name="candidate_ids")
    nisa.dma_copy(dst=table.reshape((rows, count)), src=candidate_ids)
    row_start = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=row_start, pattern=[[0, 1]], channel_multiplier=count)
    in_table = nl.ndarray((rows, keep), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=in_table, data=places, op0=nl.add, operand0=row_start)
    wanted = nl.ndarray((rows * keep, 1), dtype=nl.int32, buffer=nl.private_hbm, name="candidate_places")
    nisa.dma_copy(dst=wanted.reshape((rows, keep)), src=in_table)

    flat_ids = ids.reshape((rows * keep, 1))
    for first in range(0, rows * keep, PARTITIONS):
        last = min(rows * keep, first + PARTITIONS)
        row_numbers = load(wanted[first:last, :], nl.int32)
        found = nl.ndarray((last - first, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=found, src=table.ap(pattern=[[1, last - first], [1, 1]], vector_offset=row_numbers))
        nisa.dma_copy(dst=flat_ids[first:last, :], src=found)
