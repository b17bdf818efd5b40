"""timestep_embedding: embeddings of the times of a denoiser's images: sinusoids, then two products with SiLU between.

    s[n] = cos(a[n, i]) for all i, then sin(a[n, i]);  a[n, i] = scale * t[n] * max_period^(-i / (F / 2 - shift))
    y[n] = silu(s[n] @ w_1 + b_1) @ w_2 + b_2 + added[n]

with i from 0 to F / 2 - 1, and shift the downscale_freq_shift. Without flip_sin_to_cos the sines are first. This is
diffusers' `get_timestep_embedding`, then its `TimestepEmbedding`.

Dimensions:
    N   images; F sinusoids; K hidden size of the embedding; H elements of an embedding on this rank.

Arguments:
    t        [N, 1] @ HBM, float32; |scale * t| up to 2^18
    w_1      [F, K] @ HBM, float32 or bfloat16; read in y's dtype
    b_1      [1, K] @ HBM, float32 or bfloat16; read in y's dtype
    w_2      [K, H] @ HBM, float32 or bfloat16; read in y's dtype
    b_2      [1, H] @ HBM, float32 or bfloat16
    added    [N, H] @ HBM, y's dtype: embeddings of guidance or of a text, or None
    flip_sin_to_cos, downscale_freq_shift, max_period, scale
             compile-time bool and floats, by diffusers' names
    dtype    compile-time dtype of y and of the operands of products; w_1's where it is not given
    returns  y [N, H] @ HBM, of that dtype

Layout
    Images on the partitions for the sinusoids, which are transposed. The first product has w_1 stationary, so that K is
    on the partitions of its result, as the second product contracts it.

Tiling
    The nearest multiple of 2 pi is subtracted from the angles in three terms, as the Scalar engine's sine is valid from
    -pi to pi. The cosine is the sine a quarter of a turn later.
    For 512 columns of w_1: a load, products, one Scalar instruction for SiLU.
    Then 2048 columns of w_2 at a time, see `projection/residual_product.py`.
    Two cores of a logical core take half of the columns of w_2 each; both compute the first product.

Limits:
    N up to 128. F is even, up to 2048, and above 2 * downscale_freq_shift. K up to 16384. A row of H elements takes at
    most 32 KiB.

Cost
    HBM: all arguments and y once. Bound: reading w_2. Predicted on trn2 in bfloat16 with 256 sinusoids: one image and
    K = H = 3072 56 us, two and 1152 18 us, which is 102 and 50 % of reading the weights at 358 GB/s.
    Error of a sinusoid before it is rounded: at most 2^-22 * |a| + 2^-20, as a frequency has up to three roundings of
    2^-24 and its product with t one; that of diffusers in float32 is at most 2^-21 * |scale * t| + 2^-22.
    Rounding to y's dtype: sinusoids, the activated product, y, and w_1, b_1 and w_2 of another dtype.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.matmul import MAX_CONTRACTION
from nki_kernels.mlp import activation_reference
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.projection.feed_forward_weights import expect_row
from nki_kernels.projection.residual_product import (
    MovingWeight,
    ResidualProduct,
    compute_chunk,
    count_chunk_columns,
)
from nki_kernels.projection.row_groups import allocate_transposed, transpose_tiles
from nki_kernels.projection.sums import RankSum
from nki_kernels.tiles import (
    BANK,
    MAX_ROW_BYTES,
    PARTITIONS,
    blocks,
    broadcast_row,
    count_block_partitions,
    expect_dims,
    expect_hidden,
    filled,
    load,
    ranges,
)
from nki_kernels.weights import WeightMatrix, load_blocks

cores = (1, 2)

MAX_SINUSOIDS = 2048

FREQUENCIES = 32
"""Frequencies that are written as constants; all others are one of them times a constant."""

PI = 3.141592653589793

TURN = (6.28125, 0.0019350051879882812, 3.019916050561733e-07)
"""Terms whose sum is 2 pi. Products of the first two with a number of turns are exact, as they have 8 and 11 bits."""

HALF_TURN = 3.1415925
"""The largest float32 below pi, where the range of the Scalar engine's sine ends."""


@nki.jit
def timestep_embedding(
    t,
    w_1,
    b_1,
    w_2,
    b_2,
    added=None,
    flip_sin_to_cos=True,
    downscale_freq_shift=0.0,
    max_period=10000.0,
    scale=1.0,
    dtype=None,
):
    """Return y [N, H] @ HBM in `dtype`, by default w_1's: silu(sinusoids(t) @ w_1 + b_1) @ w_2 + b_2 + added.

    Raises AssertionError if shapes or dtypes do not fit together, or a size is above its limit.
    """
    dtype = w_1.dtype if dtype is None else dtype
    check_arguments(t, w_1, b_1, w_2, b_2, added, downscale_freq_shift, dtype)
    images, hidden = t.shape[0], w_2.shape[1]
    y = nl.ndarray((images, hidden), dtype=dtype, buffer=nl.shared_hbm)
    first, end = find_core_range(hidden, BANK, nl.program_id(0))
    times = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.sbuf)
    # The Scalar engine's queue passes the loads of weights, which would delay the times.
    transfer(times, t, SCALAR)
    frequencies = fill_frequencies(images, w_1.shape[0] // 2, downscale_freq_shift, max_period, scale)
    sinusoids = compute_sinusoids(times, frequencies, flip_sin_to_cos, dtype)
    embeddings = project_sinusoids(sinusoids, w_1, b_1)
    product = ResidualProduct(
        y[:, first:end],
        None if added is None else added[:, first:end],
        MovingWeight([WeightMatrix(w_2[:, first:end])]),
        broadcast_row(b_2[:, first:end], images, nl.float32, 0.0),
        RankSum(None, 1, 1, []),
    )
    for column in range(0, end - first, count_chunk_columns(images)):
        compute_chunk(product, [embeddings], 0, column)
    return y


def check_arguments(t, w_1, b_1, w_2, b_2, added, downscale_freq_shift, dtype):
    """Raise AssertionError if shapes or dtypes do not fit together, or a size is above its limit."""
    expect_dims(2, w_1, "w_1 [F, K]")
    expect_dims(2, w_2, "w_2 [K, H]")
    expect_dims(2, t, "t [N, 1]")
    images = t.shape[0]
    count, depth = w_1.shape
    hidden = w_2.shape[1]
    assert t.shape == (images, 1) and t.dtype == nl.float32, (
        f"t is [N, 1] float32, not {t.shape} {t.dtype}; give one time for each image"
    )
    assert images <= PARTITIONS, f"timestep_embedding takes at most {PARTITIONS} images, not {images}"
    assert count % 2 == 0 and count <= MAX_SINUSOIDS, (
        f"timestep_embedding takes an even number of sinusoids up to {MAX_SINUSOIDS}, not {count}"
    )
    assert count > 2 * downscale_freq_shift, (
        f"downscale_freq_shift is below {count // 2}, half of the sinusoids, not {downscale_freq_shift}"
    )
    assert depth <= MAX_CONTRACTION, f"timestep_embedding contracts at most {MAX_CONTRACTION}, not {depth}"
    expect_row(b_1, depth, "b_1")
    assert w_2.shape[0] == depth, f"w_2 has {w_2.shape[0]} rows for {depth} columns of w_1; give as many"
    expect_hidden("timestep_embedding", w_1, hidden, MAX_ROW_BYTES)
    expect_row(b_2, hidden, "b_2")
    if added is not None:
        assert added.shape == (images, hidden), f"added is [{images}, {hidden}], not {added.shape}"
        assert added.dtype == dtype, f"added is {added.dtype}, y is {dtype}; convert one"


def fill_frequencies(images, count, shift, max_period, scale):
    """Return the frequencies scale * max_period^(-i / (count - shift)) on each of `images` partitions.

    The result is a new float32 SBUF tile [image, count]. The first ones are constants. All others are products of these
    with a constant: the exponential of the Scalar engine has an error that large times would multiply.
    """
    tile = nl.ndarray((images, count), dtype=nl.float32, buffer=nl.sbuf)
    # One power for each constant: powers of a rounded ratio would multiply its error where numbers have 32 bits.
    constants = min(FREQUENCIES, count)
    for index in range(constants):
        nisa.memset(dst=tile[:, index : index + 1], value=scale * max_period ** (-index / (count - shift)))
    for first, end in ranges(constants, count, FREQUENCIES):
        nisa.tensor_scalar(
            dst=tile[:, first:end],
            data=tile[:, 0 : end - first],
            op0=nl.multiply,
            operand0=max_period ** (-first / (count - shift)),
        )
    return tile


def compute_sinusoids(times, frequencies, flip_sin_to_cos, dtype):
    """Return sines and cosines of the angles times * frequencies, in a new SBUF tile [image, 2 * count] of `dtype`.

    Args:
        times: [image, 1] float32 in SBUF.
        frequencies: [image, count] float32 in SBUF.
        flip_sin_to_cos: whether the cosines are first.
        dtype: of the result.
    """
    images, count = frequencies.shape
    angles = nl.ndarray((images, 2 * count), dtype=nl.float32, buffer=nl.sbuf)
    halves = (angles[:, 0:count], angles[:, count : 2 * count])
    cosines, sines = halves if flip_sin_to_cos else (halves[1], halves[0])
    nisa.tensor_scalar(dst=sines, data=frequencies, op0=nl.multiply, operand0=times)
    # A conversion to integers rounds to the nearest.
    turns = nl.ndarray((images, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=turns, data=sines, op0=nl.multiply, operand0=0.5 / PI)
    for term in TURN:
        nisa.scalar_tensor_tensor(
            dst=sines, data=turns, op0=nl.multiply, operand0=-term, op1=nl.add, operand1=sines
        )
    nisa.tensor_scalar(dst=cosines, data=sines, op0=nl.add, operand0=0.5 * PI)
    beyond = nl.ndarray((images, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=beyond, data=cosines, op0=nl.greater, operand0=PI)
    nisa.scalar_tensor_tensor(
        dst=cosines, data=beyond, op0=nl.multiply, operand0=-2.0 * PI, op1=nl.add, operand1=cosines
    )
    nisa.tensor_scalar(
        dst=angles,
        data=angles,
        op0=nl.minimum,
        operand0=HALF_TURN,
        op1=nl.maximum,
        operand1=-HALF_TURN,
    )
    sinusoids = nl.ndarray(angles.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=sinusoids, op=nl.sin, data=angles)
    return sinusoids


def project_sinusoids(sinusoids, w_1, b_1):
    """Return silu(sinusoids @ w_1 + b_1) in a new SBUF tile [k in block, block, image] in the dtype of the sinusoids.

    Args:
        sinusoids: SBUF tile [image, F].
        w_1: [F, K] @ HBM.
        b_1: [1, K] @ HBM.
    """
    images, count = sinusoids.shape
    depth, dtype = w_1.shape[1], sinusoids.dtype
    moving = allocate_transposed(count, images, dtype)
    transpose_tiles(moving, [sinusoids], 0)
    ones = filled((1, images), 1.0, dtype)
    embeddings = allocate_transposed(depth, images, dtype)
    for first, end in ranges(0, depth, BANK):
        weights = load_blocks(WeightMatrix(w_1[:, first:end]), dtype, STATIC)
        bias = load(b_1[:, first:end], dtype)
        sums = nl.ndarray(
            (embeddings.shape[0], blocks(end - first), images), dtype=nl.float32, buffer=nl.psum
        )
        for start, last in ranges(first, end):
            columns = slice(start - first, last - first)
            bank = sums[0 : last - start, (start - first) // PARTITIONS, :]
            for block in range(blocks(count)):
                used = count_block_partitions(count, block, False)
                nisa.nc_matmul(
                    dst=bank,
                    stationary=weights[0:used, block, columns],
                    moving=moving[0:used, block, :],
                    accumulate=block > 0,
                )
            nisa.nc_matmul(dst=bank, stationary=bias[:, columns], moving=ones, accumulate=True)
        # A short last block has fewer partitions, so that it takes an instruction of its own.
        full = blocks(end - first) if depth < PARTITIONS else (end - first) // PARTITIONS
        for start, last in ranges(0, full, BANK) + ranges(full, blocks(end - first)):
            block = first // PARTITIONS + start
            used = count_block_partitions(depth, block, False)
            nisa.activation(
                dst=embeddings[0:used, block : block + last - start, :],
                op=nl.silu,
                data=sums[0:used, start:last, :],
            )
    return embeddings


def timestep_embedding_reference(
    t: np.ndarray,
    w_1: np.ndarray,
    b_1: np.ndarray,
    w_2: np.ndarray,
    b_2: np.ndarray,
    added: np.ndarray | None = None,
    flip_sin_to_cos: bool = True,
    downscale_freq_shift: float = 0.0,
    max_period: float = 10000.0,
    scale: float = 1.0,
    dtype: object = None,
) -> np.ndarray:
    """Return silu(sinusoids(t) @ w_1 + b_1) @ w_2 + b_2 + added in `dtype`, by default w_1's, computed in float32.

    The sinusoids, the activated product and weights of another dtype are rounded to it, as the kernel rounds them.
    """
    times, dtype = widened(t), w_1.dtype if dtype is None else dtype
    count = w_1.shape[0] // 2
    exponents = (
        -float(np.log(max_period)) * np.arange(count, dtype=times.dtype) / (count - downscale_freq_shift)
    )
    angles = scale * (times * np.exp(exponents))
    pair = (np.cos(angles), np.sin(angles))
    sinusoids = np.concatenate(pair if flip_sin_to_cos else pair[::-1], axis=1).astype(dtype)
    product = widened(sinusoids) @ widened(w_1.astype(dtype)) + widened(b_1.astype(dtype))
    embeddings = activation_reference(product, "silu").astype(dtype)
    sums = widened(embeddings) @ widened(w_2.astype(dtype)) + widened(b_2) + widened_or_zero(added)
    return sums.astype(dtype)
