"""The command `check`: faults in the launches of a script or kernel."""

from __future__ import annotations

import argparse
from functools import partial

from simulate.check.commands import check as check_launches
from simulate.scripts import run_script_or_kernel


def check(options: argparse.Namespace) -> int:
    """Print the findings about the launches of a script or a kernel.

    Returns the exit status: 0 without findings that fail a check, 1 with such findings, 2 if nothing ran, 3
    if it failed.
    """
    return check_launches(options, partial(run_script_or_kernel, computes=True, raises=True))
