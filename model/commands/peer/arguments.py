"""Options of `nkw peer`."""

from model.commands.options import option, options

OPTIONS = options(
    "model --with --prompt",
    option("--max-new-tokens", default=16),
    option("--target", default="trn1", help="whose time is predicted (default: %(default)s)"),
    option("--tp", help="tensor-parallel ranks of the library (default: %(default)s)"),
    "--lnc",
    option(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and activations (default: %(default)s)",
    ),
    "--json",
)
