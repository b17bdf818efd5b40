"""Files of a failed test, which show what the kernel did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nkw.errors import NkwError
from simulate.check import Finding, Format, render
from simulate.occupancy import occupancies, svg, text
from simulate.run import Launch
from simulate.timing import schedule, write_trace


def write_artifacts(
    folder: Path,
    report: str,
    findings: Sequence[Finding] = (),
    launches: Sequence[Launch] = (),
    arrays: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the files of a failure into `folder`, which is created if it does not exist, and return the folder.

    report.txt: why the test failed. findings.json: findings of the detectors. stream.txt: the instructions of every
    core. memory.txt, memory.svg: the tiles in SBUF and PSUM. trace.json: the predicted timeline, for Perfetto.
    arrays.npz: output and truth in float64. A file without content is not written. For a refused launch, the files
    show the instructions before the refusal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text(report + "\n", encoding="utf-8")
    if findings:
        (folder / "findings.json").write_text(render(findings, Format.json), encoding="utf-8")
    if arrays:
        np.savez(folder / "arrays.npz", **{name: np.asarray(a, np.float64) for name, a in arrays.items()})  # type: ignore[arg-type]
    if launches:
        _write_launches(folder, launches)
    return folder


def _write_launches(folder: Path, launches: Sequence[Launch]) -> None:
    streams = [
        f"# {launch.kernel} #{number} rank {stream.rank} core {stream.core} on {launch.hardware.name}\n{stream.text()}"
        for number, launch in enumerate(launches)
        for stream in launch.streams
    ]
    (folder / "stream.txt").write_text("\n".join(streams), encoding="utf-8")
    maps = [
        (f"{launch.kernel} #{number} rank {occupancy.rank} core {occupancy.core}", occupancy)
        for number, launch in enumerate(launches)
        for occupancy in occupancies(launch)
    ]
    (folder / "memory.txt").write_text(
        "\n".join(text(occupancy, title) for title, occupancy in maps), encoding="utf-8"
    )
    (folder / "memory.svg").write_text(svg(maps), encoding="utf-8")
    try:
        timelines = [
            (f"{launch.kernel} #{number}", launch.streams, schedule(launch.streams, launch.hardware))
            for number, launch in enumerate(launches)
        ]
        write_trace(folder / "trace.json", timelines)
    except NkwError as error:  # a requested order that cannot be kept has no timeline
        (folder / "trace.txt").write_text(f"no timeline: {error}\n", encoding="utf-8")
