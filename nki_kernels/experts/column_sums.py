"""Sums of down products over experts with H on the partitions, for weights with scales in a decode step.

Scales differ from expert to expert, so each expert's sums are multiplied by its scales before they are added. With H on
the partitions w_down is stationary and the rows move: there are as few sums on a partition as there are rows, and a
scale is one number for each partition and block. With rows on the partitions an expert would take H elements of the
Vector engine's time three times, more than it takes to load a narrow expert of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.block_scales import choose_engine, copy_scaled_rows
from nki_kernels.experts.block_scales import (
    GPSIMD_SHARE,
    MOST_SCALED_SUMS,
    accumulate_scaled_rows,
    add_block_products,
)
from nki_kernels.experts.chunk_products import GatedChunk, split_by_height
from nki_kernels.tiles import BANK, PARTITIONS, blocks, copy_bank, ranges


def allocate_column_sums(hidden, rows):
    """Return zeros, float32 [h in block, block, row] in SBUF, for sums of `rows` rows of H = `hidden` columns."""
    sums = nl.ndarray((min(PARTITIONS, hidden), blocks(hidden), rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sums, value=0.0, engine=nisa.engine.gpsimd)
    return sums


@dataclass
class ScaledDown(nl.NKIObject):
    """A chunk whose down product is due, the scales of its expert's down, and the sums that it is added to.

    scales: float32 [h in block, block] @ SBUF; None for block scales, which the chunk has. total: float32 [h in block,
    block, row] @ SBUF, the rows of the chunk's intermediate. hidden: H.
    """

    gated: GatedChunk
    scales: nl.NkiTensor | None
    total: nl.NkiTensor
    hidden: int


def add_pending_down(pending):
    """Add the down product of a `ScaledDown`, times its scales, to its sums."""
    if pending.scales is None and pending.total.shape[2] > MOST_SCALED_SUMS:
        add_down_of_scaled_rows(pending)
    elif pending.scales is None:
        add_block_scaled_down(pending)
    else:
        add_column_scaled_down(pending)


def add_block_scaled_down(pending):
    """Add the down product of a `ScaledDown` with block scales to its sums, one block of F after the other."""
    gated, total, hidden = pending.gated, pending.total, pending.hidden
    down, scales = gated.weights.down, gated.weights.down_scales
    for k in range(len(down)):  # k: block of F
        tile = down[k].expand_dim(1)
        for start, stop, height in split_by_height(hidden, 0, blocks(hidden)):
            add_block_products(
                total[0:height, start:stop, :],
                gated.intermediate[:, k : k + 1, :],
                tile[:, :, start * PARTITIONS : min(hidden, stop * PARTITIONS)],
                [down[k].shape[0]],
                scales[:, k : k + 1, start:stop],
                True,
            )


def add_down_of_scaled_rows(pending):
    """Add the down product of a `ScaledDown` with block scales to its sums, from scaled copies of the intermediate."""
    gated, total, hidden = pending.gated, pending.total, pending.hidden
    down, scales = gated.weights.down, gated.weights.down_scales
    k_heights = []
    for tile in down:
        k_heights.append(tile.shape[0])
    per_bank = max(1, BANK // total.shape[2])
    for start, stop, height in split_by_height(hidden, 0, blocks(hidden)):
        panels = ranges(start, stop, per_bank)
        for n in range(len(panels)):  # n: blocks of H whose sums share a bank
            first, end = panels[n]
            engine = choose_engine(n, GPSIMD_SHARE)
            copies = copy_scaled_rows(gated.intermediate, scales[:, :, first:end], k_heights, engine)
            shape = (height, end - first, total.shape[2])
            bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
            for k in range(len(down)):  # k: block of F
                accumulate_scaled_rows(
                    bank,
                    copies[:, k : k + 1, :, :],
                    down[k].expand_dim(1),
                    k_heights[k : k + 1],
                    first * PARTITIONS,
                    k > 0,
                )
            target = total[0:height, first:end, :]
            nisa.tensor_tensor(dst=target, data1=target, data2=bank, op=nl.add)


def add_column_scaled_down(pending):
    """Add the down product of a `ScaledDown` with scales for each column to its sums."""
    gated, total, scales, hidden = pending.gated, pending.total, pending.scales, pending.hidden
    down = gated.weights.down
    rows = total.shape[2]
    full = hidden // PARTITIONS
    for first, end in ranges(0, blocks(hidden), max(1, BANK // rows)):
        bank = nl.ndarray((total.shape[0], end - first, rows), dtype=nl.float32, buffer=nl.psum)
        for b in range(first, end):  # b: block of H
            start, stop = b * PARTITIONS, min(hidden, (b + 1) * PARTITIONS)
            for k in range(len(down)):  # k: block of F
                nisa.nc_matmul(
                    dst=bank[0 : stop - start, b - first, :],
                    stationary=down[k][:, start:stop],
                    moving=gated.intermediate[0 : down[k].shape[0], k, :],
                    accumulate=k > 0,
                )
        # Partitions beyond a short last block are undefined, so that block is added apart.
        end_full = min(end, full)
        if end_full > first:
            add_scaled(
                total[:, first:end_full, :], bank[:, 0 : end_full - first, :], scales[:, first:end_full]
            )
        if end > full:
            height = hidden - full * PARTITIONS
            used = slice(full, end)
            add_scaled(total[0:height, used, :], bank[0:height, full - first :, :], scales[0:height, used])


def add_scaled(total, sums, scales):
    """Add sums [h in block, block, row] in PSUM times scales [h in block, block] to `total` in SBUF."""
    scaled = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    factor = scales.expand_dim(2).broadcast(2, sums.shape[2])
    nisa.tensor_tensor(dst=scaled, data1=sums, data2=factor, op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=scaled, op=nl.add)


def transpose_sums(total, hidden):
    """Return sums [h in block, block, row] in SBUF with rows on the partitions: float32 [row, H] in SBUF."""
    rows = total.shape[2]
    row_sums = nl.ndarray((rows, hidden), dtype=nl.float32, buffer=nl.sbuf)
    panels = ranges(0, hidden, BANK)
    for n in range(len(panels)):  # n: panel of columns of H
        first, end = panels[n]
        bank = nl.ndarray((rows, end - first), dtype=nl.float32, buffer=nl.psum)
        for start, stop in ranges(first, end):
            block = total[0 : stop - start, start // PARTITIONS, :]
            nisa.nc_transpose(dst=bank[:, start - first : stop - first], data=block)
        copy_bank(row_sums[:, first:end], bank, n, 2)
    return row_sums
