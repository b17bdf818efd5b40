"""Launches of a kernel with a range of sizes: which sizes fit into SBUF and PSUM, and where capacity ends.

The command `memory --sweep NAME=SIZES` launches the kernel dry with each size in the place of NAME in its arguments.
`simulate.profile.sweep` times the same launches. Capacity ends between the largest size known to fit and the smallest
size known not to fit. Bytes are per partition.
"""

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
    """A dry launch with one size.

    `launch` is None if the kernel was refused or failed before its end. `code` is the code of a refusal, empty if the
    kernel's Python code failed. `why` is one line. A launch whose live tiles do not fit has both a launch and a code.
    """

    size: int
    launch: Launch | None
    code: str = ""
    why: str = ""

    @property
    def misfits(self) -> bool:
        """Whether a tile, or the tiles that are live at the same time, exceed SBUF or PSUM.

        False if the kernel was refused for another reason before its end.
        """
        if self.launch is None:
            return self.code == _ONE_TILE
        return any(
            live_bytes(self.launch, region) > capacity_bytes(self.launch.hardware, region)
            for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        )

    @property
    def fits(self) -> bool:
        """Whether the kernel ran to its end with this size and its live tiles fit."""
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
    """Check the options of a command with `--sweep`.

    Args:
        options: The command line.
        exclusive: Options that cannot be used together with `--sweep`, such as "--profile".

    Raises:
        InvalidArgument: If a script and not a kernel is named, if an exclusive option is used, or if no argument of the
            kernel has the name of the sweep.
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
    """Launch a kernel dry with every size of the sweep, then with sizes between them to find where capacity ends.

    Shows progress on stderr.

    Returns:
        The launches of the sweep's sizes, in order; and where capacity ends, or None if all of them fit. Launches of
        the search are not among the first.
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
    """Launch a kernel dry with one size; refusals and errors of the kernel are returned in the trial, not raised.

    Output of the kernel is discarded.
    """
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

    Sizes between the last that fits and the first that does not are launched, in steps of the greatest common divisor
    of all sizes. The search ends early at a size that is refused for another reason.

    Args:
        trials: The launches of the sweep.
        launch_size: Launches the kernel with a size.

    Returns:
        The bounds that were found; None if no launch exceeds the capacity.
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
    """Return a sentence for every size that does not fit or was refused, and one about where capacity ends.

    Args:
        name: The name of the swept argument.
        trials: The launches of the sweep.
        end: Where capacity ends, None if it does not.
    """
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
    """Return the sweep as JSON types: bytes per partition of every size, None for sizes without a launch."""
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
    """Return the most bytes per partition of SBUF or PSUM that are live at the same time on one core of a launch."""
    return max(placements[region].live_bytes for placements in launch.placements)


def make_memory_table(name: str, trials: Sequence[Trial]) -> Part:
    """Return the table of live bytes and high-water marks in SBUF and PSUM, a row with a verdict for each size."""
    rows = [(f"{trial.size:,}", *_format_memories(trial), format_verdict(trial)) for trial in trials]
    return table(f"{name}|SBUF live|high water|PSUM live|high water|", rows, left=(5,), gap=1)


def describe_capacity(trials: Sequence[Trial]) -> list[Part]:
    """Return a sentence about the usable bytes of the chip's memories, in a list; empty if no size was launched."""
    chip = next((trial.launch.hardware for trial in trials if trial.launch), None)
    if chip is None:
        return []
    sbuf, psum = (capacity_bytes(chip, region) for region in (MemoryRegion.sbuf, MemoryRegion.psum))
    return [Hanging(f"usable: {sbuf:,} bytes per partition in SBUF, {psum:,} in PSUM")]


def format_title(options: argparse.Namespace, trials: Sequence[Trial]) -> str:
    """Return the title of a sweep: kernel, arguments, chip, and the number of ranks if there are several.

    Chip and ranks are left out if no size was launched.
    """
    launch = next((trial.launch for trial in trials if trial.launch), None)
    if launch is None:
        return " ".join([options.script, *options.arguments])
    ranks = len({stream.rank for stream in launch.streams})
    chip = f"on {launch.hardware.label}" + (f", {ranks} ranks" if ranks > 1 else "")
    return " ".join([options.script, *options.arguments, chip])


def format_verdict(trial: Trial) -> str:
    """Return the verdict on a size: "fits", "does not fit" or "refused"."""
    return "fits" if trial.fits else "does not fit" if trial.misfits else "refused"


def _format_memories(trial: Trial) -> list[str]:
    """Return the four cells of a size: live bytes and high-water mark of SBUF, then of PSUM; "-" without a launch."""
    launch = trial.launch
    if launch is None:
        return ["-"] * 4
    return [
        f"{number:,}"
        for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        for number in (live_bytes(launch, region), launch.high_water_bytes(region))
    ]


def make_memory_bars(name: str, trials: Sequence[Trial]) -> list[Bars]:
    """Return a chart of live bytes by size for SBUF and for PSUM, with the usable bytes as its limit.

    A memory in which no launch has tiles gets no chart.
    """
    used = [
        region
        for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        if any(trial.launch and live_bytes(trial.launch, region) for trial in trials)
    ]
    return [
        Bars(
            f"{region.value.upper()}, bytes per partition by {name}",
            ("live",),
            tuple(_make_bar(trial, region) for trial in trials),
            max(
                (capacity_bytes(trial.launch.hardware, region) for trial in trials if trial.launch),
                default=None,
            ),
        )
        for region in used
    ]


def _make_bar(trial: Trial, region: MemoryRegion) -> Bar:
    """Return the bar of a size's live bytes in SBUF or PSUM; without a launch it is empty and noted as refused."""
    if trial.launch is None:
        return Bar(f"{trial.size:,}", (0.0,), format_verdict(trial))
    taken = live_bytes(trial.launch, region)
    return Bar(f"{trial.size:,}", (float(taken),), f"{taken:,}")


def _shorten_error(refused: NkwError) -> str:
    """Return the code of an error with the arguments that it refused, else the first line of its message.

    The text is one line of at most 200 characters.
    """
    seen = getattr(refused, "seen", "")
    words = " ".join((f"[{refused.code}] {seen}" if seen else str(refused).splitlines()[0]).split())
    return words if len(words) <= _LONGEST_REASON else f"{words[: _LONGEST_REASON - 1]}…"
