"""Largest values of each row and their indices, in two stages: the tile helpers of lm_head and sample.

A row of n columns is cut into pieces of up to `chunks` times `width` columns. The chunks of a piece lie on partitions
of their own, [row, chunk] behind one another, so few rows fill the lanes as well as many. The first stage searches the
chunks; the second one merges what it found, and the largest of the pieces before. A row's candidates always lie in
the order of their columns, so equal values come lowest column first, as from a stable sort of the negated row.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, blocks

GROUPED_COLUMNS = 1024
"""Columns of a chunk, and more than a PSUM bank holds, from which on groups of eight may take less time."""

GROUPED_PER_VALUE = 32
"""Columns for each value wanted, from which on they do."""

MAX_GATHERED = 8192
"""Candidates of all ranks on one partition: 64 KiB with their ids. One instruction could search twice as many."""

MERGED_CHUNKS = 4
"""Chunks of a row whose candidates are merged with those of earlier pieces; more are first searched in groups."""

GROUP = 8
"""Most chunks of a group."""

MISSING = -2.0e38
"""The value of padding and of what is no number: below any score."""

LEAST = -3.0e38
"""Replaces the values that were taken: below MISSING, so that no index is taken twice."""

SENT_BY_GPSIMD = 256
"""float32 values of a partition that GpSimd sends to the other core at once; it starts sooner than a DMA."""

_EIGHT = 8
"""Values that the Vector engine finds at a time."""


def round_up_to_eight(count):
    """Return `count` rounded up to a multiple of 8: the Vector engine finds eight values at a time."""
    return blocks(count, _EIGHT) * _EIGHT


def view_backwards(tile, first):
    """View columns first … first + 7 of a whole tile [P, n] in reverse order: [P, 8]."""
    partitions, columns = tile.shape
    return tile.ap(pattern=[[columns, partitions], [-1, _EIGHT]], offset=first + _EIGHT - 1)


def take_largest(values, indices, scores, work):
    """Write the k largest of each row of `scores` [P, n] to columns 0 … k - 1 of `values`, descending.

    Their indices go to `indices`; equal values come in ascending order of them. k, a multiple of 8, is the
    width of `indices`. nc_match_replace8 serves its last slot first and takes the first occurrence that is
    left. So it gets the eight in ascending order, and equal values get ascending indices.

    Args:
        values: [P, k or more] float32, a whole tile and no view.
        indices: [P, k] uint32, a whole tile and no view.
        work: [P, n], overwritten with the scores, of which the k largest are replaced by LEAST; may be
            `scores`.
    """
    source = scores
    for first in range(0, indices.shape[1], _EIGHT):
        nisa.max8(dst=values[:, first : first + _EIGHT], src=source)
        nisa.nc_match_replace8(
            dst=work,
            data=source,
            vals=view_backwards(values, first),
            imm=LEAST,
            dst_idx=view_backwards(indices, first),
        )
        source = work


def count_row_chunks(rows, most):
    """Return over how many partitions the columns of each row are spread: a power of 2, at most `most`.

    All rows together take 128 partitions at most, if there are no more than 128 rows.
    """
    chunks = 1
    while 2 * chunks <= most and 2 * chunks * rows <= PARTITIONS:
        chunks = 2 * chunks
    return chunks


def divide_into_pieces(columns, chunks, width, keep):
    """Divide the columns of a row into pieces; return (first column, columns of a chunk) of each.

    A piece has `chunks` chunks of at most `width` columns; the last piece may extend beyond `columns`, as
    padding. A chunk with fewer columns than `keep`, or one that `is_grouped`, gets a multiple of eight
    columns.
    """
    bounds = []
    first = 0
    while first < columns:
        size = min(width, blocks(columns - first, chunks))
        if size < keep or is_grouped(size, keep):
            size = round_up_to_eight(size)
        bounds.append((first, size))
        first = first + chunks * size
    return bounds


def allocate_candidates(rows, count):
    """Allocate (values, columns) for `count` candidates of each row: float32 tiles [rows, count] in SBUF."""
    values = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    columns = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    return values, columns


def search(scores, work, keep):
    """Return the `keep` largest of each chunk, descending, and their indices in the chunk.

    A chunk is a number of neighbouring columns of a row, on a partition of its own. Both results are [row *
    chunk, keep] in SBUF, float32 and uint32. A chunk with fewer columns than `keep` gives all of them.

    Args:
        scores: [row * chunk, column].
        work: a tile of the shape of `scores`, which is overwritten; may be `scores`.
    """
    lanes, size = scores.shape
    count = min(keep, size)
    largest = nl.ndarray((lanes, count), dtype=nl.float32, buffer=nl.sbuf)
    indices = nl.ndarray((lanes, count), dtype=nl.uint32, buffer=nl.sbuf)
    if is_grouped(size, keep):
        search_groups(largest, indices, scores)
    else:
        take_largest(largest, indices, scores, work)
    return largest, indices


def is_grouped(size, keep):
    """Return whether a chunk of `size` columns is searched for its `keep` largest in groups of eight columns."""
    return size >= max(GROUPED_COLUMNS, GROUPED_PER_VALUE * keep) and keep > _EIGHT


def search_groups(largest, indices, scores):
    """Write the k largest of each row of `scores` to `largest` and their indices to `indices`, as `take_largest` does.

    The scores are kept. First the k groups of eight neighbours with the largest maxima are found, then their
    elements are searched. The k largest lie in these groups: an element of any other group has k elements
    before it, one of each chosen group. The groups are put into the order of their indices before they are
    searched, for the sake of equal values.

    Args:
        largest: [P, k] float32.
        indices: [P, k] uint32.
        scores: [P, n] in SBUF, n a multiple of 8.
    """
    lanes, size = scores.shape
    keep = indices.shape[1]
    count = size // _EIGHT
    maxima = nl.ndarray((lanes, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=maxima, op=nl.maximum, data=scores.reshape_dim(1, (count, _EIGHT)), axis=2)
    best = nl.ndarray((lanes, keep), dtype=nl.float32, buffer=nl.sbuf)
    groups = nl.ndarray((lanes, keep), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(best, groups, maxima, maxima)
    starts = nl.ndarray((lanes, keep), dtype=nl.float32, buffer=nl.sbuf)
    # The search is descending, so negated starts put the groups into ascending order.
    nisa.tensor_scalar(dst=starts, data=groups, op0=nl.multiply, operand0=-float(_EIGHT))
    ordered = nl.ndarray((lanes, keep), dtype=nl.float32, buffer=nl.sbuf)
    take_largest(ordered, groups, starts, starts)
    in_group = nl.ndarray((lanes, keep, _EIGHT), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=in_group, pattern=[[0, keep], [1, _EIGHT]])
    elements = nl.ndarray((lanes, keep, _EIGHT), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=elements, data1=in_group, data2=ordered.expand_dim(2).broadcast(2, _EIGHT), op=nl.subtract
    )
    values = nl.ndarray((lanes, keep * _EIGHT), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=values, data=scores, indices=elements)
    positions = nl.ndarray((lanes, keep), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(largest, positions, values, values)
    nisa.nc_n_gather(dst=indices, data=elements, indices=positions)


def join(values, columns, largest, indices, span, first):
    """Copy the results of several chunks side by side, by DMA, and turn indices within a chunk into columns.

    A chunk is a number of neighbouring columns of a row, on a partition of its own. Neighbouring chunks begin
    `span` columns apart, and a row's first chunk at column `first`. The DMAs take the Scalar engine's queue:
    the queue of bulk loads must not wait for a search.

    Args:
        values, columns: written, float32 [row * group, n * chunks of a group]; any number of groups of a row.
        largest, indices: read, [row * chunk, n].
    """
    lanes, count = values.shape
    chunk_values = largest.shape[1]
    offsets = nl.ndarray((lanes, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=offsets, pattern=[[span, count // chunk_values], [0, chunk_values]], offset=first)
    moved = nl.ndarray((lanes, count), dtype=indices.dtype, buffer=nl.sbuf)
    transfer(values, largest, SCALAR)
    transfer(moved, indices, SCALAR)
    # GpSimd adds, so that the Vector engine need not wait for these DMAs before it searches on.
    nisa.tensor_tensor(dst=columns, data1=moved, data2=offsets, op=nl.add, engine=nisa.engine.gpsimd)


def collect(candidates, begun, first, largest, indices, size, keep):
    """Copy the results of `search` in a piece to the candidates of each row, from index `keep` on.

    A piece is a range of columns, of which each row has several chunks of `size` neighbouring columns. More
    than MERGED_CHUNKS chunks of a row are first merged in groups. Returns (values, columns), views of the
    candidates that are filled: the first `keep` are those of earlier pieces, and are left out if none has
    `begun`.

    Args:
        candidates: (values, columns) of `allocate_candidates`, written from index `keep` on.
        first: column of the row at which the piece begins.
        largest, indices: results of `search`, [row * chunk, n].
    """
    values, columns = candidates
    rows = values.shape[0]
    chunks = largest.shape[0] // rows
    span = size
    while chunks > MERGED_CHUNKS:
        together = min(GROUP, chunks // MERGED_CHUNKS)
        chunks = chunks // together
        chunk_values = largest.shape[1]
        group = allocate_candidates(rows * chunks, together * chunk_values)
        join(group[0], group[1], largest, indices, span, 0)
        span = span * together
        best = allocate_candidates(rows * chunks, min(keep, together * chunk_values))
        merge(best, group, min(keep, together * chunk_values))
        largest = best[0]
        indices = best[1]
    end = keep + chunks * largest.shape[1]
    join(values[:, keep:end], columns[:, keep:end], largest, indices, span, first)
    start = 0 if begun else keep
    return values[:, start:end], columns[:, start:end]


def merge(largest, candidates, keep, work=None):
    """Write the `keep` largest candidates of each row, and their columns, to the first `keep` columns of `largest`.

    The candidates' values are overwritten, unless `work`, a tile of their shape, is given. An index beyond
    all, which NaN gives, becomes the last one.

    Args:
        largest, candidates: (values, columns), as of `allocate_candidates`.
    """
    values, columns = candidates
    rows, count = values.shape
    indices = nl.ndarray((rows, keep), dtype=nl.uint32, buffer=nl.sbuf)
    valid = nl.ndarray((rows, keep), dtype=nl.uint32, buffer=nl.sbuf)
    take_largest(largest[0], indices, values, values if work is None else work)
    nisa.tensor_scalar(dst=valid, data=indices, op0=nl.minimum, operand0=float(count - 1))
    nisa.nc_n_gather(dst=largest[1][:, 0:keep], data=columns, indices=valid)


def merge_candidates(candidates, keep):
    """Return (values, columns) of the `keep` largest candidates of each row, in new tiles [rows, keep] in SBUF.

    The values of `candidates` are overwritten.
    """
    largest = allocate_candidates(candidates[0].shape[0], keep)
    merge(largest, candidates, keep)
    return largest


def gather_cores(tiles):
    """Exchange tiles with the other physical core: return [rows, 2 * n] in SBUF for each tile [rows, n].

    The first core's columns come first, on both cores. Tiles are float32, in SBUF; both cores have to call
    this function.
    """
    core = nl.program_id(0)
    results = []
    for i in range(len(tiles)):
        rows, count = tiles[i].shape
        result = nl.ndarray((rows, 2 * count), dtype=nl.float32, buffer=nl.sbuf)
        start = core * count
        other = count - start
        nisa.tensor_copy(dst=result[:, start : start + count], src=tiles[i])
        nisa.sendrecv(
            src=tiles[i],
            dst=result[:, other : other + count],
            send_to_rank=1 - core,
            recv_from_rank=1 - core,
            pipe_id=i,
            dma_engine=nisa.dma_engine.gpsimd_dma if count <= SENT_BY_GPSIMD else nisa.dma_engine.dma,
        )
        results.append(result)
    return results


def gather_ranks(tiles, names, replica_group, ranks):
    """Gather tiles of all ranks: return [rows, ranks * n] float32 in SBUF for each tile [rows, n].

    The ranks' columns are in the order of the group's list. all_gather puts the ranks' rows below each other
    in HBM; loading them puts those of one row into one partition.

    Args:
        tiles: float32 tiles in SBUF.
        names: for each tile a name for its buffers in HBM.
    """
    sources = []
    everyone = []
    for i in range(len(tiles)):
        rows, count = tiles[i].shape
        one = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.private_hbm, name=f"own_{names[i]}")
        every = nl.ndarray(
            (ranks * rows, count), dtype=nl.float32, buffer=nl.private_hbm, name=f"all_{names[i]}"
        )
        nisa.dma_copy(dst=one, src=tiles[i])
        sources.append(one)
        everyone.append(every)
    ncc.all_gather(srcs=sources, dsts=everyone, replica_group=replica_group, collective_dim=0)
    results = []
    for i in range(len(tiles)):
        rows, count = tiles[i].shape
        result = nl.ndarray((rows, ranks * count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=result, src=everyone[i].reshape_dim(0, (ranks, rows)).permute((1, 0, 2)))
        results.append(result)
    return results
