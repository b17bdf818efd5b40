"""The command `time`: the launches of a script or kernel, or those of a sweep."""

from __future__ import annotations

import argparse

from simulate.profile.command import time_command
from simulate.profile.sweep import time_sweep
from simulate.scripts import prepare_process, run_to_its_end


def time(options: argparse.Namespace) -> int:
    """Print predicted times of each launch, or with `--sweep` for many sizes; return the exit status."""
    return (
        time_command(options, run_to_its_end)
        if options.sweep is None
        else time_sweep(options, prepare_process)
    )
