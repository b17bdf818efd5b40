"""Predicted times of a pipeline, in which micro-batches pass the stages one after another.

A stage has some of the model's layers. A batch is divided into micro-batches. Micro-batch m passes stage s after it has
passed stage s - 1, and after micro-batch m - 1 has passed stage s, as in GPipe. A send is a launch of both stages: it
begins when both are free, and it occupies both. The bubble is the share of time in which stages wait: (S - 1) / (M + S
- 1) for M micro-batches, S stages of equal times, and sends that take no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from model.device.prediction import Pass, Prediction, TimedLaunch, remove_rank

_MicroBatch = tuple[list[list[TimedLaunch]], list[list[TimedLaunch]]]


@dataclass(frozen=True)
class Schedule:
    """Total time of all micro-batches in ns, and the share of it in which stages wait, averaged over the stages."""

    length_ns: float
    bubble_share: float


def schedule_stages(computed_ns: Sequence[Sequence[float]], sent_ns: Sequence[Sequence[float]]) -> Schedule:
    """Return the total time and the bubble of micro-batches that pass the stages of a pipeline.

    Args:
        computed_ns: Times [micro-batches, stages] of each micro-batch on each stage, in ns.
        sent_ns: Times [micro-batches, stages - 1] of the sends from each stage to the next, in ns.
    """
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
    """Passes of all micro-batches of a step through the stages of a pipeline.

    `passes` has the launches of each micro-batch on all stages, in order; launches of the kernel named `sends` separate
    the stages. The launches of one micro-batch on one stage are one graph, which has the overhead of starting a kernel
    once.
    """

    passes: tuple[Pass, ...]
    sends: str

    def prediction(self) -> Prediction:
        """Return the prediction for the whole step, until the last micro-batch has passed the last stage.

        The use of the chip is averaged over all ranks, and the memory is the largest of any launch.
        """
        predictions = [model_pass.prediction() for model_pass in self.passes]
        micro_batches = [self._split(model_pass.launches) for model_pass in self.passes]
        stages, _ = micro_batches[0]
        if len(self.passes) == len(stages) == 1:
            return predictions[0]
        dataflow, program, serial = (
            self._schedule(micro_batches, reading) for reading in ("dataflow_ns", "program_ns", "serial_ns")
        )
        ranks = sum(len(launches[0].launch.streams) for launches in stages)
        busy: defaultdict[str, float] = defaultdict(float)
        for timed in chain.from_iterable(model_pass.launches for model_pass in self.passes):
            for track, time_ns in timed.timeline.busy_ns.items():
                busy[remove_rank(track)] += time_ns / ranks / program.length_ns
        return replace(
            predictions[0],
            dataflow_ns=dataflow.length_ns,
            program_ns=program.length_ns,
            serial_ns=serial.length_ns,
            busy_share=dict(busy),
            sbuf_bytes=max(prediction.sbuf_bytes for prediction in predictions),
            psum_bytes=max(prediction.psum_bytes for prediction in predictions),
            bubble_share=program.bubble_share,
        )

    def _split(self, launches: Sequence[TimedLaunch]) -> _MicroBatch:
        """Return the launches of a micro-batch by stage, and its sends by pair of neighbouring stages."""
        runs = groupby(launches, key=lambda timed: timed.launch.kernel == self.sends)
        stages_and_sends = [list(run) for _, run in runs]
        return stages_and_sends[::2], stages_and_sends[1::2]

    def _schedule(self, micro_batches: Sequence[_MicroBatch], reading: str) -> Schedule:
        def time_ns(launches: Sequence[TimedLaunch]) -> float:
            return sum(getattr(timed, reading) for timed in launches)

        overhead_ns = self.passes[0].overhead_ns
        return schedule_stages(
            [[overhead_ns + time_ns(launches) for launches in stages] for stages, _ in micro_batches],
            [[time_ns(launches) for launches in sends] for _, sends in micro_batches],
        )
