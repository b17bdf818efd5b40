"""References of the kernels of public repositories, in numpy and float64, from their descriptions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def numpy_dtype(name: str) -> np.dtype:
    """Return a dtype by its name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Add a and b."""
    return a + b


def transposed_matmul(lhs_t: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Compute lhs_t.T @ rhs."""
    return lhs_t.T @ rhs


def average_pool(x: np.ndarray, pool_size: int) -> np.ndarray:
    """Return means of pool_size x pool_size windows side by side; x is (channels, height, width)."""
    c, h, w = x.shape
    return x.reshape(c, h // pool_size, pool_size, w // pool_size, pool_size).mean((2, 4))


def transpose_rows(x: np.ndarray, shape2D: Any) -> np.ndarray:
    """Transpose each row, a matrix of shape2D, and flatten it again."""
    return x.reshape(x.shape[0], *shape2D).transpose(0, 2, 1).reshape(x.shape).astype(np.float64)


def max_pool(x: np.ndarray, pool_size: int) -> np.ndarray:
    """Return maxima of all pool_size x pool_size windows."""
    return np.lib.stride_tricks.sliding_window_view(x, (pool_size, pool_size)).max((2, 3))


def softmax(x: np.ndarray) -> np.ndarray:
    """Compute softmax over the last dim."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attention_of_columns(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute softmax(q.T @ k) @ v.T with tokens in the columns."""
    return softmax(q.T @ k) @ v.T


def flash_forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, use_causal_mask: bool = True, **_: Any
) -> np.ndarray:
    """Compute attention of (batch, heads, d, tokens) q and k with (batch, heads, tokens, d) v, by 1/sqrt(d)."""
    scores = np.einsum("bhdq,bhdk->bhqk", q, k) / np.sqrt(q.shape[2])
    if use_causal_mask:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return softmax(scores) @ v


def small_head_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute attention of (batch, d, tokens) q with (batch, tokens, d) k and v, scaled by 0.125."""
    return softmax(q.transpose(0, 2, 1) @ k.transpose(0, 2, 1) * 0.125) @ v


def small_head_attention_of_columns(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute small_head_attention with (batch, d, tokens) k and result."""
    return small_head_attention(q, k.transpose(0, 2, 1), v).transpose(0, 2, 1)


def pipelined_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, use_causal_mask: bool
) -> np.ndarray:
    """Compute attention of (batch, d, tokens) q and k with (batch, tokens, d) v, a block of rows at a time."""
    assert not use_causal_mask
    out = np.empty_like(v)
    for batch in range(q.shape[0]):
        for start in range(0, q.shape[2], 1024):
            rows = slice(start, start + 1024)
            out[batch, rows] = softmax(q[batch, :, rows].T @ k[batch] * softmax_scale) @ v[batch]
    return out


def flash_backward_inputs(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw q, k, v, the forward output, its gradient and the log of the softmax sums, tokens in the last dim."""
    heads, d, tokens = 1, 128, 2048
    q, k, v, dy = (random.uniform(-1, 1, (1, heads, d, tokens)).astype(np.float32) for _ in range(4))
    scores, weights = _causal(q.astype(np.float64), k.astype(np.float64))
    out = np.einsum("bhqk,bhdk->bhdq", weights, v).astype(np.float32)
    sums = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    lse = sums.reshape(1, heads, tokens // _K, _K).transpose(0, 1, 3, 2).astype(np.float32)
    return q, k, v, out, dy, np.ascontiguousarray(lse)


def flash_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, dy: np.ndarray, lse: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Compute gradients of causal attention with respect to q, k and v."""
    scale = 1 / np.sqrt(q.shape[2])
    _, weights = _causal(q, k)
    from_output = np.einsum("bhdq,bhdk->bhqk", dy, v)
    inner = (weights * from_output).sum(-1, keepdims=True)
    from_scores = weights * (from_output - inner) * scale
    return (
        np.einsum("bhqk,bhdk->bhdq", from_scores, k),
        np.einsum("bhqk,bhdq->bhdk", from_scores, q),
        np.einsum("bhqk,bhdq->bhdk", weights, dy),
    )


def _causal(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores = np.einsum("bhdq,bhdk->bhqk", q, k) / np.sqrt(q.shape[2])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return scores, softmax(scores)


def quantised_matmul_inputs(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw bfloat16 lhs (m, k), and rhs quantised by column to float8_e4m3, row tiles side by side in pairs."""
    m, k, n, largest = 256, 1024, 512, 240
    lhs, rhs = random.random((m, k)), random.random((k, n))
    scale = rhs.max(0, keepdims=True) / largest
    tiles = (rhs / scale).reshape(k // (2 * _K), 2, _K, n // 512, 512)
    laid_out = tiles.transpose(0, 2, 3, 1, 4).reshape(k // 2, 2 * n)
    columns = np.broadcast_to(scale, (_K, n))
    return tuple(
        np.ascontiguousarray(values).astype(dtype)
        for values, dtype in (
            (lhs, ml_dtypes.bfloat16),
            (laid_out, ml_dtypes.float8_e4m3),
            (columns, ml_dtypes.bfloat16),
        )
    )


def quantised_matmul(lhs: np.ndarray, laid_out: np.ndarray, scale: np.ndarray, **_: Any) -> np.ndarray:
    """Compute lhs @ (the rhs that was quantised)."""
    k, n = 2 * laid_out.shape[0], laid_out.shape[1] // 2
    tiles = laid_out.reshape(k // (2 * _K), _K, n // 512, 2, 512)
    return lhs @ (tiles.transpose(0, 3, 1, 2, 4).reshape(k, n) * scale[0])


def selective_scan(
    delta: np.ndarray, u: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """Compute Mamba's state space model, one step after the other."""
    batch, channels, steps = delta.shape
    state = np.zeros((batch, channels, a.shape[1]))
    out = np.zeros((batch, channels, steps))
    for t in range(steps):
        kept = np.exp(delta[:, :, t, None] * a)
        state = kept * state + (delta[:, :, t] * u[:, :, t])[:, :, None] * b[:, None, :, t]
        out[:, :, t] = (state * c[:, None, :, t]).sum(-1)
    return out


def upsampled(x: np.ndarray, chunk_size: int = 0) -> np.ndarray:
    """Interpolate linearly to twice the size along every dim after the first two, corners not aligned."""
    for axis in range(2, x.ndim):
        size = x.shape[axis]
        position = np.clip((np.arange(2 * size) + 0.5) / 2 - 0.5, 0, size - 1)
        below = np.floor(position).astype(int)
        above = np.minimum(below + 1, size - 1)
        weight = (position - below).reshape(tuple(-1 if d == axis else 1 for d in range(x.ndim)))
        x = np.take(x, below, axis) * (1 - weight) + np.take(x, above, axis) * weight
    return x


def nearest(x: np.ndarray, out_shape: Any) -> np.ndarray:
    """Scale (batch, height, width, channels) by taking the nearest pixel towards the origin."""
    _, height, width, _ = out_shape
    rows = np.arange(height) * x.shape[1] // height
    columns = np.arange(width) * x.shape[2] // width
    return x[:, rows][:, :, columns]


def adaptive_average_pool(x: np.ndarray, output_size: Any) -> np.ndarray:
    """Return means over windows that split the last two dims as evenly as possible."""
    high, wide = output_size if isinstance(output_size, (list, tuple)) else (output_size, output_size)
    h, w = x.shape[2:]
    out = np.empty((*x.shape[:2], high, wide))
    for i in range(high):
        for j in range(wide):
            rows = slice(i * h // high, -(-(i + 1) * h // high))
            out[:, :, i, j] = x[:, :, rows, slice(j * w // wide, -(-(j + 1) * w // wide))].mean((2, 3))
    return out


def rms_norm_projection(hidden: np.ndarray, weights: np.ndarray, **_: Any) -> np.ndarray:
    """Compute (hidden / sqrt(mean(hidden^2) + 1e-6)) @ weights."""
    norm = np.sqrt(np.mean(hidden**2, -1, keepdims=True) + 1e-6)
    return (hidden / norm) @ weights


# -- MX: four values side by side share a power of two ---------------------------------------------------

_M, _K, _N, _PACKED, _PER_SCALE = 128, 128, 512, 4, 8
_ONE = 127  # the exponent byte of 2^0


def _whole_numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw whole numbers that every fp8 and fp4 format holds, so that quantising loses nothing."""
    return random.integers(-2, 3, shape).astype(np.float32)


def _packed(values: np.ndarray) -> np.ndarray:
    """Return float8_e5m2 values, four to a uint32, the first in the lowest byte."""
    return np.ascontiguousarray(values.astype(ml_dtypes.float8_e5m2)).view(np.uint32)


def _unpacked(words: np.ndarray) -> np.ndarray:
    return words.view(ml_dtypes.float8_e5m2).astype(np.float64).reshape(*words.shape, _PACKED)


def _scales(random: np.random.Generator, columns: int) -> np.ndarray:
    return random.integers(_ONE - 2, _ONE + 3, (_K // _PER_SCALE, columns)).astype(np.uint8)


def mx_offline_inputs(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw packed stationary and moving tiles with their scales."""
    stationary, moving = (
        _packed(_whole_numbers(random, _K, 4 * _M)),
        _packed(_whole_numbers(random, _K, 4 * _N)),
    )
    return stationary, _scales(random, _M), moving, _scales(random, _N)


def mx_matmul(s: np.ndarray, s_scale: np.ndarray, m: np.ndarray, m_scale: np.ndarray, **_: Any) -> np.ndarray:
    """Return the product of two packed tiles: over partitions and over the four values of an element."""
    left = _unpacked(s) * 2.0 ** (np.repeat(s_scale.astype(float), _PER_SCALE, 0) - _ONE)[:, :, None]
    right = _unpacked(m) * 2.0 ** (np.repeat(m_scale.astype(float), _PER_SCALE, 0) - _ONE)[:, :, None]
    return np.einsum("kmq,knq->mn", left, right)


def mx_moving_inputs(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw a packed stationary tile with its scales, and a moving tile that the kernel quantises."""
    moving = _whole_numbers(random, _K, 4 * _N).astype(ml_dtypes.bfloat16)
    return _packed(_whole_numbers(random, _K, 4 * _M)), _scales(random, _M), moving


def mx_matmul_quantising(s: np.ndarray, s_scale: np.ndarray, m: np.ndarray, **_: Any) -> np.ndarray:
    """Compute mx_matmul with a moving tile that quantising leaves as it is."""
    left = _unpacked(s) * 2.0 ** (np.repeat(s_scale.astype(float), _PER_SCALE, 0) - _ONE)[:, :, None]
    return np.einsum("kmq,knq->mn", left, m.reshape(_K, _N, _PACKED))


def mx_plain_inputs(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw two matrices that the kernel lays out and quantises."""
    shapes = ((_PACKED * _K, _M), (_PACKED * _K, _N))
    return tuple(_whole_numbers(random, *shape).astype(ml_dtypes.bfloat16) for shape in shapes)


def transposed_matmul_of(s: np.ndarray, m: np.ndarray, **_: Any) -> np.ndarray:
    """Compute s.T @ m."""
    return s.T @ m
