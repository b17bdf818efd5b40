"""conv2d: images convolved with a window per pair of channels, plus a bias, through an activation, plus other images.

    y[n, o, i, j] = activation(sum over c, u, v of x[n, c, i * s + u - p, j * t + v - q] * w[u, v, c, o] + bias[o])
                    + added[n, o, i, j]

Dimensions:
    N   images of H rows and W columns; C channels of x, O of y; U, V rows and columns of the window;
    s, t strides, p, q paddings before and p', q' after rows and columns; H' = (H + p + p' - U) // s + 1, W' likewise.

Arguments:
    x          [N, C, H, W] @ HBM, float32 or bfloat16; elements beyond the image count as zeros. With `image` also
               [N * H * W, C], rows of hidden states
    w          [U, V, C, O] @ HBM, float32 or bfloat16; read in x's dtype
    bias       [1, O] @ HBM, float32 or bfloat16, or None
    stride     compile-time pair of ints from 1 on
    padding    compile-time pair of ints, less than U and V: p, q
    activation "silu", "gelu" (by the error function), "gelu_tanh", "gelu_sigmoid", "relu" or None
    padding_end compile-time pair of ints likewise: p', q'; None for p, q
    added      [N, O, H', W'] @ HBM, x's dtype, or None: the residual of a block
    image      compile-time pair of ints or None: (H, W) where x is rows; then windows are single pixels
    moments    [N, C, 2] float32 @ HBM or None: mean and variance of each channel of x. Then its group norm is
               convolved: x is normalised in SBUF, by `norm_weight` and `norm_bias` [1, C] and compile-time `groups` and
               `eps`, and passed through `norm_activation`, named as `activation`
    returns_moments
               compile-time bool: the moments of y are returned too, for the norm of the next convolution
    returns y  [N, O, H', W'] @ HBM, x's dtype

Layout
    Channels on the partitions, in blocks of 128: those of x contract, those of y are the result's. A tap of all windows
    is a view of the image, with the strides, so one matmul adds it. The padding is written around the image in SBUF.
    Where channels are few, several taps lie on the partitions, each with the image shifted by its place
    (convolution/packing.py): 16 rows and 2 columns of 3 channels, 3 taps of 40 channels. Where 64 partitions or 32 are
    enough, groups of as many hold other stripes of the images, and matmuls of all groups run side by side in tiles of
    the PE array; up to 64 outputs leave room for other results of a stripe beside them (convolution/cells.py).

    A norm is one Scalar instruction for an image of a region, as it arrives; the Vector engine then takes results that
    fill a bank. Normalised images have one tap on the partitions. The Vector engine takes the moments of y, a tile at a
    time, behind its rounding; statistics of 64 tiles are combined (convolution/moments.py).

Tiling
    for O: all of it, or as many multiples of 128 as `WEIGHT_BYTES` holds weights of
        for a stripe of images, rows or columns, or one for each group of partitions; the next ones under way
            for 128 of O
                for 4 PSUM tiles of up to 512 pixels, or several small images, for each group of columns of the array
                    for blocks of C and packs of taps: one nc_matmul for each tile and group
    Bias and activation are one instruction, as a tile leaves PSUM. Without an activation the Vector engine takes every
    second tile, and all with `added`, which is loaded while the Tensor engine sums the products. Short rows of images
    go by way of a tile, so that whole images are loaded.
    Two cores of a logical core take half of O each.

Limits:
    With moments, ceil(C / ceil(C / 128)) channels are whole groups.
    U * V * ceil(C / 128) up to 320, in float32 160, less where taps are packed. What one row of windows reads fits into
    32 KiB of a partition.

Cost
    HBM: w, y and `added` once; x once for each tap of a pack and each part of O, what windows of two stripes share
    once more. Tensor engine: a matmul of 512 columns for each of N H' W' / 512 tiles, packs of taps, and O / 128
    blocks; up to eight of few channels or few outputs at a time. Rounding to x's dtype: y, and weights of another
    dtype.
    Predicted on trn2 in bfloat16, in the slower of program order and scheduled, as shares of the floor: 8 images of 3 x
    224 x 224 in patches of 16 51 %, of 14 61 %; 3 x 3 of 3 channels to 64 89 %, of 64 63 %, of 128 70 %, of 256 74 %;
    1 x 1 of 256 to 64 96 %. Seven rows of 3 channels with stride 2 (ResNet's first) reach 58 % of 43 us: rows of the
    image are loaded 3.5 times, which with y takes HBM 59 us.
    With norm and moments, 3 x 3 in program order: 512 channels of 64 x 64 pixels 282 us (87 %), of 128 x 128 1031
    (95 %), 256 of 256 x 256 1037 (95 %), 128 of 512 x 512 1039 (95 %), with `added` 1057 (93 %); 128 to 3 545 us, of
    192 that HBM takes. A launch of `group_norm` before would take 52, 124, 272 and 631 us more.
"""

from __future__ import annotations

import nki
import nki.language as nl
import numpy as np

from nki_kernels.convolution.normalised import InputNorm
from nki_kernels.convolution.products import convolve
from nki_kernels.convolution.windows import Windows, check_windows
from nki_kernels.cores import find_core_range
from nki_kernels.mlp import activation_function, activation_reference
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.projection.feed_forward_weights import expect_row
from nki_kernels.tiles import PARTITIONS, expect_dims

cores = (1, 2)


@nki.jit
def conv2d(
    x,
    w,
    bias=None,
    stride=(1, 1),
    padding=(0, 0),
    activation=None,
    padding_end=None,
    added=None,
    image=None,
    moments=None,
    norm_weight=None,
    norm_bias=None,
    groups=1,
    eps=1e-6,
    norm_activation=None,
    returns_moments=False,
):
    """Convolve images x with windows w, add the bias, apply the activation, and add `added` if it is given.

    Returns y [N, O, H', W'] in x's dtype, in shared HBM; with returns_moments (y, moments of y [N, O, 2] float32). The
    module docstring describes the arguments and limits; AssertionError if the arguments violate them.
    """
    expect_dims(4, w, "w [U, V, C, O]")
    rows, columns, inputs, outputs = w.shape
    if image is None:
        expect_dims(4, x, "x [N, C, H, W]")
        images, channels, height, width = x.shape
    else:
        expect_dims(2, x, "x [N * H * W, C]")
        (height, width), channels = image, x.shape[1]
        pixels = height * width
        assert pixels > 0 and x.shape[0] % pixels == 0, (
            f"x has {x.shape[0]} rows, which are no whole images of {height} x {width} pixels"
        )
        images = x.shape[0] // pixels
        assert (rows, columns, stride, padding) == (1, 1, (1, 1), (0, 0)), (
            f"rows of hidden states take windows of one pixel, not {rows} x {columns} with stride {stride} and "
            f"padding {padding}"
        )
    assert inputs == channels, (
        f"w has {inputs} input channels for x of {channels}: give w [U, V, C, O] for x [N, C, H, W]"
    )
    expect_row(bias, outputs, "bias")
    check_windows("conv2d", (height, width), (rows, columns), stride, padding, padding_end)
    windows = Windows(images, (height, width), (rows, columns), stride, padding, padding_end)
    if added is not None:
        shape = (images, outputs, windows.rows, windows.columns)
        assert added.shape == shape, f"added is {list(shape)} like y, not {added.shape}"
        assert added.dtype == x.dtype, f"added has x's dtype, {x.dtype}, not {added.dtype}"
    norm = None
    if moments is not None:
        assert image is None, "rows of hidden states have no group norm: give images, or no moments"
        norm_function = nl.copy if norm_activation is None else activation_function(norm_activation)
        norm = InputNorm(moments, norm_weight, norm_bias, groups, eps, norm_function)
        norm.check(images, channels)
    function = nl.copy if activation is None else activation_function(activation)
    # Pixels as one dim: stores of different rows of results then touch boxes that are apart.
    pixels = nl.ndarray(
        (images, outputs, windows.rows * windows.columns), dtype=x.dtype, buffer=nl.shared_hbm
    )
    y = pixels.reshape((images, outputs, windows.rows, windows.columns))
    if image is not None:
        # Images of one row: a stripe is then a range of rows of x, which DMA transposes.
        windows = Windows(images, (1, height * width), (1, 1), (1, 1), (0, 0))
        x = x.reshape_dim(0, (images, height * width))
    first, end = find_core_range(outputs, PARTITIONS, nl.program_id(0))
    taps = w.flatten_dims(0, 1)[:, :, first:end]
    bias_columns = bias[:, first:end] if bias is not None else None
    summands = added[:, first:end, :, :] if added is not None else None
    results = y[:, first:end, :, :]
    if image is not None:
        results = results.flatten_dims(2, 3).expand_dim(2)
        summands = summands.flatten_dims(2, 3).expand_dim(2) if added is not None else None
    if not returns_moments:
        convolve(results, x, taps, bias_columns, windows, function, summands, norm)
        return y
    result_moments = nl.ndarray((images, outputs, 2), dtype=nl.float32, buffer=nl.shared_hbm)
    target = result_moments[:, first:end]
    convolve(results, x, taps, bias_columns, windows, function, summands, norm, target)
    return y, result_moments


def conv2d_reference(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    activation: str | None = None,
    padding_end: tuple[int, int] | None = None,
    added: np.ndarray | None = None,
    image: tuple[int, int] | None = None,
    moments: np.ndarray | None = None,
    norm_weight: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
    groups: int = 1,
    eps: float = 1e-6,
    norm_activation: str | None = None,
    returns_moments: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Compute y with NumPy: one float32 product of all windows of x as rows with w, rounded to x's dtype at the end.

    With moments the normalised and activated x is rounded too. The moments of y are those of the rounded y.
    """
    if moments is not None:
        x = normalise_by_moments_reference(x, moments, norm_weight, norm_bias, groups, eps, norm_activation)
    if image is not None:
        x = x.reshape(-1, *image, x.shape[1]).transpose(0, 3, 1, 2)
    padded = np.pad(widened(x), ((0, 0), (0, 0), *zip(padding, padding_end or padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[:2], axis=(2, 3))
    windows = windows[:, :, :: stride[0], :: stride[1]].transpose(0, 2, 3, 4, 5, 1)
    sums = windows.reshape(*windows.shape[:3], -1) @ widened(w).reshape(-1, w.shape[3])
    sums = sums + widened_or_zero(bias)
    active = sums if activation is None else activation_reference(sums, activation)
    y = (active.transpose(0, 3, 1, 2) + widened_or_zero(added)).astype(x.dtype)
    return (y, compute_moments_reference(y)) if returns_moments else y


def compute_moments_reference(y: np.ndarray) -> np.ndarray:
    """Return mean and variance of each channel of images y [N, O, H, W], [N, O, 2] float32, or float64 for float64."""
    pixels = widened(y).reshape(*y.shape[:2], -1)
    return np.stack([pixels.mean(axis=2), pixels.var(axis=2)], axis=2)


def normalise_by_moments_reference(
    x: np.ndarray,
    moments: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    groups: int,
    eps: float,
    activation: str | None,
) -> np.ndarray:
    """Return the group norm of images x [N, C, H, W], activated, in x's dtype, from moments of channels [N, C, 2]."""
    by_group = widened(moments).reshape(len(x), groups, -1, 2)
    means = by_group[..., 0].mean(axis=2, keepdims=True)
    variances = (by_group[..., 1] + (by_group[..., 0] - means) ** 2).mean(axis=2, keepdims=True)
    pixels = widened(x).reshape(*by_group.shape[:3], -1)
    normalised = (pixels - means[..., None]) / np.sqrt(variances + np.float32(eps))[..., None]
    columns = (widened(row).reshape(1, -1, 1, 1) for row in (weight, bias))
    scale, shift = columns
    sums = normalised.reshape(x.shape) * scale + shift
    return (sums if activation is None else activation_reference(sums, activation)).astype(x.dtype)
