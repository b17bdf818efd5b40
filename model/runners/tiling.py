"""Tiles of large images: an autoencoder computes overlapping tiles, which are blended where they overlap.

Tiles are those of diffusers' `enable_tiling`: a tile has the size of the images that the model was trained with, and
begins three quarters of a tile behind the one before. Tiles at the lower and right edges are smaller, so up to nine
sizes are compiled. With `equal_tiles` they are shifted to have the size of the others: one size is compiled for images
of all sizes from one tile on, and images differ from those of diffusers where tiles overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from model.config.autoencoder import AutoencoderConfig, Half
from model.errors import ModelError
from model.runners.component import Arrays, Component

_QUARTERS = 4
"""Tiles overlap by a quarter, so they have a multiple of four rows and columns of latents."""

Span = tuple[int, int]
"""Start and end of a tile along an axis, in rows or columns of latents."""


class TiledComponent:
    """Half of an autoencoder that computes images of any size, in tiles if they are larger than one tile.

    Args:
        create: Function of latent rows and columns that returns the half for this size.
        config: The half; its sizes of latents are not read.
        tile: Rows and columns of latents of a tile; by default those of `sample_size`.
        equal_tiles: Whether all tiles of an image have one size, see the module.

    Raises:
        ModelError: A tile is no positive multiple of four rows.
    """

    def __init__(
        self,
        create: Callable[[int, int], Component],
        config: AutoencoderConfig,
        tile: int | None = None,
        equal_tiles: bool = False,
    ) -> None:
        self._create = lru_cache(maxsize=None)(create)
        self._tile = config.sample_size // config.spatial_scale if tile is None else tile
        self._equal_tiles = equal_tiles
        if self._tile < 1 or self._tile % _QUARTERS:
            raise ModelError(
                f"a tile has {self._tile} rows of latents; tiles overlap by a quarter: pass a multiple of {_QUARTERS}"
            )
        is_decoder = config.half is Half.decoder
        self._source_scale = 1 if is_decoder else config.spatial_scale
        self._result_scale = config.spatial_scale if is_decoder else 1

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs by name; see `Component`. The inputs are one array [batch, channels, rows, columns].

        Raises:
            ModelError: An image of an encoder is no whole number of latents.
        """
        ((name, images),) = inputs.items()
        sides = images.shape[2:]
        if any(side % self._source_scale for side in sides):
            raise ModelError(
                f"images of {sides[0]} x {sides[1]} pixels; both are multiples of {self._source_scale}"
            )
        rows, columns = (side // self._source_scale for side in sides)
        if max(rows, columns) <= self._tile:
            return self._create(rows, columns).run(inputs)
        tiles = [
            [self._run_tile(name, images, row_span, column_span) for column_span in self._list_spans(columns)]
            for row_span in self._list_spans(rows)
        ]
        # Each tile is blended with the upper one, then with the left one, as these are after their own blending.
        strips = []
        for index, row in enumerate(tiles):
            if index:
                row = [self._blend(upper, tile, rows, index, 2) for upper, tile in zip(tiles[index - 1], row)]
            for column in range(1, len(row)):
                row[column] = self._blend(row[column - 1], row[column], columns, column, 3)
            tiles[index] = row
            strips.append(self._join(row, columns, 3))
        return {"x": self._join(strips, rows, 2)}

    def _list_spans(self, length: int) -> list[Span]:
        """Return the spans of tiles along an axis of `length` rows or columns of latents."""
        step = self._tile * (_QUARTERS - 1) // _QUARTERS
        if not self._equal_tiles:
            return [(start, min(start + self._tile, length)) for start in range(0, length, step)]
        shifts = max(0, length - self._tile)
        count = -(-shifts // step)
        starts = [index * shifts // count for index in range(count)] + [shifts]
        return [(start, min(start + self._tile, length)) for start in starts]

    def _run_tile(self, name: str, images: np.ndarray, row_span: Span, column_span: Span) -> np.ndarray:
        """Return the result of the half for one tile."""
        rows, columns = (
            slice(start * self._source_scale, end * self._source_scale)
            for start, end in (row_span, column_span)
        )
        component = self._create(row_span[1] - row_span[0], column_span[1] - column_span[0])
        return component.run({name: np.ascontiguousarray(images[:, :, rows, columns])})["x"]

    def _blend(self, before: np.ndarray, tile: np.ndarray, length: int, index: int, axis: int) -> np.ndarray:
        """Return tile number `index` along an axis, which passes linearly from `before` to itself in their overlap."""
        spans = self._list_spans(length)
        extent = (spans[index - 1][1] - spans[index][0]) * self._result_scale
        shares = (np.arange(extent, dtype=np.float32) / np.float32(extent)).reshape(-1, *(1,) * (3 - axis))
        first, inner = np.split(tile, [extent], axis)
        last = np.split(before, [before.shape[axis] - extent], axis)[1]
        return np.concatenate((last * (1 - shares) + first * shares, inner), axis)

    def _join(self, tiles: list[np.ndarray], length: int, axis: int) -> np.ndarray:
        """Return blended tiles side by side along an axis; each is cut where the next one begins."""
        starts = [start for start, _ in self._list_spans(length)]
        ends = [*starts[1:], length]
        sizes = [(end - start) * self._result_scale for start, end in zip(starts, ends)]
        return np.concatenate([np.split(tile, [size], axis)[0] for tile, size in zip(tiles, sizes)], axis)
