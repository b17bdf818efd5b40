"""Server of `nkw serve` from its options: the engine's arguments, the ASGI application, and the HTTP server.

`nkw serve` with one engine calls `serve`; replicas, cluster engines and `nkw run-batch` call `run_application`.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from model.engine import Engine
from model.engine.async_engine import AsyncEngine
from model.llm.engine_args import EngineArgs, read_engine_args
from model.loading.pipeline import is_pipeline
from model.loading.shipped import find_model_name

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from model.serve.http.server import Server
    from model.serve.openai.generation import Service

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_TEXT_BYTES, _RECORDING_BYTES = 2**20, 25 * 2**20
"""Default limits of a body, of text models and of speech models; OpenAI's API takes recordings of 25 MB."""


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """Return the arguments with which the engine is made, for the parsed options of `nkw serve`."""
    return read_engine_args(
        options,
        enable_prefix_caching=options.prefix_caching,
        enable_chunked_prefill=options.chunked_prefill,
        lnc=options.lnc,
        seed=options.seed,
        backend=options.backend,
        grammar_cpu_seconds=options.grammar_cpu_seconds,
        grammar_memory_mib=options.grammar_memory,
        mask_seconds=options.mask_timeout,
    )


async def serve(
    options: argparse.Namespace,
    keys: list[str],
    engine: Engine,
    on_listening: Callable[[int], None],
    on_created: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve an engine over HTTP until a signal stops the server.

    Args:
        options: The parsed options of `nkw serve`.
        keys: API keys of clients; with none, every client is admitted.
        engine: The engine.
        on_listening: Called with the port once the server takes connections.
        on_created: Called with the server before it starts.

    Raises:
        ModelError: The server cannot listen at its address.
    """
    async with run_application(options, engine) as (app, service):
        server = make_server(app, options, keys, on_listening, service.drain)
        on_created(server)
        await server.serve()


@asynccontextmanager
async def run_application(
    options: argparse.Namespace, engine: Engine
) -> AsyncIterator[tuple[FastAPI, Service]]:
    """Yield the ASGI application of an engine and the service behind its routes.

    The engine's thread and the worker processes start here, and end with the block.
    """
    from model.llm.prediction import Deployment
    from model.serve.http.app import make_app
    from model.serve.metrics import Metrics
    from model.serve.openai.audio.speech_model import SpeechModel
    from model.serve.openai.generation import Service
    from model.serve.openai.tools import select_tool_parser
    from model.serve.pool import WorkerPool
    from model.serve.prediction import StepTimes
    from model.serve.text_jobs import Texts

    folder = Path(options.model).resolve()
    name = options.served_model_name or find_model_name(folder)
    speech_model = SpeechModel.from_folder(folder)
    limits, deployment = engine.limits, Deployment.from_engine(engine, engine_args(options))
    prefix_caching = speech_model is None and options.prefix_caching
    metrics = Metrics(name, limits.max_model_len, prefix_caching)
    async_engine = AsyncEngine(engine, count_max_continuations(options), metrics.record_output)
    times = StepTimes(deployment)
    metrics.add_engine(async_engine.state, deployment, times.predict_seconds)
    pool = WorkerPool(engine.grammars.source, options.workers, count_max_continuations(options))
    texts = Texts(pool, folder, engine.grammars, limits.vocab_size, limits.max_model_len - 1)
    service = Service(
        async_engine, texts, name, select_tool_parser(folder, options.tool_call_parser), speech_model
    )
    async_engine.start()
    pool.start()
    try:
        yield make_app(service, metrics), service
    finally:
        texts.stop()
        times.stop()
        await async_engine.stop()


def count_max_continuations(options: argparse.Namespace) -> int:
    """Return the most continuations that an engine accepts at once: those of a step, and those of the queue."""
    return int(options.ep * options.max_num_seqs + options.max_queue)


def find_max_body_bytes(options: argparse.Namespace) -> int:
    """Return the largest request body in bytes: the option, or else 1 MiB, or 25 MiB for a speech model."""
    from model.serve.openai.audio.speech_model import SpeechModel

    if options.max_body is not None:
        return int(options.max_body)
    folder = Path(options.model)
    if is_pipeline(folder) or SpeechModel.from_folder(folder) is None:
        return _TEXT_BYTES
    return _RECORDING_BYTES


def make_server(
    app: ASGIApp,
    options: argparse.Namespace,
    keys: list[str],
    on_listening: Callable[[int], None],
    on_shutdown: Callable[[], None],
) -> Server:
    """Return the HTTP server of an application, with the limits, keys and origins of the options; it is not started.

    Args:
        app: The ASGI application.
        options: The parsed options of `nkw serve`.
        keys: API keys of clients; without keys only loopback names and --host are served.
        on_listening: Called with the port once the server takes connections.
        on_shutdown: Called when the server takes no more connections.
    """
    from model.serve.http.admission import Admission, Gate, Keys
    from model.serve.http.origins import OriginPolicy, add_cors
    from model.serve.http.server import ConnectionLimits, Server

    hosts = None if keys else LOOPBACK_NAMES | {options.host.lower()}
    origins = options.allowed_origins
    admission = Admission(app, Keys(keys), find_max_body_bytes(options), options.body_timeout)
    gate = Gate(add_cors(admission, origins), OriginPolicy(hosts, origins))
    limits = ConnectionLimits(options.max_connections, options.header_timeout, options.write_timeout)
    return Server(gate, options.host, options.port, limits, on_listening, on_shutdown)
