"""Options of checks, reports and files that a command writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from model.commands.options.readers import count
from nkw.options import Rows

ROWS: Rows = {
    "--no-check": dict(
        dest="check",
        action="store_false",
        help="do not compare the tokens with the numpy model, which takes time and memory of its own; times are "
        "predicted all the same",
    ),
    "--quiet": dict(
        action="store_true",
        help="print the texts alone; tokens that differ and a full context are said on stderr",
    ),
    "--exact": dict(
        action="store_true",
        help="replay kernels instruction by instruction, for the bytes of an eager launch",
    ),
    "--verify-replay": dict(
        action="store_true",
        help="compare every replayed launch with an eager one, and stop at a difference",
    ),
    "--replay-report": dict(action="store_true", help="print what became of the kernels' launches"),
    "--trace": dict(metavar="FILE", type=Path, help="write the predicted timeline; opens in Perfetto"),
    "--profile": dict(action="store_true", help="print where the predicted time goes by kernel and by layer"),
    "--explain": dict(
        metavar="N",
        nargs="?",
        const=1,
        type=count,
        help="show how new token N came about (default: the first): pieces of text, norms of the residual, what heads "
        "attend to, experts, candidates",
    ),
    "--list": dict(
        action="store_true",
        help="print every graph with its key, and compile nothing (without it: counts by kind)",
    ),
    "--launch": dict(action="store_true", help=argparse.SUPPRESS),
    "--out=DIR": dict(
        metavar="DIR", type=Path, required=True, help="the folder to write, which is not there yet"
    ),
    "--out=CACHE": dict(
        metavar="CACHE",
        type=Path,
        help="folder of the compiled graphs, and of graphs.json, which lists them",
    ),
    "--bench-script": dict(
        metavar="FILE",
        type=Path,
        help="write the shell commands that check the prediction on a real server; - is stdout",
    ),
    "--html": dict(metavar="FILE", type=Path, help="write that as a page, with a profile of every kernel"),
    "--json": dict(metavar="FILE", type=Path, help="write the results as JSON; - is stdout"),
}
