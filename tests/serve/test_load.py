"""Many clients for minutes, some of whom leave: no request and no page is lost, and each gets what it gets alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model import LLM, SamplingParams
from tests.serve.conftest import MODEL

pytest.importorskip("openai", reason="openai is an extra of development (dev)")

REQUESTS = 150


@pytest.mark.deep
def test_each_of_many_clients_gets_what_it_gets_alone(start: Callable[..., Any]) -> None:
    # Few pages, so that requests are preempted.
    with start("--max-num-seqs", "8", "--max-queue", "64", "--num-pages", "24") as served:
        client = served.client(timeout=600)

        def asked(number: int) -> tuple[dict[str, Any], str | None]:
            """The arguments of a request, and its answer; None where the client left."""
            draw = random.Random(number)
            arguments = {
                "prompt": "Tom had" + " a big dog" * draw.randrange(12),
                "max_tokens": draw.randrange(2, 40),
                "temperature": draw.choice([0.0, 0.7]),
                "seed": number,
            }
            texts = []
            with client.completions.create(model=MODEL, stream=True, **arguments) as stream:
                for event in stream:
                    texts.append(event.choices[0].text)
                    if number % 3 == 0:
                        return arguments, None
            return arguments, "".join(texts)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(asked, range(REQUESTS)))
        while served.engine.busy:
            time.sleep(0.05)
    llm = LLM(max_num_seqs=1)
    whole = [(arguments, text) for arguments, text in answers if text is not None]
    assert len(whole) == REQUESTS - len(range(0, REQUESTS, 3))
    for arguments, text in whole:
        given = dict(arguments)
        (output,) = llm.generate(given.pop("prompt"), SamplingParams(**given), use_tqdm=False)
        assert output.outputs[0].text == text, arguments
