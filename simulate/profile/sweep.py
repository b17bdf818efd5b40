"""`time --sweep`: the time of a kernel over a size, its floor, and the memory that it takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

from nkw.errors import NkwError, NoVerdict
from nkw.files import Outputs, json_document
from nkw.parts import Drawn, Hanging, Part, as_html, table
from nkw.terminal import error, progress, show
from simulate.isolated import without_verdict
from simulate.kernel_by_name import files_read
from simulate.memory import MemoryRegion
from simulate.occupancy import sweep
from simulate.occupancy.bars import Bar, Bars, drawn
from simulate.occupancy.bars import svg as bars_svg
from simulate.occupancy.sweep import CapacityEnd, Trial, word
from simulate.profile.numbers import share, us
from simulate.profile.profile import Profile, profile
from simulate.timing import Reading


def time_sweep(options: argparse.Namespace, bound: Callable[[argparse.Namespace], bool]) -> int:
    """Time the kernel with every size, chip and `nki` being bound by `bound`; returns the exit status.

    0 where a size could be launched, 2 where none could or the command could not run.
    """
    try:
        sweep.check(options, "--trace", "--against", "--fail-above")
        outputs = Outputs(lambda: files_read(options))
        page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
        with json_document(options.json, outputs, "time") as contents:
            if not bound(options):
                return 2
            tried, end = sweep.searched(options)
            reading = Reading(options.reading)
            profiles = [_profile(each, reading) for each in progress(tried, "profiles")]
            title = f"{sweep.title(options, tried)} ({reading.value} reading)"
            charts = [
                _bars(options.sweep.name, tried, profiles),
                *sweep.memory_bars(options.sweep.name, tried),
            ]
            parts: list[Part] = [
                Hanging(title, style="bold"),
                "",
                _table(options.sweep.name, tried, profiles),
                "",
                *sweep.sentences(options.sweep.name, tried, end),
            ]
            if page is None or options.text:
                show([*parts, "", Drawn(partial(drawn, charts[0]))])
            if page is not None:
                with page.writing() as file:
                    file.write(_page(title, as_html(parts), bars_svg(charts)))
                print(f"page: {options.html}")
            if any(each.launch for each in tried):
                contents["sweep"] = _contents(options.sweep.name, tried, profiles, end)
    except NoVerdict as failed:
        return without_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return 0 if any(each.launch for each in tried) else 2


def _profile(trial: Trial, reading: Reading) -> Profile | None:
    if trial.launch is None or not trial.fits:
        return None
    return profile(trial.launch.streams, trial.launch.hardware, reading=reading)


def _table(name: str, tried: Sequence[Trial], profiles: Sequence[Profile | None]) -> Part:
    rows = []
    for trial, found in zip(tried, profiles):
        row = ["-"] * 3 if found is None else [us(found.length_ns), us(found.roofline.least_ns)]
        if found is not None:
            row.append(share(found.roofline.least_ns, found.length_ns))
        rows.append(
            (f"{trial.size:,}", *row, found.roofline.bound if found else word(trial), *_memory(trial))
        )
    return table(f"{name}|us|floor us|floor|bound|SBUF|PSUM", rows, left=(4,))


def _memory(trial: Trial) -> list[str]:
    if trial.launch is None:
        return ["-", "-"]
    return [f"{trial.launch.high_water_bytes(each):,}" for each in (MemoryRegion.sbuf, MemoryRegion.psum)]


def _bars(name: str, tried: Sequence[Trial], profiles: Sequence[Profile | None]) -> Bars:
    """Times, the floor first and then what lies above it."""
    bars = []
    for trial, found in zip(tried, profiles):
        length, least = (found.length_ns, found.roofline.least_ns) if found else (0.0, 0.0)
        parts = min(least, length), max(length - least, 0.0)
        bars.append(Bar(f"{trial.size:,}", parts, f"{us(length)} us" if found else word(trial)))
    return Bars(f"time by {name}", ("floor", "above the floor"), tuple(bars))


def _page(title: str, report: str, picture: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<style>:root { color-scheme: light dark } body { margin: 1rem; font-family: ui-sans-serif, system-ui, "
        f"-apple-system, 'Segoe UI', sans-serif }}</style>\n{report}\n{picture}</html>\n"
    )


def _contents(
    name: str, tried: Sequence[Trial], profiles: Sequence[Profile | None], end: CapacityEnd | None
) -> dict[str, Any]:
    """The sweep as a document, with times in ns; null where a size has none."""
    found = sweep.contents(name, tried, end)
    for size, each in zip(found["sizes"], profiles):
        size["length_ns"] = float(each.length_ns) if each else None
        size["floor_ns"] = float(each.roofline.least_ns) if each else None
        size["bound"] = each.roofline.bound if each else None
    return found
