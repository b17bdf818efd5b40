"""Profile of the option `--profile`: predicted times of passes, by kernel and by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from nkw.report import Hanging, Part, table

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import KernelTime, Pass
    from model.runners.image_times import ComponentTime


def describe_passes(target: str, passes: Sequence[tuple[str, Pass]]) -> list[Part]:
    """Return the parts of the profile: for each labelled pass a headline, a table by kernel and a table by layer.

    Times are in us of the program reading. Shares are of the time in launches, without starting and ending.

    Args:
        target: The chip.
        passes: The passes of a step with their labels.
    """
    out: list[Part] = [f"where the time goes on {target} (program reading)"]
    for label, done in passes:
        times = done.kernel_times()
        total = sum(time.length_ns for time in times)
        head = (
            f"{label}: {(total + done.overhead_ns) / 1000:,.3f} us, "
            f"of which starting and ending take {done.overhead_ns / 1000:.3f}"
        )
        out += [
            "",
            Hanging(head, style="bold"),
            _tabulate_kernels(times, total),
            "",
            _tabulate_layers(times, total),
        ]
    return out


def describe_components(target: str, components: Sequence[ComponentTime]) -> list[Part]:
    """Return the parts of the profile of one pass of each component of a diffusion model, as `describe_passes` does."""
    return describe_passes(target, [(component.label, component.model_pass) for component in components])


def _tabulate_kernels(times: Sequence[KernelTime], total: float) -> Part:
    """Return a table of kernels by descending time, with utilisations and the busiest engine or queue of each.

    Args:
        times: Time of each launch.
        total: Time of all launches in ns.
    """
    kernels: dict[str, list[KernelTime]] = {}
    for time in times:
        kernels.setdefault(time.kernel, []).append(time)
    lengths = {name: sum(time.length_ns for time in launches) for name, launches in kernels.items()}
    rows = []
    for name in sorted(kernels, key=lambda name: (-lengths[name], name)):
        launches, length = kernels[name], lengths[name]
        mbu = sum(time.mbu * time.length_ns for time in launches) / length if length else 0.0
        mfu = sum(time.mfu * time.length_ns for time in launches) / length if length else 0.0
        longest = max(launches, key=lambda time: time.length_ns)
        kernel_times = (str(len(launches)), f"{length / 1000:,.3f}", _format_share(length, total))
        busiest = f"{longest.busiest} {longest.busiest_share:.0%}"
        rows.append((name, *kernel_times, f"{mbu:.1%}", f"{mfu:.1%}", busiest))
    return table("kernel|launches|us|share|MBU|MFU|busiest", rows, left=(0, 6))


def _tabulate_layers(times: Sequence[KernelTime], total: float) -> Part:
    """Return a table of embedding, layers and head in order; neighbouring layers of equal time share a row.

    Args:
        times: Time of each launch.
        total: Time of all launches in ns.
    """
    grouped = [(name, list(launches)) for name, launches in groupby(times, key=lambda time: time.section)]
    lengths = [(name, len(launches), sum(time.length_ns for time in launches)) for name, launches in grouped]
    rows = []
    for (is_layer, launches, length), equal_rows in groupby(
        lengths, key=lambda row: (row[0].startswith("layer "), row[1], row[2])
    ):
        names = [name for name, _, _ in equal_rows]
        label = names[0] if len(names) == 1 else f"layers {names[0][6:]} to {names[-1][6:]}"
        if not is_layer:
            label = ", ".join(names)
        rows.append(
            (label, str(launches), f"{length / 1000:,.3f}", _format_share(length * len(names), total))
        )
    return table("part|launches|us each|share", rows)


def _format_share(length: float, total: float) -> str:
    """Return `length` as a share of `total` in percent; "-" if the total is 0."""
    return f"{length / total:.1%}" if total else "-"
