"""Weights in MXFP4, as checkpoints of gpt-oss hold them: blocks of 32 elements of 4 bits that share a power of two.

A stack [experts, in, out] is stored as `…_blocks` [experts, out, in / 32, 16], two elements in a byte, the lower bits
first, and `…_scales` [experts, out, in / 32], exponents with a bias of 127. bfloat16 holds every product exactly, but
for those of 2^128 and more, which are infinite. Elements of a block whose scale is 255 are no numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

BLOCK = 32
"""Elements that share a scale."""

BLOCKS, SCALES = "_blocks", "_scales"
"""What stands behind the name of a stack in a checkpoint."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_NO_NUMBER = 255
_ROWS_AT_ONCE = 256
"""Of 2,880 elements the addresses of their pairs take 3 MB."""


DTYPE = np.dtype(ml_dtypes.bfloat16)
"""To which elements are widened."""


def fit(blocks: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Whether blocks and scales of these shapes are a stack."""
    return len(scales) == 3 and blocks == (*scales, BLOCK // 2)


@dataclass(frozen=True)
class Packed:
    """A tensor [in, out]: blocks [out, in / 32, 16] and scales [out, in / 32], both uint8."""

    blocks: np.ndarray
    scales: np.ndarray
    dtype = DTYPE

    @property
    def shape(self) -> tuple[int, int]:
        """[in, out]."""
        outputs, count = self.scales.shape
        return count * BLOCK, outputs

    def array(self) -> np.ndarray:
        """The tensor in bfloat16."""
        outputs, count = self.scales.shape
        pairs = np.empty((outputs, count, BLOCK // 2), np.uint32)
        for first in range(0, outputs, _ROWS_AT_ONCE):
            own = slice(first, first + _ROWS_AT_ONCE)
            places = self.scales[own, :, None].astype(np.uint16) << 8 | self.blocks[own]
            np.take(_pairs(), places, out=pairs[own])
        return pairs.view(DTYPE).reshape(outputs, -1).T


@lru_cache(maxsize=1)
def _pairs() -> np.ndarray:
    """For every scale and byte, 256 * scale + byte, its two elements in bfloat16 as one word."""
    half = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)
    codes = np.arange(256)
    elements = np.stack([half[codes & 15], half[codes >> 4]], axis=1)
    exponents = np.arange(256, dtype=np.int32) - _BIAS
    with np.errstate(over="ignore"):
        values = np.ldexp(elements, exponents[:, None, None])
    values[_NO_NUMBER] = np.nan
    return values.astype(DTYPE).view(np.uint32).ravel()
