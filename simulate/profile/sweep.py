"""`time --sweep`: the time of a kernel over a size, its floor, and the memory that it takes.

A trial is the launch with one of the sizes. Its floor is the time that it would take at peak rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

from nkw.errors import NkwError, NoVerdict
from nkw.files import Outputs, json_document
from nkw.report import Drawn, Hanging, Part, as_html, table
from nkw.terminal import error, progress, show
from simulate.isolated import print_no_verdict
from simulate.kernel_by_name import list_read_files
from simulate.memory import MemoryRegion
from simulate.occupancy import sweep
from simulate.occupancy.bars import Bar, Bars, draw_bars
from simulate.occupancy.bars import draw_bars_svg as bars_svg
from simulate.occupancy.sweep import CapacityEnd, Trial, format_verdict
from simulate.profile.numbers import format_share, format_us
from simulate.profile.profile import Profile, profile
from simulate.timing import Reading


def time_sweep(options: argparse.Namespace, bound: Callable[[argparse.Namespace], bool]) -> int:
    """Time the kernel with every size, print the report, and write the page and the JSON document as requested.

    Args:
        bound: Selects the chip and the backend of `nki`; returns whether that succeeded.

    Returns:
        The exit status: 0 if a size could be launched; 2 if none could, or if the options are refused.
    """
    try:
        sweep.check_options(options, "--trace", "--against", "--fail-above")
        outputs = Outputs(lambda: list_read_files(options))
        page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
        with json_document(options.json, outputs, "time") as contents:
            if not bound(options):
                return 2
            trials, end = sweep.launch_sizes(options)
            reading = Reading(options.reading)
            profiles = [_profile_trial(trial, reading) for trial in progress(trials, "profiles")]
            title = f"{sweep.format_title(options, trials)} ({reading.value} reading)"
            charts = [
                _make_bars(options.sweep.name, trials, profiles),
                *sweep.make_memory_bars(options.sweep.name, trials),
            ]
            report_parts: list[Part] = [
                Hanging(title, style="bold"),
                "",
                _make_table(options.sweep.name, trials, profiles),
                "",
                *sweep.describe_refusals(options.sweep.name, trials, end),
            ]
            if page is None or options.text:
                show([*report_parts, "", Drawn(partial(draw_bars, charts[0]))])
            if page is not None:
                with page.writing() as file:
                    file.write(_make_page(title, as_html(report_parts), bars_svg(charts)))
                print(f"page: {options.html}")
            if any(trial.launch for trial in trials):
                contents["sweep"] = _make_contents(options.sweep.name, trials, profiles, end)
    except NoVerdict as failed:
        return print_no_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return 0 if any(trial.launch for trial in trials) else 2


def _profile_trial(trial: Trial, reading: Reading) -> Profile | None:
    """Return the profile of a trial, or None if it was not launched or does not fit into SBUF and PSUM."""
    if trial.launch is None or not trial.fits:
        return None
    return profile(trial.launch.streams, trial.launch.hardware, reading=reading)


def _make_table(name: str, trials: Sequence[Trial], profiles: Sequence[Profile | None]) -> Part:
    """Return the table of times, floors and high-water marks, a row for each size.

    Args:
        name: Name of the swept size.
        profiles: Profile of each trial, or None.
    """
    rows = []
    for trial, trial_profile in zip(trials, profiles):
        row = (
            ["-"] * 3
            if trial_profile is None
            else [format_us(trial_profile.length_ns), format_us(trial_profile.roofline.least_ns)]
        )
        if trial_profile is not None:
            row.append(format_share(trial_profile.roofline.least_ns, trial_profile.length_ns))
        rows.append(
            (
                f"{trial.size:,}",
                *row,
                trial_profile.roofline.bound if trial_profile else format_verdict(trial),
                *_format_memory(trial),
            )
        )
    return table(f"{name}|us|floor us|floor|bound|SBUF|PSUM", rows, left=(4,))


def _format_memory(trial: Trial) -> list[str]:
    """Return the high-water marks of SBUF and PSUM in bytes, formatted; "-" for a trial without a launch."""
    if trial.launch is None:
        return ["-", "-"]
    return [f"{trial.launch.high_water_bytes(region):,}" for region in (MemoryRegion.sbuf, MemoryRegion.psum)]


def _make_bars(name: str, trials: Sequence[Trial], profiles: Sequence[Profile | None]) -> Bars:
    """Return a bar for each size: its time, split into the floor and the time above it.

    A size without a profile has a bar of length 0, labelled with the reason.

    Args:
        name: Name of the swept size.
        profiles: Profile of each trial, or None.
    """
    bars = []
    for trial, trial_profile in zip(trials, profiles):
        length_ns, floor_ns = (
            (trial_profile.length_ns, trial_profile.roofline.least_ns) if trial_profile else (0.0, 0.0)
        )
        segments = min(floor_ns, length_ns), max(length_ns - floor_ns, 0.0)
        bars.append(
            Bar(
                f"{trial.size:,}",
                segments,
                f"{format_us(length_ns)} us" if trial_profile else format_verdict(trial),
            )
        )
    return Bars(f"time by {name}", ("floor", "above the floor"), tuple(bars))


def _make_page(title: str, report: str, picture: str) -> str:
    """Return the HTML page of a sweep: the report, then the charts."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<style>:root { color-scheme: light dark } body { margin: 1rem; font-family: ui-sans-serif, system-ui, "
        f"-apple-system, 'Segoe UI', sans-serif }}</style>\n{report}\n{picture}</html>\n"
    )


def _make_contents(
    name: str, trials: Sequence[Trial], profiles: Sequence[Profile | None], end: CapacityEnd | None
) -> dict[str, Any]:
    """Return the sweep as JSON types, with times in ns; null for sizes without a profile.

    Args:
        name: Name of the swept size.
        profiles: Profile of each trial, or None.
        end: Sizes between which the launch stops fitting into memory, or None if unknown.
    """
    contents = sweep.make_contents(name, trials, end)
    for size, trial_profile in zip(contents["sizes"], profiles):
        size["length_ns"] = float(trial_profile.length_ns) if trial_profile else None
        size["floor_ns"] = float(trial_profile.roofline.least_ns) if trial_profile else None
        size["bound"] = trial_profile.roofline.bound if trial_profile else None
    return contents
