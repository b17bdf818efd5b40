"""Requests that do not run to their end: a client leaves, the queue is full, the server stops."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nkw.commands import main
from tests.interruptible import started
from tests.serve.conftest import MODEL, Reached, Served

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Tom had", "max_tokens": 240, "ignore_eos": True}
"""Until the context ends."""


def long_stream(client: Any, **changes: Any) -> Any:
    """Return a stream of many tokens after its first token has arrived."""
    arguments = LONG | changes
    extra = {"ignore_eos": arguments.pop("ignore_eos")}
    stream = client.completions.create(stream=True, extra_body=extra, **arguments)
    next(iter(stream))
    return stream


def metric(server: Served, name: str) -> float:
    """Return the value of a metric, or 0 if /metrics does not have it yet."""
    _, body = server.send("GET", "/metrics")
    lines = (line for line in body.decode().splitlines() if line.startswith(name))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def whole_answer_awaited(server: Reached) -> Iterator[None]:
    """Ask for many tokens in one answer, and leave at the end of the block."""
    body = json.dumps(LONG).encode()
    header = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{header}\r\n".encode() + body)
        yield


def wait_until(holds: Callable[[], bool]) -> None:
    """Ask again until it holds; what is waited for comes, or the request ends and the test fails by its counts."""
    while not holds():
        time.sleep(0.02)


@pytest.mark.parametrize("complete_answer", [False, True], ids=["stream", "whole answer"])
def test_client_that_leaves_frees_its_pages(server: Served, complete_answer: bool) -> None:
    aborted = 'nkw_request_success_total{finished_reason="abort"'
    before, pool = metric(server, aborted), server.engine.scheduler.cache
    if complete_answer:
        with whole_answer_awaited(server):
            wait_until(lambda: server.engine.busy)
    else:
        stream = long_stream(server.client())
        assert pool.free < pool.count
        stream.close()
    wait_until(lambda: pool.free == pool.count and not server.engine.busy)
    assert metric(server, aborted) == before + 1


@pytest.mark.slow
def test_full_queue_answers_429_until_a_place_is_free(server: Served) -> None:
    client = server.client()
    streams = [long_stream(client) for _ in range(4)]
    waiting = LONG | {"n": 2, "stream": True}
    extra = {"ignore_eos": waiting.pop("ignore_eos")}
    with client.completions.with_streaming_response.create(extra_body=extra, **waiting):
        assert metric(server, "nkw_num_requests_waiting") == 1
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="The sun", max_tokens=1)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert metric(server, "nkw_kv_cache_usage_perc") > 0
        for stream in streams:
            stream.close()
        again = server.client(max_retries=5).completions.create(model=MODEL, prompt="The sun", max_tokens=1)
        assert again.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_metrics_count_what_was_computed(server: Served) -> None:
    names = ("nkw_prompt_tokens_total", "nkw_generation_tokens_total", "nkw_prefix_cache_hits_total")
    seconds = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time")
    counted = (
        *names,
        *(f"nkw_{name}_seconds_count" for name in seconds),
        "nkw_inter_token_latency_seconds_count",
    )
    client, prompt = server.client(), list(range(100, 133))
    steps = ("nkw_step_tokens_total", "nkw_padding_tokens_total")
    wait_until(lambda: not server.engine.busy)  # with what other tests cancelled
    before, launched = [[metric(server, name) for name in names] for names in (counted, steps)]
    for _ in range(2):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0, seed=1)
    tokens = answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    after = [metric(server, name) for name in counted]
    assert [now - then for now, then in zip(after, before)] == [
        66, 2 * tokens, 32, 2, 2, 2, 2, 2 * (tokens - 1)
    ]  # fmt: skip
    computed, padding = [metric(server, name) - then for name, then in zip(steps, launched)]
    assert computed == 66 - 32 + 2 * (tokens - 1)
    assert padding > 0


def test_top_shows_what_a_server_does(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.port}"
    server.client().completions.create(model=MODEL, prompt="Tom had", max_tokens=2)
    assert main(["top", "--url", url]) == 0
    shown = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["requests"] == "0 running, 0 waiting"
    assert shown["new tokens"] == f"{metric(server, 'nkw_generation_tokens_total'):,.0f}"
    assert re.fullmatch(r"p50 up to [\d.]+ s, p99 up to [\d.]+ s", shown["first token"])
    assert main(["top", "--url", "http://127.0.0.1:1"]) == 2
    assert main(["top", "--url", "file:///etc/passwd"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "nkw: error: http://127.0.0.1:1 does not answer: [Errno 111] Connection refused",
        "nkw: error: --url is 'file:///etc/passwd'; it must be like http://127.0.0.1:8000",
    ]


@pytest.mark.slow
def test_client_that_does_not_read_is_left(start: Callable[..., Any]) -> None:
    with start("--write-timeout", "1", "--max-num-seqs", "1") as served, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", served.port))
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        wait_until(lambda: served.server.server_state.total_requests > 0)
        wait_until(lambda: not served.server.server_state.connections)
        assert served.send("GET", "/health")[0].status == 200


@contextmanager
def process() -> Iterator[tuple[Any, Any]]:
    """Yield `nkw serve` as a process, and a client of it."""
    running = started("-m", "nkw", "serve", "--port", "0", "--max-num-seqs", "2", "--log-level", "error")
    try:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        yield running, openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    finally:
        running.kill()
        running.communicate()


@pytest.mark.slow
def test_sigterm_finishes_what_was_begun_and_takes_nothing_more() -> None:
    with process() as (running, client):
        stream = long_stream(client, max_tokens=12)
        running.send_signal(signal.SIGTERM)
        reasons = [event.choices[0].finish_reason for event in stream]
        assert reasons[-1] == "length"
        assert running.communicate() == ("", "")
        assert running.returncode == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.slow
def test_second_sigterm_stops_at_once() -> None:
    with process() as (running, client):
        stream = long_stream(client)
        running.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                client.models.list()
            except (openai.APIConnectionError, openai.InternalServerError):
                return True
            return False

        wait_until(refused)
        running.send_signal(signal.SIGTERM)
        running.communicate()
        assert (running.returncode, stream.response.status_code) == (143, 200)
