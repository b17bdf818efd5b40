"""The options of an engine on the command line, and its arguments: what serves and what compiles read them alike."""

from __future__ import annotations

import argparse
import json
from typing import Any

from model.arguments import add_buckets, count
from model.engine_args import EngineArgs
from model.errors import ModelError
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
        "--speculative-config",
        metavar="JSON",
        help="drafts, as LLM takes them: '{\"num_speculative_tokens\": 3}' looks them up in the prompt",
    )
    add_buckets(parser)


def engine_args(options: argparse.Namespace, **more: Any) -> EngineArgs:
    """The engine that the options ask for; `more` are arguments that these options do not name."""
    return EngineArgs(
        model=options.model,
        tensor_parallel_size=options.tp,
        expert_parallel_size=options.ep,
        dtype=options.dtype,
        target=options.target,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        num_pages=options.num_pages,
        num_state_slots=options.num_state_slots,
        mamba_block_size=options.mamba_block_size,
        speculative_config=_object(options.speculative_config),
        buckets=options.buckets,
        **more,
    )


def _object(text: str | None) -> dict[str, Any] | None:
    """A JSON object on the command line."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError("--speculative-config is no JSON object, such as '{\"num_speculative_tokens\": 3}'")
    return found
