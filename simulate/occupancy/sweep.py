"""Launches of a kernel with a range of sizes: which sizes fit, and at which size capacity ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from nkw.child import user_output
from nkw.errors import InvalidArgument, NkwError, get_code
from nkw.report import Hanging, Part, table
from nkw.terminal import working
from simulate.kernel_by_name import InstructionCount, launch_by_name, names_a_kernel, substitute_size
from simulate.memory import MemoryRegion
from simulate.memory.placement import live_tiles_fit
from simulate.occupancy.bars import Bar, Bars
from simulate.run import Launch, recorded
from simulate.run.machine import capacity_bytes, tile_fits
from simulate.run.observers import observing

_CAPACITY, _ONE_TILE = get_code(live_tiles_fit), get_code(tile_fits)
_LONGEST_REASON = 200  # characters


@dataclass(frozen=True, slots=True)
class Trial:
    """A launch with one size.

    `launch` is None if the kernel was refused before its end; `code` and `why`, a line, then give the
    refusal.
    """

    size: int
    launch: Launch | None
    code: str = ""
    why: str = ""

    @property
    def misfits(self) -> bool:
        """Whether a tile, or the tiles live at the same time, exceed SBUF or PSUM."""
        if self.launch is None:
            return self.code == _ONE_TILE
        return any(
            live_bytes(self.launch, region) > capacity_bytes(self.launch.hardware, region)
            for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        )

    @property
    def fits(self) -> bool:
        """Whether the kernel can run with this size."""
        return self.launch is not None and not self.misfits


@dataclass(frozen=True, slots=True)
class CapacityEnd:
    """Largest size known to fit and smallest size known not to fit, in steps of `step`.

    `between` is a size between them that the kernel refuses for another reason, at which the search ended.
    """

    fits: int | None
    misfits: int
    step: int
    between: Trial | None = None


def check_options(options: argparse.Namespace, *exclusive: str) -> None:
    """Refuse a sweep of a script, and options that take a single launch.

    Raises:
        InvalidArgument: If the options contradict `--sweep`, or if no argument of the kernel has its name.
    """
    if not names_a_kernel(options.script):
        raise InvalidArgument(
            "NKW-SWEEP",
            f"--sweep takes a kernel, {options.script:.60} names none; give FILE.py:NAME or MODULE:NAME",
        )
    for option in exclusive:
        if getattr(options, option.lstrip("-").replace("-", "_")):
            raise InvalidArgument(
                "NKW-SWEEP", f"{option} takes one launch and --sweep makes many; leave one of them out"
            )
    substitute_size(options.arguments, options.sweep.name, 1)


def launch_sizes(options: argparse.Namespace) -> tuple[list[Trial], CapacityEnd | None]:
    """Launch every size of the sweep, and search the size at which capacity ends.

    Shows progress on stderr.
    """
    count, position = InstructionCount(), ""
    name, sizes = options.sweep.name, options.sweep.sizes

    def launch_size(size: int, purpose: str) -> Trial:
        nonlocal position
        position = f"{name}={size:,}, {purpose}"
        return _try_size(options, size)

    with observing(count), working(lambda: f"{position}: {count.instructions:,} instructions"):
        trials = [
            launch_size(size, f"size {number} of {len(sizes)}") for number, size in enumerate(sizes, start=1)
        ]
        end = find_capacity_end(trials, lambda size: launch_size(size, "search for the end of capacity"))
    return trials, end


def _try_size(options: argparse.Namespace, size: int) -> Trial:
    """Launch a kernel dry with one size, and record refusals and failures."""
    arguments = substitute_size(options.arguments, options.sweep.name, size)
    with user_output(to_stderr=False), recorded(refused=True, outputs=False) as launches:
        try:
            launch = launch_by_name(options.script, arguments, trips=options.trips)
        except NkwError as refused:
            full_launch = launches[-1] if refused.code == _CAPACITY and launches else None
            return Trial(size, full_launch, refused.code, _shorten_error(refused))
        except Exception as failed:  # any error of the kernel's Python code
            return Trial(size, None, why=f"{type(failed).__name__}: {failed}"[:_LONGEST_REASON])
    return Trial(size, launch)


def find_capacity_end(trials: Sequence[Trial], launch_size: Callable[[int], Trial]) -> CapacityEnd | None:
    """Find by bisection the size at which capacity ends.

    Sizes between the last that fits and the first that does not are launched, in steps of the greatest common
    divisor of all sizes.

    Returns:
        None if every launch fits.
    """
    first = next((trial.size for trial in trials if trial.misfits), None)
    if first is None:
        return None
    step = gcd(*(trial.size for trial in trials))
    last = max((trial.size for trial in trials if trial.fits and trial.size < first), default=None)
    if last is None:
        return CapacityEnd(None, first, step)
    while first - last > step:
        middle = launch_size(last + (first - last) // step // 2 * step)
        if middle.fits:
            last = middle.size
        elif middle.misfits:
            first = middle.size
        else:
            return CapacityEnd(last, first, step, middle)
    return CapacityEnd(last, first, step)


def describe_refusals(name: str, trials: Sequence[Trial], end: CapacityEnd | None) -> list[Part]:
    """Return a sentence for every refused size, and a sentence about the end of capacity."""
    refused = [trial for trial in trials if not trial.fits]
    lines: list[Part] = [
        Hanging(f"{name}={trial.size:,}: {trial.why or 'live tiles do not fit'}") for trial in refused
    ]
    if end is None:
        fitting = [trial.size for trial in trials if trial.fits]
        most = (
            f"capacity does not end here: {name}={fitting[-1]:,} fits"
            if fitting
            else "no size could be launched"
        )
        return [*lines, Hanging(most, style="bold")]
    sentence = f"capacity ends: {name}={end.misfits:,} does not fit"
    if end.fits is None:
        sentence += ", nor was a smaller size tried that fits"
    else:
        sentence = f"capacity ends: {name}={end.fits:,} fits, {name}={end.misfits:,} does not"
        sentence += f" (in steps of {end.step:,})"
    if end.between is not None:
        sentence += f"; {name}={end.between.size:,}, between them, is refused: {end.between.why}"
    return [*lines, Hanging(sentence, style="bold")]


def make_contents(name: str, trials: Sequence[Trial], end: CapacityEnd | None) -> dict[str, Any]:
    """Return the sweep as a JSON document: bytes per partition, null for sizes without a launch."""
    return {
        "name": name,
        "sizes": [
            {
                "size": trial.size,
                "verdict": format_verdict(trial),
                "why": trial.why,
                **{
                    f"{region.value}_{quantity}": trial.launch and measure(trial.launch, region)
                    for region in (MemoryRegion.sbuf, MemoryRegion.psum)
                    for quantity, measure in (
                        ("live_bytes", live_bytes),
                        ("high_water_bytes", Launch.high_water_bytes),
                    )
                },
            }
            for trial in trials
        ],
        "capacity_end": end and {"fits": end.fits, "misfits": end.misfits, "step": end.step},
    }


def live_bytes(launch: Launch, region: MemoryRegion) -> int:
    """Return the most bytes per partition that are live at the same time on any core."""
    return max(placements[region].live_bytes for placements in launch.placements)


def memory_table(name: str, trials: Sequence[Trial]) -> Part:
    """Return the table of bytes in SBUF and PSUM, a row for each size."""
    rows = [(f"{trial.size:,}", *_in_memories(trial), format_verdict(trial)) for trial in trials]
    return table(f"{name}|SBUF live|high water|PSUM live|high water|", rows, left=(5,), gap=1)


def describe_capacity(trials: Sequence[Trial]) -> list[Part]:
    """Return a sentence about the usable bytes of the chip; empty if no size could be launched."""
    chip = next((trial.launch.hardware for trial in trials if trial.launch), None)
    if chip is None:
        return []
    sbuf, psum = (capacity_bytes(chip, region) for region in (MemoryRegion.sbuf, MemoryRegion.psum))
    return [Hanging(f"usable: {sbuf:,} bytes per partition in SBUF, {psum:,} in PSUM")]


def format_title(options: argparse.Namespace, trials: Sequence[Trial]) -> str:
    """Return the kernel with its arguments, the chip, and the number of ranks if above 1."""
    launch = next((trial.launch for trial in trials if trial.launch), None)
    if launch is None:
        return " ".join([options.script, *options.arguments])
    ranks = len({stream.rank for stream in launch.streams})
    chip = f"on {launch.hardware.label}" + (f", {ranks} ranks" if ranks > 1 else "")
    return " ".join([options.script, *options.arguments, chip])


def format_verdict(trial: Trial) -> str:
    """Return the verdict on a size: "fits", "does not fit" or "refused"."""
    return "fits" if trial.fits else "does not fit" if trial.misfits else "refused"


def _in_memories(trial: Trial) -> list[str]:
    """Return live bytes and high-water marks of SBUF and PSUM, or "-" without a launch."""
    launch = trial.launch
    if launch is None:
        return ["-"] * 4
    return [
        f"{number:,}"
        for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        for number in (live_bytes(launch, region), launch.high_water_bytes(region))
    ]


def memory_bars(name: str, trials: Sequence[Trial]) -> list[Bars]:
    """Return the charts of live bytes over the sizes, for each memory in use; the usable bytes are the limit."""
    used = [
        region
        for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        if any(trial.launch and live_bytes(trial.launch, region) for trial in trials)
    ]
    return [
        Bars(
            f"{region.value.upper()}, bytes per partition by {name}",
            ("live",),
            tuple(_bar(trial, region) for trial in trials),
            max(
                (capacity_bytes(trial.launch.hardware, region) for trial in trials if trial.launch),
                default=None,
            ),
        )
        for region in used
    ]


def _bar(trial: Trial, region: MemoryRegion) -> Bar:
    """Return the bar of live bytes of a size."""
    if trial.launch is None:
        return Bar(f"{trial.size:,}", (0.0,), format_verdict(trial))
    taken = live_bytes(trial.launch, region)
    return Bar(f"{trial.size:,}", (float(taken),), f"{taken:,}")


def _shorten_error(refused: NkwError) -> str:
    """Return the code of an error with the arguments it refused, else the first line of its message."""
    seen = getattr(refused, "seen", "")
    words = " ".join((f"[{refused.code}] {seen}" if seen else str(refused).splitlines()[0]).split())
    return words if len(words) <= _LONGEST_REASON else f"{words[: _LONGEST_REASON - 1]}…"
