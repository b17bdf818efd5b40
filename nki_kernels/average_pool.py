"""average_pool: the mean of every window of an image or a sequence, for each channel.

    y[n, c, i, j] = sum over u, v of x[n, c, i * s + u - p, j * t + v - q] / count[i, j]

Dimensions:
    N   images of H rows and W columns, or sequences of L positions; C channels; U, V rows and columns of the window;
    s, t strides and p, q paddings of rows and columns; H' = (H + 2 p - U) // s + 1, W' likewise.

Arguments:
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

Limits:
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

from nki_kernels.convolution.cells import OutputBox, count_groups, split_reads
from nki_kernels.convolution.packing import Pack, load_packed
from nki_kernels.convolution.pooling import (
    allocate_result,
    create_windows,
    view_groups,
    windows_reference,
)
from nki_kernels.convolution.products import select_box, sum_taps
from nki_kernels.convolution.windows import (
    choose_stripe_sizes,
    choose_tile_sizes,
    cover_results,
    find_region_ranges,
    split_box,
)
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import ACCUMULATOR_BANKS, PARTITIONS, filled, ranges

cores = (1, 2)

HALF = PARTITIONS // 2
"""Channels that a quarter of the array adds up: its rows, and columns."""


@nki.jit
def average_pool(x, window, stride=None, padding=None, count_include_pad=True):
    """Return the mean of every window of x, in x's dtype: [N, C, H', W'] or [N, C, L'], in new shared HBM.

    The module docstring describes the arguments. AssertionError if window, stride or padding do not fit x.
    """
    beyond = (0,) * len(window) if padding is None else padding
    windows = create_windows("average_pool", x, window, stride, beyond)
    y = allocate_result(x, windows)
    identities = [repeat_identity(x.dtype, windows.window)]
    shares = {}
    for source, target, group_windows in view_groups(x, y, windows):
        pack = Pack(group_windows, source.shape[0], 1, 1, 1)
        group_windows.lay_out(pack)
        tile = choose_tile_sizes(group_windows, item_bytes(x.dtype))
        # The Tensor engine issues a matmul in 64 cycles, so two halves of few columns take longer than the whole.
        width = HALF if tile[0] * tile[1] * tile[2] >= PARTITIONS else PARTITIONS
        sizes = choose_stripe_sizes(group_windows, tile, item_bytes(x.dtype), 1, count_groups(width))
        stripes = split_box(cover_results(group_windows), sizes)
        images = source.permute((1, 0, 2, 3))
        following = load_packed(images, group_windows, stripes[0:1], pack)
        for number in range(len(stripes)):
            regions = following
            if number + 1 < len(stripes):
                following = load_packed(images, group_windows, stripes[number + 1 : number + 2], pack)
            banks = plan_banks(stripes[number], tile, source.shape[0], width)
            for group, last in ranges(0, len(banks), ACCUMULATOR_BANKS):
                sums = sum_taps(banks[group:last], regions, group_windows, identities, pack, (width, width))
                for i in range(last - group):
                    box = banks[group + i][0].box
                    share = None if count_include_pad else make_edge_factors(shares, group_windows, box)
                    store_means(target, banks[group + i], sums[i], group_windows.window, share, i % 2 == 0)
    return y


def plan_banks(stripe, tile, channels, width):
    """Return for each PSUM bank a list of the `OutputBox`es whose sums it holds.

    A bank has the results of one box of at most `tile` images, rows and columns of the stripe: an OutputBox
    for every `width` channels. The two halves of the channels change places in every second bank. So the
    matmuls of two banks lie in the four quarters of the PE array.

    Args:
        stripe: ranges of images, rows and columns of the result that are computed from one load.
    """
    stripe_boxes = split_box(stripe, tile)
    banks = []
    for number in range(len(stripe_boxes)):
        bank = []
        for first, end in ranges(0, channels, width):
            position = (first, (first + number % 2 * width) % PARTITIONS)
            bank.append(OutputBox(stripe, stripe_boxes[number], (first, end), position, end - first))
        banks.append(bank)
    return banks


def repeat_identity(dtype, window):
    """Return a view [128, window rows, window columns, 128] in SBUF: one 128 x 128 identity, repeated for each tap."""
    ones = filled((PARTITIONS, 1, 1, PARTITIONS), 1.0, dtype)
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


def make_edge_factors(shares, windows, box):
    """Return 1 / count for each window of a box, float32 [128, 1, row, column] in SBUF, or None.

    count is the number of a window's elements within the image. None means that all windows lie within it.
    Equal edges share a tile: tiles are kept in the dict `shares`, which is extended.
    """
    rows = count_elements(windows, box, 0)
    columns = count_elements(windows, box, 1)
    alike = len(rows) == 1 and len(columns) == 1
    if alike and rows[0][2] == windows.window[0] and columns[0][2] == windows.window[1]:
        return None
    key = f"{rows} {columns}"
    if key not in shares:
        height, width = rows[len(rows) - 1][1], columns[len(columns) - 1][1]
        tile = nl.ndarray((PARTITIONS, 1, height, width), dtype=nl.float32, buffer=nl.sbuf)
        for top, bottom, high in rows:
            for left, right, wide in columns:
                target = tile[:, :, top:bottom, left:right]
                nisa.memset(dst=target, value=1.0 / (high * wide), engine=nisa.engine.gpsimd)
        shares[key] = tile
    return shares[key]


def count_elements(windows, box, axis):
    """Return runs (first, end, count) of neighbouring windows of a box along an axis, 0 for rows or 1 for columns.

    Each window of a run has `count` rows or columns within the image; first and end count windows from the
    box's first.
    """
    result = []
    first, last = box[axis + 1]
    for index in range(first, last):
        window_box = (box[0], (index, index + 1), (index, index + 1))
        start, end = find_region_ranges(windows, window_box)[axis]
        inside = min(end, windows.image[axis]) - max(start, 0)
        offset = index - first
        if len(result) > 0 and result[len(result) - 1][2] == inside:
            result[len(result) - 1] = (result[len(result) - 1][0], offset + 1, inside)
        else:
            result.append((offset, offset + 1, inside))
    return result


def store_means(target, output_boxes, bank, window, share, by_scalar):
    """Divide the sums in a PSUM tile and store them to their boxes of `target` [channel, image, row, column] @ HBM.

    Args:
        output_boxes: the `OutputBox`es whose sums the tile holds.
        share: factors of `make_edge_factors`, or None: every sum is divided by the size of the window.
        by_scalar: whether the Scalar engine divides; else, and with `share`, the Vector engine does.
    """
    mean = 1.0 / (window[0] * window[1])
    for sums, first, together in split_reads(output_boxes, bank):
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
        for output_box in together:
            start = output_box.position[1] - first
            box = select_box(target[output_box.outputs[0] : output_box.outputs[1]], output_box.box)
            nisa.dma_copy(dst=box, src=result[start : start + output_box.count_outputs()])


def average_pool_reference(
    x: np.ndarray,
    window: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    count_include_pad: bool = True,
) -> np.ndarray:
    """Compute the mean of every window with NumPy in float32, rounded to x's dtype.

    Padding adds zeros to the sums; with `count_include_pad` it counts as elements of the mean, else it does
    not.
    """
    beyond = (0,) * len(window) if padding is None else padding
    sums = windows_reference(x, window, stride, beyond, 0.0)
    inside = windows_reference(np.ones_like(x), window, stride, beyond, float(count_include_pad))
    return (sums.sum(axis=-1) / inside.sum(axis=-1)).astype(x.dtype)
