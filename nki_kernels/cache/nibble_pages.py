"""Full pages of keys and values in 4 bits: their layout, the rounding to them, and the way back.

A *group* of numbers shares a scale: the `block` positions of one element of a key in a page, or the D elements of the
value of one token and kv head. (KIVI, arXiv 2402.02750.) A nibble n = 0 … 15 stands for (n - 8) * scale.

    scale  = the group's largest magnitude / 7.5; of keys rounded to bfloat16, of values float32
    nibble = 8 + round(x * (1 / scale)), clipped to 0 … 15

    k_pages  [P, block + 4, Hk, D / 2] uint8: the nibbles of `block` positions, then the bytes of the scales [Hk, D]
    v_pages  [P, block, Hk, D / 2 + 4] uint8: the nibbles of a head, then the 4 bytes of its scale

Byte i of D / 2 has element i in its low nibble and element i + D / 2 in its high one.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.nibbles import split_nibbles
from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS

STEPS = 7.25
"""The largest magnitude of a group, counted in its scale: 7 is the largest stored number, -8 the least."""

LEAST_MAGNITUDE = 2.0**-100
"""A group of zeros has the scale of this magnitude, so that no scale is zero."""

SCALE_ROWS = 4
"""Rows of D / 2 bytes behind the nibbles of a page of keys: D scales of two bytes."""

SCALE_BYTES = 4
"""Bytes behind the nibbles of a head's value: its scale."""

MIDDLE = 8.0
"""The nibble that stands for 0."""


def check_pages(k_pages, v_pages, cache):
    """Raise AssertionError unless pages of 4 bits have the layout that goes with a paged cache.

    Args:
        k_pages: full pages of keys.
        v_pages: full pages of values.
        cache: `PagedCache` of the pages that are not full.
    """
    _, block, heads, depth = cache.k_cache.shape
    assert PARTITIONS % block == 0, (
        f"a page has 1, 2, 4 … {PARTITIONS} positions, not {block}; choose a divisor of {PARTITIONS}"
    )
    assert depth % 8 == 0 and depth <= PARTITIONS, (
        f"pages of 4 bits take heads of 8, 16, 24 … {PARTITIONS} elements, not {depth}"
    )
    for name, pages, shape in (
        ("k_pages", k_pages, (block + SCALE_ROWS, heads, depth // 2)),
        ("v_pages", v_pages, (block, heads, depth // 2 + SCALE_BYTES)),
    ):
        assert pages.dtype == nl.uint8 and pages.shape[1:] == shape and len(pages.shape) == 4, (
            f"{name} are uint8 [pages, {shape[0]}, {shape[1]}, {shape[2]}] beside caches {cache.k_cache.shape}, not "
            f"{pages.dtype} {pages.shape}"
        )
    assert v_pages.shape[0] == k_pages.shape[0], (
        f"k_pages has {k_pages.shape[0]} pages, v_pages has {v_pages.shape[0]}; pass as many of both"
    )


def compute_scales(groups, dtype):
    """Return the scales of groups as a new SBUF tile of `dtype`, shaped like `groups` without the last axis.

    Args:
        groups: numbers in SBUF; the last axis has the numbers of one group.
    """
    axis = len(groups.shape) - 1
    shape = groups.shape[0:axis]
    largest = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    least = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=groups, axis=axis)
    nisa.tensor_reduce(dst=least, op=nl.minimum, data=groups, axis=axis)
    nisa.scalar_tensor_tensor(
        dst=largest, data=least, op0=nl.multiply, operand0=-1.0, op1=nl.maximum, operand1=largest
    )
    scales = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=scales,
        data=largest,
        op0=nl.maximum,
        operand0=LEAST_MAGNITUDE,
        op1=nl.multiply,
        operand1=1.0 / STEPS,
    )
    return scales


def invert_scales(scales):
    """Return 1 / scales as a new float32 SBUF tile."""
    inverses = nl.ndarray(scales.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverses, data=scales)
    return inverses


def round_to_steps(numbers, inverses):
    """Return numbers in steps of their scales, -8 … 7, as a new int8 SBUF tile of their shape.

    Args:
        numbers: keys or values in SBUF.
        inverses: 1 / scale of each number, float32 in SBUF, broadcast to `numbers`.
    """
    ratios = nl.ndarray(numbers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=ratios, data1=numbers, data2=inverses, op=nl.multiply)
    steps = nl.ndarray(numbers.shape, dtype=nl.int8, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=steps, data=ratios, op0=nl.minimum, operand0=MIDDLE - 1.0, op1=nl.maximum, operand1=-MIDDLE
    )
    return steps


def pack_steps(target, steps):
    """Write numbers -8 … 7 as nibbles, two in a byte.

    Args:
        target: uint8 [rows, position, D / 2] in SBUF.
        steps: int8 [rows, position, D] in SBUF.
    """
    half = steps.shape[2] // 2
    low = nl.ndarray(target.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=low, data=steps[:, :, 0:half], op0=nl.add, operand0=17.0 * MIDDLE)
    nisa.scalar_tensor_tensor(
        dst=target, data=steps[:, :, half:], op0=nl.multiply, operand0=16.0, op1=nl.add, operand1=low
    )


def widen_nibbles(target, packed, scales):
    """Write (nibble - 8) * scale to `target` in SBUF, in its dtype.

    Args:
        target: [partition, run, position, D] in SBUF.
        packed: uint8 [partition, run, position, D / 2] in SBUF.
        scales: shaped like `target`, in SBUF, broadcast over the positions of a run or over D.
    """
    nisa.scalar_tensor_tensor(
        dst=target,
        data=unpack_nibbles(packed),
        op0=nl.subtract,
        operand0=MIDDLE,
        op1=nl.multiply,
        operand1=scales,
    )


def unpack_nibbles(packed):
    """Return the nibbles of bytes [partition, run, position, D / 2] as a new uint8 SBUF tile, [..., D]."""
    rows, runs, positions, half = packed.shape
    nibbles = nl.ndarray((rows, runs, positions, 2 * half), dtype=nl.float8_e4m3, buffer=nl.sbuf)
    split_nibbles(nibbles[:, :, :, 0:half], packed, False)
    split_nibbles(nibbles[:, :, :, half:], packed, True)
    return nibbles.view(nl.uint8)


def pack_reference(rows: np.ndarray, axis: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return packed rows, uint8 [..., D / 2], and the scales of groups along `axis`, float32 and with that axis 1.

    Args:
        rows: keys or values, [..., D].
        axis: axis of a group.
        bits: bits of a scale: 16, as of keys, for bfloat16, or 32.
    """
    numbers = widened(rows).astype(np.float32)
    largest = np.abs(numbers).max(axis=axis, keepdims=True)
    scales = np.maximum(largest, np.float32(LEAST_MAGNITUDE)) * np.float32(1 / STEPS)
    if bits == 16:
        scales = join_bfloat16_reference(split_bfloat16_reference(scales))
    nibbles = np.clip(np.rint(numbers * (1 / scales)), -8, 7) + 8
    low, high = np.split(nibbles.astype(np.uint8), 2, axis=-1)
    return low | high << 4, scales


def split_bfloat16_reference(numbers: np.ndarray) -> np.ndarray:
    """Return the upper 16 bits of finite float32 numbers, uint16, rounded to the nearest and ties to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def join_bfloat16_reference(bits: np.ndarray) -> np.ndarray:
    """Return the float32 numbers whose upper 16 bits are `bits` and whose lower bits are 0."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unpack_reference(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return (nibble - 8) * scale in float32, [..., D], of packed rows uint8 [..., D / 2]."""
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)
    return (nibbles - np.float32(MIDDLE)) * scales


def round_reference(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values of one page, [block, Hk, D] each, as later pages read them, in float32."""
    return unpack_reference(*pack_reference(keys, 0, 16)), unpack_reference(*pack_reference(values, 2, 32))


def widen_pages_reference(
    k_pages: np.ndarray, v_pages: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values of pages of 4 bits, [P, block, Hk, D] each, rounded to the dtype of the activations."""
    count, _, heads, half = k_pages.shape
    scale_bytes = np.ascontiguousarray(k_pages[:, -SCALE_ROWS:]).reshape(count, -1)
    k_scales = join_bfloat16_reference(scale_bytes.view(np.uint16)).reshape(count, 1, heads, 2 * half)
    v_scales = np.ascontiguousarray(v_pages[..., -SCALE_BYTES:]).view(np.float32)
    keys = unpack_reference(k_pages[:, :-SCALE_ROWS], k_scales)
    values = unpack_reference(v_pages[..., :-SCALE_BYTES], v_scales)
    return keys.astype(dtype), values.astype(dtype)
