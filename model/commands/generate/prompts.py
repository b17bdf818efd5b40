"""What `nkw generate` is asked to continue and how it chooses: its options beside the files of the model's folder."""

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
"""Of one batch: the sequences that one launch of a decode step takes."""
_MOST_CHARACTERS = 2**22
"""Of a line; the longest contexts take fewer."""


def read_prompts(options: argparse.Namespace, shared: bool = False) -> list[str]:
    """The prompts of `--prompt` and of the lines of `--prompt-file`, empty lines left out.

    Raises ModelError for more than 128 prompts, a file that cannot be read or has none, stdin where several processes
    have it `shared`, and `--system` without `--chat`.
    """
    if options.system is not None and not options.chat:
        raise ModelError("--system is the first message of a chat: give --chat as well")
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        prompts += _lines(options.prompt_file, shared)
        if not prompts:
            raise ModelError(
                f"{_named(options.prompt_file)} has no prompt; each line that is not empty is one"
            )
    if len(prompts) > MOST_PROMPTS:
        raise ModelError(f"more than {MOST_PROMPTS} prompts; one batch takes {MOST_PROMPTS}")
    return prompts or [FIRST_PROMPT]


def encode_prompt(
    prompt: str, tokenizer: Tokenizer, config: ModelConfig, special_tokens: bool = True
) -> list[int]:
    """The ids of a prompt, with the special tokens that tokenizer.json adds unless `special_tokens` is False.

    Raises ModelError if there are none, or if the context has no room for another.
    """
    ids = tokenizer.encode(prompt, special_tokens)
    if not ids:
        raise ModelError("the prompt has no tokens; this tokenizer adds none at the start of a text")
    room = config.context
    if len(ids) >= room:
        raise ModelError(
            f"the prompt has {len(ids)} tokens; the context of {room} leaves no room for a new one"
        )
    return ids


def encoded(
    prompts: list[str], options: argparse.Namespace, tokenizer: Tokenizer, config: ModelConfig
) -> list[list[int]]:
    """The ids of each prompt; with `--chat`, of the conversation that it begins, whose template adds special tokens."""
    if not options.chat:
        return [encode_prompt(each, tokenizer, config) for each in prompts]
    template = ChatTemplate(options.model)
    system: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    texts = [template.render([*system, {"role": "user", "content": each}]) for each in prompts]
    return [encode_prompt(each, tokenizer, config, special_tokens=False) for each in texts]


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """How to choose: what the command line says, else generation_config.json where it samples, else greedy."""
    fields = Fields(options.model / "generation_config.json", optional=True)
    sampled = fields.flag("do_sample")
    temperature, top_k, top_p = options.temperature, options.top_k, options.top_p
    if temperature is None:
        temperature = fields.number("temperature", 1.0, positive=False) if sampled else 0.0
        if temperature < 0:
            raise fields.error("temperature", f"{temperature} is negative")
    for option, given in (("--top-k", top_k), ("--top-p", top_p), ("--min-p", options.min_p)):
        if given is not None and not temperature and given != 1.0:
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
        structured_outputs=_form(options.structured_outputs),
        seed=options.seed,
        max_tokens=options.max_new_tokens,
        stop=options.stop,
    )


def _form(form: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """The form of the text that --structured-outputs asks for."""
    if form is None:
        return None
    try:
        return StructuredOutputsParams(**form)
    except TypeError:
        names = ", ".join(field.name for field in fields(StructuredOutputsParams))
        raise ModelError(f"--structured-outputs has one of {names}") from None


def _named(path: str) -> str:
    """What a prompt file is called in a sentence."""
    return "stdin" if path == STDOUT else path


def _lines(path: str, shared: bool) -> list[str]:
    name = _named(path)
    if shared and path == STDOUT:
        raise ModelError(
            "--prompt-file - reads stdin, which the processes of torchrun share: give the prompts as a file"
        )
    try:
        file = sys.stdin if path == STDOUT else io.StringIO(read_text(path))
        return list(_prompts_of(file, name))
    except UnicodeDecodeError as error:
        raise ModelError(f"{name} is not text: {error}") from None
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {error.strerror or error}") from None


def _prompts_of(file: TextIO, name: str) -> Iterator[str]:
    """The lines that are not empty; no more than it takes to know that there are too many."""
    found = 0
    while line := file.readline(_MOST_CHARACTERS + 1):
        if len(line) > _MOST_CHARACTERS:
            raise ModelError(f"{name} has a line of more than {_MOST_CHARACTERS:,} characters")
        text = line.rstrip("\r\n")
        if text:
            yield text
            found += 1
        if found > MOST_PROMPTS:
            return
