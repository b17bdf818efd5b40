"""Activity throttle of the Tensor engine: how much longer an instruction takes, given what the array did before.

The limiter of a chip works in windows: the array runs at its full clock if columns streamed through it for at least
half of the last window. Windows that move with the schedule would break a law: work that ends earlier leaves a gap, so
a lower cost could lengthen the schedule. Here one window grows from the beginning of the kernel instead. The array
counts as busy for the work of all earlier events in program order, at the full clock. The shortest time of all bytes
loaded before is subtracted from the time, because a limiter opens within a window after a phase of loading. The stream
alone fixes both numbers. So an event that starts earlier is slowed down no more than before.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from simulate.hardware import Hardware
from simulate.run.stream import READ, Stream


class Throttle:
    """Throttle of the core that runs a stream; `done_ns` is empty if the chip or the stream needs no throttle.

    `ratio` is the full clock over the throttled clock. `done_ns[e]` is the time at full clock for which the array is
    busy with the events before e. `loading_ns[e]` is the shortest time for the bytes loaded before e. The throttle
    opens after `opening_ns` of work. It is closed while the array is busy for less than `closed_share` of the time, and
    open from `open_share` on.
    """

    def __init__(self, hardware: Hardware, stream: Stream) -> None:
        self.ratio = hardware.tensor_clock_ghz / hardware.tensor_throttled_clock_ghz
        self.pipeline_ns = hardware.matmul_throttled_latency_ns - hardware.matmul_latency_ns
        self.opening_ns = hardware.activity_throttle_window_ns / self.ratio
        self.open_share = hardware.activity_throttle_busy_fraction
        self.closed_share = self.open_share / self.ratio
        self.done_ns: list[float] = []
        self.loading_ns: list[float] = []
        if hardware.activity_throttle and any(cost.streamed_cycles for cost in stream.costs):
            streamed = [cost.streamed_cycles / hardware.tensor_clock_ghz for cost in stream.costs]
            self.done_ns = [0.0, *accumulate([streamed[number] for number in stream.cost_ids])]
            self.loading_ns = [loaded / hardware.hbm_gb_per_s_per_core for loaded in _loaded_bytes(stream)]

    def compute_delays(self, event: int, start_ns: float, interval_ns: float) -> tuple[float, float]:
        """Return the ns that the throttle adds to the issue interval of an event, and those it adds for the pipeline.

        The latency of the event grows by the sum of both. Both are 0 if the throttle is open. With a busy fraction of
        one half and a throttled clock of one half: below a quarter of the time the limiter stays closed, because at
        half rate the array is busy for less than half of the time. From a quarter to one half it alternates: one of
        every two windows is slow.

        Args:
            event: The event, numbered within the core.
            start_ns: The start of the event.
            interval_ns: The event's issue interval at the full clock.
        """
        done = self.done_ns[event]
        time = start_ns - self.loading_ns[event]
        if done < self.opening_ns or done < self.closed_share * time:
            return interval_ns * (self.ratio - 1.0), self.pipeline_ns
        if done < self.open_share * time:
            return interval_ns * (self.ratio - 1.0) / 2.0, self.pipeline_ns
        return 0.0, 0.0


def _loaded_bytes(stream: Stream) -> list[int]:
    """Return for every event the sum of the bytes of all earlier DMAs that write to SBUF or PSUM; one entry more."""
    moved = np.array([0 if cost.dma is None else cost.dma.bytes for cost in stream.costs], np.int64)
    on_chip = np.array([record.buffer.on_chip for record in stream.tensors], bool)
    rows = np.frombuffer(stream.rows, np.int64).reshape(-1, 5)[:, 0]
    counts = np.diff(np.frombuffer(stream.row_ends, np.uint64).astype(np.int64) // 5, prepend=0)
    owner = np.repeat(np.arange(len(stream)), counts)
    loads = np.zeros(len(stream), bool)
    loads[owner[((rows & 3) != READ) & on_chip[rows >> 2]]] = True
    return [0, *np.cumsum(np.where(loads, moved[np.frombuffer(stream.cost_ids, np.uint32)], 0)).tolist()]
