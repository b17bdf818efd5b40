"""The options of `nkw serve`; imports nothing of the extra."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path

from model.commands.arguments import add_cores, add_dtype, add_hardware, count, seed
from model.commands.engine_options import add_engine
from model.loading.shipped import model_path
from model.serve.openai.calls import TOOL_CALL_PARSERS
from nkw.errors import shown
from nkw.process import positive_seconds

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[1-9]\d{0,4}))?"
)
_DEFAULT_PORTS = (("http", "80"), ("https", "443"))
_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser, model: Path) -> None:
    """Add the options to a parser; `model` is the folder of the model without --model."""
    parser.description = textwrap.fill(
        "Serve a model with OpenAI's HTTP API: completions and chats of many clients, computed together by NKI kernels "
        "on simulated cores or NeuronCores. SIGTERM or Ctrl-C finishes what was begun; a second one stops.",
        78,
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="DIR",
        type=model_path,
        default=model,
        help="Hugging Face folder, or a model that comes along: stories (default), stories-moe",
    )
    add("--served-model-name", metavar="NAME", help="what clients call it (default: the folder's name)")
    add("--host", metavar="HOST", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    add("--port", metavar="N", type=seed, default=8000, help="0 takes a free one (default: %(default)s)")
    add(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="the clients' keys, one on each line; without it only a loopback address is listened at",
    )
    add(
        "--allowed-origins",
        metavar="JSON",
        type=parse_origins,
        default=(),
        help="JSON list of origins whose pages may send requests from a browser (default: none)",
    )
    add(
        "--replicas",
        metavar="N",
        type=count,
        default=1,
        help="engines behind the port, each with all that follows, in a process of its own (default: 1)",
    )
    add(
        "--backend",
        metavar="NAME",
        choices=("simulate", "neuron"),
        default="simulate",
        help="simulate or neuron (default: %(default)s)",
    )
    add_cores(parser, "trn2")
    add_hardware(parser)
    add_dtype(parser)
    add_engine(parser)
    add("--no-prefix-caching", action="store_true", help="do not share pages of prompts that begin alike")
    add(
        "--tool-call-parser",
        metavar="NAME",
        choices=TOOL_CALL_PARSERS,
        help="how the model writes calls: hermes or llama3_json (default: as its chat template says)",
    )
    add("--seed", metavar="S", type=seed, default=0, help="of requests that have none (default: 0)")
    add(
        "--max-queue",
        metavar="N",
        type=seed,
        default=64,
        help="continuations that may wait beside those of a step; more are answered 429 (default: %(default)s)",
    )
    add(
        "--max-body",
        metavar="BYTES",
        type=count,
        help="of a request (default: 1 MiB; 25 MiB where the model transcribes speech)",
    )
    add("--max-connections", metavar="N", type=count, default=256, help="at once (default: %(default)s)")
    add(
        "--header-timeout",
        metavar="S",
        type=count,
        default=10,
        help="seconds for a header (default: %(default)s)",
    )
    add(
        "--body-timeout",
        metavar="S",
        type=count,
        default=30,
        help="seconds for a body (default: %(default)s)",
    )
    add(
        "--write-timeout",
        metavar="S",
        type=count,
        default=30,
        help="seconds for a client to read what was written (default: %(default)s)",
    )
    add(
        "--workers",
        metavar="N",
        type=_two_or_more,
        default=2,
        help="processes for tokenizer, chat template and grammars, at least 2 (default: %(default)s)",
    )
    add(
        "--grammar-cpu-seconds",
        metavar="S",
        type=count,
        default=2,
        help="CPU time to compile a grammar of structured outputs; one that takes more is answered 400 (default: 2)",
    )
    add(
        "--grammar-memory",
        metavar="MIB",
        type=count,
        default=512,
        help="memory to compile a grammar; one that takes more is answered 400 (default: %(default)s)",
    )
    add(
        "--mask-timeout",
        metavar="S",
        type=positive_seconds,
        default=1.0,
        help="seconds for the mask of one token; a mask that takes longer ends its request (default: %(default)g)",
    )
    add("--log-level", metavar="NAME", choices=_LEVELS, default="info", help="debug to error (default: info)")


def parse_origins(text: str) -> tuple[str, ...]:
    """Return the origins of a JSON list, as vLLM takes them.

    Raises: argparse.ArgumentTypeError for any other text, and for an origin that no browser sends.
    """
    try:
        origins = json.loads(text)
    except (ValueError, RecursionError):
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(
            f"""{shown(text)} is no JSON list of texts; write it like '["https://chat.example"]'"""
        )
    wrong = next((origin for origin in origins if not _is_origin(origin)), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(
            f"{shown(wrong)!r} is no origin; write scheme://host or scheme://host:port in lower case, without the "
            "scheme's default port and without a path, or *"
        )
    return tuple(origins)


def _is_origin(text: str) -> bool:
    """Return whether a text is an origin as browsers write it, "null", or "*"."""
    if text in ("*", "null"):
        return True
    matched = _ORIGIN.fullmatch(text)
    return matched is not None and (matched["scheme"], matched["port"]) not in _DEFAULT_PORTS


def _two_or_more(text: str) -> int:
    """Read an integer of at least 2."""
    number = count(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} is not at least 2: one long job would stop all others")
    return number
