"""What each physical core of a logical core takes of a launch: rows of a prompt, columns of a decode step.

A logical core of two physical ones (LNC2) runs a kernel on both. They share HBM, and nothing else. Prompts are launches
of more than 128 rows; a decode step has one row for each token, 128 at most.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks


def find_core_rows(rows, ranks=1):
    """Return (first, end) of the rows that this physical core computes.

    Two cores divide prompts, of more than 128 rows in all, into whole tiles of 128 rows. For a decode step,
    of fewer rows, both get (0, rows).

    Args:
        rows: number of rows, or of each rank's own rows if rows are divided over ranks.
        ranks: number of ranks that divide the rows; a tile then has 128 // ranks rows of each.
    """
    core = nl.program_id(0)
    return find_core_range(rows, PARTITIONS // ranks, core) if rows * ranks > PARTITIONS else (0, rows)


def find_core_columns(tokens, columns, unit, in_blocks=False):
    """Return (first, end) of the weight columns that this physical core computes.

    Two cores divide the columns of a decode step, of at most 128 tokens, at multiples of `unit`, or between blocks of
    128 if `in_blocks`. For a prompt, or one core alone, that is (0, columns).
    """
    if not divides_columns(tokens):
        return (0, columns)
    core = nl.program_id(0)
    return find_core_blocks(columns, core) if in_blocks else find_core_range(columns, unit, core)


def divides_columns(tokens):
    """Return whether two cores divide the columns of weights: in a decode step, which has at most 128 tokens."""
    return nl.num_programs() > 1 and tokens <= PARTITIONS


def find_core_range(size, unit, core):
    """Return (first, end) of the range of 0 … size - 1 that physical core number `core` takes.

    All cores together cover the range. Bounds are multiples of `unit`, or of a smaller unit if there are
    fewer units than cores. AssertionError if `size` is less than the number of cores.
    """
    cores = nl.num_programs()
    assert size >= cores, f"{cores} cores divide at least {cores} columns, not {size}: launch on one core"
    unit = min(unit, blocks(size, cores))
    width = blocks(blocks(size, unit), cores) * unit
    return min(size, core * width), min(size, (core + 1) * width)


def find_core_blocks(size, core):
    """Return (first, end) of the whole blocks of 128 of 0 … size - 1 that physical core number `core` takes.

    Cores share a size of one block as `find_core_range` divides it.
    """
    if size <= PARTITIONS:
        return find_core_range(size, PARTITIONS, core)
    first, end = find_core_range(blocks(size), 1, core)
    return first * PARTITIONS, min(size, end * PARTITIONS)


def exchange_tiles(tile):
    """Exchange tiles of equal shape between the two physical cores: send `tile`, and return the other core's in SBUF.

    Both cores have to call this function.
    """
    other = 1 - nl.program_id(0)
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    nisa.sendrecv(src=tile, dst=result, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    return result
