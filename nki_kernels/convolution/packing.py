"""Several taps of a window on the partitions: where images have few channels, one matmul then adds several taps.

A *tap* is one element (row, column) of every window. A *pack* of so many rows and columns of taps lies on partitions
[column, row, channel], each tap with the image shifted by its place, loaded once more. One *step* adds a pack by one
matmul, so a window takes as many matmuls as there are packs in it, for each block of channels. A last pack of fewer
taps uses the first partitions.

A pack of at most 64 partitions, or 32, leaves room for others: each *group* of as many partitions holds the same taps
of another stripe of the image, and its matmuls run beside those of the other groups (convolution/cells.py). Boxes,
stripes and regions are those of convolution/windows.py.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.cells import MOST_TILES, count_groups, find_side
from nki_kernels.convolution.windows import find_region_ranges, measure_box
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import BANK, PARTITIONS, allocate_aligned_tile, blocks, cast, load, ranges

COLUMN_BYTES = 150
"""Bytes that HBM moves while one column streams through the Tensor engine: 358 GB/s at 2.4 GHz on trn2."""

WEIGHT_BYTES = 80 * 1024
"""Of a partition, for the weights that stay in SBUF."""

SHORT_BYTES = 512
"""Rows that are shorter are loaded together: DMA pieces take as long as so many bytes."""


class Pack(nl.NKIObject):
    """How many rows and columns of taps lie on the partitions, for how many blocks of channels.

    `blocks` are ranges (first, end) of channels, `steps` the packs in a window along its rows and its columns, and
    `matmuls` the number of matmuls that add a window of all channels. Row i of a region is row i * stride / `row_step`
    of the image, from where the region begins. `side` is the number of partitions of a group, and `groups` how many
    groups there are.

    Args:
        number: blocks that the channels are divided into.
        rows: rows of taps that lie on the partitions together.
        columns: columns of taps that lie on the partitions together.
        shortest: side of the smallest tile of the PE array; 128 for a pack that has the array to itself.
    """

    def __init__(self, windows, channels, number, rows, columns, shortest=PARTITIONS):
        self.rows, self.columns = rows, columns
        self.blocks = ranges(0, channels, blocks(channels, number))
        self.steps = (blocks(windows.window[0], rows), blocks(windows.window[1], columns))
        self.matmuls = len(self.blocks) * self.steps[0] * self.steps[1]
        # With all rows of a window on the partitions, rows of the image between those of results are not needed.
        self.by_row = self.rows == windows.window[0]
        self.row_step = 1 if self.by_row else windows.stride[0]
        # Rows of a tile of the array, and how many groups of as many partitions hold stripes of their own. Blocks of
        # fewer channels than need be take too many small DMAs for that.
        fewest = number == blocks(channels)
        self.shortest = shortest
        self.side = find_side(self.count_partitions(0), shortest) if fewest else PARTITIONS
        self.groups = count_groups(self.side)

    def count_region_rows(self, windows, rows):
        """Return how many rows a region has in SBUF for `rows` rows of results."""
        return (rows - 1) * self.row_step + (self.steps[0] - 1) * self.rows + 1

    def count_region_columns(self, windows, columns):
        """Return how many columns a region has in SBUF for `columns` columns of results."""
        return (columns - 1) * windows.stride[1] + (self.steps[1] - 1) * self.columns + 1

    def limit_groups(self, stripes):
        """Set `groups`, the groups of partitions that are used, to `stripes` if that number is less."""
        self.groups = min(self.groups, stripes)

    def count_partitions(self, block):
        """Return the number of partitions that all taps of channel block number `block` take in one group."""
        first, end = self.blocks[block]
        return self.rows * self.columns * (end - first)

    def find_width(self, outputs):
        """Return the width of a tile of the PE array, in columns, that holds so many outputs, at most 128."""
        return find_side(min(outputs, PARTITIONS), self.shortest)

    def count_used(self, window, block, position):
        """Return the partitions that one matmul uses in a group: those of its taps that lie inside the window.

        Args:
            window: rows and columns of the window.
            block: index of the block of channels.
            position: (row, column) of the matmul's first tap.
        """
        first, end = self.blocks[block]
        taps = min(self.rows, window[0] - position[0]) * min(self.columns, window[1] - position[1])
        return taps * (end - first)


def choose_pack(windows, channels, outputs, dtype, shortest):
    """Return the pack with which the slower of Tensor engine and HBM is fastest; ties go to the fewest matmuls.

    The Tensor engine's time is that of all steps. HBM's counts the images, loaded once for each tap on the partitions,
    and the results. A last pack of fewer columns uses the first partitions only if all rows of the window are in it, so
    several columns are packed beside all rows. Where weights of 128 outputs would not stay in SBUF, a pack has the
    array to itself: a larger one has fewer.

    Args:
        windows: `Windows` over the images.
        outputs: number of output channels.
        dtype: dtype of the images.
        shortest: side of the smallest tile of the PE array.
    """
    height, width = windows.window
    size = item_bytes(dtype)
    passes = 4 if size == 4 else 1
    tiles = blocks(windows.images * windows.rows * windows.columns, BANK)
    best, least = None, None
    for number in range(blocks(channels), max(blocks(channels), min(channels, PARTITIONS)) + 1):
        most = PARTITIONS // blocks(channels, number)
        for rows in range(1, min(height, most) + 1):
            for columns in range(1, (min(width, most // rows) if rows == height else 1) + 1):
                pack = Pack(windows, channels, number, rows, columns, shortest)
                if pack.matmuls * size * min(outputs, PARTITIONS) > WEIGHT_BYTES:
                    pack = Pack(windows, channels, number, rows, columns)
                loaded = channels * rows * columns * pack.row_step * windows.stride[1]
                streamed = passes * pack.matmuls * estimate_step_time(pack, outputs, tiles) * COLUMN_BYTES
                cost = max(streamed, (loaded + outputs) * size)
                if least is None or cost < least or (cost == least and pack.matmuls < best.matmuls):
                    best, least = pack, cost
    return best


def create_single_pack(windows, channels, outputs, dtype, shortest):
    """Return the pack of single taps of all channels; where few outputs' weights fit in SBUF, it has the array alone.

    The arguments are those of `choose_pack`.
    """
    pack = Pack(windows, channels, blocks(channels), 1, 1, shortest)
    if pack.matmuls * item_bytes(dtype) * min(outputs, PARTITIONS) > WEIGHT_BYTES:
        pack = Pack(windows, channels, blocks(channels), 1, 1)
    return pack


def estimate_step_time(pack, outputs, tiles):
    """Return how often a PSUM tile's columns pass the Tensor engine in one step of a pack, for all outputs.

    A step is one matmul for each 128 outputs. Each takes one pass, divided by the matmuls that run side by side in
    tiles of the PE array: at most MOST_TILES, and at most `tiles`, the number of PSUM tiles.
    """
    result = 0.0
    for first, end in ranges(0, outputs):
        tiles_together = pack.groups * count_groups(pack.find_width(end - first))
        result += 1.0 / min(tiles_together, tiles, MOST_TILES)
    return result


def load_weights(w, window, pack, dtype):
    """Load weights [taps, C, O] @ HBM; return one tile of `dtype` @ SBUF for each block of channels.

    A tile is [(group, column of tap, row of tap, channel), row step, column step, output]. Taps of the last steps that
    lie outside the window are zeros. `window` is the window's rows and columns, of which the taps are made.
    """
    taps = w.reshape_dim(0, window)
    weights = []
    for block in range(len(pack.blocks)):
        first, end = pack.blocks[block]
        height = end - first
        shape = (pack.count_partitions(block), pack.steps[0], pack.steps[1], w.shape[2])
        tile = nl.ndarray(shape, dtype=w.dtype, buffer=nl.sbuf)
        if window[0] % pack.rows > 0:
            nisa.memset(dst=tile[:, pack.steps[0] - 1, :, :], value=0.0)
        if window[1] % pack.columns > 0:
            nisa.memset(dst=tile[:, :, pack.steps[1] - 1, :], value=0.0)
        for column in range(pack.columns):
            for row in range(pack.rows):
                first_row = (column * pack.rows + row) * height
                source = taps[row : window[0] : pack.rows, column : window[1] : pack.columns, first:end, :]
                target = tile[first_row : first_row + height, 0 : source.shape[0], 0 : source.shape[1], :]
                nisa.dma_copy(dst=target, src=source.permute((2, 0, 1, 3)))
        weights.append(repeat_for_groups(tile, pack, dtype))
    return weights


def repeat_for_groups(tile, pack, dtype):
    """Return a tile in `dtype` with its rows once for each group of partitions, `pack.side` apart.

    With one group and the tile's own dtype it is the tile itself.
    """
    if pack.groups == 1:
        return cast(tile, dtype)
    height = tile.shape[0]
    shape = ((pack.groups - 1) * pack.side + height,) + tile.shape[1:]
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    for group in range(pack.groups):
        first_row = group * pack.side
        nisa.tensor_copy(dst=result[first_row : first_row + height], src=tile)
    return result


def load_packed(x, windows, stripes, pack):
    """Load what stripes read of images x [N, C, H, W] @ HBM, each stripe in its group of partitions.

    Images of one row may be given as rows x [N, W, C] for windows of one element; DMA transposes them.

    Return one region @ SBUF for each block of channels: [(group, column of tap, row of tap, channel), image, row,
    column] of x's dtype. Row r of a region is row r * stride / `row_step` of the image, counted from the stripe's first
    row. Elements beyond the image are zeros; elements that no step reads stay unwritten.

    Args:
        stripes: boxes of results, at most `pack.groups`.
    """
    as_rows = len(x.shape) == 3
    across = None if as_rows else x.permute((1, 0, 2, 3))
    regions = []
    for block in range(len(pack.blocks)):
        first, end = pack.blocks[block]
        most = (0, 0, 0)
        for stripe in stripes:
            sizes = compute_region_sizes(windows, stripe, pack)
            most = (max(most[0], sizes[0]), max(most[1], sizes[1]), max(most[2], sizes[2]))
        height = pack.count_partitions(block)
        shape = ((len(stripes) - 1) * pack.side + height,) + most
        region = allocate_aligned_tile(shape, x.dtype)
        alike = True
        for stripe in stripes:
            alike = alike and stripe[2] == stripes[0][2]
        if alike:
            clear_columns(region, windows, stripes[0], pack)
        for group in range(len(stripes)):
            images, rows, columns = compute_region_sizes(windows, stripes[group], pack)
            first_row = group * pack.side
            stripe_region = region[first_row : first_row + height, 0:images, 0:rows, 0:columns]
            if not alike:
                clear_columns(stripe_region, windows, stripes[group], pack)
            if as_rows:
                transpose_stripe(stripe_region, x[:, :, first:end], stripes[group])
            else:
                load_stripe(stripe_region, across[first:end], windows, stripes[group], pack)
        regions.append(region)
    return regions


def compute_region_sizes(windows, stripe, pack):
    """Return (images, rows, columns) of the tile in SBUF that holds what a stripe, a box of results, reads."""
    images, rows, columns = measure_box(stripe)
    return (images, pack.count_region_rows(windows, rows), pack.count_region_columns(windows, columns))


def load_stripe(region, across, windows, stripe, pack):
    """Load what a stripe reads of a block of channels into its group of a region, each tap with its shift.

    Rows beyond the image become zeros here; columns beyond the image have been set by `clear_columns`.

    Args:
        region: [(column of tap, row of tap, channel), image, row, column] @ SBUF.
        across: the block's channels of all images, [channel, image, row, column] @ HBM.
    """
    (top, _), (first_column, _) = find_region_ranges(windows, stripe)
    step = windows.stride[0] // pack.row_step
    height = across.shape[0]
    clear_rows(region, windows, top, step, pack)
    for column in range(pack.columns):
        for row in range(pack.rows):
            (upper, lower), (begin, stop) = find_inner_ranges(windows, stripe, pack, (row, column))
            if begin >= stop or upper >= lower:
                continue
            first_row = (column * pack.rows + row) * height
            start = top + row + upper * step
            source = across[
                :,
                stripe[0][0] : stripe[0][1],
                start : start + (lower - upper - 1) * step + 1 : step,
                first_column + column + begin : first_column + column + stop,
            ]
            target = region[first_row : first_row + height, :, upper:lower, begin:stop]
            load_image_rows(target, source, pack, stop - begin < region.shape[3])


def find_inner_ranges(windows, stripe, pack, tap):
    """Return (begin, end) of the rows and of the columns of a stripe's region that lie in the image.

    `tap` is the (row, column) in the pack by which the region's image is shifted.
    """
    (top, bottom), (left, right) = find_region_ranges(windows, stripe)
    step = windows.stride[0] // pack.row_step
    _, rows, columns = compute_region_sizes(windows, stripe, pack)
    return (
        clip_positions(top + tap[0], step, rows, bottom, windows.image[0]),
        clip_positions(left + tap[1], 1, columns, right, windows.image[1]),
    )


def transpose_stripe(region, rows, stripe):
    """Load what a stripe of images of one row reads of rows [image, column, channel] @ HBM, transposed by DMA.

    `region` is [channel, image, row, column] @ SBUF.
    """
    (first_image, end_image), (first_column, end_column) = stripe[0], stripe[2]
    for image in range(first_image, end_image):
        nisa.dma_transpose(dst=region[:, image - first_image, 0, :], src=rows[image, first_column:end_column])


def load_image_rows(target, source, pack, has_gaps):
    """Copy rows of images from HBM to `target` @ SBUF, both [channel, image, row, column].

    Rows shorter than SHORT_BYTES go by way of a tile, if `has_gaps`: rows are then one piece in HBM, but not in the
    region, which has more columns. It is not done for packs of several taps or groups: their copies, one for each
    group, would take longer than the shorter pieces.
    """
    short = source.shape[3] * item_bytes(source.dtype) < SHORT_BYTES
    alone = pack.rows * pack.columns * pack.groups == 1
    if not short or not has_gaps or not alone or source.shape[2] == 1:
        nisa.dma_copy(dst=target, src=source)
        return
    tile = load(source, source.dtype)
    nisa.tensor_copy(dst=target, src=tile)


def clip_positions(start, step, count, end, size):
    """Return (begin, stop) of the indices i below `count` whose position start + i * step lies in the image.

    Positions from 0 to min(end, size) - 1 do. If no position does, begin is not less than stop.
    """
    return min(count, blocks(max(0, -start), step)), min(count, blocks(max(0, min(end, size) - start), step))


def clear_columns(region, windows, stripe, pack):
    """Write zeros to the columns of a region that lie beyond the image for at least one tap, on all partitions at once.

    Loads of the other taps then overwrite what lies inside the image for them.
    """
    left = find_region_ranges(windows, stripe)[1][0]
    count = region.shape[3]
    begin = min(count, max(0, -left))
    stop = max(begin, min(count, windows.image[1] - left - pack.columns + 1))
    if begin > 0:
        nisa.memset(dst=region[:, :, :, 0:begin], value=0.0)
    if stop < count:
        nisa.memset(dst=region[:, :, :, stop:count], value=0.0)


def clear_rows(region, windows, top, step, pack):
    """Write zeros to the rows of a region that lie beyond the image for at least one tap, on all partitions.

    Loads of the other taps then overwrite what lies inside the image for them.

    Args:
        top: row of the image where the region of the first tap begins; negative in the padding.
        step: rows of the image from one row of the region to the next.
    """
    count = region.shape[2]
    upper = min(count, blocks(max(0, -top), step))
    lower = max(upper, min(count, blocks(max(0, windows.image[0] - top - pack.rows + 1), step)))
    if upper > 0:
        nisa.memset(dst=region[:, :, 0:upper, :], value=0.0)
    if lower < count:
        nisa.memset(dst=region[:, :, lower:count, :], value=0.0)
