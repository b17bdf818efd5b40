"""Predicted times of a pipeline: micro-batches pass its stages one after another.

Micro-batch m passes stage s after it has passed stage s - 1, and after micro-batch m - 1 has passed stage s, as in
GPipe. Sending a value takes both stages, as it is a launch of both, and begins when both are free. With M micro-batches
and S stages of equal times, and nothing to send, stages wait for (S - 1) / (M + S - 1) of the time: the bubble.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from model.device.prediction import Pass, Prediction, TimedLaunch, without_rank


@dataclass(frozen=True)
class Schedule:
    """The length of a pipeline's work and the share of it in which its stages wait, on average."""

    length_ns: float
    bubble_share: float


def scheduled(computed_ns: Sequence[Sequence[float]], sent_ns: Sequence[Sequence[float]]) -> Schedule:
    """The schedule of micro-batches that take `computed_ns` on each stage, and `sent_ns` from each to the next."""
    free = [0.0] * len(computed_ns[0])
    busy = 0.0
    for computed, sent in zip(computed_ns, sent_ns, strict=True):
        for stage, time_ns in enumerate(computed):
            if stage:
                arrived = max(free[stage - 1], free[stage]) + sent[stage - 1]
                free[stage - 1] = free[stage] = arrived
            free[stage] += time_ns
        busy += sum(computed) + 2 * sum(sent)
    length = max(free)
    return Schedule(length, 1 - busy / (len(free) * length) if length else 0.0)


@dataclass(frozen=True)
class PipelinedPass:
    """The passes of some micro-batches, each through all stages; launches of the kernel `sends` lie between stages.

    The launches of a micro-batch on a stage are a graph of their own, which is started and ended.
    """

    passes: tuple[Pass, ...]
    sends: str

    def prediction(self) -> Prediction:
        """The time until the last micro-batch has passed the last stage, and the use of the chip on average."""
        alone = [each.prediction() for each in self.passes]
        if len(alone) == len(self._stages[0][0]) == 1:
            return alone[0]
        times = {reading: self._scheduled(reading) for reading in ("dataflow_ns", "program_ns", "serial_ns")}
        program = times["program_ns"]
        busy: defaultdict[str, float] = defaultdict(float)
        for each in self._launches:
            for track, time_ns in each.timeline.busy_ns.items():
                busy[without_rank(track)] += time_ns / self._ranks / program.length_ns
        return replace(
            alone[0],
            dataflow_ns=times["dataflow_ns"].length_ns,
            program_ns=program.length_ns,
            serial_ns=times["serial_ns"].length_ns,
            busy_share=dict(busy),
            sbuf_bytes=max(each.sbuf_bytes for each in alone),
            psum_bytes=max(each.psum_bytes for each in alone),
            bubble_share=program.bubble_share,
        )

    @property
    def _launches(self) -> list[TimedLaunch]:
        return [launch for each in self.passes for launch in each.launches]

    @cached_property
    def _stages(self) -> list[tuple[list[list[TimedLaunch]], list[list[TimedLaunch]]]]:
        """Of each micro-batch the launches on every stage, and those between stages."""
        return [self._cut(each.launches) for each in self.passes]

    def _cut(
        self, launches: Sequence[TimedLaunch]
    ) -> tuple[list[list[TimedLaunch]], list[list[TimedLaunch]]]:
        computed: list[list[TimedLaunch]] = [[]]
        sent: list[list[TimedLaunch]] = []
        for number, each in enumerate(launches):
            if each.launch.kernel != self.sends:
                computed[-1].append(each)
                continue
            if launches[number - 1].launch.kernel != self.sends:
                computed.append([])
                sent.append([])
            sent[-1].append(each)
        return computed, sent

    @property
    def _ranks(self) -> int:
        """The ranks of all stages."""
        computed, _ = self._stages[0]
        return sum(len(own[0].launch.streams) for own in computed)

    def _scheduled(self, reading: str) -> Schedule:
        def time_ns(launches: Sequence[TimedLaunch]) -> float:
            return sum(getattr(each, reading) for each in launches)

        overhead_ns = self.passes[0].overhead_ns
        return scheduled(
            [[overhead_ns + time_ns(own) for own in computed] for computed, _ in self._stages],
            [[time_ns(own) for own in sent] for _, sent in self._stages],
        )
