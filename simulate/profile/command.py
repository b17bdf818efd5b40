"""`python -m simulate time`: run a script and show where the time of its kernel launches goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from simulate.errors import NkwError
from simulate.profile.profile import profile
from simulate.profile.text import text
from simulate.run import recorded
from simulate.timing import Reading, write_trace


def time_command(options: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Time the launches that `run` makes; returns the exit status."""
    with recorded() as launches:
        status = run(options)
    if not launches:
        if status == 0:
            print("no kernel was launched", file=sys.stderr)
        return status
    reading = Reading(options.reading)
    try:
        profiles = []
        for number, launch in enumerate(launches):
            title = f"{launch.kernel} #{number} on {launch.hardware.name}"
            profiles.append(profile(launch.streams, launch.hardware, title, reading))
            print(text(profiles[-1]))
        if options.trace:
            parts = [
                (f"{launch.kernel} #{number}", each.streams, each.timeline)
                for number, (launch, each) in enumerate(zip(launches, profiles))
            ]
            write_trace(options.trace, parts)
            print(f"trace: {options.trace}")
    except NkwError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status
