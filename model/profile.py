"""Where the predicted time of a prompt and of a token goes, as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import KernelTime, Pass


def text(target: str, passes: Sequence[tuple[str, Pass]]) -> str:
    """Labelled passes by kernel and by layer: times in us, shares of the pass without start and end."""
    blocks = [[f"where the time goes on {target} (program reading)"]]
    for label, done in passes:
        times = done.kernel_times()
        total = sum(each.length_ns for each in times)
        head = (
            f"{label}: {(total + done.overhead_ns) / 1000:,.3f} us, "
            f"of which starting and ending take {done.overhead_ns / 1000:.3f}"
        )
        blocks += [[head, *_by_kernel(times, total)], _by_part(times, total)]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)


def _by_kernel(times: Sequence[KernelTime], total: float) -> list[str]:
    """Kernels, the one that takes most first, with shares of the peaks over their time and the busiest track."""
    out = [f"{'kernel':<20s}{'launches':>9s}{'us':>12s}{'share':>8s}{'MBU':>7s}{'MFU':>7s}  {'busiest':<14s}"]
    kernels: dict[str, list[KernelTime]] = {}
    for each in times:
        kernels.setdefault(each.kernel, []).append(each)
    lengths = {name: sum(each.length_ns for each in own) for name, own in kernels.items()}
    for name in sorted(kernels, key=lambda name: (-lengths[name], name)):
        own, length = kernels[name], lengths[name]
        mbu = sum(each.mbu * each.length_ns for each in own) / length if length else 0.0
        mfu = sum(each.mfu * each.length_ns for each in own) / length if length else 0.0
        longest = max(own, key=lambda each: each.length_ns)
        out.append(
            f"{name:<20s}{len(own):>9d}{length / 1000:>12,.3f}{_share(length, total):>8s}{mbu:>7.1%}{mfu:>7.1%}"
            f"  {longest.busiest} {longest.busiest_share:.0%}"
        )
    return out


def _by_part(times: Sequence[KernelTime], total: float) -> list[str]:
    """Layers, embedding and head, in order; neighbouring layers of equal length share a row."""
    out = [f"{'part':<20s}{'launches':>9s}{'us each':>12s}{'share':>8s}"]
    parts = [(name, list(own)) for name, own in groupby(times, key=lambda each: each.part)]
    rows = [(name, len(own), sum(each.length_ns for each in own)) for name, own in parts]
    for (is_layer, launches, length), same in groupby(
        rows, key=lambda row: (row[0].startswith("layer "), row[1], row[2])
    ):
        names = [name for name, _, _ in same]
        label = names[0] if len(names) == 1 else f"layers {names[0][6:]} to {names[-1][6:]}"
        if not is_layer:
            label = ", ".join(names)
        whole = _share(length * len(names), total)
        out.append(f"{label:<20s}{launches:>9d}{length / 1000:>12,.3f}{whole:>8s}")
    return out


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
