"""Queue of requests for images: a thread draws them one after another, and a client that leaves ends its drawing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import numpy as np

from model.engine.release_rate import ReleaseRate
from model.runners.denoise import ImageRunner
from model.runners.pipelines.pipeline import Backend, ImagePipeline
from model.runners.png import describe_settings, encode_png, list_settings
from model.serve.errors import queue_full_error
from model.serve.images.metrics import ImageMetrics
from model.serve.images.requests import DrawingJob


class _Cancelled(Exception):
    """Drawing that ended because nothing waits for its images."""


class DrawingQueue:
    """Bounded queue of requests for images, with one thread that draws.

    Images are drawn one by one, so that components of one size of batches suffice and each image equals the same image
    of another request. Methods are called by the event loop's thread.

    Args:
        pipeline: The opened model.
        create_backend: Returns a new backend; called once for each change of the size of images.
        most_waiting: Requests that may wait beside the one that is drawn.
        metrics: Metrics of the server.
        model: Name of the model, for the settings in the images.
        dtype: Dtype of activations as the user named it, for the settings in the images.
        quantization: Scheme in which the denoiser was quantised, for the settings in the images; None if it was not.
    """

    def __init__(
        self,
        pipeline: ImagePipeline,
        create_backend: Callable[[], Backend],
        most_waiting: int,
        metrics: ImageMetrics,
        model: str,
        dtype: str,
        quantization: str | None = None,
    ) -> None:
        self._pipeline, self._create_backend, self._most_waiting = pipeline, create_backend, most_waiting
        self._metrics, self._model, self._dtype, self._quantization = metrics, model, dtype, quantization
        self._thread = ThreadPoolExecutor(1, "images")
        self._rate = ReleaseRate(time.monotonic)
        self._accepted = 0
        self._runner: ImageRunner | None = None

    async def draw(self, job: DrawingJob) -> list[bytes]:
        """Return the images of a job as PNG files; cancelling the coroutine ends the drawing before its next pass.

        Raises:
            ApiError: The queue is full (429).
            ModelError: A text cannot be encoded, or the device refuses the model.
        """
        if self._accepted > self._most_waiting:
            raise queue_full_error(self._rate.estimate_seconds(1))
        loop, is_left, arrival = asyncio.get_running_loop(), Event(), time.monotonic()
        self._accepted += 1
        self._metrics.waiting.inc()
        self._rate.take(1)
        future = self._thread.submit(self._run, job, is_left, arrival)
        future.add_done_callback(lambda future: loop.call_soon_threadsafe(self._release, future))
        try:
            images = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            is_left.set()
            self._metrics.count_request("cancelled")
            raise
        except Exception:
            self._metrics.count_request("failed")
            raise
        self._metrics.count_request("finished")
        self._metrics.request_seconds.observe(time.monotonic() - arrival)
        return images

    async def stop(self) -> None:
        """End the thread after the drawing in progress; waiting requests are cancelled."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _release(self, future: Future[list[bytes]]) -> None:
        """Give back the place of a request whose drawing has ended, or was cancelled before it began."""
        self._accepted -= 1
        if future.cancelled():
            self._metrics.waiting.dec()
        self._rate.free(1, has_begun=not future.cancelled())

    def _run(self, job: DrawingJob, is_left: Event, arrival: float) -> list[bytes]:
        """Draw the images of a job in the thread, and return them as PNG files."""
        began = time.monotonic()
        self._metrics.waiting.dec()
        self._metrics.running.inc()
        self._metrics.queue_seconds.observe(began - arrival)
        try:
            return [self._draw_one(job, index, is_left) for index in range(len(job.images))]
        finally:
            self._metrics.running.dec()
            self._metrics.drawing_seconds.inc(time.monotonic() - began)

    def _draw_one(self, job: DrawingJob, index: int, is_left: Event) -> bytes:
        """Return one image of a job as a PNG file with its settings.

        Raises:
            _Cancelled: The client has left.
        """
        is_doubled = job.sampling.is_guided and self._pipeline.is_guided_by_passes

        def check_client(done: int, latents: np.ndarray | None = None) -> None:
            if done:
                self._metrics.passes.inc(2 if is_doubled else 1)
            if is_left.is_set():
                raise _Cancelled

        check_client(0)
        request, sampling = job.images[index], job.sampling
        drawing = self._find_runner(job.image_size).draw([request], sampling, on_step=check_client)
        self._metrics.images.inc()
        settings = list_settings(
            self._pipeline, sampling, request.negative_prompt, self._model, self._dtype, self._quantization
        )
        return encode_png(
            drawing.images[0], describe_settings([request.prompt], settings | {"seed": request.seed})
        )

    def _find_runner(self, image_size: tuple[int, int]) -> ImageRunner:
        """Return the runner for images of a size; that of the last size is kept."""
        if image_size != self._pipeline.image_size:
            self._runner = None  # frees its device memory first
            self._pipeline = self._pipeline.with_image_size(*image_size)
        if self._runner is None:
            self._runner = ImageRunner(self._pipeline, self._create_backend())
        return self._runner
