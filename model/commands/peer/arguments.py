"""The options of `nkw peer`."""

from model.commands.options import option, options

DESCRIPTION = (
    "Run a folder and prompts through one of AWS Neuron's own inference libraries, where it is installed, and compare "
    "tokens and logits with ours. Written to the vendor's documentation; it has not run on a chip."
)
OPTIONS = options(
    "model --with --prompt",
    option("--max-new-tokens", default=16),
    option("--target", default="trn1", help="whose time is predicted (default: %(default)s)"),
    option("--tp", help="tensor-parallel ranks of the library (default: %(default)s)"),
    option(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and activations (default: %(default)s)",
    ),
    "--json",
)
