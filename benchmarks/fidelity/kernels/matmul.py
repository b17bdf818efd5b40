"""Matrix products c [M, N] = a [M, K] b [K, N] in tiles of 128 x 128 x 512, which differ in when operands are loaded.

Operands and results are in HBM. `a_t` is the transpose of a, [K, M]; kernels that take `a` transpose its tiles on the
Tensor engine. Sizes are multiples of the tiles or blocks.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import (
    BANK,
    PARTITIONS,
    constant,
    evacuate,
    load,
    load_repeated,
    psum,
    sbuf,
)


def reloaded(a_t, b, mode="none"):
    """Return the product, by a triple loop that loads both operands for each matmul; `mode` names the dge_mode."""
    depth, rows = a_t.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    for m in range(0, rows, PARTITIONS):
        for n in range(0, columns, BANK):
            bank = psum((PARTITIONS, BANK))
            for k in range(0, depth, PARTITIONS):
                left, right = (
                    load(a_t[k : k + PARTITIONS, m : m + PARTITIONS], mode),
                    load(b[k : k + PARTITIONS, n : n + BANK], mode),
                )
                nisa.nc_matmul(dst=bank, stationary=left, moving=right, accumulate=k > 0)
            nisa.dma_copy(dst=c[m : m + PARTITIONS, n : n + BANK], src=evacuate(bank, c.dtype))
    return c


def hoisted(a_t, b):
    """Return the product, with a_t's column block loaded once per row of output tiles, and b once per output tile."""
    depth, rows = a_t.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    for m in range(0, rows, PARTITIONS):
        left = [load(a_t[k : k + PARTITIONS, m : m + PARTITIONS]) for k in range(0, depth, PARTITIONS)]
        for n in range(0, columns, BANK):
            right = [load(b[k : k + PARTITIONS, n : n + BANK]) for k in range(0, depth, PARTITIONS)]
            _product(c, left, right, m, n)
    return c


def free_blocked(a_t, b, block_rows=256, block_columns=1024):
    """Return the product by blocks of M and N.

    A block of `block_rows` columns of a_t is loaded once, and b's block once per pair of blocks.
    """
    depth, rows = a_t.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    for m0 in range(0, rows, block_rows):
        left = [load(a_t[k : k + PARTITIONS, m0 : m0 + block_rows]) for k in range(0, depth, PARTITIONS)]
        for n0 in range(0, columns, block_columns):
            right = [
                load(b[k : k + PARTITIONS, n0 : n0 + block_columns]) for k in range(0, depth, PARTITIONS)
            ]
            for m in range(0, block_rows, PARTITIONS):
                for n in range(0, block_columns, BANK):
                    tiles = [tile[:, m : m + PARTITIONS] for tile in left]
                    _product(c, tiles, [tile[:, n : n + BANK] for tile in right], m0 + m, n0 + n)
    return c


def blocked(a_t, b, block_m=4, block_n=1, block_k=8):
    """Return the product by blocks of M, N and K, whose operands are loaded before the block's matmuls.

    Block sizes count tiles. The Vector engine adds each block of K to the sum in SBUF.
    """
    depth, rows = a_t.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    step_m, step_n, step_k = block_m * PARTITIONS, block_n * BANK, block_k * PARTITIONS
    for n0 in range(0, columns, step_n):
        width = min(step_n, columns - n0)
        for m0 in range(0, rows, step_m):
            high = min(step_m, rows - m0)
            sums = [sbuf((PARTITIONS, width), nl.float32) for m in range(0, high, PARTITIONS)]
            for k0 in range(0, depth, step_k):
                deep = range(k0, min(depth, k0 + step_k), PARTITIONS)
                left = [load(a_t[k : k + PARTITIONS, m0 : m0 + high]) for k in deep]
                right = [load(b[k : k + PARTITIONS, n0 : n0 + width]) for k in deep]
                for m in range(len(sums)):
                    for n in range(0, width, BANK):
                        bank = psum((PARTITIONS, min(BANK, width - n)))
                        for k in range(len(left)):
                            nisa.nc_matmul(
                                dst=bank,
                                stationary=left[k][:, m * PARTITIONS : (m + 1) * PARTITIONS],
                                moving=right[k][:, n : n + BANK],
                                accumulate=k > 0,
                            )
                        destination = sums[m][:, n : n + BANK]
                        if k0 == 0:
                            nisa.tensor_copy(dst=destination, src=bank, engine=nisa.vector_engine)
                        else:
                            nisa.tensor_tensor(dst=destination, data1=destination, data2=bank, op=nl.add)
            for m in range(len(sums)):
                result = sbuf((PARTITIONS, width), c.dtype)
                nisa.activation(dst=result, op=nl.copy, data=sums[m])
                first = m0 + m * PARTITIONS
                nisa.dma_copy(dst=c[first : first + PARTITIONS, n0 : n0 + width], src=result)
    return c


def single_bank(a_t, b):
    """Return the product by blocks of M, with all accumulation groups in the same PSUM bank.

    Each group waits until the result of the one before has been read. Blocks have 512 rows and 512 columns.
    """
    depth, rows = a_t.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    bank = psum((PARTITIONS, BANK))
    for m0 in range(0, rows, 4 * PARTITIONS):
        left = [load(a_t[k : k + PARTITIONS, m0 : m0 + 4 * PARTITIONS]) for k in range(0, depth, PARTITIONS)]
        for n in range(0, columns, BANK):
            right = [load(b[k : k + PARTITIONS, n : n + BANK]) for k in range(0, depth, PARTITIONS)]
            for m in range(0, 4 * PARTITIONS, PARTITIONS):
                for k in range(len(left)):
                    stationary = left[k][:, m : m + PARTITIONS]
                    nisa.nc_matmul(dst=bank, stationary=stationary, moving=right[k], accumulate=k > 0)
                result = sbuf((PARTITIONS, BANK), c.dtype)
                nisa.tensor_copy(dst=result, src=bank, engine=nisa.vector_engine)
                nisa.dma_copy(dst=c[m0 + m : m0 + m + PARTITIONS, n : n + BANK], src=result)
    return c


def transposing(a, b, resident, norm=None, residual=None, transposed_b=False):
    """Return a [M, K] times b [K, N], with a's tiles transposed on the Tensor engine.

    Args:
        a: [M, K].
        b: [K, N], or [N, K] if `transposed_b`.
        resident: b is loaded once and stays in SBUF; else it is loaded again for each 128 rows of a.
        norm: Gains [1, K] of an RMSNorm of a's rows, or None for no RMSNorm.
        residual: [M, K], added to a before the RMSNorm, or None.
        transposed_b: Tiles of b are transposed as well; needs `resident`.
    """
    rows, depth = a.shape
    columns = b.shape[0] if transposed_b else b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    weight = load_repeated(norm, PARTITIONS) if norm is not None else None
    epsilon = constant((PARTITIONS, 1), 1.0e-6) if norm is not None else None
    tile = load(a[0:PARTITIONS, :])  # ahead of b, so that its transposes need not wait
    right = _right(b, transposed_b) if resident else None
    for m in range(0, rows, PARTITIONS):
        if m:
            tile = load(a[m : m + PARTITIONS, :])
        if residual is not None:
            nisa.tensor_tensor(dst=tile, data1=tile, data2=load(residual[m : m + PARTITIONS, :]), op=nl.add)
        if norm is not None:
            tile = _normalised(tile, weight, epsilon)
        left = transposed(tile)
        for n in range(0, columns, BANK):
            if resident:
                tiles = right[n // BANK]
            else:
                tiles = [load(b[k : k + PARTITIONS, n : n + BANK]) for k in range(0, depth, PARTITIONS)]
            _product(c, left, tiles, m, n)
    return c


def columns_outermost(a, b):
    """Return a [M, K] times b [K, N] with the loop over 512 columns outermost; both operands are loaded once.

    a is transposed in the first iteration, and its transposed tiles stay in SBUF.
    """
    rows, depth = a.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    kept = {}
    for n in range(0, columns, BANK):
        last = min(columns, n + BANK)
        if not n:
            first = load(a[0:PARTITIONS, :])  # ahead of b, so that its transposes need not wait
        right = [load(b[k : k + PARTITIONS, n:last]) for k in range(0, depth, PARTITIONS)]
        for m in range(0, rows, PARTITIONS):
            if not n:
                kept[m] = transposed(load(a[m : m + PARTITIONS, :]) if m else first)
            _product(c, kept[m], right, m, n)
    return c


def column_blocks(a, b, block_columns=1024, resident=False):
    """Return a [M, K] times b [K, N] by blocks of columns; a's tiles are loaded and transposed again for each block.

    resident: a block of b stays in SBUF for all rows; else it is loaded again for each 128 rows.
    """
    rows, depth = a.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    for n0 in range(0, columns, block_columns):
        right = None
        if resident:
            right = [
                load(b[k : k + PARTITIONS, n0 : n0 + block_columns]) for k in range(0, depth, PARTITIONS)
            ]
        for m in range(0, rows, PARTITIONS):
            left = transposed(load(a[m : m + PARTITIONS, :]))
            wide = sbuf((PARTITIONS, block_columns), c.dtype)
            banks = [psum((PARTITIONS, BANK)) for n in range(0, block_columns, BANK)]
            for k in range(len(left)):
                tile = (
                    right[k]
                    if resident
                    else load(b[k * PARTITIONS : (k + 1) * PARTITIONS, n0 : n0 + block_columns])
                )
                for i in range(len(banks)):
                    moving = tile[:, i * BANK : (i + 1) * BANK]
                    nisa.nc_matmul(dst=banks[i], stationary=left[k], moving=moving, accumulate=k > 0)
            for i in range(len(banks)):
                nisa.activation(dst=wide[:, i * BANK : (i + 1) * BANK], op=nl.copy, data=banks[i])
            nisa.dma_copy(dst=c[m : m + PARTITIONS, n0 : n0 + block_columns], src=wide)
    return c


def contraction_first(a_t, b, block_rows=1024, block_columns=1024):
    """Return a_t [K, M] transposed, times b [K, N], by blocks of rows and columns.

    A block of a_t stays in SBUF for all columns; a block of b is loaded for each block of rows.
    """
    depth, rows = a_t.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=a_t.dtype, buffer=nl.shared_hbm)
    for m0 in range(0, rows, block_rows):
        left = [load(a_t[k : k + PARTITIONS, m0 : m0 + block_rows]) for k in range(0, depth, PARTITIONS)]
        for n0 in range(0, columns, block_columns):
            width = min(block_columns, columns - n0)
            right = [load(b[k : k + PARTITIONS, n0 : n0 + width]) for k in range(0, depth, PARTITIONS)]
            for m in range(0, block_rows, PARTITIONS):
                wide = sbuf((PARTITIONS, width), c.dtype)
                for n in range(0, width, BANK):
                    last = min(width, n + BANK)
                    bank = psum((PARTITIONS, last - n))
                    for k in range(len(left)):
                        stationary = left[k][:, m : m + PARTITIONS]
                        nisa.nc_matmul(
                            dst=bank, stationary=stationary, moving=right[k][:, n:last], accumulate=k > 0
                        )
                    nisa.activation(dst=wide[:, n:last], op=nl.copy, data=bank)
                nisa.dma_copy(dst=c[m0 + m : m0 + m + PARTITIONS, n0 : n0 + width], src=wide)
    return c


def batched(a, b):
    """Return a [B, M, K] times b [B, K, N], K at most 128; a's tiles are transposed again for each 1024 columns."""
    batches, rows, depth = a.shape
    columns = b.shape[2]
    c = nl.ndarray((batches, rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    for batch in range(batches):
        for n0 in range(0, columns, 1024):
            right = load(b[batch, :, n0 : n0 + 1024])
            for m in range(0, rows, PARTITIONS):
                tile = load(a[batch, m : m + PARTITIONS, :])
                bank = psum((depth, PARTITIONS), a.dtype)
                nisa.nc_transpose(dst=bank, data=tile)
                left = evacuate(bank, a.dtype)
                wide = sbuf((PARTITIONS, 1024), c.dtype)
                for n in range(0, 1024, BANK):
                    product = psum((PARTITIONS, BANK))
                    nisa.nc_matmul(dst=product, stationary=left, moving=right[:, n : n + BANK])
                    nisa.activation(dst=wide[:, n : n + BANK], op=nl.copy, data=product)
                nisa.dma_copy(dst=c[batch, m : m + PARTITIONS, n0 : n0 + 1024], src=wide)
    return c


def double_row(a_t, b):
    """Return an fp8 product in bfloat16, with two rows of the contraction in one instruction; a_t [K, M], b [K, N]."""
    depth, rows = a_t.shape
    columns = b.shape[1]
    c = nl.ndarray((rows, columns), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    pairs = depth // (2 * PARTITIONS)
    left = load(a_t.reshape((PARTITIONS, pairs, 2, rows)))
    for n in range(0, columns, BANK):
        right = load(b.reshape((PARTITIONS, pairs, 2, columns))[:, :, :, n : n + BANK])
        for m in range(0, rows, PARTITIONS):
            bank = psum((PARTITIONS, BANK))
            for k in range(pairs):
                nisa.nc_matmul(
                    dst=bank,
                    stationary=left[:, k, :, m : m + PARTITIONS],
                    moving=right[:, k, :, :],
                    accumulate=k > 0,
                    perf_mode=nisa.matmul_perf_mode.double_row,
                )
            nisa.dma_copy(dst=c[m : m + PARTITIONS, n : n + BANK], src=evacuate(bank, c.dtype))
    return c


def transposed(tile):
    """Return the transposes of a tile's 128 x 128 blocks, as a list of SBUF tiles; the tile is [128, K]."""
    out = []
    for k in range(0, tile.shape[1], PARTITIONS):
        bank = psum((PARTITIONS, PARTITIONS), tile.dtype)
        nisa.nc_transpose(dst=bank, data=tile[:, k : k + PARTITIONS])
        out.append(evacuate(bank, tile.dtype))
    return out


def _right(b, transposed_b):
    """Load b and return its SBUF tiles [128, 512]: for each block of 512 columns, the list over K.

    With `transposed_b`, b is [N, K] in HBM and its tiles are transposed.
    """
    if not transposed_b:
        return [
            [load(b[k : k + PARTITIONS, n : n + BANK]) for k in range(0, b.shape[0], PARTITIONS)]
            for n in range(0, b.shape[1], BANK)
        ]
    columns, depth = b.shape
    right = [sbuf((PARTITIONS, columns), b.dtype) for k in range(0, depth, PARTITIONS)]
    for n in range(0, columns, PARTITIONS):
        tile = load(b[n : n + PARTITIONS, :])
        for k in range(len(right)):
            bank = psum((PARTITIONS, PARTITIONS), b.dtype)
            nisa.nc_transpose(dst=bank, data=tile[:, k * PARTITIONS : (k + 1) * PARTITIONS])
            nisa.activation(dst=right[k][:, n : n + PARTITIONS], op=nl.copy, data=bank)
    return [[tile[:, n : n + BANK] for tile in right] for n in range(0, columns, BANK)]


def _normalised(tile, weight, epsilon):
    """Return the RMSNorm of each row of an SBUF tile, times `weight` of the tile's shape, as a new tile."""
    rows, columns = tile.shape
    squares = sbuf(tile.shape, nl.float32)
    total = sbuf((rows, 1), nl.float32)
    nisa.activation_reduce(dst=squares, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total)
    scale = sbuf((rows, 1), nl.float32)
    nisa.activation(dst=scale, op=nl.rsqrt, data=total, scale=1.0 / columns, bias=epsilon)
    result = sbuf(tile.shape, tile.dtype)
    nisa.activation(dst=result, op=nl.copy, data=tile, scale=scale)
    nisa.tensor_tensor(dst=result, data1=result, data2=weight, op=nl.multiply)
    return result


def _product(c, left, right, m, n):
    """Compute one output tile and store it to c in HBM at row `m`, column `n`.

    left: stationary tiles [128, 128], right: moving tiles [128, columns], both over K.
    """
    columns = right[0].shape[1]
    bank = psum((PARTITIONS, columns))
    for k in range(len(left)):
        nisa.nc_matmul(dst=bank, stationary=left[k], moving=right[k], accumulate=k > 0)
    nisa.dma_copy(dst=c[m : m + PARTITIONS, n : n + columns], src=evacuate(bank, c.dtype))
