"""The options of `nkw transcribe`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.commands.arguments import add_backend, add_cores, add_dtype, add_hardware, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "Transcribe a recording with a Whisper whose layers are NKI kernels, in windows of 30 "
        "seconds one after another, each on its own. Every token is compared with a plain numpy model, and the time "
        "on each chip is predicted.",
        78,
    )
    parser.add_argument("file", metavar="FILE.wav", type=Path, help="a recording: 16 kHz, one channel, PCM")
    parser.add_argument(
        "--model", metavar="DIR", type=Path, required=True, help="Hugging Face folder of a Whisper"
    )
    parser.add_argument(
        "--language",
        metavar="NAME",
        help="of the speech, such as en (default: that of generation_config.json)",
    )
    parser.add_argument(
        "--timestamps",
        action="store_true",
        help="write segments with the seconds in which they are said; a window begins where the last segment ended",
    )
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=count,
        default=128,
        help="at most so many tokens for a window (default: %(default)s)",
    )
    add_cores(parser, "trn1")
    add_hardware(parser)
    add_backend(parser)
    add_dtype(parser)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write ids, checks and predictions as JSON; - is stdout"
    )
