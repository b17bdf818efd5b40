"""Prompts become token ids in a process of their own.

The tokenizer and the chat template are tried in copies of their process (`simulate.process`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from model.chat import ChatTemplate, Message
from model.errors import ModelError
from model.serve.aside import Aside
from model.tokenizer import Tokenizer


class Texts:
    """The tokenizer and the chat template of a folder, asked from coroutines. ModelError is what they raise there."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._executor = ThreadPoolExecutor(1, "texts")
        self._aside = Aside(_Answers, folder, vocab_size)

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
        self._aside.stop()

    async def _ask(self, *question: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, self._aside.ask, *question)
        except ModelError as error:
            message = error.message.replace(f"{self._folder}/", "").replace(str(self._folder), "the model")
            raise ModelError(message) from None


class _Answers:
    """The process's side."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer(folder, vocab_size)

    def __call__(self, what: str, *arguments: Any) -> Any:
        if what == "render":
            messages, variables = arguments
            return self._template.render(messages, **variables)
        return getattr(self._tokenizer, what)(*arguments)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._folder)
