"""The options of `nkw plan`, and the options that it shares with `nkw traffic`, which reads a config.json alone too."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.commands.arguments import add_hardware, add_sequence, count, price
from model.loading.shipped import model_path

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "From a config.json alone: parameters, bytes, what fits where, and the predicted times of a prompt and of a "
        "decode step, composed of dry runs of this project's kernels.",
        78,
    )
    add_hardware(parser)
    parser.add_argument(
        "--instance",
        metavar="NAME",
        help="instance type, or several over EFA: '4 x trn1.32xlarge' (default: trn2.48xlarge)",
    )
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help="instead, the roofline of h100, a100 or any peaks given as TFLOPS,TB/s",
    )
    parser.add_argument(
        "--tp",
        metavar="N",
        type=count,
        help="tensor-parallel ranks, one core each (default: of the mesh that decodes most)",
    )
    parser.add_argument("--pp", metavar="N", type=count, help="pipeline stages (default: as --tp, else 1)")
    parser.add_argument(
        "--ep", metavar="N", type=count, help="groups that divide routed experts (default: as --pp)"
    )
    add_sequence(parser)
    parser.add_argument(
        "--batch",
        metavar="N",
        type=count,
        default=1,
        help="sequences decoded together (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        metavar="N",
        type=count,
        help="tokens of a prompt (default: 896, or what the context leaves; of a Whisper 4, beside its window)",
    )
    parser.add_argument(
        "--generate",
        metavar="N",
        type=count,
        help="tokens generated (default: an eighth of 1,024; of a window of speech 128)",
    )
    add_config(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the plan as JSON; - is stdout")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the config, the dtype in which it is planned, and the price of the instance."""
    parser.add_argument(
        "config", metavar="CONFIG", type=model_path, help="config.json, or a folder that holds one"
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        choices=_DTYPES,
        default="auto",
        help="bfloat16, float16, float32 or auto, what the config names (default: %(default)s)",
    )
    parser.add_argument(
        "--price",
        metavar="DOLLARS",
        type=price,
        help="of the instance for an hour: adds the price of tokens",
    )
