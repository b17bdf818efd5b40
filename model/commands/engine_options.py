"""The options of an engine on the command line, which `nkw serve` and `nkw compile` share; imports nothing heavy."""

from __future__ import annotations

import argparse

from model.commands.arguments import add_buckets, count
from model.state import INTERVAL


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add what decides the steps and the cache of an engine, besides `--target`, `--tp` and `--dtype`."""
    add = parser.add_argument
    add(
        "--ep",
        metavar="N",
        type=count,
        default=1,
        help="groups of --tp ranks that divide the routed experts, each with its own sequences and pages (default: 1)",
    )
    add(
        "--max-model-len",
        metavar="N",
        type=count,
        help="longest sequence (default: the context, at most 2048)",
    )
    add(
        "--max-num-seqs",
        metavar="N",
        type=count,
        default=16,
        help="sequences of a step (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=count,
        default=512,
        help="tokens of a step (default: %(default)s)",
    )
    add(
        "--block-size", metavar="N", type=count, default=16, help="positions of a page (default: %(default)s)"
    )
    add(
        "--num-pages",
        metavar="N",
        type=count,
        help="pages of the cache (default: as many as the sequences fill)",
    )
    add(
        "--num-state-slots",
        metavar="N",
        type=count,
        help="states of recurrent layers (default: two for each sequence of a step, three with drafts)",
    )
    add(
        "--mamba-block-size",
        metavar="N",
        type=count,
        default=INTERVAL,
        help="positions between snapshots of these states, a multiple of --block-size (default: %(default)s)",
    )
    add(
        "--kv-cache-dtype",
        metavar="NAME",
        default="auto",
        help="of cached keys and values: auto, the dtype of activations (default: %(default)s)",
    )
    add(
        "--speculative-config",
        metavar="JSON",
        help="drafts, as LLM takes them: '{\"num_speculative_tokens\": 3}' looks them up in the prompt",
    )
    add_buckets(parser)
