"""The options of `nkw generate`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.commands.arguments import (
    FIRST_PROMPT,
    add_backend,
    add_cores,
    add_dtype,
    add_hardware,
    add_sequence,
    count,
    probability,
    seed,
    temperature,
)
from model.loading.shipped import PRETRAINED, model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its options."""
    parser.description = textwrap.fill(
        "Continue a prompt with a Llama whose layers are NKI kernels. Every token is compared with a plain numpy "
        "model, and the time on each chip is predicted.",
        78,
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=model_path,
        default=PRETRAINED,
        help="Hugging Face folder, or a model that comes along: stories (default), or stories-moe, with experts",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        default=[],
        help=f"text to continue (default: {FIRST_PROMPT!r}); repeated, the texts are computed in one batch",
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="one text to continue on each line; - is stdin")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each text is a user's message, put into the model's chat template",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message before it, with --chat")
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end before this text; may be repeated",
    )
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=count,
        default=48,
        help="at most so many tokens (default: %(default)s)",
    )
    add_cores(parser, "trn2")
    add_hardware(parser)
    parser.add_argument(
        "--dp",
        metavar="N",
        type=count,
        default=1,
        help="groups of such ranks, which share the prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--pp",
        metavar="N",
        type=count,
        default=1,
        help="pipeline stages of such groups, each with some of the layers (default: %(default)s)",
    )
    parser.add_argument(
        "--micro-batches",
        metavar="N",
        type=count,
        help="in which prompts pass the stages (default: as many as stages, or as prompts of a group)",
    )
    parser.add_argument(
        "--ep",
        metavar="N",
        type=count,
        default=1,
        help="groups of --dp that divide routed experts (default: %(default)s)",
    )
    add_sequence(parser)
    add_backend(parser)
    add_dtype(parser)
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=temperature,
        help="0 takes the most likely token (default: 0, or that of a generation_config.json with do_sample)",
    )
    parser.add_argument("--top-k", metavar="K", type=count, help="sample from the K most likely tokens only")
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=probability,
        help="sample from the likeliest tokens of joint probability P",
    )
    parser.add_argument("--seed", metavar="S", type=seed, default=0, help="of the sampler (default: 0)")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="replay kernels instruction by instruction, for the bytes of an eager launch",
    )
    parser.add_argument(
        "--verify-replay",
        action="store_true",
        help="compare every replayed launch with an eager one, and stop at a difference",
    )
    parser.add_argument(
        "--replay-report", action="store_true", help="print what became of the kernels' launches"
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write the predicted timeline; opens in Perfetto"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the predicted time goes by kernel and by layer"
    )
    parser.add_argument(
        "--explain",
        metavar="N",
        nargs="?",
        const=1,
        type=count,
        help="show how new token N came about (default: the first): pieces of text, norms of the residual, what heads "
        "attend to, experts, candidates",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write that as a page, with a profile of every kernel"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write ids, checks and predictions as JSON; - is stdout"
    )
