"""Largest magnitudes of rows, from which scales of rows are computed: of the columns of one rank, or of all ranks.

Where ranks divide the columns of rows, a rank takes scales from its own columns, so that results depend on the number
of ranks. With shared maxima all ranks take the largest magnitude of a row over all columns, which an all-reduce finds.
Elements and scales of the rows are then those of one rank.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import filled, ranges

PIECE_COLUMNS = 2048
"""Columns of rows whose magnitudes are in SBUF at once."""


def check_shared_maxima(shares_row_maxima, quantises_rows, has_static_scales, has_block_scales):
    """Raise AssertionError if ranks share row maxima that kernels do not compute.

    shares_row_maxima, quantises_rows: arguments of a kernel. has_static_scales, has_block_scales: whether rows have
    static scales, or scales of blocks as MXFP8 has them.
    """
    if shares_row_maxima:
        assert quantises_rows, (
            "shares_row_maxima is for rows that are quantised; pass quantises_rows, or leave it out"
        )
        assert not has_static_scales, (
            "rows with input scales have no maxima that ranks share; leave shares_row_maxima out"
        )
        assert not has_block_scales, (
            "rows in MXFP8 have a scale for each 32 columns, all of one rank; leave shares_row_maxima out"
        )


def reduce_maximum(magnitudes):
    """Return the largest element of each row of an SBUF tile [row, H], a new column [row, 1] of its dtype in SBUF."""
    largest = nl.ndarray((magnitudes.shape[0], 1), dtype=magnitudes.dtype, buffer=nl.sbuf)
    # One reduction from 16 bits to 16 bits takes half a cycle for each element, and the maximum of such is one of them.
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=magnitudes, axis=1)
    return largest


def find_largest_in_rows(rows):
    """Return the largest magnitude of each row of an SBUF tile [row, n], a new column [row, 1] of its dtype in SBUF.

    Pieces of the columns keep the magnitudes small.
    """
    largest = None
    for first, end in ranges(0, rows.shape[1], PIECE_COLUMNS):
        magnitudes = nl.ndarray((rows.shape[0], end - first), dtype=rows.dtype, buffer=nl.sbuf)
        nisa.activation(dst=magnitudes, op=nl.abs, data=rows[:, first:end])
        column = reduce_maximum(magnitudes)
        if largest is None:
            largest = column
        else:
            nisa.tensor_tensor(dst=largest, data1=largest, data2=column, op=nl.maximum)
    return largest


def share_maxima(columns, replica_group):
    """Return the largest of each element of columns over the ranks of a group, found by one all-reduce.

    columns: SBUF tiles [row, 1] of one dtype, the first of which has the most rows. Returns such tiles, one for each.
    """
    maxima = columns[0]
    if len(columns) > 1:
        height = maxima.shape[0]
        # The all-reduce reads all partitions, also those that a short column lacks.
        maxima = filled((height, len(columns)), 0.0, columns[0].dtype)
        for index in range(len(columns)):
            nisa.tensor_copy(dst=maxima[0 : columns[index].shape[0], index : index + 1], src=columns[index])
    shared = nl.ndarray(maxima.shape, dtype=maxima.dtype, buffer=nl.sbuf)
    ncc.all_reduce(srcs=[maxima], dsts=[shared], replica_group=replica_group, op=nl.maximum)
    results = []
    for index in range(len(columns)):
        results.append(shared[0 : columns[index].shape[0], index : index + 1])
    return results
