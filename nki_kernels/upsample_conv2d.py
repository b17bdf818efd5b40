"""upsample_conv2d: images enlarged twice by repeating each pixel, convolved with windows of 3 x 3.

    y[n, o, i, j] = activation(sum over c, u, v of x[n, c, (i + u - 1) // 2, (j + v - 1) // 2] * w[u, v, c, o]
                               + bias[o])

Elements beyond the enlarged image count as zeros.

Dimensions:
    N   images of H rows and W columns; C channels of x, O of y.

Arguments:
    x          [N, C, H, W] @ HBM, float32 or bfloat16
    w          [3, 3, C, O] @ HBM, float32 or bfloat16; sums of weights are read in x's dtype
    bias       [1, O] @ HBM, float32 or bfloat16, or None
    activation "silu", "gelu" (by the error function), "gelu_tanh", "gelu_sigmoid", "relu" or None
    returns_moments
               compile-time bool: mean and variance of each channel of y, [N, O, 2] float32 @ HBM, are returned too, for
               the group norm of a convolution (`conv2d`)
    returns y  [N, O, 2 H, 2 W] @ HBM, x's dtype

Layout
    Channels on the partitions, as in `conv2d`. The enlarged image never exists: four windows of 2 x 2 on x, one for
    each combination of even and odd rows and columns of y, have the sums of the weights that meet one pixel, see
    `convolution/upsampled.py`.

Tiling
    for O: all of it, or as many multiples of 128 as `WEIGHT_BYTES` holds sums of weights of
        for a stripe of images, or one for each group of partitions; the next ones under way
            for 128 of O
                for 4 PSUM tiles of up to 512 pixels of x
                    for the four phases: a matmul for each of the 4 taps and each 128 of C; bias and activation
                store whole rows of y
    Two cores of a logical core take half of O each.

Limits:
    C up to 2560 in bfloat16, 1280 in float32.

Cost
    HBM: x, w and y once; x once for each part of O. Tensor engine: 16 C O operations of two for each pixel of x, in
    place of 36. Scalar engine: an element of y each. Rounded to x's dtype: the sums of weights, and y.
    Predicted on trn2 in bfloat16, in program order, as shares of the floor: 512 channels of 64 x 64 pixels 89 %, of
    128 x 128 96 %; 256 channels of 256 x 256 pixels 98 %.
"""

from __future__ import annotations

import nki
import nki.language as nl
import numpy as np

from nki_kernels.conv2d import compute_moments_reference, conv2d_reference
from nki_kernels.convolution.upsampled import PHASES, convolve_upsampled
from nki_kernels.cores import find_core_range
from nki_kernels.mlp import activation_function, activation_reference
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.projection.feed_forward_weights import expect_row
from nki_kernels.tiles import PARTITIONS, expect_dims

cores = (1, 2)


@nki.jit
def upsample_conv2d(x, w, bias=None, activation=None, returns_moments=False):
    """Convolve images x, enlarged twice, with windows w of 3 x 3, add the bias, and apply the activation.

    Returns y [N, O, 2 H, 2 W] in x's dtype, in shared HBM, with returns_moments (y, moments [N, O, 2]). Raises
    AssertionError if w is not [3, 3, C, O], the bias not [1, O], or there are too many channels.
    """
    expect_dims(4, x, "x [N, C, H, W]")
    expect_dims(4, w, "w [3, 3, C, O]")
    images, channels, height, width = x.shape
    outputs = w.shape[3]
    assert w.shape == (3, 3, channels, outputs), (
        f"w is [3, 3, {channels}, O] for x of {channels} channels, not {w.shape}"
    )
    expect_row(bias, outputs, "bias")
    function = nl.copy if activation is None else activation_function(activation)
    pixels = nl.ndarray((images, outputs, 4 * height * width), dtype=x.dtype, buffer=nl.shared_hbm)
    y = pixels.reshape((images, outputs, 2 * height, 2 * width))
    first, end = find_core_range(outputs, PARTITIONS, nl.program_id(0))
    bias_columns = bias[:, first:end] if bias is not None else None
    if not returns_moments:
        convolve_upsampled(y[:, first:end], x, w[:, :, :, first:end], bias_columns, function)
        return y
    moments = nl.ndarray((images, outputs, 2), dtype=nl.float32, buffer=nl.shared_hbm)
    target = moments[:, first:end]
    convolve_upsampled(y[:, first:end], x, w[:, :, :, first:end], bias_columns, function, target)
    return y, moments


def upsample_conv2d_reference(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    returns_moments: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Compute y with NumPy: for each phase a convolution with 2 x 2 sums of weights, rounded to x's dtype before it."""
    images, _, height, width = x.shape
    y = np.empty((images, w.shape[3], 2 * height, 2 * width), np.result_type(x.dtype, np.float32))
    for row, column in PHASES:
        taps = widened(w)
        for axis, phase in ((0, row), (1, column)):
            first, middle, last = np.split(taps, 3, axis=axis)
            pair = (first + middle, last) if phase else (first, middle + last)
            taps = np.concatenate(pair, axis=axis)
        rounded = taps.astype(x.dtype)
        sums = conv2d_reference(widened(x), widened(rounded), padding=(1, 1))
        y[:, :, row::2, column::2] = sums[:, :, row : row + height, column : column + width]
    y = y + np.reshape(widened_or_zero(bias), (1, -1, 1, 1))
    y = (y if activation is None else activation_reference(y, activation)).astype(x.dtype)
    return (y, compute_moments_reference(y)) if returns_moments else y
