"""Options of sampling: number of tokens, sampling parameters, and ends of texts."""

from __future__ import annotations

from model.commands.options.readers import (
    count,
    json_object,
    minimum,
    number,
    probability,
    seed,
    temperature,
)
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
    "--min-p": dict(
        metavar="P", type=minimum, help="sample from tokens of at least P times the best one's probability"
    ),
    "--presence-penalty": dict(
        metavar="X",
        type=number,
        default=0.0,
        help="subtracted from logits of tokens in the output (default: 0)",
    ),
    "--frequency-penalty": dict(
        metavar="X", type=number, default=0.0, help="the same, as often as they are there (default: 0)"
    ),
    "--repetition-penalty": dict(
        metavar="X",
        type=number,
        default=1.0,
        help="divides positive logits of tokens in prompt or output, multiplies negative ones (default: 1)",
    ),
    "-n|--n": dict(
        metavar="N",
        type=count,
        default=1,
        help="continuations of each prompt; under torchrun write -n (default: %(default)s)",
    ),
    "--logprobs": dict(
        metavar="K",
        type=seed,
        help="write log-probabilities of the K likeliest tokens and the chosen one to --json",
    ),
    "--structured-outputs": dict(
        metavar="JSON",
        type=json_object,
        help='the form of the text, such as \'{"regex": "[a-z]+"}\'; or json, json_object, choice, grammar',
    ),
    "--seed": dict(metavar="S", type=seed, default=0, help="of the sampler (default: %(default)s)"),
}
