"""The command `memory`: what the launches of a script have in SBUF and PSUM."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace

from simulate.errors import NkwError
from simulate.files import Outputs
from simulate.kernel_by_name import files_read
from simulate.occupancy.svg import svg
from simulate.occupancy.text import report
from simulate.occupancy.uses import Occupancy, occupancies
from simulate.run import Launch, recorded
from simulate.terminal import error, show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `memory`."""
    command.add_argument("--svg", metavar="FILE", help="write the maps as a picture")
    command.add_argument("--text", action="store_true", help="print the text also where a picture is written")


def memory(options: argparse.Namespace, run_script: Callable[[argparse.Namespace], int]) -> int:
    """Run a script and show the memory of every launch, also of one that is refused because it does not fit.

    Returns the status of the script, or 2 if there is nothing to show or the picture cannot be written.
    """
    try:
        picture = Outputs(lambda: files_read(options)).claim(options.svg, "picture", "NKW-PICTURE-PATH")
        with recorded(calls=True, refused=True, outputs=False) as launches:
            status = run_script(options)
        if not launches:
            if status == 0:
                error("no kernel was launched")
            return status or 2
        shown = distinct(launches)
        if options.text or picture is None:
            blocks = [report(occupancy, title) for title, occupancy in shown]
            show([*blocks[0], *(part for block in blocks[1:] for part in ("", *block))])
        if picture is not None:
            with picture.writing() as file:
                file.write(svg(shown))
            print(f"picture: {options.svg}")
    except NkwError as refused:
        error(refused)
        return 2
    return status


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
                names.append(f"{launch.kernel} #{number} on {launch.hardware.name}")
    return [
        (name + (f" and {len(group) - 1} equal to it" if len(group) > 1 else ""), group[0])
        for name, group in zip(names, found)
    ]
