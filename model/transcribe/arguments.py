"""The options of `nkw transcribe`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.arguments import add_hardware, count
from simulate.targets import TARGETS

ACTIVATIONS = ("auto", "float32", "bfloat16")
BACKENDS = ("simulate", "numpy", "neuron")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "Write down what is said in a recording with a Whisper whose layers are NKI kernels, in windows of 30 "
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
    parser.add_argument(
        "--target",
        metavar="CHIP",
        choices=TARGETS,
        default="trn1",
        help="trn1, inf2, trn2 or trn3 (default: %(default)s)",
    )
    add_hardware(parser)
    parser.add_argument(
        "--tp",
        metavar="N",
        type=count,
        default=1,
        help="tensor-parallel ranks, one core each (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        choices=BACKENDS,
        default="simulate",
        help="simulate, numpy or neuron (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        choices=ACTIVATIONS,
        default="float32",
        help="of activations and caches: float32, bfloat16 or auto, the checkpoint's (default: %(default)s)",
    )
    parser.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not compare the tokens with the numpy model, which takes time and memory of its own",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write ids, checks and predictions as JSON; - is stdout"
    )
