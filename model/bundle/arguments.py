"""The options of `nkw bundle` for a layer of a model, and which words ask for it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from model.arguments import FIRST_PROMPT, add_cores, add_dtype, add_hardware, count, seed
from model.folder import config_file
from model.shipped import model_path

_LAYER = "--layer"


def names_a_model(words: Sequence[str]) -> bool:
    """Whether the words behind `nkw bundle` ask for a layer of a model: --layer is there, or the first is a model."""
    if any(each.partition("=")[0] == _LAYER for each in words):
        return True
    folder = model_path(words[0]) if words else Path()
    return bool(words) and folder.is_dir() and config_file(folder).is_file()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "Write a folder that carries one layer of a model to a chip: every kernel launch of the layer, in a prompt "
        "and in the token behind it, with its arguments, expected results and predicted times. `nkw bundle` with "
        "MODULE:NAME or FILE.py:NAME carries kernels.",
        78,
    )
    add = parser.add_argument
    add("model", metavar="FOLDER", type=model_path, help="Hugging Face folder, or a model that comes along")
    add(_LAYER, metavar="N", type=seed, required=True, help="number of the layer; the first is 0")
    add("--out", metavar="DIR", type=Path, required=True, help="the folder to write, which is not there yet")
    add(
        "--tokens",
        metavar="T",
        type=count,
        default=8,
        help=f"tokens of the prompt, {FIRST_PROMPT!r} over and over (default: %(default)s)",
    )
    add_cores(parser, "trn2")
    add_dtype(parser)
    add_hardware(parser)
    add("--json", metavar="FILE", type=Path, help="write what was bundled as JSON; - is stdout")
