"""What poolings share: arguments of one or two dims, and channels of several images as groups of 128 partitions."""

from __future__ import annotations

import nki.language as nl
import numpy as np

from nki_kernels.convolution.windows import Windows, check_windows
from nki_kernels.cores import core_range
from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS


def pair(values, first):
    """Return a pair for rows and columns; of one value, for sequences, the columns' one."""
    return values if len(values) == 2 else (first, values[0])


def pool_windows(kernel, x, window, stride, padding):
    """Return the windows over x [N, C, H, W], or [N, C, L] as images of one row."""
    assert len(x.shape) in (3, 4), f"expected x [N, C, H, W] or [N, C, L], not a tensor of shape {x.shape}"
    steps = window if stride is None else stride
    for values in (window, steps, padding):
        assert len(values) == len(x.shape) - 2, (
            f"{kernel} takes {len(x.shape) - 2} numbers for each of window, stride and padding, not {values}"
        )
    height = 1 if len(x.shape) == 3 else x.shape[2]
    image = (height, x.shape[len(x.shape) - 1])
    sizes = (pair(window, 1), pair(steps, 1), pair(padding, 0))
    check_windows(kernel, image, sizes[0], sizes[1], sizes[2])
    return Windows(1, image, sizes[0], sizes[1], sizes[2])


def allocate_result(x, windows):
    """Allocate the result in HBM, of the form of x.

    Its results of one channel are one dim, so that stores of different rows touch boxes that are apart.
    """
    y = nl.ndarray(
        (x.shape[0], x.shape[1], windows.rows * windows.columns), dtype=x.dtype, buffer=nl.shared_hbm
    )
    sizes = (windows.columns,) if len(x.shape) == 3 else (windows.rows, windows.columns)
    return y.reshape((x.shape[0], x.shape[1]) + sizes)


def groups(x, y, windows):
    """Return views (x, y, windows) [channel, group, row, column] of this core's channels of all images, 128 to a group.

    A channel of an image is as good as one of another, so both are one axis. The last group may be smaller, and then
    has views of its own.
    """
    first, end = core_range(x.shape[0] * x.shape[1], PARTITIONS, nl.program_id(0))
    full = (end - first) // PARTITIONS * PARTITIONS
    result = []
    for start, last in ((first, first + full), (first + full, end)):
        if last > start:
            many = (last - start) // min(PARTITIONS, last - start)
            group_windows = Windows(many, windows.image, windows.window, windows.stride, windows.padding)
            result.append((grouped(x, start, last, many), grouped(y, start, last, many), group_windows))
    return result


def grouped(x, first, end, many):
    """Return channels first … end of x [N, C, …] in `many` groups: [channel, group, row, column]."""
    rows = x.flatten_dims(0, 1)[first:end]
    rows = rows.expand_dim(1) if len(rows.shape) == 2 else rows
    return rows.reshape_dim(0, (many, (end - first) // many)).permute((1, 0, 2, 3))


def windows_reference(
    x: np.ndarray,
    window: tuple[int, ...],
    stride: tuple[int, ...] | None,
    padding: tuple[int, ...],
    beyond: float,
) -> np.ndarray:
    """Return all windows of x, with so much beyond its edges: [N, C, windows, …, elements of a window], in float32."""
    padded = np.pad(widened(x), ((0, 0), (0, 0), *((size, size) for size in padding)), constant_values=beyond)
    axes = tuple(range(2, x.ndim))
    views = np.lib.stride_tricks.sliding_window_view(padded, window, axis=axes)
    steps = tuple(slice(None, None, step) for step in stride or window)
    views = views[(slice(None), slice(None), *steps)]
    return views.reshape(*views.shape[: x.ndim], -1)
