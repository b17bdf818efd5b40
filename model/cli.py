"""The command `nkw`: its options and exit statuses. What it does is in `command.py`, imported when it is needed.

Exit status: 0 done, 2 wrong input (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from model.arguments import FIRST_PROMPT, count, load, pause, price, probability, rate, seed, temperature
from model.serve import top
from model.serve.arguments import add_arguments
from simulate.errors import NkwError, shown
from simulate.process import INTERRUPTED, imported, leave
from simulate.targets import TARGETS
from simulate.verbs import VERBS

PRETRAINED = Path(__file__).resolve().parent / "pretrained"
DTYPES = ("auto", "bfloat16", "float16", "float32")
ACTIVATIONS = ("auto", "float32", "bfloat16")
BACKENDS = ("simulate", "numpy", "neuron")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["sim"]:
        return _simulator(arguments[1:], "nkw sim", argv is None)
    if arguments and arguments[0] in VERBS:
        return _simulator(arguments, "nkw", argv is None)
    try:
        options = _parser().parse_args(arguments)
        if options.version:
            from model.version import DISTRIBUTION, version

            print(f"{DISTRIBUTION} {version()}")
            return 0
        if options.command is None:
            _parser().error(f"a command is needed: generate, serve, top, plan, traffic, {', '.join(VERBS)}")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows a question mark
        if options.command == "plan":
            from model.plan.command import plan_command as command
        elif options.command == "traffic":
            from model.traffic.command import traffic_command as command
        elif options.command == "top":
            from model.serve.top import top_command as command
        elif options.command == "serve":
            from model.serve.command import serve_command as command
        else:
            from model.command import generate_command as command
        if argv is None:
            imported()
        status = command(options)
        sys.stdout.flush()
        return status
    except NkwError as error:
        print(f"nkw: error: {shown(error.message)}", file=sys.stderr)
        return 2
    except MemoryError:
        print("nkw: error: this needs more memory than this machine has", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        if argv is None:
            leave(stopped, "nkw: ")
        print("\n" + ": ".join(["nkw: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is not None:  # files say themselves what is wrong with them; this is stdout
            raise
        print(f"nkw: error: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
        return 2


def _simulator(arguments: Sequence[str], prog: str, is_process: bool) -> int:
    """Run a command of the simulator. What a script raises passes through, as with `python -m simulate`."""
    from simulate.cli import main as simulator

    if is_process:
        imported()
    try:
        return simulator(arguments, prog)
    except KeyboardInterrupt as stopped:
        if not is_process:
            raise
        leave(stopped, "nkw: ")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shown(message)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nkw",
        description="NKI Workbench: NKI kernels run, timed and checked without a chip, and a Llama made of them.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_generate(
        _command(
            commands,
            "generate",
            "continue a prompt, check every token, predict the time",
            "--max-new-tokens 8",
        )
    )
    add_arguments(
        _command(
            commands,
            "serve",
            "answer OpenAI's HTTP API with a model, many requests at once",
            "--port 8000 --target trn2 --tp 2",
        ),
        PRETRAINED,
    )
    top.add_arguments(_command(commands, "top", "show what a server does", "--url http://127.0.0.1:8000"))
    _add_plan(
        _command(
            commands,
            "plan",
            "what a model needs and would do on a chip, from its config.json",
            "model/pretrained --tp 2",
        )
    )
    _add_traffic(
        _command(
            commands,
            "traffic",
            "what a stream of users would see, from a config.json",
            "model/pretrained --users 8 --prompt-lengths 64 --output-lengths 32",
        )
    )
    for name, verb in VERBS.items():
        commands.add_parser(name, add_help=False, help=verb.sentence)
    return parser


def _command(commands: Any, name: str, help: str, example: str) -> argparse.ArgumentParser:
    """A command whose help ends with an example and the exit statuses."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        epilog=f"example:\n  nkw {name} {example}\n\nExit status: 0 done, 2 wrong input; 130 interrupted, "
        "143 terminated.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = textwrap.fill(
        "Continue a prompt with a Llama whose layers are NKI kernels. Every token is compared with a plain numpy "
        "model, and the time on each chip is predicted.",
        78,
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        default=PRETRAINED,
        help="Hugging Face folder (default: a small story writer)",
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
    parser.add_argument(
        "--target",
        metavar="CHIP",
        choices=TARGETS,
        default="trn1",
        help="trn1, inf2, trn2 or trn3 (default: %(default)s)",
    )
    parser.add_argument(
        "--tp",
        metavar="N",
        type=count,
        default=1,
        help="tensor-parallel ranks, one core each (default: %(default)s)",
    )
    parser.add_argument(
        "--dp",
        metavar="N",
        type=count,
        default=1,
        help="groups of such ranks, which share the prompts (default: %(default)s)",
    )
    _add_sequence(parser)
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
        help="of activations and cache: float32, bfloat16 or auto, the checkpoint's (default: %(default)s)",
    )
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
        "--no-check",
        dest="check",
        action="store_false",
        help="do not compare the tokens with the numpy model, which takes time and memory of its own",
    )
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
        "--html", metavar="FILE", type=Path, help="write that as a page, with a profile of every kernel"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write ids, checks and predictions as JSON; - is stdout"
    )


def _add_sequence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sp",
        action="store_true",
        help="the ranks of --tp cut the rows of prompts among them, for norms and residuals",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = textwrap.fill(
        "From a config.json alone: parameters, bytes, what fits where, and the predicted times of a prompt and of a "
        "decode step, composed of dry runs of this project's kernels.",
        78,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="config.json, or a folder that holds one")
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
        help="tensor-parallel ranks, one core each (default: the fewest that hold the model)",
    )
    _add_sequence(parser)
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
        help="tokens of a prompt (default: 896, or what the context leaves)",
    )
    parser.add_argument(
        "--generate", metavar="N", type=count, help="tokens generated (default: an eighth of 1,024)"
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        choices=DTYPES,
        default="auto",
        help="bfloat16, float16, float32 or auto, what the config names (default: %(default)s)",
    )
    parser.add_argument(
        "--price",
        metavar="DOLLARS",
        type=price,
        help="of the instance for an hour: adds the price of tokens",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the plan as JSON; - is stdout")


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    parser.description = textwrap.fill(
        "The scheduler of the engine serves requests on the clock of predicted steps: times to first token, "
        "between tokens and end to end, throughput, goodput, pages, and the rate at which the service level breaks.",
        78,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="config.json, or a folder that holds one")
    parser.add_argument("--instance", metavar="NAME", help="instance type (default: trn2.48xlarge)")
    parser.add_argument(
        "--tp",
        metavar="N",
        type=count,
        help="tensor-parallel ranks of a replica (default: the fewest that hold the sequences of a step)",
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
        default="512",
        help="tokens: 512, 128..1024, exp:512 or lognormal:512,0.8 (default: %(default)s)",
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
        "buckets, other tp",
    )
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
        "--dtype",
        metavar="NAME",
        choices=DTYPES,
        default="auto",
        help="bfloat16, float16, float32 or auto, what the config names (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", metavar="S", type=seed, default=0, help="of arrivals and lengths (default: 0)"
    )
    parser.add_argument(
        "--price",
        metavar="DOLLARS",
        type=price,
        help="of the instance for an hour: adds the price of tokens",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the prediction as JSON; - is stdout")
