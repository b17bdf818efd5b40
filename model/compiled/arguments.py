"""The options of `nkw compile`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.arguments import add_buckets, count
from model.shipped import model_path
from simulate.targets import TARGETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "Compile the graphs of an engine for NeuronCores: every step that its buckets allow. Without AWS Neuron's "
        "packages the graphs are listed, and what is missing is said. Written to the vendor's documentation; it has "
        "not run on a chip.",
        78,
    )
    add = parser.add_argument
    add("model", metavar="FOLDER", type=model_path, help="Hugging Face folder, or a model that comes along")
    add(
        "--target",
        metavar="CHIP",
        choices=TARGETS,
        default="trn2",
        help="trn1, inf2, trn2 or trn3 (default: trn2)",
    )
    add("--tp", metavar="N", type=count, default=1, help="tensor-parallel ranks (default: 1)")
    add(
        "--out",
        metavar="CACHE",
        type=Path,
        help="folder of the compiled graphs, and of graphs.json, which lists them",
    )
    add("--list", action="store_true", help="list the graphs with their keys, and compile nothing")
    add("--launch", action="store_true", help=argparse.SUPPRESS)
    add(
        "--dtype",
        metavar="NAME",
        choices=("auto", "float32", "bfloat16"),
        default="float32",
        help="as of nkw generate (default: float32)",
    )
    add(
        "--max-model-len",
        metavar="N",
        type=count,
        help="longest sequence (default: the context, at most 2048)",
    )
    add("--max-num-seqs", metavar="N", type=count, default=16, help="sequences of a step (default: 16)")
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=count,
        default=512,
        help="tokens of a step (default: 512)",
    )
    add("--block-size", metavar="N", type=count, default=16, help="positions of a page (default: 16)")
    add(
        "--num-pages",
        metavar="N",
        type=count,
        help="pages of the cache (default: as many as the sequences fill)",
    )
    add_buckets(parser)
