"""The loop of a feed-forward block over row groups, in which two products of neighbouring groups overlap.

`mlp` prepares the record `FeedForward`; the steps of the loop are in `feed_forward`.
"""

from __future__ import annotations

from nki_kernels.cores import exchange_tiles
from nki_kernels.projection.chunk_starts import plan_chunk_start
from nki_kernels.projection.feed_forward import (
    allocate_intermediate,
    append_row_scales,
    count_due_units,
    finish_quantisation,
    list_chunk_starts,
    list_unit_starts,
    plan_magnitudes,
    plan_prefetch,
    plan_quantisation,
    prepare_rows,
    spread_row_scales,
)
from nki_kernels.projection.gated_product import compute_unit
from nki_kernels.projection.grouped_gate import accumulate_group_unit, finish_group_unit, load_group_piece
from nki_kernels.projection.grouped_product import list_pieces, multiply_in_groups
from nki_kernels.projection.quantised_rows import count_quantisation_stages
from nki_kernels.projection.residual_product import compute_chunk
from nki_kernels.projection.row_groups import count_rows_per_rank, count_tile_rows


def run_row_groups(ffn, groups):
    """Write y for all row groups in a software pipeline: each step works on three groups at once.

    step    Tensor engine                                    the other engines and the DMA queues
    first   transpose group 0                                load and normalise group 0
    m       gate and up product of group m, in units;        activation of each unit
            down product of group m - 1, in chunks between;  add the residual to each chunk; store, or sum over ranks
            transpose group m + 1, once x is free            load group m + 1 in half of the units, then normalise it
    last    down product of the last group                   the same of each chunk

    A unit is the columns of the intermediate, a chunk those of y, whose sums fill half of the PSUM banks.
    Over several ranks the last chunks are not in y yet when this returns: the caller calls `finish` of the
    rank sum.
    """
    gated, down, ranks = ffn.gated, ffn.down, ffn.ranks
    first_piece, down_pieces = None, []
    if gated.layout is not None:
        # The Vector engine unpacks the first weights while x arrives.
        first_piece = load_group_piece(gated, 0, ffn.dtype)
    buffers = prepare_rows(ffn, groups)
    if ffn.groups is None:
        down.load_scales(min(ranks * groups[0].rows, count_tile_rows(ranks)))
    x, intermediate, intermediates, pending, pending_tile = None, None, None, None, 0
    spreads_rows = ffn.quantiser is not None
    # One unit of the next group for each stage of the quantisation of the intermediate.
    leading = count_quantisation_stages(ffn.maxima_group) if spreads_rows else 1
    for m in range(len(groups) + 1):  # m: row group
        units = list_unit_starts(ffn, groups, m)
        # The down product lags one group behind, so that it waits for no activation.
        chunks = list_chunk_starts(ffn, groups, m - 1)
        prefetch = plan_prefetch(ffn, groups, m + 1, buffers, len(units))
        if m < len(groups):
            x = buffers.transposed
            if ffn.groups is None:
                x = x[:, :, 0 : ranks * groups[m].rows]
            first_tile = groups[m].first_row // count_rows_per_rank(ranks)
            append_row_scales(ffn, x, first_tile)
            spread_row_scales(ffn, x.shape[2], first_tile)
            gated.negated_sums = None
            # The down product still reads the intermediate of group m - 1, so group m has a tile of its own.
            intermediate = allocate_intermediate(ffn, x.shape[2])
            magnitudes = plan_magnitudes(ffn, x.shape[2])
        issued = 0
        starts = []
        if ffn.groups is None:
            for column in chunks:
                starts.append(plan_chunk_start(down, intermediates, column))
        starts += [None, None]
        for n in range(len(chunks) + 1):  # n: chunk of columns of y, group m - 1
            due = count_due_units(n, len(chunks), len(units), leading)
            # Units and chunks have half of the PSUM banks each, so one half is read out while the other accumulates.
            for u in range(issued, due):  # u: unit of columns of the intermediate, group m
                if not spreads_rows or len(chunks) == 0:
                    prefetch.normalise_until(u, ffn.norm)
                if pending is not None:
                    pending.advance()
                if gated.layout is None:
                    following = units[u + 1] if u + 1 < len(units) else None
                    compute_unit(
                        gated, intermediate, x, units[u], prefetch.select_loads(u), following, starts[n]
                    )
                    if magnitudes is not None:
                        magnitudes.add(intermediate, units[u])
                else:
                    unit = accumulate_group_unit(gated, buffers.transposed, units[u], first_piece)
                    first_piece = None
                    if ffn.groups is not None and u + 1 == len(units):
                        down_pieces = [
                            list_pieces(down, ffn.groups)[0].load(intermediate.shape[0], ffn.dtype)
                        ]
                    finish_group_unit(gated, unit, intermediate)
            issued = due
            if pending is not None:
                intermediates = finish_quantisation(ffn, pending, pending_tile)
                pending = None
            if issued == len(units):  # x is free: transpose a row tile of group m + 1 before each chunk
                if spreads_rows and len(chunks) > 0:
                    prefetch.transpose_ready(buffers)
                else:
                    prefetch.normalise_until(issued, ffn.norm)
                    prefetch.transpose_next(1, buffers)
            if n < len(chunks) and ffn.groups is None:
                compute_chunk(
                    down, intermediates, groups[m - 1].first_row, chunks[n], starts[n], starts[n + 1]
                )
            if spreads_rows and len(chunks) > 0:
                # The steps follow the chunk, so that no engine reads its sums after them.
                prefetch.prepare_until(n + 1, len(chunks))
        if ffn.groups is not None and len(chunks) > 0:
            multiply_in_groups(down, ffn.grouped, intermediates, ffn.groups, down_pieces)
        # Where chunks are fewer than row tiles, the remaining ones are transposed here: the next step reads them all.
        prefetch.transpose_next(len(prefetch.tiles), buffers)
        intermediates = [intermediate]
        if ffn.core.exchanges and m < len(groups):
            # This core's columns of y contract over all of F, of which the other core computed the other part.
            intermediates.append(exchange_tiles(intermediate))
        if m < len(groups):
            pending, pending_tile = plan_quantisation(ffn, intermediates, first_tile, magnitudes), first_tile
        down.negated_sums = None
