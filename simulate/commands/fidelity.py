"""The command `fidelity`, which belongs to the repository and is not installed with the package."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from nkw import terminal
from nkw.errors import InvalidArgument
from simulate.kernel_by_name import importing_from

_MODULE = "benchmarks.fidelity.__main__"


def fidelity(options: argparse.Namespace) -> int:
    """Run the benchmark of the repository with the remaining words of the command line; return its exit status.

    Without the folder benchmarks/fidelity in the current folder, print an error and return 2.
    """
    try:
        with importing_from(Path.cwd()):
            benchmark = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name is None or not _MODULE.startswith(error.name):
            raise
        missing = InvalidArgument(
            "NKW-FIDELITY-CHECKOUT",
            "fidelity needs the folder benchmarks/fidelity, which is not installed with the package: run "
            f"`{options.prog} fidelity` in the top folder of a checkout of the repository",
        )
        terminal.error(missing)
        return 2
    status: int = benchmark.main(options.unknown, f"{options.prog} fidelity")
    return status
