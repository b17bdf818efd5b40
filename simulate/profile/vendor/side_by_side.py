"""A prediction and a measurement of one launch: engines, DMA, lines, tensors and the vendor's bounds, in pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import PurePath

from simulate.profile.advice.bounds import BOUND_ENGINES, Quantities, bounds_of, dma_active_ns
from simulate.profile.moments import source
from simulate.profile.profile import Profile
from simulate.profile.roofline import matmul_peaks
from simulate.profile.vendor.records import DeviceProfile
from simulate.timing.timeline import core_label

Place = tuple[str, int]
"""A file and the number of a line."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity, predicted and measured, in the unit of its group; None where one side does not say it."""

    name: str
    predicted: float | None
    measured: float | None
    text: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: above 1, the device needs more than was predicted."""
        if self.predicted is None or self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True)
class SideBySide:
    """A prediction of one launch on one rank, and a profile of it.

    `sbuf_live_bytes` are the most bytes of a partition that the prediction has live at one time, where they are known.
    Of a launch on several ranks, of which a profile shows one, only times, engines and queues are paired.
    """

    predicted: Profile
    measured: DeviceProfile
    sbuf_live_bytes: int | None = None

    @property
    def total(self) -> Pair:
        """The time between start and stop on the device, in ns."""
        predicted = self.predicted.length_ns + self.predicted.timeline.overhead_ns
        return Pair("total_time", predicted, self.measured.total_ns)

    @property
    def times(self) -> tuple[Pair, ...]:
        """Lengths, in ns."""
        return self.total, Pair("total_exec_time", self.predicted.length_ns, self.measured.work_ns)

    @cached_property
    def engines(self) -> tuple[Pair, ...]:
        """Active times of engines and DMA queues by core, in ns."""
        found = self.measured
        measured = {self._label(each.core) + each.name: each.active_ns for each in found.engines}
        queues = {self._label(each.core) + each.name: each.active_ns for each in found.dma.queues}
        measured.update(queues)
        return paired(self._busy_ns, measured, keep_order=True)

    @cached_property
    def dma_ns(self) -> tuple[Pair, ...]:
        """The time in which any DMA moves bytes, in ns."""
        if self._several_ranks:
            return ()
        return (Pair("dma_active_time", dma_active_ns(self.predicted.timeline), self.measured.dma.active_ns),)

    @cached_property
    def dma_bytes(self) -> tuple[Pair, ...]:
        """What DMAs move, in bytes."""
        if self._several_ranks:
            return ()
        traffic, found = self.predicted.traffic, self.measured.dma
        return (
            Pair("dma_transfer_total_bytes", self.predicted.roofline.dma_bytes, found.bytes),
            Pair("hbm_read_bytes", sum(each.read_bytes for each in traffic), found.hbm_read_bytes),
            Pair("hbm_write_bytes", sum(each.written_bytes for each in traffic), found.hbm_written_bytes),
        )

    @cached_property
    def counts(self) -> tuple[Pair, ...]:
        """DMA transfers, and FLOP of the Tensor engine."""
        if self._several_ranks:
            return ()
        return (
            Pair("dma_transfer_count", self.predicted.roofline.transfers, self.measured.dma.transfers),
            Pair("hardware_flops - transpose_flops", self.predicted.roofline.flops, self._useful_flops),
        )

    @cached_property
    def memory(self) -> tuple[Pair, ...]:
        """The most bytes of an SBUF partition in use at one time."""
        occupied = self.measured.on_chip.sbuf_occupied_bytes
        if self.sbuf_live_bytes is None and occupied is None:
            return ()
        return (Pair("SbufAllocation", self.sbuf_live_bytes, occupied),)

    @cached_property
    def lines(self) -> tuple[Pair, ...]:
        """The time by line for which its instructions hold engines and its DMAs hold queues, in ns.

        A line is known by the name of its file and its number, and by one folder more where files share a name.
        """
        if self._several_ranks or not self.measured.lines:
            return ()
        places = [(each.line[0].co_filename, each.line[1]) for each in self.predicted.lines]
        held = zip(places, (each.held_ns for each in self.predicted.lines))
        texts = zip(places, (source(each.line) for each in self.predicted.lines))
        return line_pairs(list(held), self.measured, list(texts))

    @cached_property
    def tensors(self) -> tuple[Pair, ...]:
        """Bytes that DMAs move of the tensors in HBM, by name; the profile's names are those of the NEFF."""
        measured = {
            each.name: each.moved_bytes for each in self.measured.tensors if each.moved_bytes is not None
        }
        if self._several_ranks or not measured:
            return ()
        predicted = Counter({each.name: 0 for each in self.predicted.traffic})
        for each in self.predicted.traffic:
            predicted[each.name] += each.moved_bytes
        return paired(predicted, measured)

    @cached_property
    def bounds(self) -> tuple[Pair, ...]:
        """The vendor's bounds, in ns, for one core: measured where the profile says all that a bound is made of."""
        measured = self._measured_bounds()
        return tuple(
            Pair(each.name, each.time_ns, measured.get(each.name), each.formula)
            for each in self.predicted.bounds
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be known to read the pairs."""
        notes = [*self.measured.notes, *self._other_chip]
        if self._several_ranks:
            notes.append(
                "the prediction has several ranks, the profile one: only times and engines are compared"
            )
        elif self.predicted.bounds and not self.measured.origin.dma_peak_bytes_per_ns:
            notes.append(
                f"the profile names no peaks; the bounds take those of {self.predicted.hardware.name}"
            )
        if (
            len(self._cores) > 1
            and self.measured.engines
            and not any(each.core for each in self.measured.engines)
        ):
            notes.append("the profile tells no cores apart; its engines stand at core 0")
        return tuple(notes)

    @property
    def _other_chip(self) -> list[str]:
        """A note where the instance of the profile has another chip than the prediction."""
        instance, chip = self.measured.origin.instance, self.predicted.hardware.name
        if not instance or instance.startswith(chip):
            return []
        return [f"measured on {instance}, predicted for {chip}"]

    def slower_by_more_than(self, share: Fraction) -> bool:
        """Whether the prediction is longer than the measurement and this share of it on top; equal is not longer."""
        predicted = self.total.predicted or 0.0
        return Fraction(predicted) > Fraction(self.measured.total_ns) * (1 + share)

    @property
    def _several_ranks(self) -> bool:
        return len({stream.rank for stream in self.predicted.streams}) > 1

    @property
    def _useful_flops(self) -> float | None:
        """Measured FLOP without transposes, which the roofline does not count either."""
        if self.measured.hw_flops is None:
            return None
        return max(self.measured.hw_flops - (self.measured.transpose_flops or 0), 0)

    def _label(self, core: int) -> str:
        """How the pairs name a physical core: not at all where neither side has several."""
        several = len(self._cores) > 1 or any(each.core for each in self.measured.engines)
        return f"core {core} " if several else ""

    @property
    def _cores(self) -> dict[int, int]:
        """The number of the stream of each physical core, on the first rank."""
        streams = self.predicted.streams
        return {stream.core: at for at, stream in enumerate(streams) if stream.rank == streams[0].rank}

    @property
    def _busy_ns(self) -> dict[str, float]:
        found = {}
        for core, number in self._cores.items():
            prefix = f"{core_label(self.predicted.streams, number)} ".lstrip()
            for track, busy in self.predicted.timeline.busy_ns.items():
                if track.startswith(prefix):
                    found[self._label(core) + track.removeprefix(prefix)] = busy
        return found

    def _measured_bounds(self) -> dict[str, float]:
        found, hardware = self.measured, self.predicted.hardware
        if any(each.core for each in found.engines):
            return {}
        active = {each.name: each.active_ns for each in found.engines}
        idle = 0.0 if active else math.nan  # an engine without a row did nothing
        engines = {name: active.get(name, idle) for name in BOUND_ENGINES}
        hw_flops = _or_nan(found.hw_flops)
        rows = bounds_of(
            Quantities(
                total_ns=found.total_ns,
                dma_active_ns=_or_nan(found.dma.active_ns),
                dma_bytes=_or_nan(found.dma.bytes),
                necessary_bytes=_or_nan(found.necessary_bytes),
                hw_flops=hw_flops,
                transpose_flops=_or_nan(found.transpose_flops),
                engine_active_ns=engines,
                dma_peak_bytes_per_ns=found.origin.dma_peak_bytes_per_ns
                or hardware.dma_engines * hardware.dma_engine_bytes_per_ns,
                tensor_peak_flops_per_ns=found.origin.tensor_peak_flops_per_ns
                or dict(matmul_peaks(hardware))["16-bit"],
            )
        )
        unknown = math.isnan(sum(engines.values()) + _or_nan(found.dma.active_ns))
        return {
            each.name: each.time_ns
            for each in rows
            if not math.isnan(each.time_ns) and not (unknown and each.name == "perfect_pipeline")
        }


def side_by_side(
    predicted: Profile, measured: DeviceProfile, sbuf_live_bytes: int | None = None
) -> SideBySide:
    """The pairs of a prediction and a profile of the same kernel on the same shapes."""
    return SideBySide(predicted, measured, sbuf_live_bytes)


def line_pairs(
    predicted: Sequence[tuple[Place, float]],
    found: DeviceProfile,
    texts: Iterable[tuple[Place, str]] = (),
) -> tuple[Pair, ...]:
    """Times by line, in ns; a line is known by the name of its file, and by a folder more where files share it."""
    measured = [((each.file, each.line), each.held_ns) for each in found.lines]
    shared = _shared_names(predicted) | _shared_names(measured)
    named = {_short(place, shared): text for place, text in texts}
    return paired(_summed(predicted, shared), _summed(measured, shared), named)


def paired(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    texts: Mapping[str, str] | None = None,
    keep_order: bool = False,
) -> tuple[Pair, ...]:
    """All names of both sides, by default those with the largest value first; what both sides lack is left out."""
    found = [
        Pair(name, predicted.get(name), measured.get(name), (texts or {}).get(name, ""))
        for name in dict.fromkeys([*predicted, *measured])
    ]
    found = [each for each in found if each.predicted or each.measured]
    if keep_order:
        return tuple(found)
    return tuple(sorted(found, key=lambda each: (-max(each.predicted or 0, each.measured or 0), each.name)))


def _summed(listed: Iterable[tuple[Place, float]], shared: set[str]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for place, value in listed:
        name = _short(place, shared)
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _short(place: Place, shared: set[str]) -> str:
    path = PurePath(place[0])
    parts = path.parts[-2:] if path.name in shared else (path.name,)
    return f"{'/'.join(parts)}:{place[1]}"


def _shared_names(side: Iterable[tuple[Place, float]]) -> set[str]:
    """Names that several files of one side have."""
    counts = Counter(PurePath(file).name for file in {place[0] for place, _ in side})
    return {name for name, count in counts.items() if count > 1}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
