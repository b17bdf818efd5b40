"""Prediction and measurement of a launch in pairs: engines, DMA, lines, tensors and the vendor's bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import PurePath

from simulate.profile.advice.bounds import BOUND_ENGINES, Quantities, compute_bounds, sum_dma_active_ns
from simulate.profile.moments import read_source_line
from simulate.profile.profile import Profile
from simulate.profile.roofline import list_matmul_peaks
from simulate.profile.vendor.records import DeviceProfile
from simulate.timing.timeline import format_core_label

Place = tuple[str, int]
"""File and line number."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A quantity, predicted and measured, in the unit of its group; None if that side lacks it.

    `text` is shown below the pair's row, such as the source of a line.
    """

    name: str
    predicted: float | None
    measured: float | None
    text: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: above 1, the device needs more than predicted.

        None if a side lacks the figure or the prediction is 0.
        """
        if self.predicted is None or self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True)
class SideBySide:
    """Prediction of a launch, and a device profile of it; the properties pair the figures of both.

    `sbuf_live_bytes` is the predicted peak of bytes in use per SBUF partition, or None if unknown. A profile
    shows a single rank. If the launch has several, only times, engines and queues are paired.
    """

    predicted: Profile
    measured: DeviceProfile
    sbuf_live_bytes: int | None = None

    @property
    def total(self) -> Pair:
        """Pair of the times between start and stop of the launch on the device, in ns.

        The prediction includes the overhead.
        """
        predicted = self.predicted.length_ns + self.predicted.timeline.overhead_ns
        return Pair("total_time", predicted, self.measured.total_ns)

    @property
    def times(self) -> tuple[Pair, ...]:
        """Pairs of the times between start and stop, and of the times for execution without setup, in ns."""
        return self.total, Pair("total_exec_time", self.predicted.length_ns, self.measured.work_ns)

    @cached_property
    def engines(self) -> tuple[Pair, ...]:
        """Pairs of the active times of engines and DMA queues in ns, named after the core if there are several."""
        profile = self.measured
        measured_ns = {self._label(engine.core) + engine.name: engine.active_ns for engine in profile.engines}
        queue_ns = {self._label(queue.core) + queue.name: queue.active_ns for queue in profile.dma.queues}
        measured_ns.update(queue_ns)
        return pair_amounts(self._busy_ns, measured_ns, keep_order=True)

    @cached_property
    def dma_ns(self) -> tuple[Pair, ...]:
        """Pair of the times in ns in which any DMA moves bytes; empty for several ranks."""
        if self._several_ranks:
            return ()
        return (
            Pair("dma_active_time", sum_dma_active_ns(self.predicted.timeline), self.measured.dma.active_ns),
        )

    @cached_property
    def dma_bytes(self) -> tuple[Pair, ...]:
        """Pairs of the bytes that DMAs move, and of the bytes read from and written to HBM.

        Empty for several ranks.
        """
        if self._several_ranks:
            return ()
        traffic, measured_dma = self.predicted.traffic, self.measured.dma
        return (
            Pair("dma_transfer_total_bytes", self.predicted.roofline.dma_bytes, measured_dma.bytes),
            Pair("hbm_read_bytes", sum(tensor.read_bytes for tensor in traffic), measured_dma.hbm_read_bytes),
            Pair(
                "hbm_write_bytes",
                sum(tensor.written_bytes for tensor in traffic),
                measured_dma.hbm_written_bytes,
            ),
        )

    @cached_property
    def counts(self) -> tuple[Pair, ...]:
        """Pairs of the numbers of DMA transfers, and of FLOP of the Tensor engine without transposes.

        Empty for several ranks.
        """
        if self._several_ranks:
            return ()
        return (
            Pair("dma_transfer_count", self.predicted.roofline.transfers, self.measured.dma.transfers),
            Pair("hardware_flops - transpose_flops", self.predicted.roofline.flops, self._useful_flops),
        )

    @cached_property
    def memory(self) -> tuple[Pair, ...]:
        """Pair of the peaks of occupied bytes of an SBUF partition; empty if neither side knows it."""
        occupied = self.measured.on_chip.sbuf_occupied_bytes
        if self.sbuf_live_bytes is None and occupied is None:
            return ()
        return (Pair("SbufAllocation", self.sbuf_live_bytes, occupied),)

    @cached_property
    def lines(self) -> tuple[Pair, ...]:
        """Pairs of the times in ns for which a line's instructions occupy engines, and its DMAs queues, by line.

        A line is identified by file name and number; if files share a name, by the parent folder too. Empty
        for several ranks, or if the profile has no lines.
        """
        if self._several_ranks or not self.measured.lines:
            return ()
        line_keys = [(line_time.line[0].co_filename, line_time.line[1]) for line_time in self.predicted.lines]
        times = zip(line_keys, (line_time.held_ns for line_time in self.predicted.lines))
        texts = zip(line_keys, (read_source_line(line_time.line) for line_time in self.predicted.lines))
        return pair_lines(list(times), self.measured, list(texts))

    @cached_property
    def tensors(self) -> tuple[Pair, ...]:
        """Pairs of the bytes that DMAs move of the tensors in HBM, by name.

        The profile's names are those of the NEFF. Empty for several ranks, or if the profile has no tensors.
        """
        measured = {
            tensor.name: tensor.moved_bytes
            for tensor in self.measured.tensors
            if tensor.moved_bytes is not None
        }
        if self._several_ranks or not measured:
            return ()
        predicted = Counter({tensor.name: 0 for tensor in self.predicted.traffic})
        for tensor in self.predicted.traffic:
            predicted[tensor.name] += tensor.moved_bytes
        return pair_amounts(predicted, measured)

    @cached_property
    def bounds(self) -> tuple[Pair, ...]:
        """Pairs of the vendor's bounds in ns, for one core.

        A measured bound is None if the profile lacks an input.
        """
        measured = self._measured_bounds()
        return tuple(
            Pair(bound.name, bound.time_ns, measured.get(bound.name), bound.formula)
            for bound in self.predicted.bounds
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the profile lacks, and on why pairs are missing or do not match."""
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
            and not any(engine.core for engine in self.measured.engines)
        ):
            notes.append("the profile does not tell cores apart; its engines are listed at core 0")
        return tuple(notes)

    @property
    def _other_chip(self) -> list[str]:
        """Sentence about a measurement on another chip than the predicted one, in a list.

        Empty if the chip is the same.
        """
        instance, chip = self.measured.origin.instance, self.predicted.hardware.name
        if not instance or instance.startswith(chip):
            return []
        return [f"measured on {instance}, predicted for {chip}"]

    def slower_by_more_than(self, share: Fraction) -> bool:
        """Return whether the predicted total time exceeds `1 + share` times the measured one."""
        predicted = self.total.predicted or 0.0
        return Fraction(predicted) > Fraction(self.measured.total_ns) * (1 + share)

    @property
    def _several_ranks(self) -> bool:
        """Whether the predicted launch has several ranks."""
        return len({stream.rank for stream in self.predicted.streams}) > 1

    @property
    def _useful_flops(self) -> float | None:
        """Measured FLOP without transposes, which the roofline does not count either; at least 0.

        None if the FLOP are unknown; unknown FLOP of transposes count as 0.
        """
        if self.measured.hw_flops is None:
            return None
        return max(self.measured.hw_flops - (self.measured.transpose_flops or 0), 0)

    def _label(self, core: int) -> str:
        """Return the prefix of names of a physical core, such as "core 1 ".

        Empty if neither side has several cores.
        """
        has_several = len(self._cores) > 1 or any(engine.core for engine in self.measured.engines)
        return f"core {core} " if has_several else ""

    @property
    def _cores(self) -> dict[int, int]:
        """Index of the stream of each physical core, on the first rank."""
        streams = self.predicted.streams
        return {stream.core: index for index, stream in enumerate(streams) if stream.rank == streams[0].rank}

    @property
    def _busy_ns(self) -> dict[str, float]:
        """Predicted busy times of engines and DMA queues in ns, by their names in the pairs."""
        busy_ns = {}
        for core, stream_index in self._cores.items():
            prefix = f"{format_core_label(self.predicted.streams, stream_index)} ".lstrip()
            for track, track_ns in self.predicted.timeline.busy_ns.items():
                if track.startswith(prefix):
                    busy_ns[self._label(core) + track.removeprefix(prefix)] = track_ns
        return busy_ns

    def _measured_bounds(self) -> dict[str, float]:
        """Return the vendor's bounds of the measurement in ns, by name; a bound without all inputs is left out.

        Empty if the profile has several cores.
        """
        profile, hardware = self.measured, self.predicted.hardware
        if any(engine.core for engine in profile.engines):
            return {}
        active_ns = {engine.name: engine.active_ns for engine in profile.engines}
        default_ns = 0.0 if active_ns else math.nan  # an engine without a row was idle
        engine_active_ns = {name: active_ns.get(name, default_ns) for name in BOUND_ENGINES}
        hw_flops = _convert_to_nan(profile.hw_flops)
        rows = compute_bounds(
            Quantities(
                total_ns=profile.total_ns,
                dma_active_ns=_convert_to_nan(profile.dma.active_ns),
                dma_bytes=_convert_to_nan(profile.dma.bytes),
                necessary_bytes=_convert_to_nan(profile.necessary_bytes),
                hw_flops=hw_flops,
                transpose_flops=_convert_to_nan(profile.transpose_flops),
                engine_active_ns=engine_active_ns,
                dma_peak_bytes_per_ns=profile.origin.dma_peak_bytes_per_ns
                or hardware.dma_engines * hardware.dma_engine_bytes_per_ns,
                tensor_peak_flops_per_ns=profile.origin.tensor_peak_flops_per_ns
                or dict(list_matmul_peaks(hardware))["16-bit"],
            )
        )
        unknown = math.isnan(sum(engine_active_ns.values()) + _convert_to_nan(profile.dma.active_ns))
        return {
            bound.name: bound.time_ns
            for bound in rows
            if not math.isnan(bound.time_ns) and not (unknown and bound.name == "perfect_pipeline")
        }


def side_by_side(
    predicted: Profile, measured: DeviceProfile, sbuf_live_bytes: int | None = None
) -> SideBySide:
    """Return a prediction with a device profile of the same kernel and shapes, whose figures it pairs.

    Args:
        sbuf_live_bytes: Predicted peak of bytes in use per SBUF partition, or None if unknown.
    """
    return SideBySide(predicted, measured, sbuf_live_bytes)


def pair_lines(
    predicted: Sequence[tuple[Place, float]],
    profile: DeviceProfile,
    texts: Iterable[tuple[Place, str]] = (),
) -> tuple[Pair, ...]:
    """Pair predicted and measured times by line, in ns, in descending order of the larger one.

    A line is identified by file name and number; if files share a name, by the parent folder too.

    Args:
        predicted: ((file, line), ns) of every line.
        profile: Device profile, with its lines.
        texts: Source texts of lines, for the report.
    """
    measured_ns = [((line.file, line.line), line.held_ns) for line in profile.lines]
    shared = _find_shared_names(predicted) | _find_shared_names(measured_ns)
    text_by_line = {_shorten_line(line_key, shared): text for line_key, text in texts}
    return pair_amounts(_sum_by_line(predicted, shared), _sum_by_line(measured_ns, shared), text_by_line)


def pair_amounts(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    texts: Mapping[str, str] | None = None,
    keep_order: bool = False,
) -> tuple[Pair, ...]:
    """Pair the amounts of both sides by name, without pairs that are zero or absent on both sides.

    Args:
        texts: Text of each name, for the report.
        keep_order: Keep the order of names; by default, pairs are in descending order of the larger amount.
    """
    pairs = [
        Pair(name, predicted.get(name), measured.get(name), (texts or {}).get(name, ""))
        for name in dict.fromkeys([*predicted, *measured])
    ]
    pairs = [pair for pair in pairs if pair.predicted or pair.measured]
    if keep_order:
        return tuple(pairs)
    return tuple(sorted(pairs, key=lambda pair: (-max(pair.predicted or 0, pair.measured or 0), pair.name)))


def _sum_by_line(amounts: Iterable[tuple[Place, float]], shared: set[str]) -> dict[str, float]:
    """Sum amounts by the short name of their line, such as `kernel.py:12`.

    Args:
        shared: File names that need the parent folder to be unique.
    """
    sums: dict[str, float] = {}
    for line_key, amount in amounts:
        name = _shorten_line(line_key, shared)
        sums[name] = sums.get(name, 0.0) + amount
    return sums


def _shorten_line(line_key: Place, shared: set[str]) -> str:
    """Return the short name of a line, such as `kernel.py:12`.

    With the parent folder if the file's name is in `shared`.
    """
    path = PurePath(line_key[0])
    path_parts = path.parts[-2:] if path.name in shared else (path.name,)
    return f"{'/'.join(path_parts)}:{line_key[1]}"


def _find_shared_names(amounts: Iterable[tuple[Place, float]]) -> set[str]:
    """Return the file names, without folders, that two or more different paths in `amounts` have."""
    counts = Counter(PurePath(file).name for file in {line_key[0] for line_key, _ in amounts})
    return {name for name, count in counts.items() if count > 1}


def _convert_to_nan(amount: float | None) -> float:
    """Return an amount, or NaN for None, so that formulas with it become NaN."""
    return math.nan if amount is None else amount
