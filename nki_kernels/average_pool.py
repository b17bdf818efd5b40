"""average_pool: the mean of every window of an image or a sequence, for each channel.

    y[n, c, i, j] = sum over u, v of x[n, c, i * s + u - p, j * t + v - q] / count[i, j]

Dimensions
    N   images of H rows and W columns, or sequences of L positions; C channels; U, V rows and columns of the window;
    s, t strides and p, q paddings of rows and columns; H' = (H + 2 p - U) // s + 1, W' likewise.

Arguments
    x                 [N, C, H, W] or [N, C, L] @ HBM, float32 or bfloat16; elements beyond the image count as zeros
    window            compile-time tuple of ints, (U, V) or (V,)
    stride            compile-time tuple of ints from 1 on, or None: the window
    padding           compile-time tuple of ints, less than the window; None: no padding
    count_include_pad compile-time bool: count is U * V; else the elements of the window within the image
    returns y         [N, C, H', W'] or [N, C, L'] @ HBM, x's dtype

Layout
    Channels of all images on the partitions, in groups of 128, which lie side by side where the images are small.

Tiling
    For a stripe of groups, rows or columns, the next one under way: for 4 PSUM tiles of up to 512 results, each element
    of a window is added to all of them by matmuls with an identity: one for each half of the channels. The halves of
    every second tile change places, so that four matmuls run side by side in quarters of the PE array
    (convolution/cells.py); tiles of fewer than 128 results take one matmul. The Scalar and the Vector engine divide the
    sums in turn; by counts at the edges, where those differ, the Vector engine. Short rows of images go by way of a
    tile into their padding, so that whole images are loaded.
    Two cores of a logical core take half of the channels of all images each.

Limits
    What one row of windows reads fits into 32 KiB of a partition. An infinity or NaN of one channel makes the results
    at its place of the up to 127 channels beside it NaN.

Cost
    HBM: x and y once, and what windows of two stripes share once more. Tensor engine: U * V matmuls of 512 columns for
    each 1024 results of 128 channels; so windows of more than 2 x 3 that overlap are bound by it. Rounding to x's
    dtype: y, whose sums are float32.
    Predicted for 8 x 64 x 112 x 112 on trn2 in bfloat16, in program order and scheduled: windows of 3 x 3 with stride
    2 47 and 46 us (95 % of the floor), with stride 1 109 us (66 %), of 2 x 2 42 us (all of it).
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.convolution.cells import Part, groups_of, read_together
from nki_kernels.convolution.packing import Pack, load_packed
from nki_kernels.convolution.pooling import (
    groups,
    result_of,
    windows_of,
    windows_reference,
)
from nki_kernels.convolution.products import of_box, summed
from nki_kernels.convolution.windows import boxes, spans, stripe_sizes, tile_sizes, whole
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import ACCUMULATOR_BANKS, PARTITIONS, ranges

HALF = PARTITIONS // 2
"""Channels that a quarter of the array adds up: its rows, and columns."""


@nki.jit
def average_pool(x, window, stride=None, padding=None, count_include_pad=True):
    """The mean of every window."""
    beyond = (0,) * len(window) if padding is None else padding
    windows = windows_of("average_pool", x, window, stride, beyond)
    y = result_of(x, windows)
    held = [repeated_identity(x.dtype, windows.window)]
    shares = {}
    for source, target, own in groups(x, y, windows):
        pack = Pack(own, source.shape[0], 1, 1, 1)
        pack.lay_out(own)
        tile = tile_sizes(own, item_bytes(x.dtype))
        # The Tensor engine issues a matmul in 64 cycles, so two halves of few columns take longer than the whole.
        width = HALF if tile[0] * tile[1] * tile[2] >= PARTITIONS else PARTITIONS
        sizes = stripe_sizes(own, tile, item_bytes(x.dtype), 1, groups_of(width))
        stripes = boxes(whole(own), sizes)
        images = source.permute((1, 0, 2, 3))
        following = load_packed(images, own, stripes[0:1], pack)
        for number in range(len(stripes)):
            regions = following
            if number + 1 < len(stripes):
                following = load_packed(images, own, stripes[number + 1 : number + 2], pack)
            banks = banks_of(stripes[number], tile, source.shape[0], width)
            for group, last in ranges(0, len(banks), ACCUMULATOR_BANKS):
                sums = summed(banks[group:last], regions, own, held, pack, (width, width))
                for i in range(last - group):
                    box = banks[group + i][0].box
                    share = None if count_include_pad else edge_shares(shares, own, box)
                    store_means(target, banks[group + i], sums[i], own.window, share, i % 2 == 0)
    return y


def banks_of(stripe, tile, channels, width):
    """The parts of a stripe by the PSUM bank that holds their sums: the channels of one box, `width` in each part.

    The halves of every second box change places: so the matmuls of two boxes lie in the four quarters of the array.
    """
    places = boxes(stripe, tile)
    banks = []
    for number in range(len(places)):
        parts = []
        for first, end in ranges(0, channels, width):
            position = (first, (first + number % 2 * width) % PARTITIONS)
            parts.append(Part(stripe, places[number], (first, end), position, end - first))
        banks.append(parts)
    return banks


def repeated_identity(dtype, window):
    """An identity of 128 rows for each tap, [row, tap row, tap column, column]: a view that repeats one."""
    ones = nl.ndarray((PARTITIONS, 1, 1, PARTITIONS), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    result = nl.ndarray((PARTITIONS, 1, 1, PARTITIONS), dtype=dtype, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=[[-1, PARTITIONS]],
        offset=0,
        channel_multiplier=1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    return result.broadcast(1, window[0]).broadcast(2, window[1])


def edge_shares(shares, windows, box):
    """1 / count for the windows of a box, [128, 1, row, column], kept in `shares`; None where all are whole."""
    rows = counts(windows, box, 0)
    columns = counts(windows, box, 1)
    alike = len(rows) == 1 and len(columns) == 1
    if alike and rows[0][2] == windows.window[0] and columns[0][2] == windows.window[1]:
        return None
    key = f"{rows} {columns}"
    if key not in shares:
        height, width = rows[len(rows) - 1][1], columns[len(columns) - 1][1]
        tile = nl.ndarray((PARTITIONS, 1, height, width), dtype=nl.float32, buffer=nl.sbuf)
        for top, bottom, high in rows:
            for left, right, wide in columns:
                part = tile[:, :, top:bottom, left:right]
                nisa.memset(dst=part, value=1.0 / (high * wide), engine=nisa.engine.gpsimd)
        shares[key] = tile
    return shares[key]


def counts(windows, box, axis):
    """Runs (first, end, count) of windows of a box, along rows or columns, with equally many elements in the image."""
    result = []
    first, last = box[axis + 1]
    for place in range(first, last):
        one = (box[0], (place, place + 1), (place, place + 1))
        start, end = spans(windows, one)[axis]
        inside = min(end, windows.image[axis]) - max(start, 0)
        at = place - first
        if len(result) > 0 and result[len(result) - 1][2] == inside:
            result[len(result) - 1] = (result[len(result) - 1][0], at + 1, inside)
        else:
            result.append((at, at + 1, inside))
    return result


def store_means(target, parts, bank, window, share, by_scalar):
    """Store the sums of the parts of a PSUM tile, divided by the size of a window, or times a share of each."""
    mean = 1.0 / (window[0] * window[1])
    for sums, first, together in read_together(parts, bank):
        result = nl.ndarray(sums.shape, dtype=target.dtype, buffer=nl.sbuf)
        if share is not None:
            for group in range(sums.shape[1]):
                nisa.tensor_tensor(
                    dst=result[:, group : group + 1, :, :],
                    data1=sums[:, group : group + 1, :, :],
                    data2=share[0 : sums.shape[0]],
                    op=nl.multiply,
                )
        elif by_scalar:
            nisa.activation(dst=result, op=nl.copy, data=sums, scale=mean)
        else:
            nisa.tensor_scalar(dst=result, data=sums, op0=nl.multiply, operand0=mean)
        for part in together:
            at = part.position[1] - first
            own = of_box(target[part.outputs[0] : part.outputs[1]], part.box)
            nisa.dma_copy(dst=own, src=result[at : at + part.width])


def average_pool_reference(
    x: np.ndarray,
    window: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    count_include_pad: bool = True,
) -> np.ndarray:
    """The sum of all windows, laid side by side, in float32, and those of ones in the image."""
    beyond = (0,) * len(window) if padding is None else padding
    found = windows_reference(x, window, stride, beyond, 0.0)
    inside = windows_reference(np.ones_like(x), window, stride, beyond, float(count_include_pad))
    return (found.sum(axis=-1) / inside.sum(axis=-1)).astype(x.dtype)
