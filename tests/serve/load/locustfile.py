"""Users of a server for locust: they ask, whole or in pieces, and some leave. Each outcome is a line of $OUTCOMES."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from locust import HttpUser, constant, task

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.serve.load import LEAVES, arguments

NUMBERS = count()
OUTCOMES = open(os.environ["OUTCOMES"], "w", encoding="utf-8", buffering=1)  # noqa: SIM115
MODEL = os.environ["MODEL"]


class Client(HttpUser):
    """Somebody who asks one thing after the other."""

    wait_time = constant(0)

    @task
    def ask(self) -> None:
        """Send the next request; a full queue is an answer too."""
        number = next(NUMBERS)
        streams, leaves = number % 2 == 0, number % LEAVES == 0
        body = arguments(number) | {"model": MODEL, "stream": streams}
        request_options: dict[str, Any] = {"stream": True}
        if leaves and not streams:  # a client that waits for less time than the answer takes
            body["max_tokens"], request_options = 200, {"timeout": 0.2}
        name = f"{'pieces' if streams else 'whole'}{', left' if leaves else ''}"
        with self.client.post(
            "/v1/completions", json=body, catch_response=True, name=name, **request_options
        ) as answer:
            answer.success()  # the test judges the outcomes
            if answer.status_code == 429:
                note(number, "full")
                time.sleep(min(int(answer.headers["retry-after"]), 1))
            elif answer.status_code != 200:
                note(
                    number,
                    "left"
                    if answer.status_code == 0 and "timeout" in request_options
                    else f"{answer.status_code}",
                )
            elif streams:
                note(number, *self._followed(answer, leaves))
            else:
                note(number, "whole", answer.json()["choices"][0]["text"])

    def _followed(self, answer: Any, leaves: bool) -> tuple[str, str]:
        """Return the outcome of a stream: left after its first piece, or read to its end."""
        texts = []
        for line in answer.iter_lines():
            if line == b"data: [DONE]":
                return "whole", "".join(texts)
            if line:
                texts.append(json.loads(line[6:])["choices"][0]["text"])
                if leaves:
                    return "left", ""
        return "cut", ""


def note(number: int, outcome: str, text: str = "") -> None:
    """Write an outcome down."""
    OUTCOMES.write(json.dumps([number, outcome, text]) + "\n")
