"""Server of `nkw serve` for a diffusion model from its options: the pipeline, the queue and the HTTP server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from model.loading.shipped import find_model_name
from model.loading.weights import check_ranks
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.pipeline import Backend, ImagePipeline
from model.runners.png import check_pillow
from model.serve.serving import make_server

if TYPE_CHECKING:
    from model.serve.http.server import Server


def open_served_pipeline(options: argparse.Namespace) -> ImagePipeline:
    """Return the opened model of the options.

    Raises:
        ModelError: Pillow is missing, the folder is refused, the denoiser cannot be quantised so, or the ranks cannot
            divide the model.
    """
    check_pillow()
    pipeline = open_pipeline(options.model, options.dtype)
    pipeline = replace(pipeline, denoiser=pipeline.denoiser.quantise(options.quantization, options.target))
    for component in pipeline.components:
        check_ranks(component.config, options.tp)
    return pipeline


async def serve_images(
    options: argparse.Namespace,
    keys: list[str],
    pipeline: ImagePipeline,
    on_listening: Callable[[int], None],
    on_created: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve a diffusion model over HTTP until a signal stops the server.

    Args:
        options: The parsed options of `nkw serve`.
        keys: API keys of clients; with none, every client is admitted.
        pipeline: The opened model.
        on_listening: Called with the port once the server takes connections.
        on_created: Called with the server before it starts.

    Raises:
        ModelError: The server cannot listen at its address, or the HBM of a rank does not hold the weights.
    """
    from model.serve.http.app import make_app
    from model.serve.images.metrics import ImageMetrics
    from model.serve.images.queue import DrawingQueue
    from model.serve.images.routes import IMAGE_ROUTERS, ImageService

    memory = None
    if options.backend != "numpy":
        from model.runners.rank_memory import RankMemory

        memory = RankMemory.measure(pipeline.components, options.target, options.tp)
        memory.check_weights()

    def create_backend() -> Backend:
        if options.backend == "numpy":
            return ReferenceBackend(options.tp)
        from model.device import SimulatedDevice

        return KernelBackend(SimulatedDevice(options.target, options.tp), memory=memory)

    name = options.served_model_name or find_model_name(Path(options.model).resolve())
    metrics = ImageMetrics(name)
    queue = DrawingQueue(
        pipeline, create_backend, options.max_queue, metrics, name, options.dtype, options.quantization
    )
    service = ImageService(name, pipeline, queue, Random(options.seed))
    app = make_app(service, metrics, IMAGE_ROUTERS)
    server = make_server(app, options, keys, on_listening, service.drain)
    on_created(server)
    try:
        await server.serve()
    finally:
        await queue.stop()
