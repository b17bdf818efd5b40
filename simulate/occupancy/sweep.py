"""A kernel launched with one size after another: which sizes fit, and at which one capacity ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from nkw.child import user_output
from nkw.errors import InvalidArgument, NkwError, code_of
from nkw.parts import Hanging, Part, table
from nkw.terminal import working
from simulate.kernel_by_name import InstructionCount, launch_by_name, names_a_kernel, with_size
from simulate.memory import MemoryRegion
from simulate.memory.placement import live_tiles_fit
from simulate.occupancy.bars import Bar, Bars
from simulate.run import Launch, recorded
from simulate.run.machine import capacity_bytes, tile_fits
from simulate.run.observers import observing

_CAPACITY, _ONE_TILE = code_of(live_tiles_fit), code_of(tile_fits)
_LONGEST_REASON = 200  # characters


@dataclass(frozen=True, slots=True)
class Trial:
    """A launch with one size.

    `launch` is None where the kernel was refused before its end; `code` and `why`, one line, say what refused it.
    """

    size: int
    launch: Launch | None
    code: str = ""
    why: str = ""

    @property
    def misfits(self) -> bool:
        """Whether a tile, or the tiles that are live at one time, exceed SBUF or PSUM."""
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
    """The largest size known to fit and the smallest known not to, in steps of `step`.

    `between` is a size between them that the kernel refuses for another reason, where the search ended.
    """

    fits: int | None
    misfits: int
    step: int
    between: Trial | None = None


def check(options: argparse.Namespace, *alone: str) -> None:
    """Raises InvalidArgument for a sweep of a script, and beside options that take one launch."""
    if not names_a_kernel(options.script):
        raise InvalidArgument(
            "NKW-SWEEP",
            f"--sweep takes a kernel, FILE.py:NAME or MODULE:NAME, and {options.script:.60} is none",
        )
    for option in alone:
        if getattr(options, option.lstrip("-").replace("-", "_")):
            raise InvalidArgument(
                "NKW-SWEEP", f"{option} takes one launch and --sweep makes many; give one of them"
            )
    with_size(options.arguments, options.sweep.name, 1)


def searched(options: argparse.Namespace) -> tuple[list[Trial], CapacityEnd | None]:
    """One launch for every size of the sweep, and where capacity ends; stderr shows how far the search is."""
    count, at = InstructionCount(), ""
    name, sizes = options.sweep.name, options.sweep.sizes

    def launched(size: int, why: str) -> Trial:
        nonlocal at
        at = f"{name}={size:,}, {why}"
        return _attempt(options, size)

    with observing(count), working(lambda: f"{at}: {count.instructions:,} instructions"):
        tried = [
            launched(size, f"size {number} of {len(sizes)}") for number, size in enumerate(sizes, start=1)
        ]
        end = capacity_end(tried, lambda size: launched(size, "search for the end of capacity"))
    return tried, end


def _attempt(options: argparse.Namespace, size: int) -> Trial:
    """The launch with one size, dry."""
    arguments = with_size(options.arguments, options.sweep.name, size)
    with user_output(to_stderr=False), recorded(refused=True, outputs=False) as launches:
        try:
            done = launch_by_name(options.script, arguments, trips=options.trips)
        except NkwError as refused:
            kept = launches[-1] if refused.code == _CAPACITY and launches else None
            return Trial(size, kept, refused.code, _line(refused))
        except Exception as failed:  # whatever the kernel's Python raises with these shapes
            return Trial(size, None, why=f"{type(failed).__name__}: {failed}"[:_LONGEST_REASON])
    return Trial(size, done)


def capacity_end(tried: Sequence[Trial], launched: Callable[[int], Trial]) -> CapacityEnd | None:
    """Where capacity ends, by bisection between the last size that fits and the first that does not.

    Sizes between them are tried in steps of what all sizes are multiples of. None where every launch fits.
    """
    first = next((trial.size for trial in tried if trial.misfits), None)
    if first is None:
        return None
    step = gcd(*(trial.size for trial in tried))
    last = max((trial.size for trial in tried if trial.fits and trial.size < first), default=None)
    if last is None:
        return CapacityEnd(None, first, step)
    while first - last > step:
        middle = launched(last + (first - last) // step // 2 * step)
        if middle.fits:
            last = middle.size
        elif middle.misfits:
            first = middle.size
        else:
            return CapacityEnd(last, first, step, middle)
    return CapacityEnd(last, first, step)


def sentences(name: str, tried: Sequence[Trial], end: CapacityEnd | None) -> list[Part]:
    """A sentence on every size that is refused, and one on where capacity ends."""
    refused = [trial for trial in tried if not trial.fits]
    out: list[Part] = [
        Hanging(f"{name}={each.size:,}: {each.why or 'live tiles do not fit'}") for each in refused
    ]
    if end is None:
        fitting = [trial.size for trial in tried if trial.fits]
        most = (
            f"capacity does not end here: {name}={fitting[-1]:,} fits"
            if fitting
            else "no size could be launched"
        )
        return [*out, Hanging(most, style="bold")]
    said = f"capacity ends: {name}={end.misfits:,} does not fit"
    if end.fits is None:
        said += ", nor was a smaller size tried that fits"
    else:
        said = f"capacity ends: {name}={end.fits:,} fits, {name}={end.misfits:,} does not"
        said += f" (in steps of {end.step:,})"
    if end.between is not None:
        said += f"; {name}={end.between.size:,}, between them, is refused: {end.between.why}"
    return [*out, Hanging(said, style="bold")]


def contents(name: str, tried: Sequence[Trial], end: CapacityEnd | None) -> dict[str, Any]:
    """The sweep as a document: memory in bytes per partition, null where a size has none."""
    return {
        "name": name,
        "sizes": [
            {
                "size": trial.size,
                "verdict": word(trial),
                "why": trial.why,
                **{
                    f"{region.value}_{what}": trial.launch and measure(trial.launch, region)
                    for region in (MemoryRegion.sbuf, MemoryRegion.psum)
                    for what, measure in (
                        ("live_bytes", live_bytes),
                        ("high_water_bytes", Launch.high_water_bytes),
                    )
                },
            }
            for trial in tried
        ],
        "capacity_end": end and {"fits": end.fits, "misfits": end.misfits, "step": end.step},
    }


def live_bytes(launch: Launch, region: MemoryRegion) -> int:
    """The most bytes per partition that are live at one time on any core."""
    return max(placements[region].live_bytes for placements in launch.placements)


def memory_table(name: str, tried: Sequence[Trial]) -> Part:
    """The bytes of every size in SBUF and PSUM."""
    rows = [(f"{each.size:,}", *_in_memories(each), word(each)) for each in tried]
    return table(f"{name}|SBUF live|high water|PSUM live|high water|", rows, left=(5,), gap=1)


def usable(tried: Sequence[Trial]) -> list[Part]:
    """The bytes that tiles may take on the chip of a sweep; nothing where no size could be launched."""
    chip = next((each.launch.hardware for each in tried if each.launch), None)
    if chip is None:
        return []
    sbuf, psum = (capacity_bytes(chip, region) for region in (MemoryRegion.sbuf, MemoryRegion.psum))
    return [Hanging(f"usable: {sbuf:,} bytes per partition in SBUF, {psum:,} in PSUM")]


def title(options: argparse.Namespace, tried: Sequence[Trial]) -> str:
    """The kernel with its arguments, the chip, and the ranks where there are several."""
    launch = next((each.launch for each in tried if each.launch), None)
    if launch is None:
        return " ".join([options.script, *options.arguments])
    ranks = len({stream.rank for stream in launch.streams})
    chip = f"on {launch.hardware.label}" + (f", {ranks} ranks" if ranks > 1 else "")
    return " ".join([options.script, *options.arguments, chip])


def word(trial: Trial) -> str:
    """A word on a size."""
    return "fits" if trial.fits else "does not fit" if trial.misfits else "refused"


def _in_memories(trial: Trial) -> list[str]:
    launch = trial.launch
    if launch is None:
        return ["-"] * 4
    return [
        f"{number:,}"
        for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        for number in (live_bytes(launch, region), launch.high_water_bytes(region))
    ]


def memory_bars(name: str, tried: Sequence[Trial]) -> list[Bars]:
    """Live bytes in SBUF and in PSUM over the sizes, where any are used; the usable bytes are the limit."""
    used = [
        region
        for region in (MemoryRegion.sbuf, MemoryRegion.psum)
        if any(each.launch and live_bytes(each.launch, region) for each in tried)
    ]
    return [
        Bars(
            f"{region.value.upper()}, bytes per partition by {name}",
            ("live",),
            tuple(_bar(each, region) for each in tried),
            max(
                (capacity_bytes(each.launch.hardware, region) for each in tried if each.launch), default=None
            ),
        )
        for region in used
    ]


def _bar(trial: Trial, region: MemoryRegion) -> Bar:
    if trial.launch is None:
        return Bar(f"{trial.size:,}", (0.0,), word(trial))
    taken = live_bytes(trial.launch, region)
    return Bar(f"{trial.size:,}", (float(taken),), f"{taken:,}")


def _line(refused: NkwError) -> str:
    """The code of an error with the values that it saw, else its first line."""
    seen = getattr(refused, "seen", "")
    words = " ".join((f"[{refused.code}] {seen}" if seen else str(refused).splitlines()[0]).split())
    return words if len(words) <= _LONGEST_REASON else f"{words[: _LONGEST_REASON - 1]}…"
