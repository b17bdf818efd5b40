"""The options of `nkw peer`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.commands.arguments import FIRST_PROMPT, count
from model.loading.shipped import model_path
from nkw.targets import TARGETS

LIBRARIES = ("transformers-neuronx", "neuronx-distributed-inference")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "Run a folder and prompts through one of AWS Neuron's own inference libraries, where it is installed, and "
        "compare tokens and logits with ours. Written to the vendor's documentation; it has not run on a chip.",
        78,
    )
    add = parser.add_argument
    add("model", metavar="FOLDER", type=model_path, help="Hugging Face folder")
    add(
        "--with",
        dest="library",
        metavar="NAME",
        choices=LIBRARIES,
        required=True,
        help=" or ".join(LIBRARIES),
    )
    add(
        "--prompt",
        metavar="TEXT",
        action="append",
        help=f"text to continue, may be repeated (default: {FIRST_PROMPT!r})",
    )
    add("--max-new-tokens", metavar="N", type=count, default=16, help="at most so many tokens (default: 16)")
    add(
        "--target",
        metavar="CHIP",
        choices=TARGETS,
        default="trn1",
        help="whose time is predicted (default: trn1)",
    )
    add("--tp", metavar="N", type=count, default=1, help="tensor-parallel ranks of the library (default: 1)")
    add(
        "--dtype",
        metavar="NAME",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and activations (default: float32)",
    )
    add("--json", metavar="FILE", type=Path, help="write the comparison as JSON; - is stdout")
