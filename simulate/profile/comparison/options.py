"""Options `--against` and `--fail-above` of `time`, which choose the baseline of a comparison."""

from __future__ import annotations

import argparse
from copy import copy
from pathlib import Path

from nkw.errors import InvalidArgument
from simulate.kernel_by_name import names_a_kernel
from simulate.profile.comparison.measured import Measured, read_measured
from simulate.profile.vendor.read import is_device_profile, read_profile
from simulate.profile.vendor.records import DeviceProfile


def read_baseline(options: argparse.Namespace) -> Measured | DeviceProfile | None:
    """Read the run or device profile that `--against` names.

    Returns:
        None if `--against` is absent or names a kernel, which the caller runs.

    Raises:
        InvalidArgument: If the options contradict each other, or if the file is no profile or has another
            reading.
    """
    words = options.against
    if options.fail_above is not None and not words:
        raise InvalidArgument(
            "NKW-AGAINST", "--fail-above needs a baseline; give --against KERNEL SHAPES or --against FILE"
        )
    if not words or names_a_kernel(words[0]):
        return None
    if len(words) > 1:
        raise InvalidArgument(
            "NKW-AGAINST",
            f"--against {words[0]:.60} names no kernel, so no words follow it; give FILE.py:NAME or MODULE:NAME with "
            "arguments, or one file that time --json wrote, or one profile",
        )
    if is_device_profile(words[0]):
        return read_profile(words[0])
    run = read_measured(words[0])
    if run.reading != options.reading:
        raise InvalidArgument(
            "NKW-AGAINST",
            f"{words[0]:.60} is a profile of the {run.reading} reading, this run has the {options.reading} reading; "
            f"give --reading {run.reading}",
        )
    return run


def list_compared_files(options: argparse.Namespace) -> list[str]:
    """Return the words of `--against` that follow it, and the Parquet files in folders among them.

    No output of the command may overwrite these files.
    """
    folders = [Path(word) for word in options.against if Path(word).is_dir()]
    return [*options.against, *(str(file) for folder in folders for file in folder.glob("*.parquet"))]


def make_kernel_options(options: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the options that runs the kernel which `--against` names, with the arguments given there."""
    baseline_options = copy(options)
    baseline_options.script, baseline_options.arguments = options.against[0], options.against[1:]
    return baseline_options
