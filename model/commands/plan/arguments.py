"""Options of `nkw plan`."""

from model.commands.options import option, options
from model.commands.options.device import PLANNED_LNC

OPTIONS = options(
    "--hardware",
    option(
        "--instance",
        action="append",
        help="instance type, or several over EFA: '4 x trn1.32xlarge' (default: trn2.48xlarge); with --recommend, "
        "names with commas between them (default: all)",
    ),
    "--accelerator",
    option(
        "--tp",
        default=None,
        help="tensor-parallel ranks, one core each (default: of the cheapest mesh that meets --sla)",
    ),
    option("--lnc", help=PLANNED_LNC),
    option("--pp", default=None, help="pipeline stages (default: as --tp, else 1)"),
    option("--ep", default=None, help="groups that divide routed experts (default: as --pp)"),
    "--stack --sp",
    option(
        "--batch",
        default=None,
        help="sequences decoded together (default: 1; with --recommend, up to 128 as they keep --sla)",
    ),
    "--prompt=N --generate",
    option("--sla", help="service level that the mesh should keep: ttft, itl and e2e (default: %(default)s)"),
    "--steps --guidance --size --ulysses-degree --profile",
    "--schemes --recommend",
    option("--rate", help="requests a second of --recommend, at random"),
    "config --as --dtype=PLANNED --quantization --row-scales --kv-cache-dtype --price --prices --bench-script --json",
)
