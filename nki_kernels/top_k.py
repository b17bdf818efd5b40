"""Largest values of each row and their places, in two stages: the tile helpers of lm_head and sample.

A row of n columns is cut into pieces of up to `chunks` times `width` columns. The chunks of a piece lie on partitions
of their own, [row, chunk] behind one another, so few rows fill the lanes as well as many. The first stage searches the
chunks; the second one merges what it found with the largest of the pieces before. A row's candidates always lie in
the order of their columns, so equal values come lowest column first, as from a stable sort of the negated row.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks

MAX_SEARCHED = 16384
"""Elements per partition that max8 searches in one instruction."""

LEAST = -3.0e38
"""Stands for no value: in padded columns and in place of values that were found."""

_EIGHT = 8
"""Values that the Vector engine finds at a time."""


def multiple_of_eight(count):
    """The number of values that are found for a top_k of `count`."""
    return blocks(count, _EIGHT) * _EIGHT


def backwards(tile, first):
    """Columns first … first + 7 of a whole tile [P, n], the last one first."""
    partitions, columns = tile.shape
    return tile.ap(pattern=[[columns, partitions], [-1, _EIGHT]], offset=first + _EIGHT - 1)


def take_largest(values, places, scores, work):
    """The largest of each row of scores [P, n], descending: columns 0 … k of values, and their places [P, k] uint32.

    values and places are whole tiles. Eight are found at a time, and removed in `work` [P, n], which may be `scores`.
    nc_match_replace8 serves its last slot first and takes the first occurrence that is left. So it gets the eight in
    ascending order, and equal values get ascending places.
    """
    source = scores
    for first in range(0, places.shape[1], _EIGHT):
        nisa.max8(dst=values[:, first : first + _EIGHT], src=source)
        nisa.nc_match_replace8(
            dst=work, data=source, vals=backwards(values, first), imm=LEAST, dst_idx=backwards(places, first)
        )
        source = work


def chunks_of_a_row(rows, most):
    """Partitions over which the columns of each of `rows` rows are spread, at most `most`."""
    return max(1, min(most, PARTITIONS // rows))


def pieces(columns, chunks, width, keep):
    """The pieces of a row, as (first column, columns of a chunk); the end of the last piece may be padding.

    A chunk with less than `keep` columns gets a multiple of eight of them, all of which are candidates.
    """
    found = []
    first = 0
    while first < columns:
        size = min(width, blocks(columns - first, chunks))
        if size < keep:
            size = multiple_of_eight(size)
        found.append((first, size))
        first = first + chunks * size
    return found


def new_candidates(rows, count):
    """Room for `count` candidates of each row: values [rows, count], and their columns [rows, count], in float32."""
    values = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    columns = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    return values, columns


def search_piece(candidates, begun, first, scores, work, keep):
    """First stage: the `keep` largest of each chunk of scores [row * chunk, column], a piece from column `first` on.

    They go to the candidates from place `keep` on, behind the largest of earlier pieces if those have `begun`. Returns
    the candidates that are there. They travel on GpSimd's queue: the queue that loads must not wait for a search.
    """
    values, columns = candidates
    rows = values.shape[0]
    lanes, size = scores.shape
    chunks = lanes // rows
    each = min(keep, size)
    end = keep + chunks * each
    found = nl.ndarray((lanes, each), dtype=nl.float32, buffer=nl.sbuf)
    places = nl.ndarray((lanes, each), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(found, places, scores, work)
    chunk_start = nl.ndarray((rows, chunks * each), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=chunk_start, pattern=[[size, chunks], [0, each]], offset=first)
    in_chunk = nl.ndarray((rows, chunks * each), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.dma_copy(dst=values[:, keep:end], src=found, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=in_chunk, src=places, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(
        dst=columns[:, keep:end], data1=in_chunk, data2=chunk_start, op=nl.add, engine=nisa.engine.gpsimd
    )
    start = 0 if begun else keep
    return values[:, start:end], columns[:, start:end]


def merge(largest, candidates, keep):
    """Second stage: the `keep` largest candidates of each row, whose values are lost, to the first places of `largest`.

    A place that is none, which NaN gives, becomes the last one: a gather takes places only.
    """
    values, columns = candidates
    rows, count = values.shape
    places = nl.ndarray((rows, keep), dtype=nl.uint32, buffer=nl.sbuf)
    valid = nl.ndarray((rows, keep), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(largest[0], places, values, values)
    nisa.tensor_scalar(dst=valid, data=places, op0=nl.minimum, operand0=float(count - 1))
    nisa.nc_n_gather(dst=largest[1][:, 0:keep], data=columns, indices=valid)


def gather_ranks(candidates, replica_group, ranks):
    """Candidates of all ranks beside each other, [rows, ranks * n], in the order of the group's list.

    all_gather puts the ranks' rows below each other; loading them puts a row's candidates into one partition.
    """
    rows, count = candidates[0].shape
    results = new_candidates(rows, ranks * count)
    own = []
    everyone = []
    names = ("values", "ids")
    for i in range(2):
        one = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.private_hbm, name=f"own_{names[i]}")
        every = nl.ndarray(
            (ranks * rows, count), dtype=nl.float32, buffer=nl.private_hbm, name=f"all_{names[i]}"
        )
        nisa.dma_copy(dst=one, src=candidates[i])
        own.append(one)
        everyone.append(every)
    ncc.all_gather(srcs=own, dsts=everyone, replica_group=replica_group, collective_dim=0)
    for i in range(2):
        nisa.dma_copy(dst=results[i], src=everyone[i].reshape_dim(0, (ranks, rows)).permute((1, 0, 2)))
    return results
