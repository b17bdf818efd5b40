"""PNG files of images, with the settings that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np

from model.errors import ModelError
from nkw.files import OutputFile

_GAP = 2
"""Pixels between the images of a grid."""


def check_pillow() -> None:
    """Raise ModelError if the library that writes PNG files is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ModelError(
            "images are written with Pillow, which is missing: pip install 'nki-workbench[images]'",
            "NKW-IMAGE-EXTRA",
        ) from None


def write_png(output: OutputFile, image: np.ndarray, settings: Mapping[str, str]) -> None:
    """Write an image, uint8 [rows, columns, 3], with settings as texts of the PNG.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    from PIL import Image, PngImagePlugin

    texts = PngImagePlugin.PngInfo()
    for name, text in settings.items():
        texts.add_itxt(name, text)
    content = BytesIO()
    Image.fromarray(image).save(content, "PNG", pnginfo=texts)
    with output.writing() as file:
        file.buffer.write(content.getvalue())


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


def describe_settings(prompts: Sequence[str], settings: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of a PNG: the prompt, the settings as "name: value, …", and the program."""
    listed = ", ".join(
        f"{name}: {setting}" for name, setting in settings.items() if setting not in (None, "")
    )
    return {"prompt": "\n".join(prompts), "settings": listed, "Software": "NKI Workbench"}
