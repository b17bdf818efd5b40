"""What each physical core of a logical core takes of a launch: rows of a prompt, columns of a decode step.

A logical core of two physical ones (LNC2) runs a kernel on both. They share HBM, and nothing else.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks


def core_rows(rows, ranks=1):
    """Return (first, end) of this core's rows: its part of whole row tiles; all rows of a decode step.

    Of rows that are cut over ranks these are the own rows of each rank.
    """
    core = nl.program_id(0)
    return core_range(rows, PARTITIONS // ranks, core) if rows * ranks > PARTITIONS else (0, rows)


def core_columns(tokens, columns, unit):
    """Return (first, end) of this core's columns: its part of whole units in a decode step; all columns in a prompt."""
    return core_range(columns, unit, nl.program_id(0)) if divides_columns(tokens) else (0, columns)


def divides_columns(tokens):
    """Return whether two cores divide columns: those of the weights are what a decode step reads."""
    return nl.num_programs() > 1 and tokens <= PARTITIONS


def core_range(size, unit, core):
    """Return (first, end) of a core's part of `size`: whole units, smaller ones where there are fewer than cores."""
    cores = nl.num_programs()
    assert size >= cores, f"{cores} cores divide at least {cores} columns, not {size}"
    unit = min(unit, blocks(size, cores))
    width = blocks(blocks(size, unit), cores) * unit
    return min(size, core * width), min(size, (core + 1) * width)


def from_other_core(tile):
    """Return the other core's tile of the same shape, for this one."""
    other = 1 - nl.program_id(0)
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    nisa.sendrecv(src=tile, dst=result, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    return result
