"""Options of images: prompts, sampling, and files of images."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from model.commands.options.readers import count, number
from model.loading.shipped import SHAPES, find_model_path
from nkw.options import Rows

FIRST_PROMPT = "a red circle above a blue square"


def parse_image_size(text: str) -> tuple[int, int]:
    """Return the width and the height of WIDTHxHEIGHT in pixels.

    Raises:
        argparse.ArgumentTypeError: The text is not two positive whole numbers of at most five digits with an x between.
    """
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not like 512x512, a width and a height in pixels")
    return int(match[1]), int(match[2])


ROWS: Rows = {
    "prompt=IMAGE": dict(
        metavar="PROMPT",
        nargs="*",
        help=f"what an image shows (default: {FIRST_PROMPT!r}); several become several images, drawn in one batch",
    ),
    "--model=IMAGES": dict(
        dest="model",
        metavar="DIR",
        type=find_model_path,
        default=SHAPES,
        help="folder of a diffusion model in the layout of diffusers, or the model that comes along: shapes (default)",
    ),
    "--negative-prompt": dict(
        metavar="TEXT", default="", help="what no image should show (default: nothing)"
    ),
    "--steps": dict(
        metavar="N", type=count, default=20, help="steps of the noise schedule (default: %(default)s)"
    ),
    "--guidance": dict(
        metavar="G",
        type=number,
        default=4.0,
        help="how strongly images follow the prompt; 1 saves the pass with the negative prompt, which distilled models "
        "never take (default: %(default)s)",
    ),
    "--guidance-passes": dict(
        metavar="HOW",
        choices=("batched", "separate"),
        default="batched",
        help="the two passes of a step as one batch, or one after the other: batched or separate "
        "(default: %(default)s)",
    ),
    "--images": dict(
        metavar="N",
        type=count,
        default=1,
        help="images of each prompt, with seeds that follow each other (default: %(default)s)",
    ),
    "--size": dict(
        metavar="WIDTHxHEIGHT",
        type=parse_image_size,
        help="of an image in pixels, a size of the model (default: its first)",
    ),
    "--ulysses-degree": dict(
        metavar="N",
        type=count,
        default=1,
        help="Ulysses ranks of each rank of --tp: they divide the rows of the denoiser's images, and its heads around "
        "attention (default: %(default)s)",
    ),
    "--latents": dict(
        metavar="FILE",
        type=Path,
        help="the noise to begin with, a .npy of shape images, channels, rows, columns; --seed is for later noise then",
    ),
    "--out=PNG": dict(
        metavar="FILE",
        type=Path,
        help="write the image as PNG with the settings in it; several images need --grid, or are numbered",
    ),
    "--grid": dict(action="store_true", help="write all images into one, a row for each prompt"),
    "--save-steps": dict(
        metavar="DIR", type=Path, help="write the images after each step too, into a new folder"
    ),
}
