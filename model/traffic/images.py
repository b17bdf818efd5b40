"""Prediction of `nkw traffic` for a diffusion model: image requests on the replicas of an instance.

Each replica is a group of ranks, or several that share batches. It draws one batch at a time, whose time is the sum of
its components' predicted times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean

import numpy as np

from model.device import Instance, choose_lnc, find_instance
from model.errors import ModelError
from model.plan.images import ImagePredictor, count_copies
from model.plan.plan import DEFAULT_INSTANCE
from model.plan.prices import Price, compute_price_per, find_price
from model.runners.denoise import Sampling, check_count
from model.runners.pipelines.pipeline import ImagePipeline
from model.traffic.image_service import ImageBatch, serve_images
from model.traffic.report import Percentiles, compute_all_percentiles
from model.traffic.traffic import DEFAULT_SHARE, REQUESTS, check_arrivals
from model.traffic.workload import SECOND_NS, RequestStream, draw_poisson_times

MOST_IMAGES_OF_BATCH = 4
"""Images of the largest batch, unless the request says otherwise."""


@dataclass(frozen=True)
class ImageTrafficRequest:
    """Options of a prediction; the prediction chooses those that are None.

    | field | meaning |
    |---|---|
    | `steps` | numbers of steps, of which each request has one, drawn with equal chance |
    | `tp`, `dp` | tensor-parallel ranks of a group; groups of a replica, which share its batches |
    | `rate`, `share` | requests per second; or the rate as a share of the rate of full batches |
    | `users`, `think_s` | users who send requests instead, and their pause after an image in seconds |
    | `most_images` | most images of a batch |
    | `price`, `prices` | dollars an hour of the instance; a file that replaces the shipped prices |
    | `lnc` | physical cores of a rank; None: those in NEURON_LOGICAL_NC_CONFIG, else the most that the chip has |

    Raises:
        ModelError: If options exclude one another, or a number is above its limit.
    """

    steps: tuple[int, ...] = (20,)
    guidance: float = 4.0
    instance: str | None = None
    tp: int = 1
    dp: int = 1
    lnc: int | None = None
    replicas: int | None = None
    rate: float | None = None
    share: float | None = None
    users: int | None = None
    think_s: float = 0.0
    requests: int = REQUESTS
    most_images: int = MOST_IMAGES_OF_BATCH
    price: float | None = None
    prices: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_arrivals(self.users, self.rate, self.share, self.requests)
        check_count(self.most_images)

    @cached_property
    def samplings(self) -> tuple[Sampling, ...]:
        """Settings among which requests are drawn."""
        return tuple(Sampling(steps, self.guidance) for steps in self.steps)


@dataclass(frozen=True)
class ImageSummary:
    """Summary of a run on all replicas; times are in ns, at every percent from 1 to 100.

    | field | meaning |
    |---|---|
    | `queue`, `drawing`, `e2e` | times of requests: until their batch begins, of their batch, and of both |
    | `mean_queue_ns` | mean time until a batch begins |
    | `stages_ns` | time of all batches by component |
    | `utilisation` | share of the time in which batches are drawn, mean over the replicas |
    """

    images: int
    batches: int
    queue: Percentiles
    drawing: Percentiles
    e2e: Percentiles
    mean_queue_ns: float
    stages_ns: dict[str, int]
    elapsed_ns: int
    utilisation: float

    @property
    def images_per_s(self) -> float:
        """Images per second."""
        return self.images * SECOND_NS / self.elapsed_ns

    @property
    def images_per_batch(self) -> float:
        """Mean number of images of a batch."""
        return self.images / self.batches

    def dollars_per_thousand(self, price: float) -> float:
        """Return the dollars per 1,000 images, which pay the whole instance, idle time included.

        Args:
            price: Price of the instance in dollars an hour.
        """
        return compute_price_per(1000, self.images_per_s, price)


@dataclass(frozen=True)
class ImageTraffic:
    """Result of a prediction: its request, the replicas, the requests that they served, and the summary of the run.

    `full_rate` is the number of images per second of full batches on all replicas. `price` is None if no price is
    known. `batch_times` has the times of each predicted batch in ns by component.
    """

    request: ImageTrafficRequest
    pipeline: ImagePipeline
    instance: Instance
    lnc: int
    replicas: int
    stream: RequestStream[Sampling]
    summary: ImageSummary
    full_rate: float
    price: Price | None
    batch_times: dict[tuple[Sampling, int], dict[str, int]]


class _BatchClock:
    """Function from settings and images of a batch to its times; each pair is predicted once."""

    def __init__(self, predictor: ImagePredictor) -> None:
        self._predictor = predictor
        self.times: dict[tuple[Sampling, int], dict[str, int]] = {}

    def predict(self, sampling: Sampling, images: int) -> dict[str, int]:
        """Return the times of the components of a batch in whole ns, at least 1 each."""
        key = sampling, images
        if key not in self.times:
            times_ns = Counter[str]()
            for component in self._predictor.predict(sampling, images):
                times_ns[component.name] += max(1, round(component.total_ns))
            self.times[key] = dict(times_ns)
        return self.times[key]


def predict_image_traffic(
    pipeline: ImagePipeline, request: ImageTrafficRequest, report_progress: Callable[[str], None]
) -> ImageTraffic:
    """Predict what users who ask for images would see on an instance: latencies, images per second and price.

    Args:
        pipeline: The model for images of one size.
        request: The options.
        report_progress: Called with the name of each phase when it begins.

    Raises:
        ModelError: If the model, the instance or the options do not allow the prediction.
    """
    for steps in request.steps:
        pipeline.plan(steps)
    instance = find_instance(request.instance or DEFAULT_INSTANCE)
    lnc = choose_lnc(instance.target, request.lnc, largest=True)
    copies = count_copies(instance.physical_cores, request.tp * request.dp, lnc)
    replicas = request.replicas or copies
    if replicas > copies:
        raise ModelError(
            f"{replicas} replicas of {request.tp * request.dp} ranks; {instance.name} holds {copies}: give fewer"
        )
    price = find_price(instance, request.price, request.prices)
    clock = _BatchClock(ImagePredictor(pipeline, instance.target, request.tp, lnc, request.dp))
    report_progress("dry runs of full batches")
    full_times_ns = [
        sum(clock.predict(sampling, request.most_images).values()) for sampling in request.samplings
    ]
    full_rate = replicas * request.most_images * SECOND_NS / mean(full_times_ns)
    stream = _make_stream(request, full_rate)
    report_progress(f"{len(stream.queries):,} requests")
    shares = (stream.select_share(replica, replicas) for replica in range(replicas))
    runs = [
        [] if share is None else serve_images(share, clock.predict, request.most_images) for share in shares
    ]
    return ImageTraffic(
        *(request, pipeline, instance, lnc, replicas, stream),
        summary=summarize_images(runs),
        full_rate=full_rate,
        price=price,
        batch_times=clock.times,
    )


def _make_stream(request: ImageTrafficRequest, full_rate: float) -> RequestStream[Sampling]:
    """Return the requests of users, or those that arrive at the request's rate or share of `full_rate`.

    Without a rate and a share it is `DEFAULT_SHARE`.
    """
    generator = np.random.default_rng(request.seed)
    indices = generator.integers(len(request.samplings), size=request.requests).tolist()
    queries = tuple(request.samplings[index] for index in indices)
    if request.users is not None:
        return RequestStream(queries, users=request.users, think_ns=round(request.think_s * SECOND_NS))
    offered = RequestStream(queries, draw_poisson_times(len(queries), 1.0, generator))
    rate = request.rate or (request.share or DEFAULT_SHARE) * full_rate
    return offered if offered.rate is None else offered.stretch_to_rate(rate)


def summarize_images(runs: Sequence[Sequence[ImageBatch]]) -> ImageSummary:
    """Summarize a run.

    Args:
        runs: The batches of each replica in order; at least one replica has a batch.
    """
    batches = [batch for run in runs for batch in run]
    stages_ns = Counter[str]()
    for batch in batches:
        stages_ns.update(batch.stages_ns)
    elapsed_ns = max(batch.end_ns for batch in batches)
    queue_ns = [batch.begin_ns - arrival.arrival_ns for batch in batches for arrival in batch.requests]
    return ImageSummary(
        images=len(queue_ns),
        batches=len(batches),
        queue=compute_all_percentiles(queue_ns),
        drawing=compute_all_percentiles(batch.time_ns for batch in batches for _ in batch.requests),
        e2e=compute_all_percentiles(
            batch.end_ns - arrival.arrival_ns for batch in batches for arrival in batch.requests
        ),
        mean_queue_ns=mean(queue_ns),
        stages_ns=dict(stages_ns),
        elapsed_ns=elapsed_ns,
        utilisation=sum(batch.time_ns for batch in batches) / (len(runs) * elapsed_ns),
    )
