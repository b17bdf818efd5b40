"""Windows that slide over images [channel, image, row, column], and the parts of images that they read.

A *box* is a range of images, of rows and of columns of the result. What its windows read is its *region*: a tile in
SBUF with the channels on the partitions. Places of a region beyond the image hold the padding. So every tap of a window
is a view of a region, with the window's strides, and no tap needs a case of its own.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, blocks, ranges

TILE_BYTES = 32 * 1024
"""Of a partition, for what the windows of one PSUM tile read."""

STRIPE_BYTES = 16 * 1024
"""Of a partition, for what is loaded together, if that is more than one PSUM tile needs."""

LOADS = 4
"""Of all images, where stripes may be smaller for it: the first matmuls wait for the first load."""


class Windows(nl.NKIObject):
    """Windows over images of one size: sizes as (rows, columns), and how many windows there are of each."""

    def __init__(self, images, image, window, stride, padding):
        self.images = images
        self.image = image
        self.window = window
        self.stride = stride
        self.padding = padding
        self.rows = count(image[0], window[0], stride[0], padding[0])
        self.columns = count(image[1], window[1], stride[1], padding[1])
        # Of a region in SBUF: elements that windows read, and how far apart windows are. A pack of taps changes both.
        self.reach, self.step = window, stride

    def lay_out(self, pack):
        """Set the step and reach of windows to those of the regions that a pack of taps loads."""
        self.step = (pack.row_step, self.stride[1])
        self.reach = (pack.region_rows(self, 1), pack.region_columns(self, 1))


def count(size, window, stride, padding):
    """Return how many windows of one dim lie within the padded size."""
    return (size + 2 * padding - window) // stride + 1


def check_windows(kernel, image, window, stride, padding):
    """Refuse strides below 1, windows that do not fit into the padded image, and padding that a window may not see."""
    for axis in range(2):
        assert window[axis] >= 1 and stride[axis] >= 1 and padding[axis] >= 0, (
            f"{kernel} takes windows and strides from 1 and padding from 0 on, not {window}, {stride}, {padding}"
        )
        assert padding[axis] < window[axis], (
            f"padding of {kernel} is less than the window, {window[axis]}, not {padding[axis]}"
        )
        padded = image[axis] + 2 * padding[axis]
        assert padded >= window[axis], (
            f"a window of {window[axis]} does not fit into {padded} padded elements"
        )


def all_results(windows):
    """Return the box of all results."""
    return ((0, windows.images), (0, windows.rows), (0, windows.columns))


def boxes(box, sizes):
    """Return boxes of at most `sizes` images, rows and columns that cover a box."""
    result = []
    for images in ranges(box[0][0], box[0][1], sizes[0]):
        for rows in ranges(box[1][0], box[1][1], sizes[1]):
            for columns in ranges(box[2][0], box[2][1], sizes[2]):
                result.append((images, rows, columns))
    return result


def box_sizes(box):
    """Return images, rows and columns of a box."""
    return (box[0][1] - box[0][0], box[1][1] - box[1][0], box[2][1] - box[2][0])


def evenly(size, most):
    """Return the size of parts of at most `most`, so that all are about equal."""
    return blocks(size, blocks(size, most))


def tile_sizes(windows, each_bytes, most=BANK):
    """Return images, rows and columns of a PSUM tile of at most `most` results, whose region fits into TILE_BYTES.

    each_bytes: of a partition, for one element of the image: those of all its blocks of channels.
    """
    columns = evenly(windows.columns, most)
    rows = evenly(windows.rows, most // columns)
    images = 1
    if rows == windows.rows and columns == windows.columns:
        images = evenly(windows.images, most // (rows * columns))
    while region_elements(windows, (images, rows, columns)) * each_bytes > TILE_BYTES:
        if images > 1:
            images = blocks(images, 2)
        elif rows > 1:
            rows = blocks(rows, 2)
        else:
            assert columns > 1, (
                f"windows of {windows.window} take more than {TILE_BYTES} bytes of a partition for all channels"
            )
            columns = blocks(columns, 2)
    return (images, rows, columns)


def stripe_sizes(windows, tile, each_bytes, rows=1, columns=1):
    """Return images, rows and columns to load together: PSUM tiles along one axis, as many as fit into STRIPE_BYTES.

    Where `rows` stripes are loaded and `columns` tiles of each are summed at a time, the sizes that take fewest steps.
    Of sizes that take as many, the largest one with at least LOADS loads.
    """
    limits = (windows.images, windows.rows, windows.columns)
    best, least = tile, None
    for sizes in candidates(tile, limits, columns):
        if region_elements(windows, sizes) * each_bytes <= STRIPE_BYTES:
            loads = blocks(boxes_in(limits, sizes), rows)
            steps = loads * blocks(boxes_in(sizes, tile), columns) if rows * columns > 1 else 1
            enough = loads >= LOADS or rows * columns == 1
            if least is None or steps < least or (steps == least and enough):
                best, least = sizes, steps
    return best


def candidates(tile, limits, columns):
    """Return sizes of stripes: so many tiles along the first axis that one does not cover, or images for `columns`."""
    axis = 2
    while axis > 0 and tile[axis] == limits[axis]:
        axis = axis - 1
    result = []
    for times in range(1, blocks(limits[axis], tile[axis]) + 1):
        result.append(stretched(tile, axis, times, limits))
    if axis == 1:
        for images in range(2, columns + 1):
            result.append((min(images, limits[0]), limits[1], limits[2]))
    return result


def boxes_in(sizes, inner):
    """Return how many boxes of an inner size cover another."""
    return blocks(sizes[0], inner[0]) * blocks(sizes[1], inner[1]) * blocks(sizes[2], inner[2])


def stretched(sizes, axis, times, limits):
    """Return sizes with one of them so many times as large, up to its limit."""
    result = []
    for other in range(3):
        size = sizes[other] * times if other == axis else sizes[other]
        result.append(min(size, limits[other]))
    return (result[0], result[1], result[2])


def region_elements(windows, sizes):
    """Return the elements of one channel that a box of these sizes reads."""
    rows = (sizes[1] - 1) * windows.step[0] + windows.reach[0]
    columns = (sizes[2] - 1) * windows.step[1] + windows.reach[1]
    return sizes[0] * rows * columns


def spans(windows, box):
    """Return (start, end) of a box's input region for rows and for columns; parts outside the image are padding."""
    result = []
    for axis in range(2):
        first, last = box[axis + 1]
        start = first * windows.stride[axis] - windows.padding[axis]
        end = (last - 1) * windows.stride[axis] - windows.padding[axis] + windows.window[axis]
        result.append((start, end))
    return result


def load_region(x, windows, box, padding):
    """Load what a box reads of images x [channel, image, row, column]: [channel, image, row, column]."""
    (top, bottom), (left, right) = spans(windows, box)
    images = box_sizes(box)[0]
    height, width = bottom - top, right - left
    region = nl.ndarray((x.shape[0], images, height, width), dtype=x.dtype, buffer=nl.sbuf)
    first_row, end_row = max(0, -top), min(bottom, windows.image[0]) - top
    first_column, end_column = max(0, -left), min(right, windows.image[1]) - left
    if first_row > 0:
        nisa.memset(dst=region[:, :, 0:first_row, :], value=padding)
    if end_row < height:
        nisa.memset(dst=region[:, :, end_row:height, :], value=padding)
    inner = region[:, :, first_row:end_row, :]
    if first_column > 0:
        nisa.memset(dst=inner[:, :, :, 0:first_column], value=padding)
    if end_column < width:
        nisa.memset(dst=inner[:, :, :, end_column:width], value=padding)
    source = x[
        :, box[0][0] : box[0][1], top + first_row : top + end_row, left + first_column : left + end_column
    ]
    nisa.dma_copy(dst=inner[:, :, :, first_column:end_column], src=source)
    return region


def tap(region, windows, stripe, box, row, column):
    """Return a view of the elements at (row, column) of a box's windows, in the region of its stripe."""
    images, rows, columns = box_sizes(box)
    image = box[0][0] - stripe[0][0]
    top = (box[1][0] - stripe[1][0]) * windows.step[0] + row
    left = (box[2][0] - stripe[2][0]) * windows.step[1] + column
    bottom = top + (rows - 1) * windows.step[0] + 1
    right = left + (columns - 1) * windows.step[1] + 1
    return region[:, image : image + images, top : bottom : windows.step[0], left : right : windows.step[1]]
