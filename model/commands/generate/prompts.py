"""Prompts and sampling parameters of `nkw generate`, from its options and the files of the model's folder."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TextIO

from model.commands.options.inputs import FIRST_PROMPT
from model.config import Fields, ModelConfig
from model.engine import SamplingParams, StructuredOutputsParams
from model.errors import ModelError
from model.loading.chat import ChatTemplate, Message
from model.loading.tokenizer import Tokenizer
from nkw.files import STDOUT, read_text

MOST_PROMPTS = 128
"""Most prompts of a batch: the sequences that a launch of a decode step takes."""
_MOST_CHARACTERS = 2**22
"""Most characters of a line; the longest contexts have fewer."""


def read_prompts(options: argparse.Namespace, shared: bool = False) -> list[str]:
    """Return the prompts of --prompt and the lines of --prompt-file that are not empty; by default one shipped prompt.

    Args:
        options: The parsed options.
        shared: Whether several processes share stdin.

    Raises:
        ModelError: There are more than 128 prompts, a file cannot be read or has no prompt, --prompt-file is a shared
        stdin, or --system is given without --chat.
    """
    if options.system is not None and not options.chat:
        raise ModelError("--system is the first message of a chat: give --chat as well")
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        prompts += _read_lines(options.prompt_file, shared)
        if not prompts:
            raise ModelError(
                f"{_name_file(options.prompt_file)} has no prompt; each line that is not empty is one"
            )
    if len(prompts) > MOST_PROMPTS:
        raise ModelError(f"more than {MOST_PROMPTS} prompts; one batch takes {MOST_PROMPTS}: give fewer")
    return prompts or [FIRST_PROMPT]


def encode_prompt(
    prompt: str, tokenizer: Tokenizer, config: ModelConfig, special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: The text.
        tokenizer: The model's tokenizer.
        config: The model.
        special_tokens: Whether the special tokens of tokenizer.json are added.

    Raises:
        ModelError: The prompt has no tokens, or fills the context.
    """
    ids = tokenizer.encode(prompt, special_tokens)
    if not ids:
        raise ModelError("the prompt has no tokens; this tokenizer adds none at the start of a text")
    if len(ids) >= config.context:
        raise ModelError(
            f"the prompt has {len(ids)} tokens; the context of {config.context} leaves no room for a new one: "
            "shorten it"
        )
    return ids


def encode_prompts(
    prompts: list[str], options: argparse.Namespace, tokenizer: Tokenizer, config: ModelConfig
) -> list[list[int]]:
    """Return the token ids of each prompt. With --chat, a prompt is a message in the chat template.

    Raises:
        ModelError: A prompt has no tokens or fills the context, or the chat template is missing or refuses a message.
    """
    if not options.chat:
        return [encode_prompt(prompt, tokenizer, config) for prompt in prompts]
    template = ChatTemplate(options.model)
    system: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    texts = [template.render([*system, {"role": "user", "content": prompt}]) for prompt in prompts]
    return [encode_prompt(text, tokenizer, config, special_tokens=False) for text in texts]


def read_sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the options.

    An option that is not given is read from generation_config.json if that file has do_sample; otherwise sampling is
    greedy.

    Raises:
        ModelError: An option excludes another one, or a parameter is out of its range.
    """
    fields = Fields(options.model / "generation_config.json", optional=True)
    sampled = fields.flag("do_sample")
    temperature, top_k, top_p = options.temperature, options.top_k, options.top_p
    if temperature is None:
        temperature = fields.number("temperature", 1.0, positive=False) if sampled else 0.0
        if temperature < 0:
            raise fields.error("temperature", f"{temperature} is negative")
    for option, number in (("--top-k", top_k), ("--top-p", top_p), ("--min-p", options.min_p)):
        if number not in (None, 1.0) and not temperature:
            raise ModelError(
                f"{option} chooses among candidates, and temperature 0 always takes the most likely one: give "
                "--temperature T as well"
            )
    if top_k is None and sampled and temperature:
        # transformers writes 0 for "all".
        top_k = fields.count("top_k") if fields.get("top_k", 0) != 0 else None
    if top_p is None:
        top_p = fields.number("top_p", 1.0) if sampled else 1.0
        if top_p > 1:
            raise fields.error("top_p", f"{top_p} is above 1")
    return SamplingParams(
        temperature=temperature,
        top_k=top_k or 0,
        top_p=top_p,
        min_p=options.min_p or 0.0,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        n=options.n,
        logprobs=options.logprobs,
        structured_outputs=_read_structured_outputs(options.structured_outputs),
        seed=options.seed,
        max_tokens=options.max_new_tokens,
        stop=options.stop,
    )


def _read_structured_outputs(form: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the parameters of --structured-outputs, or None if `form` is None.

    Raises:
        ModelError: The form has an unknown name, or is invalid.
    """
    if form is None:
        return None
    try:
        return StructuredOutputsParams(**form)
    except TypeError:
        names = ", ".join(field.name for field in fields(StructuredOutputsParams))
        raise ModelError(f"--structured-outputs has an unknown name; give one of {names}") from None


def _name_file(path: str) -> str:
    """Return the name of a prompt file for messages: "stdin" for -, else the path."""
    return "stdin" if path == STDOUT else path


def _read_lines(path: str, shared: bool) -> list[str]:
    """Return the lines of a prompt file that are not empty, at most one more than a batch takes.

    Args:
        path: Path of the file, or - for stdin.
        shared: Whether several processes share stdin.

    Raises:
        ModelError: The file cannot be read, a line is too long, or stdin is shared.
    """
    name = _name_file(path)
    if shared and path == STDOUT:
        raise ModelError(
            "--prompt-file - reads stdin, which the processes of torchrun share: give the prompts as a file"
        )
    try:
        file = sys.stdin if path == STDOUT else io.StringIO(read_text(path))
        return list(_iterate_prompts(file, name))
    except UnicodeDecodeError as error:
        raise ModelError(f"{name} is not text: {error}") from None
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {error.strerror or error}") from None


def _iterate_prompts(file: TextIO, name: str) -> Iterator[str]:
    """Yield the lines that are not empty, at most one more than a batch takes.

    Args:
        file: The open file.
        name: Its name in messages.

    Raises:
        ModelError: A line has more than 2**22 characters.
    """
    prompts = 0
    while line := file.readline(_MOST_CHARACTERS + 1):
        if len(line) > _MOST_CHARACTERS:
            raise ModelError(f"{name} has a line of more than {_MOST_CHARACTERS:,} characters")
        text = line.rstrip("\r\n")
        if text:
            yield text
            prompts += 1
        if prompts > MOST_PROMPTS:
            return
