"""Options of `nkw top`."""

from model.commands.options import option, options

OPTIONS = options(
    "--url", option("--api-key-file", help="a file whose first line is a key of the server"), "--every --once"
)
