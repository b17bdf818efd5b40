"""Options of `nkw compile`."""

from model.commands.options import options
from model.commands.serve.arguments import ENGINE

OPTIONS = options("model --target --tp --out=CACHE --list --launch --dtype", *ENGINE)
