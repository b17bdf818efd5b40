"""Options of sampling: how many tokens, which ones, and where a text ends."""

from __future__ import annotations

from model.commands.options.readers import count, probability, seed, temperature
from nkw.options import Rows

ROWS: Rows = {
    "--max-new-tokens": dict(
        metavar="N", type=count, default=48, help="at most so many tokens (default: %(default)s)"
    ),
    "--stop": dict(metavar="TEXT", action="append", default=[], help="end before this text; may be repeated"),
    "--temperature": dict(
        metavar="T",
        type=temperature,
        help="0 takes the most likely token (default: 0, or that of a generation_config.json with do_sample)",
    ),
    "--top-k": dict(metavar="K", type=count, help="sample from the K most likely tokens only"),
    "--top-p": dict(
        metavar="P", type=probability, help="sample from the likeliest tokens of joint probability P"
    ),
    "--seed": dict(metavar="S", type=seed, default=0, help="of the sampler (default: %(default)s)"),
}
