"""Sizes and tile helpers that the kernels share: checks of shapes, loads, fills, transposes, and copies out of PSUM.

A matrix product contracts over partitions, so both of its operands lie in SBUF in *blocks*. A matrix [K,
columns] is then a tile [row in block, block, column] of ceil(K / 128) blocks, with row k on partition k % 128
in block k // 128. The last block may be short. Activations arrive row by row, [T, K], and are brought into
the same form, [k in block, block, t], by transposes on the Tensor engine.

In *runs* row k lies on partition k // C instead, in block k % C, where C = ceil(K / 128).
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
"""Partitions of SBUF and PSUM, and rows and columns of the PE array, on every chip (nl.tile_size.pmax)."""

BANK = 512
"""float32 elements per partition of a PSUM bank, and columns of the widest moving tile that every chip takes."""

BANK_BYTES = 2048
"""Bytes per partition of a PSUM bank."""

ACCUMULATOR_BANKS = 4
"""PSUM banks of one product: half of the eight, so that the next product can start while these are read out."""

MAX_ROW_BYTES = 32768
"""Most bytes of a row of activations on one partition: hidden sizes up to 8192 in float32, 16384 in bfloat16."""

WEIGHT_ELEMENTS = 8192
"""Elements per partition of one loaded weight tile: 32 KiB in float32, DMAs of up to 4 MiB."""

RESIDENT_ELEMENTS = 16384
"""Elements per partition of transposed activations that stay in SBUF during a product: 64 KiB in float32."""

MASKED = -1.0e30
"""Number that is added to masked scores: far below any score, and far from the lowest float32."""


def expect_dims(dims, tensor, form):
    """Raise AssertionError if a tensor has not `dims` dims.

    form: names the tensor and its dims in the message, such as "x [T, H]".
    """
    assert len(tensor.shape) == dims, f"expected {form}, not a tensor of shape {tensor.shape}"


def expect_hidden(kernel, x, hidden, most_bytes):
    """Raise AssertionError if rows of `hidden` elements of x's dtype take more than `most_bytes` bytes.

    kernel: the name that the message begins with.
    """
    most = most_bytes // (4 if x.dtype == nl.float32 else 2)
    assert hidden <= most, f"{kernel} takes a hidden size of at most {most}, not {hidden}"


def blocks(size, height=PARTITIONS):
    """Return how many blocks of `height` rows cover `size` rows: size / height, rounded up."""
    return (size + height - 1) // height


def count_block_partitions(depth, block, runs):
    """Return how many partitions block number `block` of a contraction of `depth` elements takes, at most 128.

    runs: with False, all blocks but the last have 128. With True, elements lie in runs of C = ceil(depth /
    128), one run on each partition, and block b has element b of each run: the last run may be too short for
    it.
    """
    if runs:
        return (depth - block + blocks(depth) - 1) // blocks(depth)
    return min(PARTITIONS, depth - block * PARTITIONS)


def ranges(first, end, size=PARTITIONS):
    """Return the list of ranges (start, end) that cover first … end - 1 in order, `size` numbers each.

    The last one may have fewer numbers; the list is empty if `first` is `end` or more.
    """
    result = []
    for start in range(first, end, size):
        result.append((start, min(end, start + size)))
    return result


def choose_rows_at_once(depth):
    """Return how many rows share one pass over the weights, a multiple of 128: at most 512, fewer for a large `depth`.

    The transposed rows [depth, rows] have to fit in RESIDENT_ELEMENTS elements per partition, unless they are
    just 128.
    """
    tiles = min(ACCUMULATOR_BANKS, RESIDENT_ELEMENTS // (blocks(depth) * PARTITIONS))
    return PARTITIONS * max(1, tiles)


def count_columns_at_once(rows):
    """Return how many columns of a product fit in ACCUMULATOR_BANKS PSUM banks for `rows` rows: a multiple of BANK."""
    return BANK * max(1, ACCUMULATOR_BANKS // blocks(rows))


def filled(shape, value, dtype=nl.float32):
    """Return a new SBUF tile of a shape and dtype, all of whose elements are `value`."""
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=result, value=value)
    return result


def cast(tile, dtype):
    """Return the tile itself if it has the dtype, else a new SBUF tile with its elements in the dtype."""
    if tile.dtype == dtype:
        return tile
    result = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=tile)
    return result


def load(source, dtype):
    """Load `source`, a view in HBM with at most 128 rows, into a new SBUF tile of the same shape and of `dtype`."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return cast(tile, dtype)


def load_repeated(row, rows):
    """Load a row [1, n] of HBM onto each partition of a new SBUF tile [rows, n], in the row's dtype.

    Operands do not broadcast over partitions, so a row that meets every row of a tile is needed on all of
    them.
    """
    columns = row.shape[1]
    return load(row.ap(pattern=[[0, rows], [1, columns]]), row.dtype)


def identity(size, dtype):
    """Return the identity matrix as a new SBUF tile [size, size] of `dtype`."""
    ones = filled((size, size), 1, dtype)
    result = nl.ndarray((size, size), dtype=dtype, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=[[-1, size]],
        channel_multiplier=1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    return result


def allocate_aligned_tile(shape, dtype):
    """Return a new SBUF tile whose partitions are a multiple of 32 bytes apart; it is not initialised.

    Users report that the compiler refuses a DMA transpose into a tile with another distance.
    """
    elements = 1
    for size in shape[1:]:
        elements *= size
    multiple = 8 if dtype == nl.float32 else 16
    padded = blocks(elements, multiple) * multiple
    if padded == elements:
        return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    tile = nl.ndarray((shape[0], padded), dtype=dtype, buffer=nl.sbuf)
    return tile[:, 0:elements].reshape_dim(1, shape[1:])


def allocate_psum_slots(height, slots, columns, dtype):
    """Return a PSUM tile [height, slots, columns] whose slots start at a multiple of 4 bytes; it is not initialised.

    Users report that the compiler refuses a result of 16 bits that starts elsewhere. So slots with an odd
    number of 16-bit columns are one column apart.
    """
    tile = nl.ndarray((height, slots, count_slot_columns(columns, dtype)), dtype=dtype, buffer=nl.psum)
    return tile[:, :, 0:columns]


def count_slot_columns(columns, dtype):
    """Return how many columns a slot of a PSUM bank takes: `columns`, rounded up to an even number unless float32."""
    return columns if dtype == nl.float32 else columns + columns % 2


def transpose_into(result, first_block, first_row, tile):
    """Transpose an SBUF tile [rows, n] on the Tensor engine into blocks of `result`, [width, blocks, all rows] in SBUF.

    Column c of row r of the tile goes to partition c % width, block first_block + c // width, row first_row +
    r. As many transposes as fit share a PSUM bank, and one copy of the Vector engine moves them to SBUF.
    """
    rows, columns = tile.shape
    width = result.shape[0]
    full = columns // width
    per_bank = BANK // count_slot_columns(rows, tile.dtype)
    end_row = first_row + rows
    for first in range(0, full, per_bank):
        count = min(per_bank, full - first)
        bank = allocate_psum_slots(width, count, rows, tile.dtype)
        for i in range(count):
            start = (first + i) * width
            nisa.nc_transpose(dst=bank[:, i, :], data=tile[:, start : start + width])
        target = result[:, first_block + first : first_block + first + count, first_row:end_row]
        nisa.tensor_copy(dst=target, src=bank)
    short = columns - full * width
    if short > 0:
        bank = nl.ndarray((short, rows), dtype=tile.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=tile[:, full * width : columns])
        nisa.tensor_copy(dst=result[0:short, first_block + full, first_row:end_row], src=bank)


def broadcast_row(row, rows, dtype, offset):
    """Return a new SBUF tile [rows, n] of `dtype` with a row [1, n] of HBM plus the number `offset` on every partition.

    HBM is read once: a product with a column of ones copies the row to the other partitions.
    """
    columns = row.shape[1]
    tile = load(row, row.dtype)
    repeated = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.sbuf)
    if rows == 1:
        nisa.tensor_scalar(dst=repeated, data=tile, op0=nl.add, operand0=offset)
        return repeated
    # The product copies the row on chip, so that HBM is read once and not once for each partition.
    ones = filled((1, rows), 1.0, row.dtype)
    # A matmul writes inside one PSUM bank, which holds 512 float32 columns.
    for first in range(0, columns, BANK):
        last = min(columns, first + BANK)
        bank = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=ones, moving=tile[:, first:last], accumulate=False)
        nisa.tensor_scalar(dst=repeated[:, first:last], data=bank, op0=nl.add, operand0=offset)
    return repeated


def shuffle_row(row, rows):
    """Return a new float32 SBUF tile [rows, n] with a float32 row [1, n] of HBM on every partition.

    The Vector engine copies the row within quadrants of 32 partitions. The Tensor engine, which `broadcast_row`
    uses, would take four passes over float32 rows.
    """
    tile = load(row, row.dtype)
    repeated = nl.ndarray((rows, row.shape[1]), dtype=row.dtype, buffer=nl.sbuf)
    quadrant = PARTITIONS // 4
    for first in range(0, rows, quadrant):
        end = min(rows, first + quadrant)
        nisa.nc_stream_shuffle(dst=repeated[first:end, :], src=tile, shuffle_mask=[0] * quadrant)
    return repeated


def transpose_rows(transposed, first_row, tile, vector_share=0):
    """Transpose an SBUF tile [row, n] on the Tensor engine into the SBUF tile `transposed`, [k in block, block, row].

    Column k of row r of the tile goes to partition k % height, block k // height, row first_row + r. Here
    height is the number of partitions of `transposed`. As many transposes as fit share a PSUM bank, which one
    copy moves to SBUF. vector_share: the Vector engine copies one of so many banks, the Scalar engine the
    others; with 0 the Scalar engine copies all.
    """
    rows, columns = tile.shape
    width = transposed.shape[0]
    full = columns // width
    itemsize = 4 if tile.dtype == nl.float32 else 2
    blocks_per_bank = BANK_BYTES // itemsize // count_slot_columns(rows, tile.dtype)
    end_row = first_row + rows
    copies = 0
    for first in range(0, full, blocks_per_bank):
        count = min(blocks_per_bank, full - first)
        bank = allocate_psum_slots(width, count, rows, tile.dtype)
        for i in range(count):
            start = (first + i) * width
            nisa.nc_transpose(dst=bank[:, i, :], data=tile[:, start : start + width])
        copy_bank(transposed[:, first : first + count, first_row:end_row], bank, copies, vector_share)
        copies += 1
    short = columns - full * width
    if short > 0:
        bank = nl.ndarray((short, rows), dtype=tile.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=tile[:, full * width : columns])
        copy_bank(transposed[0:short, full, first_row:end_row], bank, copies, vector_share)


def copy_bank(dst, bank, index, vector_share, row_scale=None, column_scales=None):
    """Copy a PSUM tile to `dst` in SBUF, in dst's dtype, its rows times `row_scale`, a float32 column, if there is one.

    column_scales: float32 tile of the bank's shape in SBUF that multiplies its elements, or None. With it the
    Vector engine copies, because no other engine reads PSUM and multiplies two tiles.

    index: number of the bank among those that are copied one after the other. The Vector engine copies if it
    is a multiple of `vector_share`, else the Scalar engine; with `vector_share` 0 the Scalar engine copies
    all.
    """
    if column_scales is not None and row_scale is not None:
        nisa.scalar_tensor_tensor(
            dst=dst, data=bank, op0=nl.multiply, operand0=row_scale, op1=nl.multiply, operand1=column_scales
        )
    elif column_scales is not None:
        nisa.tensor_tensor(dst=dst, data1=bank, data2=column_scales, op=nl.multiply)
    elif vector_share == 0 or index % vector_share != 0:
        nisa.activation(dst=dst, op=nl.copy, data=bank, scale=1.0 if row_scale is None else row_scale)
    elif row_scale is None:
        nisa.tensor_copy(dst=dst, src=bank)
    else:
        nisa.tensor_scalar(dst=dst, data=bank, op0=nl.multiply, operand0=row_scale)
