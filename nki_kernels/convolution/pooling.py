"""What poolings share: arguments of one or two dims, and channels of several images as groups of 128 partitions.

`max_pool` and `average_pool` call these functions.
"""

from __future__ import annotations

import nki.language as nl
import numpy as np

from nki_kernels.convolution.windows import Windows, check_windows
from nki_kernels.cores import find_core_range
from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS


def expand_pair(values, first):
    """Return `values` as (rows, columns): a pair as it is, a tuple (n,) for sequences as (`first`, n)."""
    return values if len(values) == 2 else (first, values[0])


def create_windows(kernel, x, window, stride, padding):
    """Return the `Windows` over x [N, C, H, W], or over x [N, C, L] as images of one row.

    Args:
        kernel: name of the kernel for messages.
        stride: tuple of ints, or None for the window.

    Raises:
        AssertionError: x has not 3 or 4 dims, a tuple has not one number for each dim behind the channels, or
            `check_windows` refuses the numbers.
    """
    assert len(x.shape) in (3, 4), f"expected x [N, C, H, W] or [N, C, L], not a tensor of shape {x.shape}"
    steps = window if stride is None else stride
    for values in (window, steps, padding):
        assert len(values) == len(x.shape) - 2, (
            f"{kernel} takes {len(x.shape) - 2} numbers for each of window, stride and padding, not {values}"
        )
    height = 1 if len(x.shape) == 3 else x.shape[2]
    image = (height, x.shape[len(x.shape) - 1])
    sizes = (expand_pair(window, 1), expand_pair(steps, 1), expand_pair(padding, 0))
    check_windows(kernel, image, sizes[0], sizes[1], sizes[2])
    return Windows(1, image, sizes[0], sizes[1], sizes[2])


def allocate_result(x, windows):
    """Allocate the result y in HBM with x's dtype and number of dims: [N, C, H', W'] or [N, C, L'].

    The results of a channel are one dim of the tensor, of which y is a view: stores of different rows touch boxes that
    are apart.
    """
    y = nl.ndarray(
        (x.shape[0], x.shape[1], windows.rows * windows.columns), dtype=x.dtype, buffer=nl.shared_hbm
    )
    sizes = (windows.columns,) if len(x.shape) == 3 else (windows.rows, windows.columns)
    return y.reshape((x.shape[0], x.shape[1]) + sizes)


def view_groups(x, y, windows):
    """Return a list of (x view, y view, windows) for this core's channels of all images, 128 to a group.

    A channel of an image is as good as one of another, so both are one axis. Views are [channel, group, row, column],
    and `windows` count the groups as images. There is one entry for all full groups and one for a last smaller one, if
    any.
    """
    first, end = find_core_range(x.shape[0] * x.shape[1], PARTITIONS, nl.program_id(0))
    full = (end - first) // PARTITIONS * PARTITIONS
    result = []
    for start, last in ((first, first + full), (first + full, end)):
        if last > start:
            num_groups = (last - start) // min(PARTITIONS, last - start)
            group_windows = Windows(
                num_groups, windows.image, windows.window, windows.stride, windows.padding
            )
            result.append(
                (
                    group_channels(x, start, last, num_groups),
                    group_channels(y, start, last, num_groups),
                    group_windows,
                )
            )
    return result


def group_channels(x, first, end, num_groups):
    """View channels first … end - 1 of x [N, C, …], in `num_groups` groups: [channel, group, row, column].

    Channel c of image n has the number n * C + c. Sequences [N, C, L] have one row.
    """
    rows = x.flatten_dims(0, 1)[first:end]
    rows = rows.expand_dim(1) if len(rows.shape) == 2 else rows
    return rows.reshape_dim(0, (num_groups, (end - first) // num_groups)).permute((1, 0, 2, 3))


def windows_reference(
    x: np.ndarray,
    window: tuple[int, ...],
    stride: tuple[int, ...] | None,
    padding: tuple[int, ...],
    beyond: float,
) -> np.ndarray:
    """Return all windows of x in float32: [N, C, H', W', elements of a window], or [N, C, L', elements of a window].

    Args:
        padding: elements that x has more on both sides of each dim.
        beyond: value of the padding.
    """
    padded = np.pad(widened(x), ((0, 0), (0, 0), *((size, size) for size in padding)), constant_values=beyond)
    axes = tuple(range(2, x.ndim))
    views = np.lib.stride_tricks.sliding_window_view(padded, window, axis=axes)
    steps = tuple(slice(None, None, step) for step in stride or window)
    views = views[(slice(None), slice(None), *steps)]
    return views.reshape(*views.shape[: x.ndim], -1)
