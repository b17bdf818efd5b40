"""Options of `nkw run-batch`; imports nothing of the extra `serve`."""

from model.commands.options import option, options
from model.commands.serve.arguments import ENGINE

OPTIONS = options(
    "-i|--input-file -o|--output-file",
    "--model",
    option("--served-model-name", help="what the requests call it (default: the folder's name)"),
    option("--backend", choices=("simulate", "neuron"), help="simulate or neuron (default: %(default)s)"),
    "--target --tp --hardware --dtype",
    *ENGINE,
    "--calibration --no-prefix-caching --no-chunked-prefill --tool-call-parser",
    option("--seed", help="of requests that have none (default: %(default)s)"),
    "--workers --grammar-cpu-seconds --grammar-memory --mask-timeout",
)
