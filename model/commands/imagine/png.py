"""PNG files of images, with the settings that made them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from model.runners.png import encode_png
from nkw.files import OutputFile

_GAP = 2
"""Pixels between the images of a grid."""


def write_png(output: OutputFile, image: np.ndarray, settings: Mapping[str, str]) -> None:
    """Write an image, uint8 [rows, columns, 3], with settings as texts of the PNG.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    content = encode_png(image, settings)
    with output.writing() as file:
        file.buffer.write(content)


def arrange_grid(images: np.ndarray, columns: int) -> np.ndarray:
    """Return images [images, rows, columns, 3] as one, with so many images in a row and white lines between them."""
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    shape = (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels)
    grid = np.full(shape, 255, np.uint8)
    for index, image in enumerate(images):
        row, column = index // columns * (height + _GAP), index % columns * (width + _GAP)
        grid[row : row + height, column : column + width] = image
    return grid
