"""The jobs of a text worker: encode and decode texts, describe tokenizers, render templates, try out grammars."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from model.loading.chat import ChatTemplate, describe_tokenizer
from model.loading.tokenizer import Tokenizer
from model.workers.grammar import GrammarCompiler
from model.workers.text_length import text_bound


class TextTasks:
    """Tasks of a text worker: the tokenizer, the chat template and the grammar compiler of a model folder.

    The worker process (`supervisor`) makes one object. For each job it calls `prepare`, then forks a process with
    limits and calls `run` there, so the job finds loaded what `prepare` has loaded. No library call is tried in
    another process first.
    """

    def __init__(self, folder: str, vocab_size: int, end_tokens: list[int]) -> None:
        self._folder = Path(folder)
        self._tokenizer = Tokenizer(self._folder, vocab_size, isolated=False)
        self._grammars = GrammarCompiler(self._tokenizer.as_json, vocab_size, end_tokens)
        self.facts: dict[str, Any] = {"text_bound": text_bound(self._tokenizer.as_json())}

    def prepare(self, task: str) -> None:
        """Load what the jobs of a task share: the chat template for "render", a tokenizer for "grammar".

        Does nothing for other tasks, or if it is loaded.

        Raises:
            ModelError: The folder has no usable template, or llguidance does not take the tokenizer.
        """
        if task == "render":
            _ = self._template
        elif task == "grammar":
            _ = self._grammars.tokenizer

    def run(self, task: str, arguments: list[Any]) -> Any:
        """Return the answer to a job as JSON data.

        Args:
            task: "render", "grammar", "describe", "encode", or anything else for decoding.
            arguments: Arguments of the function that the task calls.

        Raises:
            ModelError: The input is refused.
        """
        if task == "render":
            messages, variables = arguments
            return self._template.render(messages, **variables)
        if task == "grammar":
            return self._grammars.try_out(*arguments)
        if task == "describe":
            return describe_tokenizer(self._folder)
        if task == "encode":
            return self._tokenizer.encode(*arguments)
        return self._tokenizer.decode(*arguments)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._folder, isolated=False)
