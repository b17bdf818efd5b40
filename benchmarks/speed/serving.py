"""Latency that the HTTP server adds: a request without computation, and the time to the first token."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from benchmarks.speed.measure import Row, seconds
from model.engine import SamplingParams
from model.llm.llm import LLM

_REQUESTS = 100
_PROMPT = list(range(3, 35))


def rows() -> Iterator[Row]:
    """Yield the server's latency and its time to the first token, both in ms on one kept connection."""
    engine = LLM(enable_prefix_caching=False).engine
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def first_token_of_engine() -> None:
        engine.submit("0", _PROMPT, params)
        while engine.busy:
            engine.step()

    with _connection_to_server() as connection:
        latency = median(seconds(lambda: _list_models(connection)) for _ in range(_REQUESTS))
        samples = [
            (_measure_first_token(connection), seconds(first_token_of_engine)) for _ in range(_REQUESTS)
        ]
    over_http, without_http = (median(column) for column in zip(*samples))
    yield Row("server: GET /v1/models on a kept connection", "", 1e3 * latency, "ms")
    work = f"server: time to first token over HTTP, {len(_PROMPT)} tokens of prompt"
    yield Row(work, "the engine without HTTP", 1e3 * over_http, "ms", over_http / without_http)


@contextmanager
def _connection_to_server() -> Iterator[http.client.HTTPConnection]:
    """Start `nkw serve` in its own process for the block, and yield a connection to it."""
    command = [
        sys.executable,
        "-m",
        "nkw",
        "serve",
        "--port",
        "0",
        "--no-prefix-caching",
        "--log-level",
        "error",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline()
        connection = http.client.HTTPConnection(url.removeprefix("http://").partition("/")[0])
        yield connection
        connection.close()
    finally:
        server.terminate()
        server.communicate()


def _list_models(connection: http.client.HTTPConnection) -> None:
    """Request the list of models and read the answer."""
    connection.request("GET", "/v1/models")
    connection.getresponse().read()


def _measure_first_token(connection: http.client.HTTPConnection) -> float:
    """Return the seconds from a request to the first event of its stream; the remaining events are read afterwards."""
    request = {"model": "stories", "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    body = json.dumps(request | {"ignore_eos": True})
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    event = response.readline()
    taken = time.perf_counter() - begun
    assert event.startswith(b"data: "), event
    response.read()
    return taken
