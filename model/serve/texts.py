"""Token ids of prompts, texts of token ids, chat templates and grammars, by a pool of job processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model.engine.grammars import CompiledGrammar, Grammars, GrammarsFull
from model.engine.structured import StructuredOutputsParams
from model.errors import ModelError
from model.loading.chat import Message
from model.serve.errors import queue_is_full, stopping_now, worker_ended
from model.serve.pool import JobCancelled, PoolFull, WorkerEnded, WorkerPool
from model.workers.launch import JobLimits
from model.workers.text_length import count_bytes

_LONG_BYTES = 2**16
"""Text whose encoding counts as a long job from the start."""
_POLL_SECONDS = 0.005
_ENCODE = JobLimits(10, 2**30, "the tokenizer")
_DECODE = JobLimits(10, 2**30, "the tokenizer")
_RENDER = JobLimits(2, 2**29, "the chat template")
"""Published templates render a conversation in milliseconds, and published tokenizers encode a megabyte in seconds."""


class Texts:
    """The tokenizer, the chat template and the grammars of a model folder.

    `most_tokens` is the longest prompt. Methods raise ModelError for a bad input or an exceeded limit, and ApiError
    where the pool's queue is full or its process has ended.
    """

    def __init__(
        self, pool: WorkerPool, folder: Path, grammars: Grammars, vocab_size: int, most_tokens: int
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._most_tokens = most_tokens
        self._is_draining = False

    async def encode(self, text: str, special_tokens: bool = True, fits: bool = True) -> list[int]:
        """Return the ids of a text.

        A text that certainly has more tokens than a prompt may have is refused by its length, if it has to be one that
        `fits`; no other text is.
        """
        if fits:
            await self.check_length(text)
        ids: list[int] = await self._run("encode", _ENCODE, len(text) >= _LONG_BYTES, text, special_tokens)
        return ids

    async def check_length(self, text: str) -> None:
        """Raise ModelError for a text that certainly has more tokens than a prompt may have."""
        if len(text) <= self._most_tokens:  # a token may be as short as a byte, so the text may fit
            return
        try:
            bound = (await self._pool.known_facts())["text_bound"]
        except WorkerEnded:
            raise worker_ended() from None
        if bound is None:
            return
        token_bytes, without_blanks = bound
        length, most = count_bytes(text, without_blanks), token_bytes * self._most_tokens
        if length > most:
            raise ModelError(
                f"the text has {length:,} bytes; a prompt has at most {self._most_tokens:,} tokens, which stand for at "
                f"most {most:,} bytes: shorten the text"
            )

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids. Raises ModelError for ids that the vocabulary does not have."""
        wrong = next((id for id in ids if not 0 <= id < self._vocab_size), None)
        if wrong is not None:
            raise ModelError(f"token id {wrong} does not exist; the vocabulary has {self._vocab_size} tokens")
        text: str = await self._run("decode", _DECODE, len(ids) >= _LONG_BYTES, list(ids))
        return text

    async def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return a conversation as the text of a prompt, special tokens included; templates read `variables` too."""
        text: str = await self._run("render", _RENDER, False, list(messages), dict(variables))
        return text

    async def grammar(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Return a form's compiled grammar, after a trial under the limits where it is not known yet."""
        known = self._grammars.find(params)
        if known is not None:
            return known
        text, size_bytes = await self._run("grammar", self._grammars.limits.job, False, params.form)
        call = self._grammars.submit(params, text, size_bytes)
        while not call.is_done:
            await asyncio.sleep(_POLL_SECONDS)
        try:
            grammar: CompiledGrammar = call.result()
        except GrammarsFull:
            raise queue_is_full(None) from None
        return grammar

    def drain(self) -> None:
        """Cancel chat templates and grammars: their requests have not begun, and a server that stops begins none."""
        self._is_draining = True
        self._pool.cancel("render", "grammar")

    def stop(self) -> None:
        """End the pool."""
        self._pool.stop()

    async def _run(self, task: str, limits: JobLimits, is_long: bool, *arguments: Any) -> Any:
        if self._is_draining and task in ("render", "grammar"):
            raise stopping_now()
        try:
            return await self._pool.run(task, *arguments, limits=limits, is_long=is_long)
        except PoolFull:
            raise queue_is_full(None) from None
        except JobCancelled:
            raise stopping_now() from None
        except WorkerEnded:
            raise worker_ended() from None
        except ModelError as error:
            message = error.message.replace(f"{self._folder}/", "").replace(str(self._folder), "the model")
            raise ModelError(message, error.code) from None
