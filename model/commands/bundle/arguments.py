"""The options of `nkw bundle` for a model or a layer of it, and which words ask for it."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from model.commands.arguments import FIRST_PROMPT, add_cores, add_dtype, add_hardware, count, seed
from model.loading.shipped import model_path

_LAYER = "--layer"


def names_a_model(words: Sequence[str]) -> bool:
    """Whether the words behind `nkw bundle` ask for a model or a layer: --layer is there, or the first is a model."""
    if any(each.partition("=")[0] == _LAYER for each in words):
        return True
    from model.config.folder import config_file  # imports numpy, which no help needs

    folder = model_path(words[0]) if words else Path()
    return bool(words) and os.path.isdir(folder) and os.path.isfile(config_file(folder))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "Write a folder that carries a model to a chip: every kernel launch of a generation, with expected results, "
        "tokens and predicted times; the weights are taken from a folder there. With --layer, every launch of one "
        "layer, in a prompt and in the token behind it, with its weights. `nkw bundle` with MODULE:NAME or "
        "FILE.py:NAME carries kernels.",
        78,
    )
    add = parser.add_argument
    add("model", metavar="FOLDER", type=model_path, help="Hugging Face folder, or a model that comes along")
    add(_LAYER, metavar="N", type=seed, help="this layer alone; the first is 0 (default: the whole model)")
    add("--out", metavar="DIR", type=Path, required=True, help="the folder to write, which is not there yet")
    add(
        "--prompt",
        metavar="TEXT",
        action="append",
        help=f"what to continue; may be given again, for several generations (default: {FIRST_PROMPT!r})",
    )
    add(
        "--max-new-tokens",
        metavar="N",
        type=count,
        help="most tokens of a generation (default: 8)",
    )
    add(
        "--tokens",
        metavar="T",
        type=count,
        help=f"with --layer, tokens of the prompt, {FIRST_PROMPT!r} over and over (default: 8)",
    )
    add_cores(parser, "trn2")
    add_dtype(parser)
    add_hardware(parser)
    add("--json", metavar="FILE", type=Path, help="write what was bundled as JSON; - is stdout")
