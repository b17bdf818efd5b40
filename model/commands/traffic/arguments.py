"""The options of `nkw traffic`."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from model.commands.arguments import add_buckets, add_hardware, count, load, pause, rate, seed
from model.commands.plan.arguments import add_config
from model.loading.shipped import model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = textwrap.fill(
        "The scheduler of the engine serves requests on the clock of predicted steps: times to first token, "
        "between tokens and end to end, throughput, goodput, pages, and the rate at which the service level breaks.",
        78,
    )
    add_hardware(parser)
    parser.add_argument("--instance", metavar="NAME", help="instance type (default: trn2.48xlarge)")
    parser.add_argument(
        "--tp",
        metavar="N",
        type=count,
        help="tensor-parallel ranks of a replica (default: the fewest that hold the sequences of a step)",
    )
    parser.add_argument(
        "--ep",
        metavar="N",
        type=count,
        default=1,
        help="groups of --tp ranks of a replica that divide the routed experts (default: 1)",
    )
    parser.add_argument(
        "--replicas",
        metavar="N",
        type=count,
        help="copies of the model (default: all that the instance holds)",
    )
    parser.add_argument(
        "--rate", metavar="R", type=rate, help="requests a second, at random; of a trace, its times stretched"
    )
    parser.add_argument(
        "--load",
        metavar="SHARE",
        type=load,
        help="instead, a share of the rate at which the service level breaks (default: 90%%, without a trace)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="requests of a CSV file with TIMESTAMP, ContextTokens, GeneratedTokens, or of a ShareGPT JSON file",
    )
    parser.add_argument(
        "--users",
        metavar="N",
        type=count,
        help="instead, users that each wait for the answer before they go on",
    )
    parser.add_argument(
        "--think", metavar="SECONDS", type=pause, default=0.0, help="for so long, with --users (default: 0)"
    )
    parser.add_argument(
        "--requests", metavar="N", type=count, help="requests (default: 1,000, or the whole trace)"
    )
    parser.add_argument(
        "--prompt-lengths",
        metavar="LENGTHS",
        help="tokens: 512, 128..1024, exp:512 or lognormal:512,0.8 (default: 512; of a Whisper 4, beside its window)",
    )
    parser.add_argument(
        "--output-lengths", metavar="LENGTHS", default="128", help="the same (default: %(default)s)"
    )
    parser.add_argument(
        "--shared-prefix",
        metavar="N[:GROUPS]",
        help="tokens before every prompt, the same for all requests of a group",
    )
    parser.add_argument(
        "--sla",
        metavar="BOUNDS",
        default="ttft=500ms,itl=50ms",
        help="the service level of a request: ttft, itl (its mean) and e2e (default: %(default)s)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="serve the same requests in other ways: static batches, whole prompts, no prefix cache, half the "
        "buckets, no drafts, prompts on replicas of their own, other tp",
    )
    parser.add_argument(
        "--prefill-replicas",
        metavar="N",
        type=count,
        default=0,
        help="replicas that compute prompts and hand their pages over to the others, which decode (default: none)",
    )
    _add_drafts(parser)
    parser.add_argument(
        "--max-num-seqs",
        metavar="N",
        type=count,
        default=256,
        help="sequences of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        metavar="N",
        type=count,
        default=2048,
        help="tokens of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len", metavar="N", type=count, help="tokens of a request (default: those of the longest)"
    )
    parser.add_argument(
        "--block-size", metavar="N", type=count, default=16, help="positions of a page (default: %(default)s)"
    )
    add_buckets(parser)
    parser.add_argument(
        "--no-chunked-prefill",
        dest="chunked_prefill",
        action="store_false",
        help="compute a prompt in one step, in which nothing decodes",
    )
    parser.add_argument(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        help="compute every prompt whole",
    )
    parser.add_argument(
        "--seed", metavar="S", type=seed, default=0, help="of arrivals and lengths (default: 0)"
    )
    add_config(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the prediction as JSON; - is stdout")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write it as a page, with distributions, the run over time, and latencies over rates",
    )


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculative-tokens",
        metavar="N",
        type=count,
        default=0,
        help="drafts that a step verifies for each request (default: none)",
    )
    parser.add_argument(
        "--acceptance",
        metavar="SHARE[,...]",
        help="of the drafts that are right where those before them are: 0.7, or 0.7,0.5 by their place",
    )
    parser.add_argument(
        "--acceptance-text",
        metavar="FILE",
        type=Path,
        help="instead, what prompt lookup finds in a text, by the tokenizer of CONFIG's folder",
    )
    parser.add_argument(
        "--draft-model",
        metavar="CONFIG",
        type=model_path,
        help="the model that proposes drafts, which takes time and pages (default: prompt lookup, which takes none)",
    )
