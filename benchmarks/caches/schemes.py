"""Quantisation of cached keys, values and latent rows in numpy, page by page.

A page has `PAGE` positions. The tokens of a page attend to the keys and values of their own page as they are, and to
those of earlier pages as a scheme stores them. Keys have a scale and an offset for each channel of a page, because a
few channels are large in all positions. Values have them for each token. (KIVI, arXiv 2402.02750.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.config import rope
from model.config.mixers import Positions
from model.layers.attention import Attention

PAGE = 16

Store = Callable[[Attention, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""Function of a layer, keys and values of a page [heads, PAGE, head_dim] and its first position; returns both as
stored."""


def round_to_levels(rows: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return numbers rounded to 2^bits equal steps from the least to the largest along an axis."""
    least, largest = rows.min(axis=axis, keepdims=True), rows.max(axis=axis, keepdims=True)
    scale = (largest - least) / np.float32(2**bits - 1)
    scale[scale == 0] = 1
    return np.rint((rows - least) / scale) * scale + least


def quantise_keys_and_values(bits: int) -> Store:
    """Return the scheme with a scale for each channel of a page of keys, and for each token of values."""

    def store(
        layer: Attention, keys: np.ndarray, values: np.ndarray, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return round_to_levels(keys, bits, 1), round_to_levels(values, bits, 2)

    return store


@dataclass(frozen=True)
class LatentBasis:
    """Orthonormal basis [keys and values of all heads, latent] of a layer's keys before rotation and its values."""

    basis: np.ndarray
    positions: Positions

    @classmethod
    def from_weights(cls, keys: np.ndarray, values: np.ndarray, positions: Positions) -> LatentBasis:
        """Return the left singular vectors of both projections [outputs, hidden], one below the other."""
        return cls(np.linalg.svd(np.concatenate([keys, values]), full_matrices=False)[0], positions)

    def rotate(self, keys: np.ndarray, first: int, sign: float) -> np.ndarray:
        """Return keys [heads, positions, head_dim] rotated by their positions; back with a sign of -1."""
        count, positions = keys.shape[1], self.positions
        cos, sin = rope.compute_tables(positions.rope, positions.width, positions.limit, first + count)
        cos, sin = cos[first:], sign * sin[first:]
        first_half, second_half = np.split(keys, 2, axis=-1)
        return np.concatenate(
            [first_half * cos - second_half * sin, second_half * cos + first_half * sin], axis=-1
        )


def quantise_latents(bits: int, bases: dict[str, LatentBasis]) -> Store:
    """Return the scheme that stores a latent row for each token: all keys and values in a layer's basis.

    As in latent attention, a row serves all heads and has one scale.

    Args:
        bits: Bits of an element; 0 to round nothing.
        bases: The basis of each layer by its name.
    """

    def store(
        layer: Attention, keys: np.ndarray, values: np.ndarray, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        basis = bases[layer.name]
        both = np.concatenate([basis.rotate(keys, first, -1.0), values])
        rows = both.swapaxes(0, 1).reshape(keys.shape[1], -1) @ basis.basis
        rows = round_to_levels(rows, bits, 1) if bits else rows
        heads, dim = len(both), keys.shape[2]
        both = (rows @ basis.basis.T).reshape(-1, heads, dim).swapaxes(0, 1).astype(np.float32)
        new_keys, new_values = np.split(both, 2)
        return basis.rotate(new_keys, first, 1.0), new_values

    return store
