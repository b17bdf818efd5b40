"""group_norm: images whose groups of channels have mean 0 and variance 1, weighted, through an activation.

    y[n, c, p] = activation((x[n, c, p] - mean[n, g]) / sqrt(var[n, g] + eps) * weight[c] + bias[c]),  g = c // (C / G)

mean and var are over all pixels p of the C / G channels of a group of image n.

Dimensions:
    N   images of H rows and W columns, or sequences of L positions; C channels in G groups.

Arguments:
    x          [N, C, H, W] or [N, C, L] @ HBM, float32 or bfloat16
    weight     [1, C] @ HBM, float32 or bfloat16; bias the same
    groups     compile-time int, G
    eps        compile-time float
    activation "silu", "gelu" (by the error function), "gelu_tanh", "gelu_sigmoid", "relu" or None
    returns y  the shape of x @ HBM, x's dtype

Layout
    Channels of all images on the partitions, as many whole groups as 128 partitions hold; pixels in the free dim.

Tiling
    for some groups: the Vector engine takes mean and variance of each channel, 512 pixels at a time, while they arrive
        two products with the groups' members add over the channels of a group, and give each channel its group's sums
        one Scalar instruction for 4096 pixels scales, adds and activates, as they are stored
    Pixels of a channel that take at most `RESIDENT_BYTES` stay in SBUF. Others are loaded again for the second step.
    Two cores of a logical core take half of the groups of all images each.

Limits:
    C / G up to 128.

    `conv2d` computes this norm of the images that it reads, without moving them, where they have moments.

Cost
    HBM: x once, twice if it does not stay in SBUF; y once. Vector engine: each element once, at one element a cycle;
    Scalar engine the same. The variance of a group is the mean of its channels' variances plus that of the squared
    distances of their means, so a large mean costs no digits. Rounded: y.
    Predicted on trn2 in bfloat16 with SiLU, in program order: 512 channels of 64 x 64 pixels 49 us, 256 of 256 x 256
    270 us, 128 of 512 x 512 629 us, whose share of moving x and y once at 358 GB/s is 48, 69 and 60 %.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.mlp import activation_function, activation_reference
from nki_kernels.norms.groups import compute_factors, create_membership, load_affine
from nki_kernels.norms.row_tiles import STATISTICS
from nki_kernels.precision import widened
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import PARTITIONS, blocks, filled, ranges

cores = (1, 2)

PIXELS = 4096
"""Most pixels of a channel that are loaded and activated at once."""

RESIDENT_BYTES = 98304
"""Most bytes of a partition that pixels may take to stay in SBUF between the two steps."""


@nki.jit
def group_norm(x, weight, bias, groups, eps, activation=None):
    """Return y @ HBM in x's shape and dtype: normalised groups of channels, weighted, through the activation.

    Raises AssertionError if x has not 3 or 4 dims, weight or bias is not [1, C], `groups` does not divide C, a group
    has more than 128 channels, or the activation is unknown.
    """
    assert len(x.shape) in (3, 4), f"expected x [N, C, H, W] or [N, C, L], not a tensor of shape {x.shape}"
    channels = x.shape[1]
    for name, row in (("weight", weight), ("bias", bias)):
        assert row.shape == (1, channels), (
            f"{name} is [1, {channels}] for {channels} channels, not {row.shape}"
        )
    assert groups >= 1 and channels % groups == 0, (
        f"{groups} groups do not divide {channels} channels: give a divisor of {channels}"
    )
    members = channels // groups
    assert members <= PARTITIONS, (
        f"group_norm takes groups of at most {PARTITIONS} channels, not {members}: give more groups"
    )
    function = nl.copy if activation is None else activation_function(activation)
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    source, target = flatten_channels(x), flatten_channels(y)
    first, end = find_core_range(x.shape[0] * groups, PARTITIONS // members, nl.program_id(0))
    eps_column = filled((PARTITIONS, 1), eps)
    for start, last in ranges(first, end, PARTITIONS // members):
        rows = (start * members, last * members)
        normalise_groups(target, source, rows, members, (weight, bias), eps_column, function)
    return y


def flatten_channels(x):
    """Return a view of x [N, C, H, W] or [N, C, L] as [N * C, pixels]."""
    rows = x.flatten_dims(0, 1)
    return rows if len(rows.shape) == 2 else rows.flatten_dims(1, 2)


def normalise_groups(target, source, rows, members, affine, eps, function):
    """Write the normalised and activated pixels of some whole groups to `target`.

    Args:
        target: y as [channels of all images, pixels] @ HBM.
        source: x likewise.
        rows: first channel and end among those of all images, at most 128 channels.
        members: channels of a group.
        affine: weight and bias, [1, C] @ HBM each.
        eps: [128, 1] float32 in SBUF.
        function: the activation.
    """
    first, end = rows
    pixels = source.shape[1]
    spans = ranges(0, pixels, PIXELS)
    stays = pixels * item_bytes(source.dtype) <= RESIDENT_BYTES
    statistics = nl.ndarray((end - first, 6 * blocks(pixels, STATISTICS)), dtype=nl.float32, buffer=nl.sbuf)
    tiles = []
    for first_pixel, end_pixel in spans:
        tile = load_pixels(source, rows, first_pixel, end_pixel)
        if stays:
            tiles.append(tile)
        for begin, stop in ranges(first_pixel, end_pixel, STATISTICS):
            index = 6 * (begin // STATISTICS)
            nisa.bn_stats(
                dst=statistics[:, index : index + 6], data=tile[:, begin - first_pixel : stop - first_pixel]
            )
    moments = nl.ndarray((end - first, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_aggr(dst=moments, data=statistics)
    columns = load_affine(affine, rows)
    scale, shift = compute_factors(moments, members, columns, eps, create_membership(end - first, members))
    for index in range(len(spans)):
        first_pixel, end_pixel = spans[index]
        tile = tiles[index] if stays else load_pixels(source, rows, first_pixel, end_pixel)
        activated = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        nisa.activation(dst=activated, op=function, data=tile, scale=scale, bias=shift)
        nisa.dma_copy(dst=target[first:end, first_pixel:end_pixel], src=activated)


def load_pixels(source, rows, first_pixel, end_pixel):
    """Load pixels first_pixel … end_pixel - 1 of channels `rows` (first, end) into a new SBUF tile [channel, pixel]."""
    tile = nl.ndarray((rows[1] - rows[0], end_pixel - first_pixel), dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source[rows[0] : rows[1], first_pixel:end_pixel])
    return tile


def group_norm_reference(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    groups: int,
    eps: float,
    activation: str | None = None,
) -> np.ndarray:
    """Compute y with NumPy in float32, or in float64 for float64 arguments, rounded to x's dtype."""
    images, channels = x.shape[:2]
    pixels = widened(x).reshape(images, groups, -1)
    centred = pixels - pixels.mean(axis=2, keepdims=True)
    normalised = centred / np.sqrt(np.mean(centred * centred, axis=2, keepdims=True) + eps)
    by_channel = (1, channels, *(1 for _ in x.shape[2:]))
    weighted = normalised.reshape(x.shape) * widened(weight).reshape(by_channel)
    sums = weighted + widened(bias).reshape(by_channel)
    return (sums if activation is None else activation_reference(sums, activation)).astype(x.dtype)
