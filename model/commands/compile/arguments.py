"""Options of `nkw compile`."""

from model.commands.options import option, options
from model.commands.serve.arguments import ENGINE
from nkw.targets import LNC_VARIABLE

OPTIONS = options(
    "model --target --tp",
    option("--lnc", help=f"physical cores of a rank, 1 or 2 (default: {LNC_VARIABLE}, else 1)"),
    "--out=CACHE --list --launch --dtype",
    *ENGINE,
)
