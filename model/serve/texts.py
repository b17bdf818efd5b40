"""Prompts become token ids in a process of their own, which has one thread.

The tokenizer and the chat template are tried in copies of their process (`simulate.process`). A process with several
threads, as the server has, cannot be copied safely: a lock that another thread holds would stay locked in the copy.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from model.chat import ChatTemplate, Message
from model.errors import ModelError
from model.tokenizer import Tokenizer

_SECONDS = 60
"""For one question; the limits of a tokenizer and of a chat template end earlier."""


class Texts:
    """The tokenizer and the chat template of a folder, asked from coroutines. ModelError is what they raise there."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._executor = ThreadPoolExecutor(1, "texts")
        self._pipe, self._process = self._started()

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ids: list[int] = await self._ask("encode", text, special_tokens)
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; ModelError for ids that the vocabulary has not."""
        wrong = next((each for each in ids if not 0 <= each < self._vocab_size), None)
        if wrong is not None:
            raise ModelError(f"token id {wrong} does not exist; the vocabulary has {self._vocab_size} tokens")
        text: str = await self._ask("decode", list(ids))
        return text

    async def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """A conversation as the text of a prompt, which has its special tokens; templates read `variables` too."""
        text: str = await self._ask("render", list(messages), dict(variables))
        return text

    def stop(self) -> None:
        """End the process and the thread that asks it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _started(self) -> tuple[Connection, Any]:
        context = multiprocessing.get_context("spawn")
        own, other = context.Pipe()
        process = context.Process(target=_answers, args=(other, self._folder, self._vocab_size), daemon=True)
        process.start()
        other.close()
        return own, process

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    async def _ask(self, what: str, *arguments: Any) -> Any:
        question = json.dumps([what, *arguments]).encode()
        loop = asyncio.get_running_loop()
        found, value = json.loads(await loop.run_in_executor(self._executor, self._answer, question))
        if not found:
            raise ModelError(value.replace(f"{self._folder}/", "").replace(str(self._folder), "the model"))
        return value

    def _answer(self, question: bytes) -> bytes:
        """Ask the process; one that does not answer is replaced."""
        try:
            self._pipe.send_bytes(question)
            if self._pipe.poll(_SECONDS):
                return self._pipe.recv_bytes()
        except (EOFError, OSError):
            pass
        self._end()
        self._pipe, self._process = self._started()
        return json.dumps([False, "the text cannot be turned into tokens: its process has ended"]).encode()


def _answers(pipe: Connection, folder: Path, vocab_size: int) -> None:
    """The process: answers until its parent has gone. Signals to the whole group are the parent's to obey."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    tokenizer = Tokenizer(folder, vocab_size)
    template: ChatTemplate | None = None
    while True:
        try:
            what, *arguments = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        answer: tuple[bool, Any]
        try:
            if what == "render":
                template = template or ChatTemplate(folder)
                messages, variables = arguments
                answer = True, template.render(messages, **variables)
            else:
                answer = True, getattr(tokenizer, what)(*arguments)
        except ModelError as error:
            answer = False, error.message
        pipe.send_bytes(json.dumps(answer).encode())
