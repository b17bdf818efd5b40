"""Files of predicted passes: a trace for Perfetto, and a page of profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model.device.binding import checked
from model.device.prediction import Pass
from nkw.files import Named
from simulate.occupancy import occupancies, svg
from simulate.profile.page import PageLaunch, PageStep, style
from simulate.profile.page import write_page as write_profiles
from simulate.timing import write_trace


def write_passes(path: Named, passes: Sequence[tuple[str, Pass]]) -> None:
    """Write a trace for Perfetto in which the launches of labelled passes follow each other."""
    parts = [
        (f"{label}: {each.launch.kernel}", each.launch.streams, each.timeline)
        for label, done in passes
        for each in done.launches
    ]
    checked(lambda: write_trace(path, parts))


def page_style() -> str:
    """The style sheet that all pages share."""
    return style()


def write_page(path: Named, title: str, passes: Sequence[tuple[str, Pass]]) -> None:
    """Write a page that profiles labelled passes: their launches in order, and each distinct launch in full."""
    parts: dict[int, tuple[int, PageLaunch]] = {}
    steps = []
    for label, done in passes:
        for number, each in enumerate(done.launches):
            if id(each) not in parts:
                launch = each.launch
                name = f"{label}: {launch.kernel}"
                maps = svg([(name, occupancy) for occupancy in occupancies(launch)[:1]])
                parts[id(each)] = (len(parts), PageLaunch(replace(each.profile, title=name), maps))
            steps.append(
                PageStep((label, done.part_of_model(number), each.launch.kernel), parts[id(each)][0])
            )
    checked(lambda: write_profiles(path, title, [part for _, part in parts.values()], steps))
