"""Windows that slide over images [channel, image, row, column], and the parts of images that they read.

A *box* is a range of images, of rows and of columns of the result: ((first, end), (first, end), (first, end)). What its
windows read is its *region*: a tile in SBUF with the channels on the partitions. A *stripe* is a box whose region is
loaded at a time; it is cut into boxes of one PSUM tile each. Elements of a region beyond the image hold the padding. So
every *tap*, one element of all windows, is a view of a region, with the window's strides, and no tap needs a case of
its own. Convolutions and poolings use these functions.
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
    """Windows over images of one size: `image`, `window`, `stride` and `padding` are (rows, columns).

    `padding` is that before the image, and after it too unless `padding_end` says otherwise. `rows` and `columns` count
    the windows of an image. In a region in SBUF, `reach` elements (rows, columns) belong to one window, and the next
    window begins `step` further; both are `window` and `stride` until `lay_out`.
    """

    def __init__(self, images, image, window, stride, padding, padding_end=None):
        self.images = images
        self.image = image
        self.window = window
        self.stride = stride
        self.padding = padding
        end = padding if padding_end is None else padding_end
        self.rows = count_windows(image[0] + padding[0] + end[0], window[0], stride[0])
        self.columns = count_windows(image[1] + padding[1] + end[1], window[1], stride[1])
        # Of a region in SBUF: elements that windows read, and how far apart windows are. A pack of taps changes both.
        self.reach, self.step = window, stride

    def lay_out(self, pack):
        """Set `step` and `reach` to those of the regions that a pack of taps loads."""
        self.step = (pack.row_step, self.stride[1])
        self.reach = (pack.count_region_rows(self, 1), pack.count_region_columns(self, 1))


def count_windows(padded, window, stride):
    """Return how many windows fit along one dim of `padded` elements, the padding on both sides included."""
    return (padded - window) // stride + 1


def check_windows(kernel, image, window, stride, padding, padding_end=None):
    """Raise AssertionError if the sizes (rows, columns) of windows are invalid; `kernel` is the name for the message.

    They are invalid if a stride or window is below 1, padding is negative or not less than the window, or a window does
    not fit into the padded image.
    """
    for axis in range(2):
        padded = image[axis]
        for amounts in (padding, padding if padding_end is None else padding_end):
            assert window[axis] >= 1 and stride[axis] >= 1 and amounts[axis] >= 0, (
                f"{kernel} takes windows and strides from 1 and padding from 0 on, not window {window}, "
                f"stride {stride} and padding {amounts}"
            )
            assert amounts[axis] < window[axis], (
                f"padding of {kernel} is {amounts[axis]}; pass less than the window, which is {window[axis]}"
            )
            padded += amounts[axis]
        assert padded >= window[axis], (
            f"a window of {window[axis]} does not fit into {padded} padded elements; use a smaller window "
            "or more padding"
        )


def cover_results(windows):
    """Return the box ((0, images), (0, rows), (0, columns)) of all results of all images."""
    return ((0, windows.images), (0, windows.rows), (0, windows.columns))


def split_box(box, sizes):
    """Return boxes of at most `sizes` (images, rows, columns) that cover a box, by image, then row, then column.

    A box is ((first, end) of images, of rows, of columns).
    """
    result = []
    for images in ranges(box[0][0], box[0][1], sizes[0]):
        for rows in ranges(box[1][0], box[1][1], sizes[1]):
            for columns in ranges(box[2][0], box[2][1], sizes[2]):
                result.append((images, rows, columns))
    return result


def measure_box(box):
    """Return the number of images, rows and columns of a box ((first, end) of images, of rows, of columns)."""
    return (box[0][1] - box[0][0], box[1][1] - box[1][0], box[2][1] - box[2][0])


def divide_evenly(size, most):
    """Return the size of each part, rounded up, if `size` is cut into the fewest equal parts of at most `most`."""
    return blocks(size, blocks(size, most))


def choose_tile_sizes(windows, element_bytes, most=BANK):
    """Return (images, rows, columns) of a PSUM tile of at most `most` results, whose region fits into TILE_BYTES.

    A tile takes whole rows first, then whole images, then several images.

    Args:
        element_bytes: bytes of a partition for one element of the image: those of all its blocks of channels.

    Raises:
        AssertionError: the region of a single result takes more than TILE_BYTES.
    """
    columns = divide_evenly(windows.columns, most)
    rows = divide_evenly(windows.rows, most // columns)
    images = 1
    if rows == windows.rows and columns == windows.columns:
        images = divide_evenly(windows.images, most // (rows * columns))
    while count_region_elements(windows, (images, rows, columns)) * element_bytes > TILE_BYTES:
        if images > 1:
            images = blocks(images, 2)
        elif rows > 1:
            rows = blocks(rows, 2)
        else:
            assert columns > 1, (
                f"one window of {windows.window} takes more than {TILE_BYTES} bytes of a partition for all channels; "
                "use a smaller window or fewer channels"
            )
            columns = blocks(columns, 2)
    return (images, rows, columns)


def choose_stripe_sizes(windows, tile, element_bytes, rows=1, columns=1):
    """Return (images, rows, columns) of a stripe: PSUM tiles along one axis, as many as fit into STRIPE_BYTES.

    If `rows` * `columns` is 1, they are the largest sizes that fit. Else they are those that take fewest steps, loads
    times sums; of sizes that take as many, the largest one with at least LOADS loads. If nothing fits, they are `tile`.

    Args:
        tile: (images, rows, columns) of a PSUM tile.
        element_bytes: bytes of a partition for one element of the image.
        rows: stripes that are loaded at a time.
        columns: tiles of a stripe that are summed at a time.
    """
    limits = (windows.images, windows.rows, windows.columns)
    best, least = tile, None
    for sizes in list_stripe_sizes(tile, limits, columns):
        if count_region_elements(windows, sizes) * element_bytes <= STRIPE_BYTES:
            loads = blocks(count_boxes(limits, sizes), rows)
            steps = loads * blocks(count_boxes(sizes, tile), columns) if rows * columns > 1 else 1
            enough = loads >= LOADS or rows * columns == 1
            if least is None or steps < least or (steps == least and enough):
                best, least = sizes, steps
    return best


def list_stripe_sizes(tile, limits, columns):
    """Return sizes of stripes in ascending order: 1, 2, … tiles along the first axis that a tile does not cover.

    Axes are columns, rows, images. Where it is the axis of rows, sizes of 2 … `columns` whole images follow. `limits`
    are (images, rows, columns) of all results.
    """
    axis = 2
    while axis > 0 and tile[axis] == limits[axis]:
        axis = axis - 1
    result = []
    for times in range(1, blocks(limits[axis], tile[axis]) + 1):
        result.append(stretch_sizes(tile, axis, times, limits))
    if axis == 1:
        for images in range(2, columns + 1):
            result.append((min(images, limits[0]), limits[1], limits[2]))
    return result


def count_boxes(sizes, inner):
    """Return how many boxes of sizes `inner` (images, rows, columns) cover a box of `sizes`."""
    return blocks(sizes[0], inner[0]) * blocks(sizes[1], inner[1]) * blocks(sizes[2], inner[2])


def stretch_sizes(sizes, axis, times, limits):
    """Return `sizes` with the size of one axis multiplied by `times`, and each size cut to its limit."""
    result = []
    for other in range(3):
        size = sizes[other] * times if other == axis else sizes[other]
        result.append(min(size, limits[other]))
    return (result[0], result[1], result[2])


def count_region_elements(windows, sizes):
    """Return how many elements of one channel the windows of a box of `sizes` (images, rows, columns) read."""
    rows = (sizes[1] - 1) * windows.step[0] + windows.reach[0]
    columns = (sizes[2] - 1) * windows.step[1] + windows.reach[1]
    return sizes[0] * rows * columns


def find_region_ranges(windows, box):
    """Return [(start, end) of rows, (start, end) of columns] of the image that the windows of a box of results read.

    Rows and columns outside the image, such as negative ones, are padding.
    """
    result = []
    for axis in range(2):
        first, last = box[axis + 1]
        start = first * windows.stride[axis] - windows.padding[axis]
        end = (last - 1) * windows.stride[axis] - windows.padding[axis] + windows.window[axis]
        result.append((start, end))
    return result


def load_region(x, windows, box, padding):
    """Load what the windows of a box of results read of images x [channel, image, row, column] @ HBM.

    Return a new tile [channel, image, row, column] @ SBUF of x's dtype. Elements beyond the image are `padding`, a
    number.
    """
    (top, bottom), (left, right) = find_region_ranges(windows, box)
    images = measure_box(box)[0]
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


def view_tap(region, windows, stripe, box, row, column):
    """View one tap, the elements at (row, column) of all windows of a box: [channel, image, row, column] @ SBUF.

    `region` holds what the windows of `stripe` read, a box that contains `box`.
    """
    images, rows, columns = measure_box(box)
    image = box[0][0] - stripe[0][0]
    top = (box[1][0] - stripe[1][0]) * windows.step[0] + row
    left = (box[2][0] - stripe[2][0]) * windows.step[1] + column
    bottom = top + (rows - 1) * windows.step[0] + 1
    right = left + (columns - 1) * windows.step[1] + 1
    return region[:, image : image + images, top : bottom : windows.step[0], left : right : windows.step[1]]
