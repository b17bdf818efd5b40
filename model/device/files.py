"""Files about predicted passes: a trace for Perfetto, and an HTML page of kernel profiles.

A pass is one step of a model; see `prediction.Pass`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model.device.binding import run_checked
from model.device.prediction import Pass
from nkw.files import Named
from simulate.occupancy import occupancies, svg
from simulate.profile.page import PageLaunch, PageStep
from simulate.profile.page import write_page as write_profiles
from simulate.timing import write_trace


def write_passes(path: Named, passes: Sequence[tuple[str, Pass]]) -> None:
    """Write a trace file for Perfetto with the launches of several passes, one after another.

    Args:
        path: The file.
        passes: Pairs of a label, which begins the names of the launches, and a pass.
    """
    traced = [
        (f"{label}: {timed.launch.kernel}", timed.launch.streams, timed.timeline)
        for label, model_pass in passes
        for timed in model_pass.launches
    ]
    run_checked(lambda: write_trace(path, traced))


def write_page(path: Named, title: str, passes: Sequence[tuple[str, Pass]]) -> None:
    """Write an HTML page that profiles passes: their launches in order, and each distinct launch in full.

    Args:
        path: The file.
        title: Title of the page.
        passes: Pairs of a label and a pass.
    """
    numbers: dict[int, int] = {}
    pages: list[PageLaunch] = []
    steps = []
    for label, model_pass in passes:
        for index, timed in enumerate(model_pass.launches):
            launch, number = timed.launch, numbers.setdefault(id(timed), len(numbers))
            if number == len(pages):
                name = f"{label}: {launch.kernel}"
                maps = svg([(name, occupancy) for occupancy in occupancies(launch)[:1]])
                pages.append(PageLaunch(replace(timed.profile, title=name), maps))
            steps.append(PageStep((label, model_pass.find_section(index), launch.kernel), number))
    run_checked(lambda: write_profiles(path, title, pages, steps))
