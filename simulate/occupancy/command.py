"""The command `memory`: what the launches of a script have in SBUF and PSUM."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from nkw.errors import NkwError, NoVerdict
from nkw.files import Outputs, json_document
from nkw.parts import Drawn, Hanging
from nkw.terminal import error, show, working
from simulate.isolated import without_verdict
from simulate.kernel_by_name import files_read, names_a_kernel, nothing_launched
from simulate.occupancy import sweep
from simulate.occupancy.bars import drawn
from simulate.occupancy.bars import svg as bars_svg
from simulate.occupancy.svg import svg
from simulate.occupancy.text import place_of, report, verdict
from simulate.occupancy.uses import Occupancy, occupancies
from simulate.run import Launch, recorded
from simulate.run.launch_text import summary


def memory(options: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Run a script and show the memory of every launch, also of one that is refused because it does not fit.

    Returns the status of the script, or 2 if there is nothing to show or the picture cannot be written.
    """
    try:
        outputs = Outputs(lambda: files_read(options))
        picture = outputs.claim(options.svg, "picture", "NKW-PICTURE-PATH")
        with json_document(options.json, outputs, "memory") as contents:
            with recorded(calls=True, refused=True, outputs=False) as launches:
                status = run(options)
            if not launches:
                if status != 2 or not names_a_kernel(options.script):
                    contents.update(launches=[], cores=[])
                if status == 0:
                    error(nothing_launched(options.script))
                return status or 2
            with working(lambda: "memory maps"):
                shown = distinct(launches)
            if options.text or picture is None:
                blocks = [report(occupancy, title) for title, occupancy in shown]
                show([*blocks[0], *(part for block in blocks[1:] for part in ("", *block))])
            if picture is not None:
                with picture.writing() as file:
                    file.write(svg(shown))
                print(f"picture: {options.svg}")
            contents["launches"] = [summary(each) for each in launches]
            contents["cores"] = [_core(title, occupancy) for title, occupancy in shown]
    except NoVerdict as failed:
        return without_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return status


def memory_sweep(options: argparse.Namespace, bound: Callable[[argparse.Namespace], bool]) -> int:
    """Show the memory of a kernel with every size of the sweep, chip and `nki` being bound by `bound`.

    Returns 0 where a size could be launched, 2 where none could or the command could not run.
    """
    try:
        sweep.check(options)
        outputs = Outputs(lambda: files_read(options))
        picture = outputs.claim(options.svg, "picture", "NKW-PICTURE-PATH")
        with json_document(options.json, outputs, "memory") as contents:
            if not bound(options):
                return 2
            tried, end = sweep.searched(options)
            charts = sweep.memory_bars(options.sweep.name, tried)
            if options.text or picture is None:
                head = Hanging(sweep.title(options, tried), style="bold")
                rows = sweep.memory_table(options.sweep.name, tried)
                sentences = [*sweep.usable(tried), *sweep.sentences(options.sweep.name, tried, end)]
                drawings = [part for each in charts for part in ("", Drawn(partial(drawn, each)))]
                show([head, "", rows, "", *sentences, *drawings])
            if picture is not None:
                with picture.writing() as file:
                    file.write(bars_svg(charts))
                print(f"picture: {options.svg}")
            if any(each.launch for each in tried):
                contents["sweep"] = sweep.contents(options.sweep.name, tried, end)
    except NoVerdict as failed:
        return without_verdict(failed)
    except NkwError as refused:
        error(refused)
        return 2
    return 0 if any(each.launch for each in tried) else 2


def _core(title: str, occupancy: Occupancy) -> dict[str, Any]:
    """One core as a document: bytes per partition, and the allocations of each memory, the largest first."""
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
                        "place": place_of(source),
                        "bytes": int(source.bytes),
                        "most_live": int(source.most_live),
                    }
                    for source in (memory.sources[number] for number in memory.ranks)
                ],
            }
            for memory in occupancy.memories
        ],
    }


def distinct(launches: Iterable[Launch]) -> list[tuple[str, Occupancy]]:
    """The cores of launches whose memory differs, each with a title that counts the equal ones."""
    found: list[list[Occupancy]] = []
    names: list[str] = []
    known: dict[tuple[object, ...], list[int]] = {}
    for number, launch in enumerate(launches):
        for occupancy in occupancies(launch):
            anonymous = replace(occupancy, rank=0, core=0)
            equal = known.setdefault((launch.kernel, len(launch.streams), occupancy.events), [])
            for index in equal:
                if replace(found[index][0], rank=0, core=0) == anonymous:
                    found[index].append(occupancy)
                    break
            else:
                equal.append(len(found))
                found.append([occupancy])
                names.append(f"{launch.kernel} #{number} on {launch.hardware.label}")
    return [
        (name + (f" and {len(group) - 1} equal to it" if len(group) > 1 else ""), group[0])
        for name, group in zip(names, found)
    ]
