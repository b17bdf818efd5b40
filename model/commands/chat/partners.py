"""Partners of `nkw chat`, which answer its conversations: a server's model, or a folder's model in this process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from model.commands.api_client import Address, ApiClient, RequestFailed, check_client, read_client_key
from model.config.folder import check_model_folder
from model.errors import ModelError
from model.llm.llm import LLM
from model.loading.chat import ChatTemplate, Message

_DEFAULT_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class Piece:
    """Next piece of an answer.

    Attributes:
        text: Text of the piece.
        tokens: Number of tokens of the answer so far.
        finish_reason: Why the answer ends with this piece, or None.
        is_reasoning: Whether the text is what a server calls the reasoning before the answer.
    """

    text: str
    tokens: int
    finish_reason: str | None = None
    is_reasoning: bool = False


class Partner(Protocol):
    """Model that answers conversations."""

    def answer(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Yield the pieces of the answer to a conversation; closing the generator cancels it.

        Raises:
            ModelError: There is no answer.
        """

    def close(self) -> None:
        """Close the connection to a server, if there is one."""


class ServerPartner:
    """Model of a server of OpenAI's API."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Ask the server of --url for its model, unless --model-name names one.

        Raises:
            ModelError: The server does not answer.
        """
        check_client("nkw chat --url")
        self._options = options
        self._loop = asyncio.new_event_loop()
        address = Address.parse(options.url or _DEFAULT_URL, "--url")
        self._client = ApiClient(address, read_client_key(options.api_key_file))
        try:
            self.name = options.model_name or self._run(self._client.find_model())["id"]
        except RequestFailed as failed:
            raise ModelError(f"{failed.message}; start nkw serve, or give --url URL or --model DIR") from None

    def answer(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Yield the pieces of the answer to a conversation; closing the generator cancels it.

        Tokens are counted by the server, and until its count arrives as one for each event.

        Raises:
            ModelError: The server refuses the conversation, or its answer breaks off.
        """
        options = self._options
        fields = {name: getattr(options, name) for name in ("temperature", "top_p", "seed", "max_tokens")}
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: field for name, field in fields.items() if field is not None},
        }
        events = self._client.stream("/v1/chat/completions", body)
        tokens = 0
        try:
            while (event := self._run(anext(events, None))) is not None:
                for choice in event.get("choices") or ():
                    tokens += 1
                    yield from _read_choice(choice, tokens)
                if usage := event.get("usage"):
                    tokens = usage.get("completion_tokens") or tokens
                    yield Piece("", tokens)
        except RequestFailed as failed:
            raise ModelError(failed.message) from None
        finally:
            self._run(events.aclose())

    def close(self) -> None:
        """Close the connection to the server."""
        self._client.close()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        """Run a coroutine to its end and return its result; an interrupt cancels it and is raised again."""

        async def await_work() -> Any:
            return await work

        task = self._loop.create_task(await_work())
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            self._loop.run_until_complete(asyncio.wait({task}))
            raise


def _read_choice(choice: dict[str, Any], tokens: int) -> Iterator[Piece]:
    """Yield the pieces of one choice in an event of a stream: reasoning, then text or the end of the answer.

    Args:
        choice: The choice.
        tokens: Number of tokens so far.
    """
    delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    if reasoning:
        yield Piece(reasoning, tokens, is_reasoning=True)
    if delta.get("content") or reason:
        yield Piece(delta.get("content") or "", tokens, reason)


class LocalPartner:
    """Model of a folder, in this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load the model of --model.

        Raises:
            ModelError: The folder has no config.json or no chat template, or the options do not suit the model.
        """
        self.name = str(options.model)
        check_model_folder(options.model)
        self._template = ChatTemplate(options.model)
        self._llm = LLM(
            options.model,
            target=options.target,
            tensor_parallel_size=options.tp,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            calibration=options.calibration,
            max_model_len=options.max_model_len,
            max_num_seqs=1,
        )
        changes = {name: getattr(options, name) for name in ("temperature", "top_p", "seed")}
        self._params = replace(
            self._llm.get_default_sampling_params(),
            max_tokens=options.max_tokens,
            **{name: change for name, change in changes.items() if change is not None},
        )
        self._numbers = count()

    def answer(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Compute the answer to a conversation, and yield a piece after each step; closing the generator cancels it.

        Raises:
            ModelError: The chat template refuses the conversation, or the engine cannot compute the answer.
        """
        engine, id = self._llm.engine, str(next(self._numbers))
        text = self._template.render(messages)
        ids = self._llm.get_tokenizer().encode(text, special_tokens=False)
        request = engine.submit(id, ids, self._params, text)
        (output,) = request.outputs
        told = 0
        try:
            while not request.finished:
                with _deferring_interrupts():
                    engine.step()
                if output.finish_reason == "error":
                    raise ModelError(str(output.stop_reason))
                yield Piece(output.text[told:], len(output.token_ids), output.finish_reason)
                told = len(output.text)
        finally:
            engine.cancel(id)

    def close(self) -> None:
        """Do nothing: there is no connection."""


@contextmanager
def _deferring_interrupts() -> Iterator[None]:
    """Hold back an interrupt that arrives in the block, and raise KeyboardInterrupt at the end of the block.

    An engine whose step was broken off has no consistent state. Interrupts are held back in the main thread only.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        raise KeyboardInterrupt


def open_partner(options: argparse.Namespace) -> Partner:
    """Return a partner for the options: the folder of --model, or else the server of --url.

    Raises:
        ModelError: Both are given, the server does not answer, or the model cannot be loaded.
    """
    if options.model is not None and options.url is not None:
        raise ModelError("--url asks a server and --model computes in this process: give one of them")
    return ServerPartner(options) if options.model is None else LocalPartner(options)
