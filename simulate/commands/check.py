"""The command `check`: faults in the launches of a script or kernel."""

from __future__ import annotations

import argparse
from functools import partial

from simulate.check.commands import check as check_launches
from simulate.scripts import run_script_or_kernel


def check(options: argparse.Namespace) -> int:
    """Print findings; returns the exit status."""
    return check_launches(options, partial(run_script_or_kernel, computes=True, raises=True))
