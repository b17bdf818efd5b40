"""The hidden states of a decode step in SBUF: loads from HBM, the layout in which products take them, and stores.

`attention_block_decode` and `decoder_layer_decode` keep few rows in this layout between their products.

The layout is called runs (see `norms/blocks`): with C = ceil(H / 128) partition p holds elements p * C … p * C + C -
1 of every row, as [partition, row, element]. So the norm of a row and the sum with the residual use up to 128
partitions for few rows too. What leaves one product is the operand of the next one without a transpose. Hidden states
that meet weights of 4 bits lie in paired runs, see `nibbles`.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC, transfer
from nki_kernels.nibbles import view_paired_runs
from nki_kernels.tiles import PARTITIONS, blocks, count_block_partitions

HIDDEN_BYTES = 8192
"""Bytes per partition of hidden states that stay in SBUF beside the caches."""


def can_hold_hidden(rows, hidden, dtype):
    """Return whether hidden states [rows, hidden] may stay in SBUF: at most 128 rows, HIDDEN_BYTES on a partition."""
    bytes_each = 4 if dtype == nl.float32 else 2
    return rows <= PARTITIONS and rows * blocks(hidden) * bytes_each <= HIDDEN_BYTES


def create_hidden_tile(rows, hidden, dtype):
    """Return an uninitialised SBUF tile [partition, row, C] for hidden states [rows, H], C = ceil(H / 128).

    It has ceil(H / C) partitions, the last of which may have fewer than C elements of a row.
    """
    shape = (count_block_partitions(hidden, 0, True), rows, blocks(hidden))
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def load_hidden(x, paired=False):
    """Load hidden states [T, H] from HBM into a new SBUF tile [partition, T, C], C = ceil(H / 128), of their dtype.

    Partition p holds elements p * C … p * C + C - 1 of every row. Elements beyond H on the last partition are 0.
    paired: whether they lie in paired runs.
    """
    rows, hidden = x.shape
    tile = create_hidden_tile(rows, hidden, x.dtype)
    count = blocks(hidden)
    if paired:
        for half in range(2):
            target = tile[:, :, half * count // 2 : (half + 1) * count // 2]
            transfer(target, view_paired_runs(x, half).permute((1, 2, 0, 3)), STATIC)
        return tile
    full = hidden // count
    if full < tile.shape[0]:
        # The norm adds the squares of all elements of the tile, so what the last partition lacks must be zero.
        nisa.memset(dst=tile, value=0.0)
        last = tile[full : full + 1, :, 0 : hidden - full * count]
        transfer(last, x[:, full * count : hidden], STATIC)
    source = x[:, 0 : full * count].reshape_dim(1, (full, count)).permute((1, 0, 2))
    transfer(tile[0:full, :, :], source, STATIC)
    return tile


def store_hidden(y, tile, paired=False):
    """Write an SBUF tile [partition, T, C] of hidden states, as `load_hidden` returns it, to rows `y` [T, H] in HBM.

    paired: whether they lie in paired runs.
    """
    hidden = y.shape[1]
    count = blocks(hidden)
    if paired:
        for half in range(2):
            source = tile[:, :, half * count // 2 : (half + 1) * count // 2]
            transfer(view_paired_runs(y, half).permute((1, 2, 0, 3)), source, COMPILER)
        return
    full = hidden // count
    target = y[:, 0 : full * count].reshape_dim(1, (full, count)).permute((1, 0, 2))
    transfer(target, tile[0:full, :, :], COMPILER)
    if full < tile.shape[0]:
        last = tile[full : full + 1, :, 0 : hidden - full * count]
        transfer(y[:, full * count : hidden], last, COMPILER)
