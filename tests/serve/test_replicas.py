"""`nkw serve --replicas N`: a router before several processes answers as one server does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from model import LLM, SamplingParams
from nkw.commands import main
from tests.interruptible import started
from tests.serve.conftest import MODEL, Reached, Served
from tests.serve.test_ends import LONG, long_stream, wait_until, whole_answer_awaited

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

OPTIONS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-queue", "2")
TALES = [f"{name} had a big red ball and a small blue box. " * 3 for name in ("Tom", "Lily", "Ben")]


@dataclass
class Replicas(Reached):
    """A router that runs as a process, and the processes behind it."""

    running: subprocess.Popen[str]
    pids: dict[int, int]

    def started(self, number: int = 1) -> None:
        """Wait until so many replicas say that they answer."""
        assert self.running.stderr is not None
        while number:
            line = self.running.stderr.readline()
            assert line, "the server has ended"
            if match := re.search(r"replica (\d+) answers, as process (\d+)", line):
                self.pids[int(match[1])] = int(match[2])
                number -= 1

    def numbers(self, name: str) -> dict[int, float]:
        """Return the values of a metric by replica."""
        _, body = self.send("GET", "/metrics")
        sums: dict[int, float] = {}
        for line in body.decode().splitlines():
            if line.startswith(f"{name}{{"):
                number = int(line.partition('replica="')[2].partition('"')[0])
                sums[number] = sums.get(number, 0.0) + float(line.rsplit(" ", 1)[1])
        return sums

    def running_requests(self) -> list[float]:
        """Return the number of requests in steps, of each replica that answers."""
        return list(self.numbers("nkw_num_requests_running").values())


@contextmanager
def process(*words: str, environment: dict[str, str] | None = None) -> Iterator[Replicas]:
    """Start `nkw serve WORDS --port 0` with two replicas, or as many as the words say."""
    words = ("--replicas", "2", *words)
    count = int(words[len(words) - 1 - words[::-1].index("--replicas") + 1])
    running = started("-m", "nkw", "serve", "--port", "0", *words, environment=environment)
    try:
        started_replicas = Replicas(0, [], running, {})
        started_replicas.started(count if count > 1 else 0)
        assert running.stdout is not None
        started_replicas.port = int(running.stdout.readline().rpartition(":")[2].partition("/")[0])
        yield started_replicas
    finally:
        running.kill()
        running.communicate()


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    """Yield two replicas with the options of the fixture `server`."""
    with process(*OPTIONS) as started_replicas:
        yield started_replicas


@pytest.mark.slow
def test_each_replica_answers_as_the_engine_alone(replicas: Replicas) -> None:
    client, params = replicas.client(), {"temperature": 0.8, "seed": 3, "max_tokens": 6}
    before = replicas.numbers("nkw_generation_tokens_total")
    prompts = ["The red key", "Tom had"] * 2
    outputs = LLM(max_num_seqs=2, max_num_batched_tokens=64).generate(
        prompts, SamplingParams(**params), use_tqdm=False
    )
    answers = [client.completions.create(model=MODEL, prompt=prompt, **params) for prompt in prompts]
    streams = [
        client.completions.create(model=MODEL, prompt=prompt, stream=True, **params) for prompt in prompts
    ]
    texts = ["".join(event.choices[0].text for event in stream) for stream in streams]
    assert (
        [answer.choices[0].text for answer in answers]
        == [output.outputs[0].text for output in outputs]
        == texts
    )
    after = replicas.numbers("nkw_generation_tokens_total")
    assert len(after) == 2 and all(after[replica] > before.get(replica, 0) for replica in after)
    messages = [{"role": "user", "content": "Tom had"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, **params).choices[0].message.content


REQUESTS: list[tuple[str, str, bytes | None, dict[str, str]]] = [
    ("GET", "/v1/models/nobody", None, {}),
    ("GET", "/nowhere", None, {}),
    ("GET", "/v1/completions", None, {}),
    ("POST", "/health", b"", {}),
    ("GET", "/health", None, {}),
    ("GET", "/ready", None, {}),
    ("GET", "/version", None, {}),
    ("GET", "/openapi.json?x=1", None, {}),
    ("POST", "/tokenize", b'{"prompt": "Tom had"}', {}),
    ("POST", "/v1/completions", b"{", {}),
    ("POST", "/v1/completions", b'{"model": "stories", "prompt": 3}', {}),
    ("POST", "/v1/completions", b'{"model": "stories", "prompt": "a", "n": 7}', {}),
    ("POST", "/v1/completions", b'{"model": "stories", "prompt": "a", "logit_bias": {"x": 1}}', {}),
    ("POST", "/v1/completions", b'{"model": "stories", "prompt": "a"}', {"content_type": "text/plain"}),
    ("POST", "/v1/completions", b"{}", {"content_length": str(2**20 + 1)}),
    ("POST", "/v1/chat/completions", b'{"model": "stories", "messages": []}', {}),
    ("POST", "/v1/audio/transcriptions", b"", {}),
    ("GET", "/health", None, {"host": "other.example"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    REQUESTS,
    ids=lambda request_case: f"{request_case[0]} {request_case[1]} {(request_case[2] or b'')[:60]!r}",
)
def test_what_no_engine_computes_is_answered_as_by_one_server(
    replicas: Replicas, server: Served, request_: tuple[str, str, bytes | None, dict[str, str]]
) -> None:
    method, path, body, headers = request_
    (one, expected), (several, answer) = [
        server_process.send(method, path, body, **headers) for server_process in (server, replicas)
    ]
    kept = ("content-type", "content-length", "allow", "retry-after", "connection")
    assert (several.status, answer) == (one.status, expected)
    assert [several.headers.get_all(name) for name in kept] == [one.headers.get_all(name) for name in kept]
    assert (
        several.headers["x-request-id"].startswith("req_") and len(several.headers.get_all("date") or []) == 1
    )


@pytest.mark.slow
def test_prompts_that_begin_alike_land_on_one_replica(replicas: Replicas) -> None:
    client = replicas.client()

    def hits(order: list[int], end: str) -> dict[int, float]:
        """Return the tokens that each replica found in its pages, for prompts in an order."""
        before = replicas.numbers("nkw_prefix_cache_hits_total")
        for index in order:
            client.completions.create(model=MODEL, prompt=TALES[index] + end, max_tokens=1)
        return {
            number: now - before[number]
            for number, now in replicas.numbers("nkw_prefix_cache_hits_total").items()
        }

    hits([0, 1, 2], "")
    again = hits([2, 1, 0], "The end.")
    assert all(count > 0 for count in again.values()), "both replicas know some"
    tokens = [client.post("/../tokenize", body={"prompt": tale}, cast_to=object)["count"] for tale in TALES]
    assert sum(again.values()) == sum(count // 16 * 16 for count in tokens)


@pytest.mark.slow
def test_load_spreads_and_a_full_queue_answers_429(replicas: Replicas) -> None:
    client = replicas.client()
    streams = [long_stream(client) for _ in range(8)]
    assert replicas.running_requests() == [4, 4]
    waiting = LONG | {"n": 2, "stream": True}
    extra = {"ignore_eos": waiting.pop("ignore_eos")}
    with (
        client.completions.with_streaming_response.create(extra_body=extra, **waiting),
        client.completions.with_streaming_response.create(extra_body=extra, **waiting),
    ):
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="The sun", max_tokens=1)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) > 0
    for stream in streams:
        stream.close()
    wait_until(lambda: not any(replicas.numbers("nkw_kv_cache_usage_perc").values()))


@pytest.mark.slow
@pytest.mark.parametrize("complete_answer", [False, True], ids=["stream", "whole answer"])
def test_client_that_leaves_frees_the_pages_of_its_replica(replicas: Replicas, complete_answer: bool) -> None:
    stays = long_stream(replicas.client())
    (home,) = [number for number, running in replicas.numbers("nkw_num_requests_running").items() if running]
    if complete_answer:
        with whole_answer_awaited(replicas):
            wait_until(lambda: all(replicas.numbers("nkw_kv_cache_usage_perc").values()))
    else:
        leaves = long_stream(replicas.client())
        assert all(replicas.numbers("nkw_kv_cache_usage_perc").values())
        leaves.close()
    wait_until(lambda: not replicas.numbers("nkw_kv_cache_usage_perc")[1 - home])
    assert replicas.numbers("nkw_kv_cache_usage_perc")[home] > 0
    stays.close()
    wait_until(lambda: not any(replicas.numbers("nkw_kv_cache_usage_perc").values()))


def test_metrics_are_those_of_each_replica(replicas: Replicas, server: Served, capsys: Any) -> None:
    def names(one: Reached) -> dict[str, str]:
        one.client().completions.create(model=MODEL, prompt="Tom had", max_tokens=1)
        lines = one.send("GET", "/metrics")[1].decode().splitlines()
        return dict(line[7:].split(" ", 1) for line in lines if line.startswith(("# TYPE", "# HELP")))

    router = {
        "nkw_routed_requests_total",
        "nkw_routed_requests_created",
        "nkw_replica_up",
        "nkw_replica_restarts_total",
    }
    both, one = names(replicas), names(server)
    assert {name: both.get(name) for name in one} == one
    assert set(both) - set(one) == router
    text = replicas.send("GET", "/metrics")[1].decode()
    assert text.count("# TYPE nkw_prompt_tokens_total") == 1
    assert replicas.numbers("nkw_replica_up") == {0: 1, 1: 1}
    assert main(["top", "--url", f"http://127.0.0.1:{replicas.port}"]) == 0
    shown = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["new tokens"] == f"{sum(replicas.numbers('nkw_generation_tokens_total').values()):,.0f}"
    assert shown["replicas"] == "2 answer"


def last(stream: Any) -> Any:
    """Return the last choice of a stream."""
    return [event.choices[0] for event in stream][-1]


def result(answer: Future[Any]) -> Any:
    """Return the choice of an answer that is on its way."""
    return answer.result().choices[0]


def outcome(choice: Callable[[Any], Any], answer: Any) -> str:
    """Return why an answer ended: its finish reason, or status and code of the error."""
    try:
        return str(choice(answer).finish_reason)
    except openai.APIError as error:
        return f"{getattr(error, 'status_code', None)} {error.code}"


@pytest.mark.slow
def test_replica_that_is_killed_fails_its_requests_only_and_starts_again(replicas: Replicas) -> None:
    client, arguments = replicas.client(), LONG | {"max_tokens": 100}
    extra = {"extra_body": {"ignore_eos": arguments.pop("ignore_eos")}}
    with ThreadPoolExecutor(2) as pool:
        streams = [long_stream(client, max_tokens=100) for _ in range(2)]
        futures = [pool.submit(client.completions.create, **arguments, **extra) for _ in range(2)]
        wait_until(lambda: replicas.running_requests() == [2, 2])
        os.kill(replicas.pids[0], signal.SIGKILL)
        outcomes = [outcome(last, stream) for stream in streams]
        answers = [outcome(result, future) for future in futures]
    assert sorted(outcomes) == ["None replica_ended", "length"]
    assert sorted(answers) == ["503 replica_ended", "length"]
    replicas.started()
    assert replicas.numbers("nkw_replica_up") == {0: 1, 1: 1}
    assert replicas.numbers("nkw_replica_restarts_total") == {0: 1, 1: 0}
    before = replicas.numbers("nkw_routed_requests_total")
    for _ in range(2):
        client.completions.create(model=MODEL, prompt="The sun", max_tokens=1)
    after = replicas.numbers("nkw_routed_requests_total")
    assert after[0] > before[0]
