"""Options of `nkw plan`."""

from model.commands.options import option, options
from model.commands.options.device import PLANNED_LNC

OPTIONS = options(
    "--hardware --instance --accelerator",
    option(
        "--tp",
        default=None,
        help="tensor-parallel ranks, one core each (default: of the cheapest mesh that meets --sla)",
    ),
    option("--lnc", help=PLANNED_LNC),
    option("--pp", default=None, help="pipeline stages (default: as --tp, else 1)"),
    option("--ep", default=None, help="groups that divide routed experts (default: as --pp)"),
    "--stack --sp --batch --prompt=N --generate",
    option("--sla", help="service level that the mesh should keep: ttft, itl and e2e (default: %(default)s)"),
    "config --as --dtype=PLANNED --price --prices --json",
)
