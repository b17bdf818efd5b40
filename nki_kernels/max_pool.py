"""max_pool: the largest element of every window of an image or a sequence, for each channel.

    y[n, c, i, j] = max over u, v of x[n, c, i * s + u - p, j * t + v - q]

Dimensions:
    N   images of H rows and W columns, or sequences of L positions; C channels; U, V rows and columns of the window;
    s, t strides and p, q paddings of rows and columns; H' = (H + 2 p - U) // s + 1, W' likewise.

Arguments:
    x          [N, C, H, W] or [N, C, L] @ HBM, float32 or bfloat16
    window     compile-time tuple of ints, (U, V) or (V,)
    stride     compile-time tuple of ints from 1 on, or None: the window
    padding    compile-time tuple of ints, less than the window; None: no padding. Padding is less than any element
    returns y  [N, C, H', W'] or [N, C, L'] @ HBM, x's dtype

Layout
    Channels of all images on the partitions, in groups of 128, which lie side by side where the images are small.

Tiling
    A stripe is some rows or columns of results of some groups; what it reads is loaded while the stripe before is
    computed. Its maxima are taken along the columns of the windows first, by V - 1 instructions. Then they are taken
    along the rows of these results, by U - 1 instructions.
    Two cores of a logical core take half of the channels of all images each.

Limits:
    What one row of windows reads fits into 32 KiB of a partition.

Cost
    HBM: x and y once, and elements that windows of two stripes share once more. Vector engine: H * W' * (V - 1) +
    H' * W' * (U - 1) elements of a channel. Nothing is rounded.
    Predicted for 8 x 64 x 112 x 112 on trn2 in bfloat16, in program order and scheduled: windows of 3 x 3 with stride
    2 58 and 52 us (78 % of the floor), of 2 x 2 41 us (all of it). Windows of 3 x 3 with stride 1 reach 50 %.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.convolution.pooling import (
    allocate_result,
    create_windows,
    view_groups,
    windows_reference,
)
from nki_kernels.convolution.products import select_box
from nki_kernels.convolution.windows import choose_tile_sizes, cover_results, load_region, split_box
from nki_kernels.projection.row_groups import item_bytes

cores = (1, 2)

LOWEST = float("-inf")

RESULTS = 2048
"""Most results of a channel in one stripe."""


@nki.jit
def max_pool(x, window, stride=None, padding=None):
    """Return y [N, C, H', W'] or [N, C, L'] @ HBM in x's dtype: the largest element of every window of every channel.

    stride: None takes the window's sizes. padding: None is no padding; padded elements are minus infinity.
    Raises AssertionError if window, stride or padding do not fit x, or if a row of windows takes too much of
    SBUF.
    """
    beyond = (0,) * len(window) if padding is None else padding
    windows = create_windows("max_pool", x, window, stride, beyond)
    y = allocate_result(x, windows)
    for source, target, group_windows in view_groups(x, y, windows):
        sizes = choose_tile_sizes(group_windows, item_bytes(x.dtype), RESULTS)
        stripes = split_box(cover_results(group_windows), sizes)
        following = load_region(source, group_windows, stripes[0], LOWEST)
        for number in range(len(stripes)):
            region = following
            if number + 1 < len(stripes):
                following = load_region(source, group_windows, stripes[number + 1], LOWEST)
            # Columns first and rows then: U + V - 2 maxima of tiles in place of U * V - 1.
            wide = find_window_maxima(region, 3, group_windows.window[1], group_windows.stride[1])
            result = find_window_maxima(wide, 2, group_windows.window[0], group_windows.stride[0])
            nisa.dma_copy(dst=select_box(target, stripes[number]), src=result)
    return y


def find_window_maxima(tile, dim, window, stride):
    """Return the largest elements of all windows along one dim of an SBUF tile, as a new SBUF tile.

    A window of one element is copied nowhere: the result is then a view of `tile`.

    Args:
        tile: SBUF tile with channels on the partitions.
        dim: the dim along which windows lie.
        window: elements of a window.
        stride: distance of the first elements of two windows.
    """
    count = (tile.shape[dim] - window) // stride + 1
    taps = []
    for element in range(window):
        taps.append(tile.slice(dim, element, element + (count - 1) * stride + 1, stride))
    if window == 1:
        return taps[0]
    result = nl.ndarray(taps[0].shape, dtype=tile.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=taps[0], data2=taps[1], op=nl.maximum)
    for element in range(2, window):
        nisa.tensor_tensor(dst=result, data1=result, data2=taps[element], op=nl.maximum)
    return result


def max_pool_reference(
    x: np.ndarray,
    window: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Return the largest element of every window, in x's dtype and the kernel's shape; padding is minus infinity."""
    beyond = (0,) * len(window) if padding is None else padding
    return windows_reference(x, window, stride, beyond, -np.inf).max(axis=-1).astype(x.dtype)
