"""patch_output: the last layer of a denoiser: LayerNorm modulated by image, a product, and patches put into images.

    y[n, c, i * P + u, j * P + v] = sum over h of z[n, t, h] * w[h, (u * P + v) * C + c] + bias[(u * P + v) * C + c]
    z[n, t, h] = (x[n, t, h] - mean) / sqrt(var + eps) * (norm_weight[n, h] + norm_offset) + norm_bias[n, h]

where token t is the j-th of the i-th row of patches, t = i * columns + j, and mean and var are those of its elements.
DiT, PixArt and SD3 have w's columns in this order. FLUX has (c * P + u) * P + v, so its columns have to be permuted.

Dimensions:
    N   images of T = rows * columns patches; H hidden size; P rows and columns of a patch; C channels in w.

Arguments:
    x            [N * T, H] @ HBM, float32 or bfloat16
    w            [H, P * P * C] @ HBM, float32 or bfloat16; read in x's dtype
    norm_weight  [N, H] @ HBM, float32 or bfloat16, the scale of each image; or [1, H] for all images
    norm_bias    the same shape @ HBM, float32 or bfloat16, the shift; read in x's dtype
    eps          compile-time float
    rows, columns, patch
                 compile-time ints; patch is P
    bias         [1, P * P * C] @ HBM, float32 or bfloat16, or None; read in x's dtype
    norm_offset  compile-time float, 1.0 for adaLN
    channels     compile-time int: the channels of y, the first of w's, such as half with a learned sigma; None for all
    returns y    [N, channels, rows * P, columns * P] @ HBM, x's dtype

Layout
    H on the partitions of both operands: a DMA transposes x. Tokens are on the partitions of the sums, so that mean and
    deviation are columns. Transposes bring rows and channels of a patch to the partitions, [u, c], where columns of
    patches are written beside each other, so that whole rows of the images are stored.

Tiling
    For an image: w' = w * (norm_weight + norm_offset), its sums over h, and norm_bias @ w + bias.
    For up to 512 tokens, whole rows of patches or a part of one: x @ w', the sum of x by a column of ones beside w',
    the sum of squares as the diagonal of x @ x^T. Then (x @ w' - mean * sums of w') / deviation + norm_bias @ w + bias.
    In float32 means are subtracted from x before: the sums would lose digits that bfloat16 does not have.
    The tokens before are transposed and stored meanwhile, those behind are loaded.
    Two cores of a logical core take half of these groups of tokens each; the first core takes a single one.

Limits:
    P * channels up to 128, P * P * channels up to 511; N up to 128; H up to 4096. P * P * C * ceil(H / 128) elements of
    x's dtype take at most 24 KiB.

Cost
    HBM: x, w and y once, norm_weight and norm_bias once. Bound: reading x, and the Tensor engine, whose products for
    the squares take as long as 128 further columns of w. Rounding to x's dtype: w', y, and operands of another dtype.
    Predicted on trn2 in bfloat16 for 4096 tokens and P = 2: PixArt (H = 1152, 4 of 8 channels) 40 us, SD3.5 (1536, 16)
    51 us, FLUX (3072, 16) 85 us; moving x, w and y at 358 GB/s takes 67, 73 and 85 % of it. Float32 takes 5 times as
    long.
    In bfloat16 the variance is the mean of squares less the square of the mean: its relative error is about 2^-22 * (1
    + mean^2 / var).
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import STATIC
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.precision import widened
from nki_kernels.projection.feed_forward_weights import expect_row
from nki_kernels.projection.products import allocate_blocks, transpose_block_range
from nki_kernels.projection.row_groups import item_bytes, transpose_tiles
from nki_kernels.tiles import (
    BANK,
    PARTITIONS,
    blocks,
    count_block_partitions,
    expect_dims,
    filled,
    identity,
    load,
    ranges,
)
from nki_kernels.weights import WeightMatrix, load_blocks

cores = (1, 2)

MAX_HIDDEN = 4096

WEIGHT_BYTES = 24576
"""Most bytes of a partition that w may take."""

GROUP_BYTES = 12288
"""Most bytes of a partition that the tokens of a group take, unless they are 128."""

GROUP_TILES = 4
"""Most tiles of 128 tokens in a group: their products x @ x^T fill a PSUM bank."""

STORE_LAG = 2
"""Groups whose products are computed before a group is transposed, so that its norm is ready then."""


@dataclass
class PatchLayer(nl.NKIObject):
    """Operands that all images share, in SBUF or @ HBM.

    x: [N * T, H] @ HBM. y: [N, channels, rows * P, columns * P] @ HBM. weights: [h in block, block, (v, u, c)], w of
    the channels of y. bias: [1, (v, u, c)], or None. scales: norm_weight + norm_offset, [h in block, block, image]
    float32. shifts: norm_bias likewise, in x's dtype. grid: rows and columns of patches. patch: P. eps: [128, 1]
    float32. ones: [128, 128] in x's dtype. averages: 1 / H everywhere, [128, 128] float32; None for bfloat16.
    diagonal: the identity, [128, 128] float32.
    """

    x: nl.NkiTensor
    y: nl.NkiTensor
    weights: nl.NkiTensor
    bias: nl.NkiTensor | None
    scales: nl.NkiTensor
    shifts: nl.NkiTensor
    grid: tuple
    patch: int
    eps: nl.NkiTensor
    ones: nl.NkiTensor
    averages: nl.NkiTensor | None
    diagonal: nl.NkiTensor


@dataclass
class ImageOperands(nl.NKIObject):
    """Operands of the tokens of an image, in SBUF.

    weights: w' and a column of ones, [h in block, block, outputs + 1]. sums: sums of w' over h, [128, outputs] float32,
    equal rows. constants: norm_bias @ w + bias likewise.
    """

    weights: nl.NkiTensor
    sums: nl.NkiTensor
    constants: nl.NkiTensor


@dataclass
class TokenGroup(nl.NKIObject):
    """Consecutive tokens of an image: rows and columns of patches as ranges (first, end).

    A group has all columns, or is a part of one row.
    """

    image: int
    rows: tuple
    columns: tuple

    def count_tokens(self):
        """Return the number of tokens."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@nki.jit
def patch_output(
    x,
    w,
    norm_weight,
    norm_bias,
    eps,
    rows,
    columns,
    patch,
    bias=None,
    norm_offset=1.0,
    channels=None,
):
    """Return y [N, channels, rows * patch, columns * patch] @ HBM in x's dtype: images of modulated, projected tokens.

    Raises AssertionError if shapes do not fit together or a size is above its limit.
    """
    images, channels = check_arguments(x, w, norm_weight, norm_bias, (rows, columns), patch, bias, channels)
    y = nl.ndarray((images, channels, rows * patch, columns * patch), dtype=x.dtype, buffer=nl.shared_hbm)
    groups = list_groups(images, (rows, columns), count_tokens_at_once(x, patch * patch * channels))
    core, count = nl.program_id(0), nl.num_programs()
    groups = groups[len(groups) * core // count : len(groups) * (core + 1) // count]
    if len(groups) == 0:
        return y
    layer = load_layer(x, y, w, (norm_weight, norm_bias), bias, (rows, columns), patch, eps, norm_offset)
    tiles, outputs = [load_group(x, groups[0], layer.grid)], []
    for index in range(len(groups) + STORE_LAG):
        if index < len(groups):
            group = groups[index]
            if index + 1 < len(groups):
                tiles.append(load_group(x, groups[index + 1], layer.grid))
            if index == 0 or (group.image != groups[index - 1].image and layer.scales.shape[2] > 1):
                operands = prepare_image(layer, group.image % layer.scales.shape[2])
            if layer.averages is not None:
                centre_tokens(tiles[index], x.shape[1], layer.averages)
            squares, sums = multiply_tokens(tiles[index], operands.weights, x.shape[1])
        if index >= STORE_LAG:
            store_group(layer, groups[index - STORE_LAG], outputs[index - STORE_LAG])
        if index < len(groups):
            outputs.append(normalise_sums(layer, squares, sums, operands, group.count_tokens()))
    return y


def check_arguments(x, w, norm_weight, norm_bias, grid, patch, bias, channels):
    """Return the numbers of images and of channels of y.

    Raise AssertionError if shapes do not fit together or a size is above its limit.
    """
    expect_dims(2, x, "x [N * T, H]")
    expect_dims(2, w, "w [H, P * P * C]")
    rows, columns = grid
    tokens, hidden = x.shape
    assert rows >= 1 and columns >= 1 and tokens % (rows * columns) == 0, (
        f"x has whole images of {rows} x {columns} patches, not {tokens} rows"
    )
    images = tokens // (rows * columns)
    assert images <= PARTITIONS, f"patch_output takes at most {PARTITIONS} images, not {images}"
    assert hidden <= MAX_HIDDEN, f"patch_output takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    assert w.shape[0] == hidden, f"w has {w.shape[0]} rows for a hidden size of {hidden}; give as many"
    assert patch >= 1 and w.shape[1] % (patch * patch) == 0, (
        f"w has {w.shape[1]} columns, which patches of {patch} x {patch} do not divide"
    )
    most = w.shape[1] // (patch * patch)
    channels = most if channels is None else channels
    assert channels >= 1 and channels <= most, f"channels is 1 to {most}, the channels of w, not {channels}"
    assert patch * channels <= PARTITIONS, (
        f"patch_output takes rows of a patch of at most {PARTITIONS} elements of all channels, not {patch * channels}"
    )
    outputs = patch * patch * channels
    assert outputs < BANK, f"patch_output takes patches of at most {BANK - 1} elements, not {outputs}"
    size = blocks(hidden) * w.shape[1] * item_bytes(x.dtype)
    assert size <= WEIGHT_BYTES, (
        f"w [{hidden}, {w.shape[1]}] takes {size} bytes of a partition, more than {WEIGHT_BYTES}; drop channels of it"
    )
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        expect_dims(2, tensor, f"{name} [N, H]")
        assert tensor.shape[1] == hidden and tensor.shape[0] in (1, images), (
            f"{name} is [{images}, {hidden}] or [1, {hidden}], not {tensor.shape}"
        )
    assert norm_weight.shape == norm_bias.shape, (
        f"norm_weight {norm_weight.shape} and norm_bias {norm_bias.shape} have the same number of rows"
    )
    expect_row(bias, w.shape[1], "bias")
    return images, channels


def count_tokens_at_once(x, outputs):
    """Return the most tokens of a group, a multiple of 128, as PSUM has room for their sums and SBUF for them."""
    tiles = GROUP_BYTES // (blocks(x.shape[1]) * PARTITIONS * item_bytes(x.dtype))
    return PARTITIONS * max(1, min(GROUP_TILES, BANK // (outputs + 1), tiles))


def list_groups(images, grid, most):
    """Return the TokenGroups of all images in order, of up to `most` tokens: whole rows, or a part of one."""
    groups = []
    for image in range(images):
        for rows in ranges(0, grid[0], max(1, most // grid[1])):
            for columns in ranges(0, grid[1], most):
                groups.append(TokenGroup(image, rows, columns))
    return groups


def load_group(x, group, grid):
    """Load the tokens of a group, transposed by DMA, into a new SBUF tile [h in block, block, token]."""
    tokens, hidden = group.count_tokens(), x.shape[1]
    first = (group.image * grid[0] + group.rows[0]) * grid[1] + group.columns[0]
    tile = allocate_blocks(hidden, blocks(hidden), tokens, x.dtype)
    transpose_block_range(tile, x[first : first + tokens, :], 0)
    return tile


def list_block_spans(hidden):
    """Return ranges (first, end, partitions) of blocks with equal partitions: all full ones, then the short one."""
    full = hidden // PARTITIONS
    spans = []
    if full > 0:
        spans.append((0, full, PARTITIONS))
    if hidden > full * PARTITIONS:
        spans.append((full, full + 1, hidden - full * PARTITIONS))
    return spans


def load_layer(x, y, w, modulation, bias, grid, patch, eps, norm_offset):
    """Load what all images share; return the PatchLayer. modulation: norm_weight and norm_bias @ HBM."""
    hidden, channels = x.shape[1], y.shape[1]
    outputs = patch * patch * channels
    factors, shifts = (
        load_transposed(modulation[0], modulation[0].dtype),
        load_transposed(modulation[1], x.dtype),
    )
    loaded = load_blocks(WeightMatrix(w), x.dtype, STATIC)
    scales = nl.ndarray(factors.shape, dtype=nl.float32, buffer=nl.sbuf)
    weights = nl.ndarray((loaded.shape[0], loaded.shape[1], outputs), dtype=x.dtype, buffer=nl.sbuf)
    for first, end, height in list_block_spans(hidden):
        raised = scales[0:height, first:end, :]
        nisa.tensor_scalar(dst=raised, data=factors[0:height, first:end, :], op0=nl.add, operand0=norm_offset)
        order_outputs(weights[0:height, first:end, :], loaded[0:height, first:end, :], patch)
    bias_row = None
    if bias is not None:
        bias_row = nl.ndarray((1, 1, outputs), dtype=x.dtype, buffer=nl.sbuf)
        order_outputs(bias_row, load(bias, bias.dtype).expand_dim(1), patch)
        bias_row = bias_row[:, 0, :]
    return PatchLayer(
        x,
        y,
        weights,
        bias_row,
        scales,
        shifts,
        grid,
        patch,
        filled((PARTITIONS, 1), eps),
        filled((PARTITIONS, PARTITIONS), 1.0, x.dtype),
        filled((PARTITIONS, PARTITIONS), 1.0 / hidden) if x.dtype == nl.float32 else None,
        identity(PARTITIONS, nl.float32),
    )


def order_outputs(dst, src, patch):
    """Copy columns (u, v, C) of `src` to columns (v, u, c) of `dst`, for as many channels c as `dst` has.

    Both are SBUF tiles [partition, block, column].
    """
    area = patch * patch
    source = src.reshape_dim(2, (patch, patch, src.shape[2] // area)).permute((0, 1, 3, 2, 4))
    channels = dst.shape[2] // area
    target = dst.reshape_dim(2, (patch, patch, channels))
    for column in range(patch):
        nisa.tensor_copy(dst=target[:, :, column], src=source[:, :, column, :, 0:channels])


def load_transposed(matrix, dtype):
    """Load a matrix [N, H] @ HBM, N up to 128, into a new SBUF tile [h in block, block, image] of `dtype`."""
    images, hidden = matrix.shape
    transposed = allocate_blocks(hidden, blocks(hidden), images, dtype)
    transpose_tiles(transposed, [load(matrix, dtype)], 0)
    return transposed


def prepare_image(layer, image):
    """Return the ImageOperands of an image. image: its column of the layer's scales and shifts."""
    weights, hidden = layer.weights, layer.x.shape[1]
    partitions, count, outputs = weights.shape
    scaled = nl.ndarray((partitions, count, outputs + 1), dtype=weights.dtype, buffer=nl.sbuf)
    nisa.memset(dst=scaled[:, :, outputs : outputs + 1], value=1.0)
    for first, end, height in list_block_spans(hidden):
        factors = layer.scales[0:height, first:end, image : image + 1].broadcast(2, outputs)
        nisa.tensor_tensor(
            dst=scaled[0:height, first:end, 0:outputs],
            data1=weights[0:height, first:end, :],
            data2=factors,
            op=nl.multiply,
        )
    shift = layer.shifts[:, :, image : image + 1].broadcast(2, PARTITIONS)
    ones = layer.ones.expand_dim(1).broadcast(1, count)
    banks = (
        multiply_blocks(ones, scaled[:, :, 0:outputs], hidden),
        multiply_blocks(shift, weights, hidden),
    )
    if layer.bias is not None:
        nisa.nc_matmul(dst=banks[1], stationary=layer.ones[0:1, :], moving=layer.bias, accumulate=True)
    rows = []
    for bank in banks:
        row = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=row, src=bank)
        rows.append(row)
    return ImageOperands(scaled, rows[0], rows[1])


def multiply_blocks(stationary, moving, hidden):
    """Return stationary^T @ moving over all of H in a new float32 PSUM tile; both are [h in block, block, column]."""
    bank = nl.ndarray((stationary.shape[2], moving.shape[2]), dtype=nl.float32, buffer=nl.psum)
    for block in range(blocks(hidden)):
        used = count_block_partitions(hidden, block, False)
        nisa.nc_matmul(
            dst=bank,
            stationary=stationary[0:used, block, :],
            moving=moving[0:used, block, :],
            accumulate=block > 0,
        )
    return bank


def centre_tokens(tokens, hidden, averages):
    """Subtract the mean of each token from its elements, in place: an SBUF tile [h in block, block, token].

    averages: [128, 128] in SBUF, 1 / hidden everywhere: products with it have the means on all partitions.
    """
    means = multiply_blocks(averages.expand_dim(1).broadcast(1, blocks(hidden)), tokens, hidden)
    for first, end, height in list_block_spans(hidden):
        elements = tokens[0:height, first:end, :]
        repeated = means[0:height, :].expand_dim(1).broadcast(1, end - first)
        nisa.tensor_tensor(dst=elements, data1=elements, data2=repeated, op=nl.subtract)


def multiply_tokens(tokens, weights, hidden):
    """Return products of tokens with each other and with the weights of their image, PSUM tiles [token, tile, column].

    Args:
        tokens: SBUF tile [h in block, block, token].
        weights: w' and ones, SBUF tile [h in block, block, outputs + 1].
        hidden: H.
    """
    count, width = tokens.shape[2], weights.shape[2]
    tiles = ranges(0, count)
    height = min(PARTITIONS, count)
    squares = nl.ndarray((height, len(tiles), height), dtype=nl.float32, buffer=nl.psum)
    sums = nl.ndarray((height, len(tiles), width), dtype=nl.float32, buffer=nl.psum)
    for index in range(len(tiles)):
        first, end = tiles[index]
        for block in range(blocks(hidden)):
            used = count_block_partitions(hidden, block, False)
            rows = tokens[0:used, block, first:end]
            for bank, moving in ((squares, rows), (sums, weights[0:used, block, :])):
                nisa.nc_matmul(
                    dst=bank[0 : end - first, index, 0 : moving.shape[1]],
                    stationary=rows,
                    moving=moving,
                    accumulate=block > 0,
                )
    return squares, sums


def normalise_sums(layer, squares, sums, operands, tokens):
    """Return the outputs of a group's tokens in a new SBUF tile [token, tile, output] in x's dtype.

    squares, sums: results of `multiply_tokens`. operands: ImageOperands. tokens: their number.
    """
    outputs = sums.shape[2] - 1
    patches = nl.ndarray((sums.shape[0], sums.shape[1], outputs), dtype=layer.y.dtype, buffer=nl.sbuf)
    full = tokens // PARTITIONS
    for first, end in ranges(0, full, GROUP_TILES) + ranges(full, blocks(tokens)):
        height = min(PARTITIONS, tokens - first * PARTITIONS)
        normalise_tiles(
            patches[0:height, first:end, :],
            squares[0:height, first:end, 0:height],
            sums[0:height, first:end, :],
            layer,
            operands,
        )
    return patches


def normalise_tiles(patches, squares, sums, layer, operands):
    """Write the outputs of some tiles with equally many tokens to `patches`, [token, tile, output] in SBUF.

    squares, sums: views of PSUM, [token, tile, token] and [token, tile, output + 1]. operands: ImageOperands.
    """
    height, count, outputs = patches.shape
    scale = 1.0 / layer.x.shape[1]
    totals = sums[:, :, outputs]
    means = nl.ndarray((height, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=means, data=totals, op0=nl.multiply, operand0=-scale)
    terms = nl.ndarray((height, count, height), dtype=nl.float32, buffer=nl.sbuf)
    diagonal = layer.diagonal[0:height, 0:height].expand_dim(1).broadcast(1, count)
    nisa.tensor_tensor(dst=terms, data1=squares, data2=diagonal, op=nl.multiply)
    products = nl.ndarray((height, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=products, data1=means, data2=totals, op=nl.multiply)
    variances = nl.ndarray((height, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=variances, op=nl.add, data=terms, axis=2)
    # The sum of squares, less the square of the sum by H; rounding may leave zero below zero.
    nisa.tensor_tensor(dst=variances, data1=variances, data2=products, op=nl.add)
    nisa.tensor_scalar(dst=variances, data=variances, op0=nl.maximum, operand0=0.0)
    scales = compute_inverse_root(variances, scale, layer.eps)
    centred = nl.ndarray(patches.shape, dtype=nl.float32, buffer=nl.sbuf)
    weight_sums = operands.sums[0:height, :].expand_dim(1).broadcast(1, count)
    constants = operands.constants[0:height, :].expand_dim(1).broadcast(1, count)
    nisa.tensor_tensor(
        dst=centred, data1=weight_sums, data2=means.expand_dim(2).broadcast(2, outputs), op=nl.multiply
    )
    nisa.tensor_tensor(dst=centred, data1=centred, data2=sums[:, :, 0:outputs], op=nl.add)
    nisa.tensor_tensor(
        dst=centred, data1=centred, data2=scales.expand_dim(2).broadcast(2, outputs), op=nl.multiply
    )
    nisa.tensor_tensor(dst=patches, data1=centred, data2=constants, op=nl.add)


def store_group(layer, group, outputs):
    """Store the outputs of a group's tokens, an SBUF tile [token, tile, (v, u, c)], to their places in y."""
    patch, tokens = layer.patch, group.count_tokens()
    channels = layer.y.shape[1]
    height = patch * channels
    stage = nl.ndarray((height, tokens, patch), dtype=layer.y.dtype, buffer=nl.sbuf)
    tiles = ranges(0, tokens)
    for column in range(patch):
        bank = nl.ndarray((height, tokens), dtype=layer.y.dtype, buffer=nl.psum)
        for index in range(len(tiles)):
            first, end = tiles[index]
            nisa.nc_transpose(
                dst=bank[:, first:end],
                data=outputs[0 : end - first, index, column * height : (column + 1) * height],
            )
        nisa.activation(dst=stage[:, :, column], op=nl.copy, data=bank)
    (top, bottom), (first_column, end_column) = group.rows, group.columns
    target = layer.y[group.image, :, top * patch : bottom * patch, first_column * patch : end_column * patch]
    lines = target.reshape_dim(1, (bottom - top, patch)).permute((2, 0, 1, 3))
    nisa.dma_copy(dst=lines, src=stage.reshape((height, bottom - top, (end_column - first_column) * patch)))


def patch_output_reference(
    x: np.ndarray,
    w: np.ndarray,
    norm_weight: np.ndarray,
    norm_bias: np.ndarray,
    eps: float,
    rows: int,
    columns: int,
    patch: int,
    bias: np.ndarray | None = None,
    norm_offset: float = 1.0,
    channels: int | None = None,
) -> np.ndarray:
    """Compute y with NumPy in float32, rounded to x's dtype, as is w times norm_weight + norm_offset."""
    hidden = x.shape[1]
    tokens = widened(x).reshape(-1, rows * columns, hidden)
    centred = tokens - tokens.mean(axis=2, keepdims=True)
    normalised = centred / np.sqrt(np.mean(centred * centred, axis=2, keepdims=True) + eps)
    weights = widened(w.astype(x.dtype))
    scales = widened(norm_weight)[:, :, None] + norm_offset
    products = normalised @ widened((weights * scales).astype(x.dtype))
    sums = products + (widened(norm_bias.astype(x.dtype)) @ weights)[:, None, :]
    if bias is not None:
        sums = sums + widened(bias.astype(x.dtype))
    patches = sums.reshape(len(tokens), rows, columns, patch, patch, -1)[..., :channels]
    images = patches.transpose(0, 5, 1, 3, 2, 4)
    return images.reshape(len(tokens), -1, rows * patch, columns * patch).astype(x.dtype)
