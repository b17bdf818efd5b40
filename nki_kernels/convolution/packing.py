"""Several taps of a window on the partitions: where images have few channels, one matmul then adds several taps.

A pack of so many rows and columns of taps lies on partitions [column, row, channel], each tap with the image shifted by
its place, loaded once more. So a window takes as many matmuls as there are packs in it, for each block of channels. A
last pack of fewer taps uses the first partitions.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.windows import sizes_of, spans
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import PARTITIONS, blocks, cast, ranges

COLUMN_BYTES = 150
"""Bytes that HBM moves while one column streams through the Tensor engine: 358 GB/s at 2.4 GHz on trn2."""

SHORT_BYTES = 512
"""Rows that are shorter are loaded together: DMA pieces take as long as so many bytes."""


class Pack(nl.NKIObject):
    """How many rows and columns of taps lie on the partitions, for how many blocks of channels."""

    def __init__(self, windows, channels, number, rows, columns):
        self.rows, self.columns = rows, columns
        self.blocks = ranges(0, channels, blocks(channels, number))
        self.steps = (blocks(windows.window[0], rows), blocks(windows.window[1], columns))
        self.matmuls = len(self.blocks) * self.steps[0] * self.steps[1]
        # With all rows of a window on the partitions, rows of the image between those of results are not needed.
        self.by_row = self.rows == windows.window[0]
        self.row_step = 1 if self.by_row else windows.stride[0]

    def region_rows(self, windows, rows):
        """Rows of a region of so many rows of results."""
        return (rows - 1) * self.row_step + (self.steps[0] - 1) * self.rows + 1

    def region_columns(self, windows, columns):
        """Columns of a region of so many columns of results."""
        return (columns - 1) * windows.stride[1] + (self.steps[1] - 1) * self.columns + 1

    def used(self, window, block, place):
        """Partitions in the step that begins at a place (row, column) of the window: those of the taps inside it."""
        first, end = self.blocks[block]
        taps = min(self.rows, window[0] - place[0]) * min(self.columns, window[1] - place[1])
        return taps * (end - first)


def packed(windows, channels, outputs, dtype):
    """The pack with which the slower of Tensor engine and HBM is fastest; of equals the one that loads least.

    A last pack of fewer columns uses the first partitions only if all rows of the window are in it, so several columns
    are packed beside all rows.
    """
    height, width = windows.window
    size = item_bytes(dtype)
    passes = 4 if size == 4 else 1
    best, least = None, None
    for number in range(blocks(channels), max(blocks(channels), min(channels, PARTITIONS)) + 1):
        most = PARTITIONS // blocks(channels, number)
        for rows in range(1, min(height, most) + 1):
            for columns in range(1, (min(width, most // rows) if rows == height else 1) + 1):
                pack = Pack(windows, channels, number, rows, columns)
                loaded = channels * rows * columns * pack.row_step * windows.stride[1]
                streamed = passes * pack.matmuls * blocks(outputs) * COLUMN_BYTES
                cost = max(streamed, (loaded + outputs) * size)
                if least is None or cost < least:
                    best, least = pack, cost
    return best


def load_weights(w, window, pack, dtype):
    """For every block of channels its weights [tap and channel, row step, column step, output]."""
    taps = w.reshape_dim(0, window)
    held = []
    for first, end in pack.blocks:
        height = end - first
        shape = (pack.rows * pack.columns * height, pack.steps[0], pack.steps[1], w.shape[2])
        tile = nl.ndarray(shape, dtype=w.dtype, buffer=nl.sbuf)
        if window[0] % pack.rows > 0:
            nisa.memset(dst=tile[:, pack.steps[0] - 1, :, :], value=0.0)
        if window[1] % pack.columns > 0:
            nisa.memset(dst=tile[:, :, pack.steps[1] - 1, :], value=0.0)
        for column in range(pack.columns):
            for row in range(pack.rows):
                at = (column * pack.rows + row) * height
                source = taps[row : window[0] : pack.rows, column : window[1] : pack.columns, first:end, :]
                target = tile[at : at + height, 0 : source.shape[0], 0 : source.shape[1], :]
                nisa.dma_copy(dst=target, src=source.permute((2, 0, 1, 3)))
        held.append(cast(tile, dtype))
    return held


def load_packed(x, windows, stripe, pack):
    """What a stripe reads of images x [N, C, H, W], for every block of channels: [tap and channel, image, row, column].

    Row r of a region is row r * row_step of the image, from where the stripe begins. Places beyond the image are zeros;
    what no step reads stays unwritten.
    """
    across = x.permute((1, 0, 2, 3))
    (top, bottom), (left, right) = spans(windows, stripe)
    images, rows, columns = sizes_of(stripe)
    sizes = (pack.region_rows(windows, rows), pack.region_columns(windows, columns))
    step = windows.stride[0] // pack.row_step
    regions = []
    for first, end in pack.blocks:
        height = end - first
        shape = (pack.rows * pack.columns * height, images, sizes[0], sizes[1])
        region = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf)
        clear_edges(region, windows, (top, left), step, pack)
        for column in range(pack.columns):
            begin, stop = inside(left + column, 1, sizes[1], right, windows.image[1])
            for row in range(pack.rows):
                upper, lower = inside(top + row, step, sizes[0], bottom, windows.image[0])
                if begin >= stop or upper >= lower:
                    continue
                at = (column * pack.rows + row) * height
                start = top + row + upper * step
                source = across[
                    first:end,
                    stripe[0][0] : stripe[0][1],
                    start : start + (lower - upper - 1) * step + 1 : step,
                    left + column + begin : left + column + stop,
                ]
                load_part(region[at : at + height, :, upper:lower, begin:stop], source, pack)
        regions.append(region)
    return regions


def load_part(target, source, pack):
    """Load rows of images; short ones that lie together in HBM but not in their region by way of a tile."""
    short = source.shape[3] * item_bytes(source.dtype) < SHORT_BYTES
    if not short or pack.rows * pack.columns > 1 or source.shape[2] == 1:
        nisa.dma_copy(dst=target, src=source)
        return
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    nisa.tensor_copy(dst=target, src=tile)


def inside(start, step, count, end, size):
    """Of `count` places from `start` on, so many apart, the range that lies within the image and before `end`."""
    return min(count, blocks(max(0, -start), step)), min(count, blocks(max(0, min(end, size) - start), step))


def clear_edges(region, windows, corner, step, pack):
    """Zeros where the image of any tap of a region ends: rows and columns on all partitions at once."""
    top, left = corner
    height, width = windows.image
    count = region.shape[2]
    upper = min(count, blocks(max(0, -top), step))
    lower = max(upper, min(count, blocks(max(0, height - top - pack.rows + 1), step)))
    if upper > 0:
        nisa.memset(dst=region[:, :, 0:upper, :], value=0.0)
    if lower < count:
        nisa.memset(dst=region[:, :, lower:count, :], value=0.0)
    count = region.shape[3]
    begin = min(count, max(0, -left))
    stop = max(begin, min(count, width - left - pack.columns + 1))
    if begin > 0 and lower > upper:
        nisa.memset(dst=region[:, :, upper:lower, 0:begin], value=0.0)
    if stop < count and lower > upper:
        nisa.memset(dst=region[:, :, upper:lower, stop:count], value=0.0)
