"""Drawing of pictures with coloured shapes: where shapes are, and which pixels they cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.shapes.captions import COLOURS, RELATIONS, Figure

SIDE = 64
"""Rows and columns of a picture."""
BACKGROUND = (246, 244, 240)
"""RGB value of the background, from 0 to 255."""
RADII = {"small": (6.0, 7.5), "large": (11.0, 13.0)}
"""Least and largest half width of a shape in pixels, by size."""

_MARGIN = 1.0
"""Least distance of a shape from the edge of the picture, in pixels."""
_GAP = 3.0
"""Least distance of the bounding boxes of two shapes along the axis of their relation, in pixels."""
_DOMINANCE = 6.0
"""By how many pixels the distance of two centres along the axis of their relation exceeds that along the other."""
_SAMPLES = 4
"""Points along each side of a pixel at which coverage is sampled."""


@dataclass(frozen=True)
class PlacedShape:
    """Shape in a picture: centre (row, column) of its bounding box and its half width, in pixels."""

    colour: str
    shape: str
    row: float
    column: float
    radius: float


def compute_coverage(shape: str, row: float, column: float, radius: float) -> np.ndarray:
    """Return the share of each pixel that a shape covers, float32 [64, 64], from 4 x 4 points of a pixel."""
    points = (np.arange(SIDE * _SAMPLES) + 0.5) / _SAMPLES
    down, right = points[:, None] - row, points[None, :] - column
    inside = _is_inside(shape, down / radius, right / radius)
    return inside.reshape(SIDE, _SAMPLES, SIDE, _SAMPLES).mean((1, 3), dtype=np.float32)


def _is_inside(shape: str, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return which points are inside a shape of half width 1 around the origin; coordinates broadcast."""
    height, width = np.abs(down), np.abs(right)
    if shape == "circle":
        return down**2 + right**2 <= 1
    if shape == "square":
        return np.maximum(height, width) <= 0.88
    if shape == "diamond":
        return height + width <= 1
    if shape == "cross":
        return (np.maximum(height, width) <= 1) & (np.minimum(height, width) <= 0.3)
    return (width <= (down + 1) / 2) & (down <= 1)  # a triangle with its tip up


def place_shapes(
    rng: np.random.Generator, figures: tuple[Figure, ...], relation: str
) -> tuple[PlacedShape, ...]:
    """Return one or two figures, all with a size, at random places where their relation is true and they do not touch.

    Places are drawn uniformly until the relation holds: along its axis the boxes are 3 pixels apart, and the centres
    are farther apart than along the other axis.
    """
    while True:
        shapes = tuple(_place_shape(rng, figure) for figure in figures)
        if not relation or _holds_clearly(shapes, relation):
            return shapes


def _place_shape(rng: np.random.Generator, figure: Figure) -> PlacedShape:
    """Return a figure at a uniformly drawn place inside the picture, with a radius of its size."""
    radius = rng.uniform(*RADII[figure.size])
    row, column = rng.uniform(radius + _MARGIN, SIDE - radius - _MARGIN, 2)
    return PlacedShape(figure.colour, figure.shape, row, column, radius)


def _holds_clearly(shapes: tuple[PlacedShape, ...], relation: str) -> bool:
    """Return whether a relation is true of two shapes, without doubt about its axis."""
    axis, sign = RELATIONS[relation]
    first, second = shapes
    distances = (second.row - first.row, second.column - first.column)
    along, across = sign * distances[axis], abs(distances[1 - axis])
    return along >= max(first.radius + second.radius + _GAP, across + _DOMINANCE)


def draw_picture(shapes: tuple[PlacedShape, ...]) -> np.ndarray:
    """Return the picture of shapes, uint8 [64, 64, 3], later shapes above earlier ones."""
    picture = np.broadcast_to(np.float32(BACKGROUND), (SIDE, SIDE, 3))
    for shape in shapes:
        coverage = compute_coverage(shape.shape, shape.row, shape.column, shape.radius)[:, :, None]
        picture = picture * (1 - coverage) + np.float32(COLOURS[shape.colour]) * coverage
    return np.rint(picture).astype(np.uint8)
