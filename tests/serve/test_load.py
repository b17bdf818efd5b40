"""Many clients for minutes, some of whom leave: no request and no page is lost, and each gets what it gets alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model import LLM, SamplingParams
from tests.serve.conftest import MODEL
from tests.serve.load import LEAVES, arguments
from tests.serve.test_ends import wait_until
from tests.serve.test_replicas import process

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

REQUESTS = 150
PRESSED = ("--max-num-seqs", "8", "--max-queue", "64", "--num-pages", "24")
"""Few pages, so that requests are preempted."""


def request_text(client: Any, number: int) -> str | None:
    """Return the text of a request, or None where the client left, as every third client does."""
    texts = []
    with client.completions.create(model=MODEL, stream=True, **arguments(number)) as stream:
        for event in stream:
            texts.append(event.choices[0].text)
            if number % LEAVES == 0:
                return None
    return "".join(texts)


def check_alone(answers: Iterable[tuple[int, str | None]]) -> int:
    """Compare each complete text with the engine's without other requests; return the number of texts."""
    llm, finished = LLM(max_num_seqs=1), 0
    for number, text in answers:
        if text is not None:
            params = arguments(number)
            (output,) = llm.generate(params.pop("prompt"), SamplingParams(**params), use_tqdm=False)
            assert output.outputs[0].text == text, number
            finished += 1
    return finished


@pytest.mark.parametrize(
    "requests", [pytest.param(9, marks=pytest.mark.slow), pytest.param(REQUESTS, marks=pytest.mark.deep)]
)
def test_each_of_many_clients_gets_what_it_gets_alone(start: Callable[..., Any], requests: int) -> None:
    with start(*PRESSED) as served:
        client = served.client(timeout=600)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda number: request_text(client, number), range(requests)))
        while served.engine.busy:
            time.sleep(0.05)
    assert check_alone(enumerate(answers)) == requests - len(range(0, requests, LEAVES))


@pytest.mark.deep
def test_clients_of_replicas_that_end_lose_the_requests_of_these_only() -> None:
    ends, clients = 3, 16
    with process(*PRESSED) as served:
        client = served.client(timeout=600, max_retries=10)
        lost: dict[int, str | None] = {}

        def answer(number: int) -> str | None:
            try:
                return request_text(client, number)
            except openai.APIError as error:
                lost[number] = error.code
                return None

        with ThreadPoolExecutor(clients) as pool:
            answers = pool.map(answer, range(REQUESTS))
            for index in range(ends):
                wait_until(lambda: all(served.running_requests()))
                os.kill(served.pids[index % 2], signal.SIGKILL)
                served.started()
            texts = list(answers)
        assert len(lost) <= ends * clients and set(lost.values()) <= {"replica_ended"}
        wait_until(lambda: not any(served.numbers("nkw_kv_cache_usage_perc").values()))
        assert sum(served.numbers("nkw_replica_restarts_total").values()) == ends
    left = len(set(range(0, REQUESTS, LEAVES)) - set(lost))
    assert check_alone(enumerate(texts)) == REQUESTS - left - len(lost)
