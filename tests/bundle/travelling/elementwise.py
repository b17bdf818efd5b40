"""Small kernels with their references; each uses other instructions beside dma_copy."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from travelling.tiles import tiles


def loaded(a, region):
    tile = nl.ndarray(
        (region[0].stop - region[0].start, region[1].stop - region[1].start), dtype=a.dtype, buffer=nl.sbuf
    )
    nisa.dma_copy(dst=tile, src=a[region[0], region[1]])
    return tile


@nki.jit
def scaled(a, factor):
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for region in tiles(a.shape):
        tile = loaded(a, region)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
        nisa.dma_copy(dst=result[region[0], region[1]], src=tile)
    return result


def scaled_reference(a, factor):
    return a * factor


@nki.jit
def shifted(a, shift=1.0):
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for region in tiles(a.shape):
        tile = loaded(a, region)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=shift)
        nisa.dma_copy(dst=result[region[0], region[1]], src=tile)
    return result


def shifted_reference(a, shift=1.0):
    return a + shift


@nki.jit
def doubled(a):
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for region in tiles(a.shape):
        tile = loaded(a, region)
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        nisa.dma_copy(dst=result[region[0], region[1]], src=tile)
    return result


def doubled_reference(a):
    return 2 * a


@nki.jit
def picked(a, number):
    """Return a part of `a`, and the number that was given."""
    _, rows, columns = a.shape
    tile = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=a[1])
    copied = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=copied, src=tile)
    result = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
    again = nl.ndarray((1, 1), dtype=number.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=copied)
    nisa.dma_copy(dst=again, src=number)
    return result, again


def picked_reference(a, number):
    return a[1], np.asarray(number)


@nki.jit
def stored(cache, row):
    """Return `cache` with `row` in its fourth place, and the squares of `row`; it writes to its first argument."""
    tile = loaded(row, (slice(0, 1), slice(0, row.shape[1])))
    squares = nl.ndarray(row.shape, dtype=row.dtype, buffer=nl.sbuf)
    nisa.activation(dst=squares, op=nl.square, data=tile)
    result = nl.ndarray(row.shape, dtype=row.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=squares)
    nisa.dma_copy(dst=cache[3:4], src=tile)
    return result, cache


def stored_reference(cache, row):
    cache[3] = row
    return row**2, cache
