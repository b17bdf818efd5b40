"""Pipelines whose denoiser attends to image and text together, and whose images are all multiples of a patch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import prod

import numpy as np

from model.runners.pipelines.pipeline import ImagePipeline

_MOST_KEYS = 8192
"""Most patches and rows of text together: in every dtype, the kernel of attention has room for so many keys."""


@dataclass(frozen=True)
class JointPipeline(ImagePipeline):
    """Opened model with joint attention; its latents are shifted after they are scaled."""

    @property
    @abstractmethod
    def most_side_patches(self) -> int:
        """Most patches of a side of an image."""

    @property
    def _patch_side(self) -> int:
        """Rows and columns of a patch in pixels."""
        return self.denoiser_config.patch_size * self.autoencoder_config.spatial_scale

    @property
    def _most_patches(self) -> int:
        """Most patches of an image; the rows of its text are keys of attention too."""
        return _MOST_KEYS - self.denoiser_config.text_rows

    def has_size(self, rows: int, columns: int) -> bool:
        """Return whether an image of a size in pixels has whole patches, and few enough of them."""
        side = self._patch_side
        patches = rows // side, columns // side
        is_whole = rows % side == columns % side == 0
        return is_whole and max(patches) <= self.most_side_patches and prod(patches) <= self._most_patches

    def describe_sizes(self, aspect_ratio: float) -> str:
        """Return in words which sizes are taken."""
        side = self._patch_side
        return (
            f"width and height are multiples of {side} up to {self.most_side_patches * side}, together at most "
            f"{self._most_patches * side * side:,} pixels"
        )

    def unscale(self, latents: np.ndarray) -> np.ndarray:
        """Return latent images as the autoencoder decodes them: scaled, then shifted."""
        return super().unscale(latents) + np.float32(self.autoencoder_config.shift_factor)
