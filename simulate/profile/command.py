"""The command `time`: run a script and show where the time of its kernel launches goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

from nkw.errors import NkwError, NoVerdict
from nkw.files import OutputFile, Outputs, json_document
from nkw.parts import Part
from nkw.terminal import error, progress, show, working
from simulate.isolated import without_verdict
from simulate.kernel_by_name import files_read, names_a_kernel, nothing_launched
from simulate.occupancy import svg
from simulate.occupancy.command import distinct as cores
from simulate.profile.comparison import options as against
from simulate.profile.comparison import text as comparison_text
from simulate.profile.comparison.compare import Comparison
from simulate.profile.comparison.measured import Measured, measured
from simulate.profile.document import document
from simulate.profile.numbers import us
from simulate.profile.page import PageLaunch, PageStep, write_page
from simulate.profile.profile import Profile, profile
from simulate.profile.text import report
from simulate.profile.vendor import DeviceProfile, SideBySide
from simulate.profile.vendor import text as vendor_text
from simulate.profile.vendor.command import measured_slices, pairs
from simulate.run import Launch, recorded
from simulate.run.launch_text import summary
from simulate.run.stream import Stream
from simulate.timing import Reading, write_trace


def time_command(options: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Time the launches that `run` makes; returns the exit status."""
    try:
        before = against.stored(options)
        outputs = Outputs(lambda: [*files_read(options), *against.files_compared(options)])
        trace = outputs.claim(options.trace, "trace", "NKW-TRACE-PATH")
        page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
        with json_document(options.json, outputs, "time") as contents:
            with recorded(calls=True, outputs=False) as launches:
                status = run(options)
            if not launches:
                if status != 2 or not names_a_kernel(options.script):
                    contents.update(launches=[], profiles=[])
                if status == 0:
                    print(nothing_launched(options.script), file=sys.stderr)
                return status
            profiles, numbers = distinct(launches, Reading(options.reading))
            if status:
                before = None
            elif options.against and before is None:
                status, before = _measure(against.kernel_options(options), run)
                if before is None:
                    return status
            for each in profiles:
                if (page is None and before is None) or options.text:
                    with working(partial("{}: critical path and what-if".format, each.title)):
                        shown = report(each, all_advice=options.advice)
                    show([*shown, ""])
                elif page is not None:
                    print(f"{each.title}: {us(each.length_ns)} us ({each.reading.value} reading)")
            if trace is not None:
                named = [f"{launch.kernel} #{number}" for number, launch in enumerate(launches)]
                chosen = [profiles[number] for number in numbers]
                parts = [(name, each.streams, each.timeline) for name, each in zip(named, chosen)]
                write_trace(trace, parts, measured_slices(before))
                print(f"trace: {options.trace}")
            if page is not None:
                _write_page(page, options, launches, profiles, numbers)
            if options.json is not None:
                contents["launches"] = [
                    {**summary(launch), "profile": number} for launch, number in zip(launches, numbers)
                ]
                contents["profiles"] = [document(each) for each in progress(profiles, "documents")]
            if isinstance(before, DeviceProfile):
                beside = pairs(before, profiles, launches[0])
                if options.json is not None:
                    contents["measurement"] = vendor_text.contents(beside)
                return _compare(
                    beside, vendor_text.report(beside), vendor_text.verdict(beside), options.fail_above
                )
            if before is not None:
                found = Comparison(measured(profiles, numbers), before)
                if options.json is not None:
                    contents["comparison"] = comparison_text.contents(found)
                return _compare(
                    found, comparison_text.report(found), comparison_text.verdict(found), options.fail_above
                )
    except NoVerdict as failed:
        return without_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return status


def _compare(
    found: Comparison | SideBySide, parts: Sequence[Part], verdict: str, fail_above: Fraction | None
) -> int:
    """Show a comparison; 1 where the run is slower by more than is allowed."""
    show(parts)
    if fail_above is None or not found.slower_by_more_than(fail_above):
        return 0
    print(f"slower by more than {float(100 * fail_above):g} %: {verdict}", file=sys.stderr)
    return 1


def _measure(
    options: argparse.Namespace, run: Callable[[argparse.Namespace], int]
) -> tuple[int, Measured | None]:
    """The launches that `run` makes, added up; None where it fails."""
    with recorded(calls=True, outputs=False) as launches:
        status = run(options)
    return status, measured(*distinct(launches, Reading(options.reading))) if status == 0 else None


def _write_page(
    page: OutputFile,
    options: argparse.Namespace,
    launches: Sequence[Launch],
    profiles: Sequence[Profile],
    numbers: Sequence[int],
) -> None:
    firsts = [launches[numbers.index(part)] for part in range(len(profiles))]
    steps = [PageStep((launch.kernel,), number) for launch, number in zip(launches, numbers)]
    parts = [PageLaunch(each, svg(cores([launch]))) for each, launch in zip(profiles, firsts)]
    write_page(page, Path(options.script).name, parts, steps)
    print(f"page: {options.html}")


def distinct(launches: Sequence[Launch], reading: Reading) -> tuple[list[Profile], list[int]]:
    """A profile for each launch that differs from those before it, and for every launch the number of its profile."""
    known: dict[tuple[object, ...], int] = {}
    first: list[tuple[int, Launch]] = []
    numbers = []
    for number, launch in enumerate(launches):
        key = (launch.kernel, launch.hardware, *map(_contents, launch.streams))
        if key not in known:
            known[key] = len(first)
            first.append((number, launch))
        numbers.append(known[key])
    profiles = []
    for part, (number, launch) in enumerate(progress(first, "profiles")):
        equal = numbers.count(part) - 1
        title = f"{launch.kernel} #{number}" + (f" and {equal} equal to it" if equal else "")
        profiles.append(
            profile(launch.streams, launch.hardware, f"{title} on {launch.hardware.label}", reading)
        )
    return profiles, numbers


def _contents(stream: Stream) -> tuple[object, ...]:
    """The parts of a stream that decide its profile."""
    columns = (stream.ops, stream.engines, stream.triggers, stream.cost_ids, stream.line_ids, stream.row_ends)
    return (
        stream.rank,
        stream.core,
        *(column.tobytes() for column in (*columns, stream.rows)),
        tuple(stream.op_names),
        tuple(stream.costs),
        tuple(stream.lines),
        tuple(stream.names.items()),
        tuple(stream.rendezvous.items()),
        tuple(stream.requested),
        tuple(stream.tensors),
    )
