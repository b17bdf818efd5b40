"""Tokenizer, chat template and grammars of a model folder, run in job processes for the routes of the server.

A job process has limits of CPU time and memory, so that no input of a client can stop the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model.engine.grammars import CompiledGrammar, Grammars, GrammarsFull
from model.engine.structured import StructuredOutputsParams
from model.errors import ContextFull, ModelError
from model.loading.chat import Message
from model.serve.errors import queue_full_error, server_stopping_error
from model.serve.pool import WorkerPool
from model.workers.launch import JobLimits
from model.workers.text_length import count_bytes

_LONG_JOB_SIZE = 2**16
"""Number of characters or token ids from which encoding and decoding count as long jobs from the start."""
_POLL_SECONDS = 0.005
_CANCELLED_TASKS = ("render", "grammar")
"""Tasks of requests that have not been submitted, which a stopping server cancels."""
_TOKENIZER = JobLimits(10, 2**30, "the tokenizer")
_CHAT_TEMPLATE = JobLimits(2, 2**29, "the chat template")
"""Published templates render a conversation in milliseconds, and published tokenizers encode a megabyte in seconds."""


class Texts:
    """The tokenizer, the chat template and the grammars of a model folder.

    Methods raise ModelError for a bad input or an exceeded limit. They raise ApiError if the queue of the pool is full,
    if its worker process has ended, or if the server is stopping.

    Args:
        pool: Runs the jobs.
        folder: The model's folder; messages to clients do not show it.
        grammars: Cache of compiled grammars.
        vocab_size: Number of token ids.
        max_prompt_tokens: Number of tokens of the longest prompt.
    """

    def __init__(
        self, pool: WorkerPool, folder: Path, grammars: Grammars, vocab_size: int, max_prompt_tokens: int
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self._is_draining = False

    async def encode(self, text: str, special_tokens: bool = True, must_fit_prompt: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            special_tokens: Whether the tokenizer adds its special tokens.
            must_fit_prompt: Whether `check_length` first refuses a text that is too long for a prompt.

        Raises:
            ContextFull: `must_fit_prompt` is set, and the text has more bytes than the tokens of a prompt can have.
        """
        if must_fit_prompt:
            await self.check_length(text)
        return list(await self._run("encode", _TOKENIZER, len(text) >= _LONG_JOB_SIZE, text, special_tokens))

    async def check_length(self, text: str) -> None:
        """Refuse a text that cannot fit into a prompt, by its number of bytes; nothing is encoded.

        A text that passes may still have too many tokens. Without a bound of bytes per token every text passes.

        Raises:
            ContextFull: The text has more bytes than the tokens of a prompt can have.
        """
        if len(text) <= self._max_prompt_tokens:  # a token may be as short as a byte, so the text may fit
            return
        bound = (await self._pool.wait_for_facts())["text_bound"]
        if bound is None:
            return
        token_bytes, without_blanks = bound
        num_bytes, max_bytes = count_bytes(text, without_blanks), token_bytes * self._max_prompt_tokens
        if num_bytes > max_bytes:
            raise ContextFull(
                f"the text has {num_bytes:,} bytes; a prompt has at most {self._max_prompt_tokens:,} tokens, which "
                f"stand for at most {max_bytes:,} bytes: shorten the text"
            )

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids.

        Raises:
            ModelError: The vocabulary lacks one of the ids.
        """
        for id in ids:
            if not 0 <= id < self._vocab_size:
                raise ModelError(
                    f"token id {id} does not exist; the vocabulary has {self._vocab_size} tokens"
                )
        return str(await self._run("decode", _TOKENIZER, len(ids) >= _LONG_JOB_SIZE, list(ids)))

    async def describe(self) -> dict[str, str | None]:
        """Return facts about the tokenizer for /tokenizer_info: its class, special tokens and chat template by name.

        A fact that is unknown is None.
        """
        return dict(await self._run("describe", _TOKENIZER, False))

    async def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return the text of the prompt that the chat template makes of a conversation, with its special tokens.

        Args:
            messages: The conversation.
            variables: Further variables of the template, such as `tools`.
        """
        return str(await self._run("render", _CHAT_TEMPLATE, False, list(messages), dict(variables)))

    async def compile_grammar(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Return the compiled grammar of structured outputs, from the cache if it is there.

        Another grammar is first compiled in a job process, under the limits of grammars, and then added to the cache.

        Raises:
            ApiError: Too many grammars wait to be added ("queue_full").
            ModelError: The grammar is invalid or exceeds a limit.
        """
        cached = self._grammars.find(params)
        if cached is not None:
            return cached
        text, size_bytes = await self._run("grammar", self._grammars.limits.job, False, params.form)
        call = self._grammars.submit(params, text, size_bytes)
        while not call.done():
            await asyncio.sleep(_POLL_SECONDS)
        try:
            grammar: CompiledGrammar = call.result()
        except GrammarsFull:
            raise queue_full_error(None) from None
        return grammar

    def drain(self) -> None:
        """Cancel chat templates and grammars, now and later; their calls raise ApiError ("stopping").

        Their requests have not been submitted to the engine, and a stopping server starts none.
        """
        self._is_draining = True
        self._pool.cancel(*_CANCELLED_TASKS)

    def stop(self) -> None:
        """Stop the pool of job processes; later calls raise ApiError ("worker_ended")."""
        self._pool.stop()

    async def _run(self, task: str, limits: JobLimits, is_long: bool, *arguments: Any) -> Any:
        if self._is_draining and task in _CANCELLED_TASKS:
            raise server_stopping_error()
        try:
            return await self._pool.run(task, *arguments, limits=limits, is_long=is_long)
        except ModelError as error:
            message = error.message.replace(f"{self._folder}/", "").replace(str(self._folder), "the model")
            raise ModelError(message, error.code) from None
