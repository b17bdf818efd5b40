"""The command `time`: run a script and report where the time of its kernel launches goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nkw.errors import NkwError, NoVerdict
from nkw.files import OutputFile, Outputs, json_document
from nkw.terminal import error, progress, show, working
from simulate.isolated import print_no_verdict
from simulate.kernel_by_name import explain_no_launch, list_read_files, names_a_kernel
from simulate.occupancy import svg
from simulate.occupancy.command import group_equal_cores as cores
from simulate.profile.comparison import options as against
from simulate.profile.comparison import text as comparison_text
from simulate.profile.comparison.compare import Comparison
from simulate.profile.comparison.measured import Measured, sum_profiles
from simulate.profile.document import make_document
from simulate.profile.numbers import format_us
from simulate.profile.page import PageLaunch, PageStep, write_page
from simulate.profile.profile import Profile, profile
from simulate.profile.text import make_report
from simulate.profile.vendor import DeviceProfile, SideBySide
from simulate.profile.vendor import text as vendor_text
from simulate.profile.vendor.command import pair_launches, read_measured_slices
from simulate.run import Launch, recorded
from simulate.run.launch_text import summary
from simulate.run.stream import Stream
from simulate.timing import Reading, write_trace


def time_command(options: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Time the launches that `run` makes; print the report and write the requested files.

    Args:
        run: Runs the script or kernel of the options, and returns an exit status.

    Returns:
        The exit status: that of `run`; 1 if `--fail-above` is exceeded; 2 if options or files are refused.
    """
    try:
        baseline = against.read_baseline(options)
        outputs = Outputs(lambda: [*list_read_files(options), *against.list_compared_files(options)])
        trace = outputs.claim(options.trace, "trace", "NKW-TRACE-PATH")
        page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
        with json_document(options.json, outputs, "time") as contents:
            with recorded(calls=True, outputs=False) as launches:
                status = run(options)
            if not launches:
                if status != 2 or not names_a_kernel(options.script):
                    contents.update(launches=[], profiles=[])
                if status == 0:
                    print(explain_no_launch(options.script), file=sys.stderr)
                return status
            profiles, profile_indices = profile_distinct(launches, Reading(options.reading))
            if status:
                baseline = None
            elif options.against and baseline is None:
                status, baseline = _measure_baseline(against.make_kernel_options(options), run)
                if baseline is None:
                    return status
            for profile in profiles:
                if (page is None and baseline is None) or options.text:
                    with working(partial("{}: critical path and what-if".format, profile.title)):
                        shown = make_report(profile, all_advice=options.advice)
                    show([*shown, ""])
                elif page is not None:
                    print(
                        f"{profile.title}: {format_us(profile.length_ns)} us ({profile.reading.value} reading)"
                    )
            if trace is not None:
                _write_trace(trace, options, launches, profiles, profile_indices, baseline)
            if page is not None:
                _write_page(page, options, launches, profiles, profile_indices)
            if options.json is not None:
                contents["launches"] = [
                    {**summary(launch), "profile": profile_index}
                    for launch, profile_index in zip(launches, profile_indices)
                ]
                contents["profiles"] = [make_document(profile) for profile in progress(profiles, "documents")]
            if baseline is not None:
                return _compare(baseline, profiles, profile_indices, launches[0], options, contents)
    except NoVerdict as failed:
        return print_no_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return status


def _compare(
    baseline: Measured | DeviceProfile,
    profiles: Sequence[Profile],
    profile_indices: Sequence[int],
    first: Launch,
    options: argparse.Namespace,
    contents: dict[str, Any],
) -> int:
    """Print the comparison of a run with its baseline, and add it to the JSON document.

    Args:
        baseline: An earlier run, or a profile of the device.
        profiles: Profiles of the distinct launches of the run.
        profile_indices: For each launch, the index of its profile.
        first: First launch of the run.
        contents: JSON document to which the comparison is added, if `--json` is given.

    Returns:
        The exit status: 1 if the run is slower than `--fail-above` allows, else 0.
    """
    comparison: Comparison | SideBySide
    if isinstance(baseline, DeviceProfile):
        comparison = pair_launches(baseline, profiles, first)
        document = {"measurement": vendor_text.make_contents(comparison)}
        report_parts, verdict = vendor_text.make_report(comparison), vendor_text.format_verdict(comparison)
    else:
        comparison = Comparison(sum_profiles(profiles, profile_indices), baseline)
        document = {"comparison": comparison_text.make_contents(comparison)}
        report_parts = comparison_text.make_report(comparison)
        verdict = comparison_text.format_verdict(comparison)
    if options.json is not None:
        contents.update(document)
    show(report_parts)
    if options.fail_above is None or not comparison.slower_by_more_than(options.fail_above):
        return 0
    print(f"slower by more than {float(100 * options.fail_above):g} %: {verdict}", file=sys.stderr)
    return 1


def _write_trace(
    trace: OutputFile,
    options: argparse.Namespace,
    launches: Sequence[Launch],
    profiles: Sequence[Profile],
    profile_indices: Sequence[int],
    baseline: object,
) -> None:
    """Write a trace with every launch as a process, and print a line with its path.

    Args:
        trace: File to write.
        profiles: Profiles of the distinct launches.
        profile_indices: For each launch, the index of its profile.
        baseline: If this is a device profile, its slices are added.
    """
    titles = [f"{launch.kernel} #{index}" for index, launch in enumerate(launches)]
    launch_profiles = [profiles[profile_index] for profile_index in profile_indices]
    processes = [(name, profile.streams, profile.timeline) for name, profile in zip(titles, launch_profiles)]
    write_trace(trace, processes, read_measured_slices(baseline))
    print(f"trace: {options.trace}")


def _measure_baseline(
    options: argparse.Namespace, run: Callable[[argparse.Namespace], int]
) -> tuple[int, Measured | None]:
    """Run the kernel of the baseline; return (exit status, all of its launches added up).

    The launches are None if the status is not 0.
    """
    with recorded(calls=True, outputs=False) as launches:
        status = run(options)
    return status, sum_profiles(
        *profile_distinct(launches, Reading(options.reading))
    ) if status == 0 else None


def _write_page(
    page: OutputFile,
    options: argparse.Namespace,
    launches: Sequence[Launch],
    profiles: Sequence[Profile],
    profile_indices: Sequence[int],
) -> None:
    """Write the HTML page of a run, and print a line with its path.

    It has the profile and a picture of memory of each distinct launch, and the order of all launches.

    Args:
        page: File to write.
        profiles: Profiles of the distinct launches.
        profile_indices: For each launch, the index of its profile.
    """
    firsts = [launches[profile_indices.index(profile_index)] for profile_index in range(len(profiles))]
    steps = [
        PageStep((launch.kernel,), profile_index) for launch, profile_index in zip(launches, profile_indices)
    ]
    page_launches = [PageLaunch(profile, svg(cores([launch]))) for profile, launch in zip(profiles, firsts)]
    write_page(page, Path(options.script).name, page_launches, steps)
    print(f"page: {options.html}")


def profile_distinct(launches: Sequence[Launch], reading: Reading) -> tuple[list[Profile], list[int]]:
    """Profile every launch that differs from all earlier launches in kernel, chip or streams.

    Returns:
        The profiles, and for every launch the index of its profile.
    """
    index_by_key: dict[tuple[object, ...], int] = {}
    firsts: list[tuple[int, Launch]] = []
    profile_indices = []
    for number, launch in enumerate(launches):
        key = (launch.kernel, launch.hardware, *map(_make_stream_key, launch.streams))
        if key not in index_by_key:
            index_by_key[key] = len(firsts)
            firsts.append((number, launch))
        profile_indices.append(index_by_key[key])
    profiles = []
    for profile_index, (number, launch) in enumerate(progress(firsts, "profiles")):
        num_equal = profile_indices.count(profile_index) - 1
        title = f"{launch.kernel} #{number}" + (f" and {num_equal} equal to it" if num_equal else "")
        profiles.append(
            profile(launch.streams, launch.hardware, f"{title} on {launch.hardware.label}", reading)
        )
    return profiles, profile_indices


def _make_stream_key(stream: Stream) -> tuple[object, ...]:
    """Return everything in a stream that its profile depends on, as a hashable key."""
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
