"""The options `--against` and `--fail-above` of `time`: what a run is compared with."""

from __future__ import annotations

import argparse
from copy import copy
from pathlib import Path

from nkw.errors import InvalidArgument
from simulate.kernel_by_name import names_a_kernel
from simulate.profile.comparison.measured import Measured, read_measured
from simulate.profile.vendor.read import is_device_profile, read_profile
from simulate.profile.vendor.records import DeviceProfile


def stored(options: argparse.Namespace) -> Measured | DeviceProfile | None:
    """The run or the device profile that `--against` names; None where it names a kernel, or nothing.

    Raises InvalidArgument for options that cannot be followed and for a file that holds no profile, or one of another
    reading.
    """
    words = options.against
    if options.fail_above is not None and not words:
        raise InvalidArgument(
            "NKW-AGAINST", "--fail-above compares with nothing; give --against KERNEL SHAPES or FILE"
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
    found = read_measured(words[0])
    if found.reading != options.reading:
        raise InvalidArgument(
            "NKW-AGAINST",
            f"{words[0]:.60} is a profile of the {found.reading} reading; give --reading {found.reading}",
        )
    return found


def files_compared(options: argparse.Namespace) -> list[str]:
    """The words of `--against`, and the files of a folder that one of them names."""
    folders = [Path(each) for each in options.against if Path(each).is_dir()]
    return [*options.against, *(str(file) for folder in folders for file in folder.glob("*.parquet"))]


def kernel_options(options: argparse.Namespace) -> argparse.Namespace:
    """The options for the run of the kernel that `--against` names."""
    other = copy(options)
    other.script, other.arguments = options.against[0], options.against[1:]
    return other
