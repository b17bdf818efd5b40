"""Options of `nkw quantize`."""

from model.commands.options import option, options
from model.loading.shipped import find_config_path

OPTIONS = options(
    option(
        "model",
        type=find_config_path,
        help="Hugging Face folder, or a model that comes along; with --plan also a config.json or a published name",
    ),
    "--scheme",
    option("--out=DIR", required=False),
    "--calibration=TEXTS --held-out --texts --ignore --group-size --act-order --damping --plan",
    option("--tp", help="tensor-parallel ranks of the predicted steps (default: %(default)s)"),
    option("--html", help="write the report as a page"),
    option("--json", help="write the report as JSON; - is stdout"),
)
