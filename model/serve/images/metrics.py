"""Metrics of a server of images for `/metrics`, with the prefix `nkw_` and the label `model_name`."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Outcome = Literal["finished", "cancelled", "failed"]
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class ImageMetrics:
    """Counters, gauges and histograms of one server of images, in their own registry.

    Attributes:
        running: Requests that are drawn.
        waiting: Requests that wait.
        images: Images that were drawn.
        passes: Passes of the denoiser, two for each guided step.
        drawing_seconds: Seconds in which images were drawn.
        queue_seconds: Seconds from the arrival of a request to its first image.
        request_seconds: Seconds from the arrival of a request to its end.

    Args:
        model: The value of the label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self._requests = Counter(
            "nkw_image_requests",
            "Requests for images that ended, by outcome.",
            ["model_name", "outcome"],
            registry=self._registry,
        )
        for outcome in get_args(Outcome):
            self._requests.labels(model, outcome)  # a rate needs the sample before the first request
        self.running = self._add_gauge("num_requests_running", "Requests that are drawn.")
        self.waiting = self._add_gauge("num_requests_waiting", "Requests that wait.")
        self.images = self._add_counter("images", "Images that were drawn.")
        self.passes = self._add_counter(
            "denoiser_passes", "Passes of the denoiser, two for each guided step."
        )
        self.drawing_seconds = self._add_counter("drawing_seconds", "Seconds in which images were drawn.")
        self.queue_seconds = self._add_histogram("request_queue_time_seconds", "From arrival to first image.")
        self.request_seconds = self._add_histogram("e2e_request_latency_seconds", "From arrival to end.")

    def count_request(self, outcome: Outcome) -> None:
        """Count a request that ended."""
        self._requests.labels(self._model, outcome).inc()

    def format_samples(self) -> bytes:
        """Return all samples in Prometheus' text format."""
        return generate_latest(self._registry)

    def _add_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"nkw_{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _add_counter(self, name: str, text: str) -> Counter:
        return Counter(f"nkw_{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _add_histogram(self, name: str, text: str) -> Histogram:
        registry = self._registry
        histogram = Histogram(f"nkw_{name}", text, ["model_name"], buckets=_SECONDS, registry=registry)
        return histogram.labels(self._model)
