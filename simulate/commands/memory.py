"""The command `memory`: the launches of a script or kernel, or those of a sweep."""

from __future__ import annotations

import argparse

from simulate.occupancy.command import memory as memory_once
from simulate.occupancy.command import memory_sweep
from simulate.scripts import prepare_process, run_to_its_end


def memory(options: argparse.Namespace) -> int:
    """Print what SBUF and PSUM hold in each launch, or with `--sweep` for many sizes; return the exit status."""
    return (
        memory_once(options, run_to_its_end)
        if options.sweep is None
        else memory_sweep(options, prepare_process)
    )
