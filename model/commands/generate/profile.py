"""Where the predicted time of a prompt and of a token goes, by kernel and by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from nkw.parts import Hanging, Part, table
from nkw.terminal import rendered

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import KernelTime, Pass


def text(target: str, passes: Sequence[tuple[str, Pass]]) -> str:
    """The profile as text of 80 columns."""
    return rendered(parts(target, passes))


def parts(target: str, passes: Sequence[tuple[str, Pass]]) -> list[Part]:
    """Labelled passes by kernel and by layer: times in us, shares of the pass without start and end."""
    out: list[Part] = [f"where the time goes on {target} (program reading)"]
    for label, done in passes:
        times = done.kernel_times()
        total = sum(each.length_ns for each in times)
        head = (
            f"{label}: {(total + done.overhead_ns) / 1000:,.3f} us, "
            f"of which starting and ending take {done.overhead_ns / 1000:.3f}"
        )
        out += ["", Hanging(head, style="bold"), _by_kernel(times, total), "", _by_part(times, total)]
    return out


def _by_kernel(times: Sequence[KernelTime], total: float) -> Part:
    """Kernels, the one that takes most first, with shares of the peaks over their time and the busiest track."""
    kernels: dict[str, list[KernelTime]] = {}
    for each in times:
        kernels.setdefault(each.kernel, []).append(each)
    lengths = {name: sum(each.length_ns for each in own) for name, own in kernels.items()}
    rows = []
    for name in sorted(kernels, key=lambda name: (-lengths[name], name)):
        own, length = kernels[name], lengths[name]
        mbu = sum(each.mbu * each.length_ns for each in own) / length if length else 0.0
        mfu = sum(each.mfu * each.length_ns for each in own) / length if length else 0.0
        longest = max(own, key=lambda each: each.length_ns)
        times_of_kernel = (str(len(own)), f"{length / 1000:,.3f}", _share(length, total))
        busiest = f"{longest.busiest} {longest.busiest_share:.0%}"
        rows.append((name, *times_of_kernel, f"{mbu:.1%}", f"{mfu:.1%}", busiest))
    return table("kernel|launches|us|share|MBU|MFU|busiest", rows, left=(0, 6))


def _by_part(times: Sequence[KernelTime], total: float) -> Part:
    """Layers, embedding and head, in order; neighbouring layers of equal length share a row."""
    grouped = [(name, list(own)) for name, own in groupby(times, key=lambda each: each.part)]
    lengths = [(name, len(own), sum(each.length_ns for each in own)) for name, own in grouped]
    rows = []
    for (is_layer, launches, length), same in groupby(
        lengths, key=lambda row: (row[0].startswith("layer "), row[1], row[2])
    ):
        names = [name for name, _, _ in same]
        label = names[0] if len(names) == 1 else f"layers {names[0][6:]} to {names[-1][6:]}"
        if not is_layer:
            label = ", ".join(names)
        rows.append((label, str(launches), f"{length / 1000:,.3f}", _share(length * len(names), total)))
    return table("part|launches|us each|share", rows)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
