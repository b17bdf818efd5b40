"""The command `memory`: occupancy of SBUF and PSUM by the launches of a script."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from nkw.errors import NkwError, NoVerdict
from nkw.files import Outputs, json_document
from nkw.report import Drawn, Hanging
from nkw.terminal import error, show, working
from simulate.isolated import print_no_verdict
from simulate.kernel_by_name import explain_no_launch, list_read_files, names_a_kernel
from simulate.occupancy import sweep
from simulate.occupancy.bars import draw_bars
from simulate.occupancy.bars import draw_bars_svg as bars_svg
from simulate.occupancy.marks import format_call_chain
from simulate.occupancy.svg import svg
from simulate.occupancy.text import make_report, verdict
from simulate.occupancy.uses import Occupancy, occupancies
from simulate.run import Launch, recorded
from simulate.run.launch_text import summary


def memory(options: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Run a script and show the memory of every launch, including a launch refused because it does not fit.

    Prints the maps, and writes the picture and the JSON document that the options request.

    Args:
        options: The command line.
        run: Runs the script or kernel that the options name, and returns the script's exit status.

    Returns:
        The exit status: that of the script, except that it is 2 if a successful script launches no kernel, or if a
        file cannot be written.
    """
    try:
        outputs = Outputs(lambda: list_read_files(options))
        picture = outputs.claim(options.svg, "picture", "NKW-PICTURE-PATH")
        with json_document(options.json, outputs, "memory") as contents:
            with recorded(calls=True, refused=True, outputs=False) as launches:
                status = run(options)
            if not launches:
                if status != 2 or not names_a_kernel(options.script):
                    contents.update(launches=[], cores=[])
                if status == 0:
                    error(explain_no_launch(options.script))
                return status or 2
            with working(lambda: "memory maps"):
                shown = group_equal_cores(launches)
            if options.text or picture is None:
                blocks = [make_report(occupancy, title) for title, occupancy in shown]
                show([*blocks[0], *(line for block in blocks[1:] for line in ("", *block))])
            if picture is not None:
                with picture.writing() as file:
                    file.write(svg(shown))
                print(f"picture: {options.svg}")
            contents["launches"] = [summary(launch) for launch in launches]
            contents["cores"] = [_describe_core(title, occupancy) for title, occupancy in shown]
    except NoVerdict as failed:
        return print_no_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return status


def memory_sweep(options: argparse.Namespace, bound: Callable[[argparse.Namespace], bool]) -> int:
    """Launch a kernel dry with every size of `--sweep`, and show its memory for each.

    Prints a table and bar charts, and writes the picture and the JSON document that the options request.

    Args:
        options: The command line.
        bound: Selects the chip and the backend of `nki`; returns whether that succeeded.

    Returns:
        The exit status: 0 if the kernel ran to its end with at least one size, whether it fits or not; 2 if it did with
        none, or if the options are refused.
    """
    try:
        sweep.check_options(options)
        outputs = Outputs(lambda: list_read_files(options))
        picture = outputs.claim(options.svg, "picture", "NKW-PICTURE-PATH")
        with json_document(options.json, outputs, "memory") as contents:
            if not bound(options):
                return 2
            trials, end = sweep.launch_sizes(options)
            charts = sweep.make_memory_bars(options.sweep.name, trials)
            if options.text or picture is None:
                head = Hanging(sweep.format_title(options, trials), style="bold")
                rows = sweep.make_memory_table(options.sweep.name, trials)
                sentences = [
                    *sweep.describe_capacity(trials),
                    *sweep.describe_refusals(options.sweep.name, trials, end),
                ]
                drawings = [drawing for chart in charts for drawing in ("", Drawn(partial(draw_bars, chart)))]
                show([head, "", rows, "", *sentences, *drawings])
            if picture is not None:
                with picture.writing() as file:
                    file.write(bars_svg(charts))
                print(f"picture: {options.svg}")
            if any(trial.launch for trial in trials):
                contents["sweep"] = sweep.make_contents(options.sweep.name, trials, end)
    except NoVerdict as failed:
        return print_no_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return 0 if any(trial.launch for trial in trials) else 2


def _describe_core(title: str, occupancy: Occupancy) -> dict[str, Any]:
    """Return the occupancy of a core as JSON types: bytes per partition, and the allocations, most bytes first."""
    return {
        "title": title,
        "rank": occupancy.rank,
        "core": occupancy.core,
        "memories": [
            {
                "memory": memory.region.value,
                "usable_bytes": memory.usable_bytes,
                "live_bytes": int(memory.peak_bytes),
                "high_water_bytes": int(memory.high_water_bytes),
                "verdict": verdict(memory),
                "allocations": [
                    {
                        "name": source.name,
                        "place": format_call_chain(source),
                        "bytes": int(source.bytes),
                        "most_live": int(source.most_live),
                    }
                    for source in (memory.sources[number] for number in memory.ranks)
                ],
            }
            for memory in occupancy.memories
        ],
    }


def group_equal_cores(launches: Iterable[Launch]) -> list[tuple[str, Occupancy]]:
    """Group the cores of launches, so that cores with equal occupancy are shown once.

    Cores are equal if they ran the same kernel on as many cores, with the same tiles, lifetimes and addresses.

    Returns:
        (title, occupancy) of the first core of each group, in the order of launches; the title counts the others.
    """
    groups: list[list[Occupancy]] = []
    names: list[str] = []
    known: dict[tuple[object, ...], list[int]] = {}
    for number, launch in enumerate(launches):
        for occupancy in occupancies(launch):
            anonymous = replace(occupancy, rank=0, core=0)
            equal = known.setdefault((launch.kernel, len(launch.streams), occupancy.events), [])
            for index in equal:
                if replace(groups[index][0], rank=0, core=0) == anonymous:
                    groups[index].append(occupancy)
                    break
            else:
                equal.append(len(groups))
                groups.append([occupancy])
                names.append(f"{launch.kernel} #{number} on {launch.hardware.label}")
    return [
        (name + (f" and {len(group) - 1} equal to it" if len(group) > 1 else ""), group[0])
        for name, group in zip(names, groups)
    ]
