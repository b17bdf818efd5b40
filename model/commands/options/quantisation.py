"""Options of `nkw quantize`: the scheme, its texts, and what stays plain."""

from __future__ import annotations

from pathlib import Path

from model.commands.options.readers import count, probability
from nkw.options import Rows

SCHEMES = (
    *("fp8", "fp8-dynamic", "int8", "w8a8", "int4", "gptq", "awq", "smoothquant", "llm-int8"),
    *("mxfp8", "mxfp4"),
)
"""Names of schemes; a test compares them with `model.quantize.schemes`."""

ROWS: Rows = {
    "--scheme": dict(
        metavar="SCHEME",
        choices=SCHEMES,
        required=True,
        help=f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]} (docs/quantize.md)",
    ),
    "--calibration=TEXTS": dict(
        metavar="FILE",
        type=Path,
        help="texts with lines <|endoftext|> between them, whose inputs gptq, awq, smoothquant and llm-int8 read",
    ),
    "--held-out": dict(
        metavar="FILE",
        type=Path,
        help="texts on which the loss is measured (default: the last tenth of the texts of --calibration)",
    ),
    "--texts": dict(
        metavar="N", type=count, default=128, help="most texts of each file (default: %(default)s)"
    ),
    "--ignore": dict(
        metavar="PATTERN",
        action="append",
        default=[],
        help="a module that stays plain, or re: and a regular expression; may be repeated; embedding, head and routers "
        "always stay plain",
    ),
    "--group-size": dict(
        metavar="N",
        type=count,
        help="columns of int4, gptq and awq that share a scale: 32, 64 or 128 (default: all of a row)",
    ),
    "--act-order": dict(
        action="store_true", help="gptq rounds the columns with the largest inputs first (activation order)"
    ),
    "--damping": dict(
        metavar="X",
        type=probability,
        default=0.01,
        help="of gptq, as a part of the mean of the products' diagonal (default: %(default)s)",
    ),
    "--plan": dict(
        action="store_true", help="print sizes and times for a config, and quantise and write nothing"
    ),
}
