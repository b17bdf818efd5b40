"""Options of `nkw plan`."""

from model.commands.options import option, options

OPTIONS = options(
    "--hardware --instance --accelerator",
    option(
        "--tp",
        default=None,
        help="tensor-parallel ranks, one core each (default: of the mesh that decodes most)",
    ),
    option("--pp", default=None, help="pipeline stages (default: as --tp, else 1)"),
    option("--ep", default=None, help="groups that divide routed experts (default: as --pp)"),
    "--sp --batch --prompt=N --generate config --dtype=PLANNED --price --prices --json",
)
