"""Options of a server and of `nkw top`."""

from __future__ import annotations

from pathlib import Path

from model.commands.options.readers import count, parse_origins, seed, two_or_more
from model.serve.openai.calls import TOOL_CALL_PARSERS
from nkw.options import Rows
from nkw.process import parse_seconds

ROWS: Rows = {
    "--served-model-name": dict(
        metavar="NAME", help="what clients call it (default: stories, or the folder's name)"
    ),
    "--host": dict(metavar="HOST", default="127.0.0.1", help="address to listen at (default: %(default)s)"),
    "--port": dict(metavar="N", type=seed, default=8000, help="0 takes a free one (default: %(default)s)"),
    "--api-key-file": dict(
        metavar="FILE",
        type=Path,
        help="the clients' keys, one on each line; without it only a loopback address is listened at",
    ),
    "--allowed-origins": dict(
        metavar="JSON",
        type=parse_origins,
        default=(),
        help="JSON list of origins whose pages may send requests from a browser (default: none)",
    ),
    "--replicas": dict(
        metavar="N",
        type=count,
        default=1,
        help="engines behind the port, each with all that follows, in a process of its own (default: %(default)s)",
    ),
    "--cluster": dict(
        metavar="ADDRESS",
        help="Ray cluster that places, restarts and checks the engines: its address, auto, or local to start one here",
    ),
    "--tool-call-parser": dict(
        metavar="NAME",
        choices=TOOL_CALL_PARSERS,
        help="how the model writes calls: hermes or llama3_json (default: as its chat template says)",
    ),
    "--max-queue": dict(
        metavar="N",
        type=seed,
        default=64,
        help="continuations that may wait beside those of a step; more are answered 429 (default: %(default)s)",
    ),
    "--max-body": dict(
        metavar="BYTES",
        type=count,
        help="of a request (default: 1 MiB; 25 MiB where the model transcribes speech)",
    ),
    "--max-connections": dict(metavar="N", type=count, default=256, help="at once (default: %(default)s)"),
    "--header-timeout": dict(
        metavar="S", type=count, default=10, help="seconds for a header (default: %(default)s)"
    ),
    "--body-timeout": dict(
        metavar="S", type=count, default=30, help="seconds for a body (default: %(default)s)"
    ),
    "--write-timeout": dict(
        metavar="S",
        type=count,
        default=30,
        help="seconds for a client to read what was written (default: %(default)s)",
    ),
    "--workers": dict(
        metavar="N",
        type=two_or_more,
        default=2,
        help="processes for tokenizer, chat template and grammars, at least 2 (default: %(default)s)",
    ),
    "--grammar-cpu-seconds": dict(
        metavar="S",
        type=count,
        default=2,
        help="CPU time to compile a grammar of structured outputs; one that takes more is answered 400 "
        "(default: %(default)s)",
    ),
    "--grammar-memory": dict(
        metavar="MIB",
        type=count,
        default=512,
        help="memory to compile a grammar; one that takes more is answered 400 (default: %(default)s)",
    ),
    "--mask-timeout": dict(
        metavar="S",
        type=parse_seconds,
        default=1.0,
        help="seconds for the mask of one token; a mask that takes longer ends its request (default: %(default)g)",
    ),
    "--log-level": dict(
        metavar="NAME",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="debug to error (default: %(default)s)",
    ),
    "--url": dict(metavar="URL", default="http://127.0.0.1:8000", help="the server (default: %(default)s)"),
    "--every": dict(
        metavar="S", type=count, default=2, help="seconds between two looks (default: %(default)s)"
    ),
    "--once": dict(action="store_true", help="look once; so does a stdout that is no terminal"),
}
