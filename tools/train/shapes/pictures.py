"""Training pictures: drawn anew for every batch, with captions that leave out sizes at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tools.shapes.captions import Caption, Figure, draw_training_figures, drop_sizes, make_split
from tools.shapes.drawing import draw_picture, place_shapes

_SPLIT = make_split()
_OTHER_SIZES = {"small": "large", "large": "small"}


def draw_pictures(
    rng: np.random.Generator, count: int
) -> tuple[np.ndarray, list[tuple[tuple[Figure, ...], str]]]:
    """Return training pictures, uint8 [count, 64, 64, 3], and the figures and relation of each."""
    scenes = [draw_training_figures(rng, _SPLIT) for _ in range(count)]
    return np.stack([draw_picture(place_shapes(rng, *scene)) for scene in scenes]), scenes


def describe_scenes(rng: np.random.Generator, scenes: list[tuple[tuple[Figure, ...], str]]) -> list[str]:
    """Return a caption of each scene, without a size with probability 1/2 where pictures show both sizes of a figure.

    Where they show one, a caption without it would teach that colour and shape decide the size.
    """
    captions = []
    for figures, relation in scenes:
        described = [
            figure if replace(figure, size=_OTHER_SIZES[figure.size]) in _SPLIT.figures else shortened
            for figure, shortened in zip(figures, drop_sizes(rng, figures), strict=True)
        ]
        captions.append(Caption(tuple(described), relation).text)
    return captions


def to_tensor(pictures: np.ndarray) -> torch.Tensor:
    """Return pictures uint8 [count, 64, 64, 3] as float32 [count, 3, 64, 64] from -1 to 1."""
    scaled = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    return scaled.contiguous(memory_format=torch.channels_last)


def to_pictures(tensor: torch.Tensor) -> np.ndarray:
    """Return float [count, 3, 64, 64] from -1 to 1 as pictures uint8 [count, 64, 64, 3]."""
    scaled = ((tensor.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).numpy()
