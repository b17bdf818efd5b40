"""Fixtures for tests of the HTTP server: a server in a thread of this process on a free port, and OpenAI's client."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.commands.serve.images import check_image_options
from model.engine import Engine
from model.llm.llm import make_engine
from model.serve.http.keys import read_keys
from model.serve.images.serving import open_served_pipeline, serve_images
from model.serve.serving import engine_args, serve
from nkw.commands import build_parser
from tests.model.test_denoise import folders  # noqa: F401

MODEL = "stories"


@dataclass
class Reached:
    """A server that listens at a port of this machine."""

    port: int
    keys: list[str]

    @property
    def url(self) -> str:
        """Base URL of OpenAI's routes."""
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **options: Any) -> Any:
        """Return OpenAI's client for the server, which does not retry."""
        import openai

        key = self.keys[0] if self.keys else "none"
        return openai.OpenAI(**{"base_url": self.url, "api_key": key, "max_retries": 0} | options)

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request unchanged and return the response together with its body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        request_headers = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        try:
            connection.request(method, path, body, request_headers)
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()


@dataclass
class Served(Reached):
    """A server that runs in this process."""

    engine: Engine
    server: Any


@dataclass
class ServedImages(Reached):
    """A server of images that runs in this process; `server` is its HTTP server."""

    server: Any


def options_of(*words: str) -> argparse.Namespace:
    """Return the parsed options of `nkw serve WORDS` with a free port."""
    return build_parser(["serve"]).parse_args(["serve", "--port", "0", *words])


@contextmanager
def serving(*words: str) -> Iterator[Served]:
    """Run the server of `nkw serve WORDS` in a thread for the block, and yield it."""
    options = options_of(*words)
    engine, keys = make_engine(engine_args(options)), read_keys(options.api_key_file)
    with run_in_thread(lambda *calls: serve(options, keys, engine, *calls)) as (port, http_server):
        yield Served(port, keys, engine, http_server)
    assert engine.scheduler.cache.free == engine.scheduler.cache.count, "a page was lost"


@contextmanager
def run_in_thread(serve: Callable[..., Coroutine[Any, Any, None]]) -> Iterator[tuple[int, Any]]:
    """Run a server in a thread for the block, and yield its port and the HTTP server.

    Args:
        serve: Serves; called with the functions to call with the port and with the HTTP server.
    """
    ports: list[int] = []
    servers: list[Any] = []
    bound = threading.Event()

    def told(port: int) -> None:
        ports.append(port)
        bound.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve(told, servers.append)), daemon=True)
    thread.start()
    assert bound.wait(60), "the server did not start"
    try:
        yield ports[0], servers[0]
    finally:
        servers[0].should_exit = True
        thread.join()


@contextmanager
def serving_images(*words: str) -> Iterator[ServedImages]:
    """Run the server of `nkw serve WORDS` for images in a thread for the block, and yield it."""
    options = options_of(*words)
    check_image_options(options)
    keys, pipeline = read_keys(options.api_key_file), open_served_pipeline(options)
    with run_in_thread(lambda *calls: serve_images(options, keys, pipeline, *calls)) as (port, http_server):
        yield ServedImages(port, keys, http_server)


@pytest.fixture(scope="package")
def server() -> Iterator[Served]:
    """Yield a server of the default model that runs up to six requests at once."""
    with serving("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-queue", "2") as served:
        yield served


@pytest.fixture(scope="package")
def client(server: Served) -> Any:
    """Return OpenAI's client for the server."""
    return server.client()


@pytest.fixture(scope="package")
def drawing(folders: dict[str, Path]) -> Iterator[ServedImages]:  # noqa: F811
    """Yield a server of a tiny pipeline in NumPy, in which one request waits beside the one that is drawn."""
    with serving_images("--model", str(folders["flow"]), "--backend", "numpy", "--max-queue", "1") as served:
        yield served


@pytest.fixture
def start() -> Callable[..., Any]:
    """Return a function of command-line options, whose result is a context manager that runs another server."""
    return serving


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Write a file with two API keys and return its path."""
    path = tmp_path / "keys"
    path.write_text("first-key-of-clients\nsecond-key-of-clients\n", encoding="utf-8")
    return path
