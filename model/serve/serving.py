"""What options ask for, put together: an engine's arguments, its application, and the server in front of it."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from model.engine import Engine
from model.engine.async_engine import AsyncEngine
from model.layers.paged import STATES, CacheGroup
from model.llm.engine_args import EngineArgs, read_engine_args

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from model.serve.http.server import Server
    from model.serve.openai.generation import Service

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_TEXT_BYTES, _RECORDING_BYTES = 2**20, 25 * 2**20
"""Of a body where the options do not say; OpenAI's API takes recordings of 25 MB."""


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """The engine that the options of `nkw serve` ask for."""
    return read_engine_args(
        options,
        enable_prefix_caching=options.prefix_caching,
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
    bound: Callable[[int], None],
    server_made: Callable[[Server], None] = lambda server: None,
) -> None:
    """Serve until the server is told to end; `server_made` gets it before it starts."""
    async with answering(options, engine) as (app, service):
        server = server_for(app, options, keys, bound, service.drain)
        server_made(server)
        await server.serve()


@asynccontextmanager
async def answering(options: argparse.Namespace, engine: Engine) -> AsyncIterator[tuple[FastAPI, Service]]:
    """The application on an engine that computes until the block ends."""
    from model.serve.http.app import make_app
    from model.serve.metrics import Metrics
    from model.serve.openai.audio.speech_model import SpeechModel
    from model.serve.openai.generation import Service
    from model.serve.openai.tools import tool_parser
    from model.serve.pool import WorkerPool
    from model.serve.prediction import Deployment, StepTimes
    from model.serve.texts import Texts

    name = options.served_model_name or Path(options.model).resolve().name
    speech_model = SpeechModel.from_folder(Path(options.model))
    metrics = Metrics(name, prefix_caching=speech_model is None and options.prefix_caching)
    asynchronous = AsyncEngine(engine, places(options), metrics.watch)
    cache, args = engine.scheduler.cache, engine_args(options)
    pages: dict[CacheGroup, int] = {None: cache.pages, **dict(cache.window_pages)}
    if cache.slots is not None:
        pages[STATES] = cache.slots.count
    deployment = Deployment(
        *(Path(args.model), args.target, args.tensor_parallel_size, args.expert_parallel_size, args.dtype),
        *(engine.limits.max_model_len, pages, cache.block_size),
    )
    times = StepTimes(deployment)
    metrics.show(asynchronous.state, options.target, times.seconds)
    pool = WorkerPool(engine.grammars.source, options.workers, places(options))
    folder, limits = Path(options.model).resolve(), engine.limits
    texts = Texts(pool, folder, engine.grammars, limits.vocab_size, limits.max_model_len - 1)
    parser = tool_parser(Path(options.model), options.tool_call_parser)
    service = Service(asynchronous, texts, name, parser, speech_model)
    asynchronous.start()
    pool.start()
    try:
        yield make_app(service, metrics), service
    finally:
        texts.stop()
        times.stop()
        await asynchronous.stop()


def places(options: argparse.Namespace) -> int:
    """How many continuations an engine takes at once."""
    taken: int = options.ep * options.max_num_seqs + options.max_queue
    return taken


def most_bytes(options: argparse.Namespace) -> int:
    """Of a body: as many as the options say, else as a form of texts has, or a recording of a speech model."""
    from model.serve.openai.audio.speech_model import SpeechModel

    given: int | None = options.max_body
    if given is not None:
        return given
    return _TEXT_BYTES if SpeechModel.from_folder(Path(options.model)) is None else _RECORDING_BYTES


def server_for(
    app: ASGIApp,
    options: argparse.Namespace,
    keys: list[str],
    bound: Callable[[int], None],
    drains: Callable[[], None],
) -> Server:
    """The server of an application at the port that the options name, behind the gate."""
    from model.serve.http.gate import Admission, Gate, Keys
    from model.serve.http.origins import OriginPolicy, add_cors
    from model.serve.http.server import ConnectionLimits, Server

    hosts = None if keys else LOOPBACK_NAMES | {options.host.lower()}
    admission = Admission(app, Keys(keys), most_bytes(options), options.body_timeout)
    origins = options.allowed_origins
    gate = Gate(add_cors(admission, origins), OriginPolicy(hosts, origins))
    limits = ConnectionLimits(options.max_connections, options.header_timeout, options.write_timeout)
    return Server(gate, options.host, options.port, limits, bound, drains)
