"""Rows of a batch of images, whose modulation has one row for each image.

The T rows of N images are consecutive: image n has rows n * T / N … (n + 1) * T / N - 1. An argument that differs from
image to image is [N, columns]; one row for all rows is N = 1. A tile of rows may have rows of several images.
"""

from __future__ import annotations

import nki.language as nl
import numpy as np

from nki_kernels.dma import STATIC, transfer
from nki_kernels.precision import widened


def check_image_rows(name, rows, tokens, columns):
    """Raise AssertionError unless `rows` is [N, columns] for an N that divides the rows of all tokens.

    name: that of the argument, for the message.
    """
    assert len(rows.shape) == 2 and rows.shape[1] == columns, (
        f"{name} has to be [1, {columns}], not {rows.shape}; or [images, {columns}], a row for each image"
    )
    assert tokens % rows.shape[0] == 0, (
        f"{name} has {rows.shape[0]} rows, one for each image, which do not divide {tokens} rows; "
        "images have equally many rows"
    )


def list_image_runs(first_row, rows, image_rows):
    """Divide a tile of rows between images; return runs (start, end, image, images).

    Rows start … end - 1 of the tile are those of `images` images from number `image` on, with equally many rows each.

    Args:
        first_row: the tile's first row among all rows.
        rows: rows of the tile.
        image_rows: rows of an image.
    """
    runs, start = [], 0
    while start < rows:
        image, skipped = (first_row + start) // image_rows, (first_row + start) % image_rows
        # Images that begin and end in the tile are one run.
        images = max(1, (rows - start) // image_rows) if skipped == 0 else 1
        end = min(rows, start + images * image_rows - skipped)
        runs.append((start, end, image, images))
        start = end
    return runs


def load_image_rows(source, first_row, rows, image_rows):
    """Load for each row of a tile the row of its image into a new SBUF tile [rows, columns] of the source's dtype.

    source: [N, columns] @ HBM. The other arguments are those of `list_image_runs`.
    """
    tile = nl.ndarray((rows, source.shape[1]), dtype=source.dtype, buffer=nl.sbuf)
    for start, end, image, images in list_image_runs(first_row, rows, image_rows):
        repeated = source[image : image + images, :].expand_dim(1).broadcast(1, (end - start) // images)
        transfer(tile[start:end, :], repeated, STATIC)
    return tile


def repeat_image_rows_reference(rows: np.ndarray, tokens: int) -> np.ndarray:
    """Return the row of its image for each of `tokens` rows, in float32 or wider; one row stays one."""
    wide = widened(rows)
    return wide if len(rows) == 1 else np.repeat(wide, tokens // len(rows), axis=0)
