"""Checker of pictures: finds the shapes in a picture, and says which attributes of a caption they have.

A picture is divided into connected regions that differ from the background. The colour of a region is the palette's
nearest one in its interior. Its shape and half width are those of the drawn shape that overlaps it best.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np

from tools.shapes.captions import COLOURS, RELATIONS, SHAPES, Caption
from tools.shapes.drawing import BACKGROUND, SIDE, PlacedShape, compute_coverage

_FOREGROUND = 0.35
"""Least share of the way from the background to the nearest colour that makes a pixel part of a shape."""
_SMALLEST_REGION = 12
"""Regions of fewer pixels are ignored as specks; the smallest shape covers 60."""
_SAME_COLOUR = 0.8
"""Least share of a region's interior that has one colour."""
_OVERLAP = 0.72
"""Least overlap (intersection over union) of a region with the drawn shape that it is taken for."""
_SIZE_BOUNDARY = 9.2
"""Half width in pixels between small and large shapes; those end at 7.5 and begin at 11."""

_PALETTE = np.float32([BACKGROUND, *COLOURS.values()])
_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Verdict:
    """Attributes of a caption that a picture has: True, False, or None for one that the caption does not state.

    count     the picture has as many shapes as the caption, all of them recognised
    """

    count: bool
    colour: bool | None = None
    shape: bool | None = None
    size: bool | None = None
    relation: bool | None = None

    @property
    def is_right(self) -> bool:
        """Whether the picture has all stated attributes."""
        return self.count and False not in (self.colour, self.shape, self.size, self.relation)


def check_picture(picture: np.ndarray, caption: Caption) -> Verdict:
    """Return which attributes of a caption a picture, uint8 [64, 64, 3], has."""
    return check_shapes(find_shapes(picture), caption)


def check_shapes(regions: list[PlacedShape | None], caption: Caption) -> Verdict:
    """Return which attributes of a caption the shapes have that `find_shapes` found in a picture.

    With two shapes, they are assigned to the caption's figures in the order that gives the most right attributes of
    colour and shape.
    """
    shapes = [shape for shape in regions if shape is not None]
    if len(regions) != len(caption.figures) or len(shapes) != len(regions):
        return Verdict(False)
    orders = [tuple(shapes), tuple(reversed(shapes))][: len(shapes)]
    return max((_judge(order, caption) for order in orders), key=_count_right)


def _count_right(verdict: Verdict) -> tuple[bool, int]:
    """Return a key that orders verdicts from worse to better."""
    attributes = (verdict.colour, verdict.shape, verdict.size, verdict.relation)
    return verdict.is_right, sum(attribute is True for attribute in attributes)


def _judge(shapes: tuple[PlacedShape, ...], caption: Caption) -> Verdict:
    """Return the verdict on shapes that stand for a caption's figures in this order."""
    pairs = list(zip(shapes, caption.figures))
    sizes = [figure.size == measure_size(shape) for shape, figure in pairs if figure.size]
    relation = None
    if caption.relation:
        axis, sign = RELATIONS[caption.relation]
        first, second = shapes
        distances = (second.row - first.row, second.column - first.column)
        relation = sign * distances[axis] > abs(distances[1 - axis])
    return Verdict(
        True,
        all(shape.colour == figure.colour for shape, figure in pairs),
        all(shape.shape == figure.shape for shape, figure in pairs),
        all(sizes) if sizes else None,
        relation,
    )


def measure_size(shape: PlacedShape) -> str:
    """Return "small" or "large" by the half width of a shape."""
    return "small" if shape.radius < _SIZE_BOUNDARY else "large"


def find_shapes(picture: np.ndarray) -> list[PlacedShape | None]:
    """Return the shapes in a picture, uint8 [64, 64, 3], in the order of their first pixel; None for an unknown one.

    A region is unknown if its interior has several colours, or if no drawn shape overlaps it well.
    """
    pixels = np.float32(picture)
    labels = np.argmin(((pixels[:, :, None] - _PALETTE) ** 2).sum(-1), -1)
    strength = np.max([_project(pixels, colour) for colour in _PALETTE[1:]], 0)
    return [
        _recognise(pixels, labels, region)
        for region in _find_regions(strength >= _FOREGROUND)
        if region.sum() >= _SMALLEST_REGION
    ]


def _project(pixels: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Return how far each pixel is on the way from the background (0) to a colour (1), float32 [rows, columns]."""
    way = colour - _PALETTE[0]
    return np.clip((pixels - _PALETTE[0]) @ way / (way @ way), 0, 1)


def _find_regions(mask: np.ndarray) -> list[np.ndarray]:
    """Return the regions of a mask that are connected over edges or corners of pixels, as masks."""
    regions, remaining = [], mask.copy()
    while remaining.any():
        region = np.zeros_like(mask)
        region[np.unravel_index(np.argmax(remaining), mask.shape)] = True
        while True:
            grown = _dilate(region) & remaining
            if (grown == region).all():
                break
            region = grown
        regions.append(region)
        remaining &= ~region
    return regions


def _dilate(mask: np.ndarray) -> np.ndarray:
    """Return a mask grown by one pixel in all eight directions."""
    padded = np.pad(mask, 1)
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3)).any((2, 3))


def _recognise(pixels: np.ndarray, labels: np.ndarray, region: np.ndarray) -> PlacedShape | None:
    """Return the shape that a region of a picture is, or None."""
    interior = ~_dilate(~region)
    if not interior.any():
        return None
    counts = np.bincount(labels[interior], minlength=len(_PALETTE))
    colour = int(np.argmax(counts))
    if colour == 0 or counts[colour] < _SAME_COLOUR * interior.sum():
        return None
    coverage = np.where(_dilate(region), _project(pixels, _PALETTE[colour]), 0)
    overlap, shape, row, column, radius = max(_fit(coverage, shape) for shape in SHAPES)
    return PlacedShape(_NAMES[colour - 1], shape, row, column, radius) if overlap >= _OVERLAP else None


def _fit(coverage: np.ndarray, shape: str) -> tuple[float, str, float, float, float]:
    """Return the best overlap of a shape with a region's coverage, the shape, its centre (row, column) and half width.

    The area and the centroid of the region give the first half width and centre; steps of 1 and then 0.5 pixels along
    one of the three at a time refine them.
    """
    unit_area, unit_offset = _measure_unit(shape)
    total = float(coverage.sum())
    rows, columns = (np.arange(SIDE) + 0.5 for _ in range(2))
    radius = (total / unit_area) ** 0.5
    row = float((coverage.sum(1) * rows).sum()) / total - unit_offset * radius
    column = float((coverage.sum(0) * columns).sum()) / total
    best = _overlap(coverage, shape, row, column, radius), row, column, radius
    for step in (1.0, 0.5, 0.5):
        for axis, sign in itertools.product(range(3), (-1, 1)):
            candidate = list(best[1:])
            candidate[axis] = max(2.0, candidate[axis] + sign * step)
            best = max(best, (_overlap(coverage, shape, *candidate), *candidate))
    overlap, row, column, radius = best
    return overlap, shape, row, column, radius


def _overlap(coverage: np.ndarray, shape: str, row: float, column: float, radius: float) -> float:
    """Return the intersection over union of a region's coverage with that of a drawn shape."""
    expected = compute_coverage(shape, row, column, radius)
    return float(np.minimum(coverage, expected).sum() / np.maximum(coverage, expected).sum())


@cache
def _measure_unit(shape: str) -> tuple[float, float]:
    """Return the area, and the row of the centroid relative to the centre, of a shape of half width 1."""
    radius, middle = 24.0, SIDE / 2
    coverage = compute_coverage(shape, middle, middle, radius)
    row = float((coverage.sum(1) * (np.arange(SIDE) + 0.5)).sum() / coverage.sum())
    return float(coverage.sum()) / radius**2, (row - middle) / radius
