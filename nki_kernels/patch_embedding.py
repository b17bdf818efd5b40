"""patch_embedding: images cut into square patches, each of which becomes a row of hidden states.

    y[n * T + t, o] = sum over c, u, v of x[n, c, i * P + u, j * P + v] * w[u, v, c, o] + bias[o] + added[t, o]

where patch t is the j-th of the i-th row of patches, t = i * (W / P) + j.

Dimensions:
    N   images of H rows and W columns; C channels; P rows and columns of a patch; T = H / P * W / P patches of an
    image; O hidden size.

Arguments:
    x        [N, C, H, W] @ HBM, float32 or bfloat16
    w        [P, P, C, O] @ HBM, float32 or bfloat16; read in x's dtype
    bias     [1, O] @ HBM, float32 or bfloat16, or None; read in x's dtype
    added    [T, O] @ HBM, float32 or bfloat16, or None: embeddings of the patches' positions, the same for all images
    returns  y [N * T, O] @ HBM, x's dtype

Layout
    Rows and channels of a patch on the partitions, [u, c], so that loads are whole rows of the image; the pixels of a
    row of a patch are views of the tile. The image is stationary, so that a result is a row of hidden states.

Tiling
    for up to 128 patches of some rows of patches, or of a part of one: load, the next ones under way
        for up to 2048 of O: P products, and one of ones with the bias; add the positions, store
    Two cores of a logical core take half of O each.

Limits:
    P * C up to 128; O up to 16384.

Cost
    HBM: x, w and y once; the positions once for each image. Bound: HBM, and for few channels the length of a row of the
    image. Rounded to x's dtype: y, and w and bias of another dtype.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.convolution.products import add_row, store_rows
from nki_kernels.cores import find_core_range
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.projection.feed_forward_weights import expect_row
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, cast, expect_dims, filled, load, ranges

cores = (1, 2)

MAX_OUTPUTS = 16384


@nki.jit
def patch_embedding(x, w, bias=None, added=None):
    """Return y [N * T, O] @ HBM in x's dtype: the patches of images times w, plus bias and positions.

    Raises AssertionError if w is not [P, P, C, O], patches do not divide the image, bias is not [1, O] or `added` not
    [T, O], or P * C or O is above its limit.
    """
    expect_dims(4, x, "x [N, C, H, W]")
    expect_dims(4, w, "w [P, P, C, O]")
    images, channels, height, width = x.shape
    size, outputs = w.shape[0], w.shape[3]
    assert w.shape == (size, size, channels, outputs), (
        f"w is [P, P, {channels}, O] for x of {channels} channels, not {w.shape}"
    )
    assert height % size == 0 and width % size == 0, (
        f"patches of {size} x {size} do not divide images of {height} x {width}"
    )
    assert size * channels <= PARTITIONS, (
        f"patch_embedding takes rows of a patch of at most {PARTITIONS} elements of all channels, not {size * channels}"
    )
    assert outputs <= MAX_OUTPUTS, (
        f"patch_embedding takes a hidden size of at most {MAX_OUTPUTS}, not {outputs}"
    )
    grid = (height // size, width // size)
    expect_row(bias, outputs, "bias")
    if added is not None:
        assert added.shape == (grid[0] * grid[1], outputs), (
            f"added is [{grid[0] * grid[1]}, {outputs}] for {grid[0]} x {grid[1]} patches, not {added.shape}"
        )
    y = nl.ndarray((images * grid[0] * grid[1], outputs), dtype=x.dtype, buffer=nl.shared_hbm)
    first, end = find_core_range(outputs, PARTITIONS, nl.program_id(0))
    weights = load_patch_weights(w[:, :, :, first:end], x.dtype)
    bias_row, ones = None, None
    if bias is not None:
        bias_row, ones = load(bias[:, first:end], x.dtype), filled((1, PARTITIONS), 1.0, x.dtype)
    tiles = list_patch_tiles(images, grid)
    following = load_patches(x, tiles[0], size)
    for index in range(len(tiles)):
        (image, rows, columns), patches = tiles[index], following
        if index + 1 < len(tiles):
            following = load_patches(x, tiles[index + 1], size)
        position = rows[0] * grid[1] + columns[0]
        count = (rows[1] - rows[0]) * (columns[1] - columns[0])
        start = image * grid[0] * grid[1] + position
        for first_output, end_output in ranges(0, end - first, ACCUMULATOR_BANKS * BANK):
            panels = ranges(first_output, end_output, BANK)
            sums = multiply_patches(patches, weights, panels, size)
            if bias is not None:
                add_row(sums, panels, ones[:, 0:count], bias_row)
            outputs_of_core = (first + first_output, first + end_output)
            positions = None
            if added is not None:
                positions = added[position : position + count, outputs_of_core[0] : outputs_of_core[1]]
            store_rows(
                y[start : start + count, outputs_of_core[0] : outputs_of_core[1]], sums, positions, nl.copy
            )
    return y


def load_patch_weights(w, dtype):
    """Load weights [P, P, C, O] @ HBM into a new SBUF tile [(row of patch, channel), column of patch, output]."""
    size, _, channels, outputs = w.shape
    tile = nl.ndarray((size * channels, size, outputs), dtype=w.dtype, buffer=nl.sbuf)
    for row in range(size):
        nisa.dma_copy(dst=tile[row * channels : (row + 1) * channels], src=w[row].permute((1, 0, 2)))
    return cast(tile, dtype)


def list_patch_tiles(images, grid):
    """Return (image, rows, columns) of tiles of at most 128 patches; rows and columns are ranges (first, end).

    A tile has whole rows of patches, as many as fit, or a part of one row.
    """
    tiles = []
    for image in range(images):
        for rows in ranges(0, grid[0], max(1, PARTITIONS // grid[1])):
            for columns in ranges(0, grid[1], PARTITIONS):
                tiles.append((image, rows, columns))
    return tiles


def load_patches(x, tile, size):
    """Load the pixels of a tile of patches: [(row of patch, channel), row of patches, column of the image] @ SBUF."""
    image, (top, bottom), (first_column, end_column) = tile
    channels = x.shape[1]
    shape = (size * channels, bottom - top, (end_column - first_column) * size)
    patches = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf)
    for row in range(size):
        source = x[
            image,
            :,
            top * size + row : (bottom - 1) * size + row + 1 : size,
            first_column * size : end_column * size,
        ]
        nisa.dma_copy(dst=patches[row * channels : (row + 1) * channels], src=source)
    return patches


def multiply_patches(patches, weights, panels, size):
    """Return the products of patches and weights: a float32 PSUM tile [patch, output] for each panel of outputs."""
    depth, rows, columns = patches.shape
    sums = []
    for first_output, end_output in panels:
        sums.append(
            nl.ndarray((rows * columns // size, end_output - first_output), dtype=nl.float32, buffer=nl.psum)
        )
    for column in range(size):
        pixels = patches[:, :, column:columns:size]
        # Panels come innermost, so that the array keeps the pixels for all of them.
        for index in range(len(panels)):
            first_output, end_output = panels[index]
            nisa.nc_matmul(
                dst=sums[index],
                stationary=pixels,
                moving=weights[0:depth, column, first_output:end_output],
                accumulate=column > 0,
            )
    return sums


def patch_embedding_reference(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, added: np.ndarray | None = None
) -> np.ndarray:
    """Compute y with NumPy: one float32 product of all patches, rounded to x's dtype."""
    images, channels, height, width = x.shape
    size, outputs = w.shape[0], w.shape[3]
    grid = widened(x).reshape(images, channels, height // size, size, width // size, size)
    patches = grid.transpose(0, 2, 4, 3, 5, 1).reshape(images, -1, size * size * channels)
    rows = patches @ widened(w.astype(x.dtype)).reshape(-1, outputs)
    if bias is not None:
        rows = rows + widened(bias.astype(x.dtype))
    return (rows + widened_or_zero(added)).astype(x.dtype).reshape(-1, outputs)
