"""The options of `nkw compile`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.commands.arguments import add_cores, add_dtype
from model.commands.engine_options import add_engine
from model.loading.shipped import model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "Compile the graphs of an engine for NeuronCores: every step that its buckets allow. Without AWS Neuron's "
        "packages the graphs are counted, and what is missing is said. Written to the vendor's documentation; it has "
        "not run on a chip.",
        78,
    )
    add = parser.add_argument
    add("model", metavar="FOLDER", type=model_path, help="Hugging Face folder, or a model that comes along")
    add_cores(parser, "trn2")
    add(
        "--out",
        metavar="CACHE",
        type=Path,
        help="folder of the compiled graphs, and of graphs.json, which lists them",
    )
    add(
        "--list",
        action="store_true",
        help="print every graph with its key, and compile nothing (without it: counts by kind)",
    )
    add("--launch", action="store_true", help=argparse.SUPPRESS)
    add_dtype(parser)
    add_engine(parser)
