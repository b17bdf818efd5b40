"""conv1d: sequences convolved with a window per pair of channels, plus a bias, through an activation.

    y[n, o, t] = activation(sum over c, u of x[n, c, t * stride + u - padding] * w[u, c, o] + bias[o])

Dimensions:
    N   sequences of L positions; C channels of x, O of y; U positions of the window;
    T = (L + 2 * padding - U) // stride + 1.

Arguments:
    x          [N, C, L] @ HBM, float32 or bfloat16; positions beyond the sequence count as zeros. Or images
               [N, C, H, W], whose L = H * W pixels follow one another row by row
    w          [U, C, O] @ HBM, float32 or bfloat16; read in x's dtype
    bias       [1, O] @ HBM, float32 or bfloat16, or None; with as_rows read in x's dtype
    stride     compile-time int from 1 on
    padding    compile-time int, less than U
    activation "silu", "gelu" (by the error function), "gelu_tanh", "gelu_sigmoid", "relu" or None
    as_rows    compile-time bool: y as rows of hidden states, as attention and MLP take them
    added      [T, O] @ HBM, float32 or bfloat16, or None: added to each sequence behind the activation; as_rows only
    returns y  [N, O, T] @ HBM, x's dtype; as_rows [N * T, O]

Layout
    C on the partitions, in blocks of 128. A tap of all windows is a view of the sequence, with the stride. Without
    as_rows the weights are stationary and O lies on the partitions of the result; else x is, and T does.

Tiling
    As `conv2d` does images of one row. As rows, for a stripe of positions, the next one under way: for 128 of T, for
    2048 of O, for C and U: one nc_matmul for each 512 of O. There the bias is one more product, with ones.
    Two cores of a logical core take half of O each.

Limits:
    U * ceil(C / 128) up to 320, in float32 160. What two windows that follow one another read fits into 32 KiB of a
    partition.

Cost
    HBM: w, y, `added` once; x once for each part of O whose weights stay in SBUF, or with few C for each of the taps on
    the partitions together (`convolution.packing`). Tensor engine: U * C / 128 matmuls of 512 columns for 128 of O and
    512 of T. Rounding to x's dtype: y, and weights of another dtype.
    Predicted for Whisper's first and second convolution on trn2 in bfloat16, with the floor's share of the time: tiny
    22 us (38 %; floor 8 us), 33 us (51 %); large-v3 52 us (72 %), 227 us in program order and 220 scheduled (83 %).
"""

from __future__ import annotations

import nki
import nki.language as nl
import numpy as np

from nki_kernels.conv2d import conv2d_reference
from nki_kernels.convolution.products import convolve, convolve_rows
from nki_kernels.convolution.windows import Windows, check_windows
from nki_kernels.cores import find_core_range
from nki_kernels.mlp import activation_function
from nki_kernels.precision import widened
from nki_kernels.projection.feed_forward_weights import expect_row
from nki_kernels.tiles import PARTITIONS, expect_dims

cores = (1, 2)


@nki.jit
def conv1d(x, w, bias=None, stride=1, padding=0, activation=None, as_rows=False, added=None):
    """Convolve sequences x with windows w, add the bias, apply the activation, and add `added` if it is given.

    Returns y [N, O, T] in x's dtype in shared HBM, or [N * T, O] with as_rows. The module docstring describes
    the arguments. AssertionError if they do not fit together or exceed its limits; `added` needs as_rows.
    """
    assert len(x.shape) in (3, 4), f"expected x [N, C, L] or [N, C, H, W], not a tensor of shape {x.shape}"
    expect_dims(3, w, "w [U, C, O]")
    x = x if len(x.shape) == 3 else x.flatten_dims(2, 3)
    sequences, channels, length = x.shape
    taps, inputs, outputs = w.shape
    assert inputs == channels, (
        f"w has {inputs} input channels for x of {channels}: give w [U, C, O] for x [N, C, L]"
    )
    expect_row(bias, outputs, "bias")
    check_windows("conv1d", (1, length), (1, taps), (1, stride), (0, padding))
    windows = Windows(sequences, (1, length), (1, taps), (1, stride), (0, padding))
    if added is not None:
        assert as_rows, "added is given without as_rows: conv1d adds to rows alone; set as_rows"
        assert added.shape == (windows.columns, outputs), (
            f"added has to be [{windows.columns}, {outputs}], not {added.shape}"
        )
    function = nl.copy if activation is None else activation_function(activation)
    first, end = find_core_range(outputs, PARTITIONS, nl.program_id(0))
    images = x.expand_dim(2)
    bias_columns = bias[:, first:end] if bias is not None else None
    if as_rows:
        y = nl.ndarray((sequences * windows.columns, outputs), dtype=x.dtype, buffer=nl.shared_hbm)
        rows = y[:, first:end].reshape_dim(0, (sequences, windows.columns))
        other = added[:, first:end] if added is not None else None
        convolve_rows(rows, images, w[:, :, first:end], bias_columns, other, windows, function)
        return y
    y = nl.ndarray((sequences, outputs, windows.columns), dtype=x.dtype, buffer=nl.shared_hbm)
    convolve(y[:, first:end, :].expand_dim(2), images, w[:, :, first:end], bias_columns, windows, function)
    return y


def conv1d_reference(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    stride: int = 1,
    padding: int = 0,
    activation: str | None = None,
    as_rows: bool = False,
    added: np.ndarray | None = None,
) -> np.ndarray:
    """Compute y with NumPy as a conv2d of images with one row, rounded to x's dtype.

    y is [N, O, T], or with as_rows [N * T, O], to which `added` [T, O] is added for each sequence.
    """
    y = conv2d_reference(
        widened(x).reshape(*x.shape[:2], 1, -1), w[None], bias, (1, stride), (0, padding), activation
    )[:, :, 0]
    if not as_rows:
        return y.astype(x.dtype)
    rows = y.transpose(0, 2, 1) + (0.0 if added is None else widened(added))
    return rows.reshape(-1, rows.shape[2]).astype(x.dtype)
