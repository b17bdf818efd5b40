"""Serves a stream of image requests on one replica, which draws waiting requests of equal settings in one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from model.runners.denoise import Sampling
from model.traffic.service import Arrival, Arrivals
from model.traffic.workload import RequestStream

StageTimes = Mapping[str, int]
"""Times of the components of a batch in ns, by name."""
PredictBatch = Callable[[Sampling, int], StageTimes]
"""Function from the settings and the number of images of a batch to its times."""


@dataclass(frozen=True)
class ImageBatch:
    """Images that a replica draws together from `begin_ns` on; the requests are in the order of their arrival."""

    begin_ns: int
    requests: tuple[Arrival[Sampling], ...]
    stages_ns: StageTimes

    @cached_property
    def time_ns(self) -> int:
        """Time of the batch in ns."""
        return sum(self.stages_ns.values())

    @property
    def end_ns(self) -> int:
        """End of the batch in ns since the start of the run."""
        return self.begin_ns + self.time_ns


def serve_images(
    stream: RequestStream[Sampling], predict: PredictBatch, most_images: int
) -> list[ImageBatch]:
    """Serve a stream on one replica until its last image is drawn, and return the batches in order.

    When the replica is free, it draws the request that has waited longest, together with the next waiting requests of
    equal settings.

    Args:
        stream: The requests, one image each.
        predict: Returns the times of a batch.
        most_images: Most images of a batch.
    """
    arrivals, batches, now = Arrivals(stream), list[ImageBatch](), 0
    waiting = dict[Sampling, deque[Arrival[Sampling]]]()
    while True:
        _queue(arrivals.pop_arrived(now), waiting)
        if not waiting:
            if arrivals.next_arrival_ns is None:
                return batches
            now = arrivals.next_arrival_ns
            continue
        sampling = min(waiting, key=lambda key: (waiting[key][0].arrival_ns, waiting[key][0].index))
        queue = waiting[sampling]
        requests = tuple(queue.popleft() for _ in range(min(most_images, len(queue))))
        if not queue:
            del waiting[sampling]
        batches.append(ImageBatch(now, requests, predict(sampling, len(requests))))
        now = batches[-1].end_ns
        arrivals.schedule_next(len(requests), now)


def _queue(arrived: Iterable[Arrival[Sampling]], waiting: dict[Sampling, deque[Arrival[Sampling]]]) -> None:
    """Append requests to the queues of their settings."""
    for arrival in arrived:
        waiting.setdefault(arrival.query, deque()).append(arrival)
