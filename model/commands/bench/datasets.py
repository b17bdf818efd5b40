"""Prompts of `nkw bench serve`: random words, the lines of a file, or the shipped stories."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol

from model.commands.api_client import ApiClient
from model.errors import ModelError, read_text_file
from model.loading.tokenizer import Tokenizer

_STORIES = Path(__file__).with_name("stories.txt")
_STORY_OUTPUT_LEN = 128
_NO_VOCABULARY_LIMIT = 2**62
_MAX_CUTS = 6


@dataclass(frozen=True)
class Prompt:
    """Request of a benchmark: its text, its length in tokens, and its number of new tokens.

    `length` is 0 if the number of tokens is unknown.
    """

    text: str
    length: int
    output_len: int


class Encoder(Protocol):
    """Tokenizer of the benchmarked model; token ids have no special tokens unless they are asked for."""

    async def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens if `special_tokens` is True."""

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""


class FolderEncoder:
    """Tokenizer of a model folder on this machine.

    Raises:
        ModelError: The folder has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        Tokenizer(folder, _NO_VOCABULARY_LIMIT).encode("a")  # in a process of its own, which may abort
        self._tokenizer = Tokenizer(folder, _NO_VOCABULARY_LIMIT, isolated=False)

    async def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens if `special_tokens` is True."""
        return self._tokenizer.encode(text, special_tokens)

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(ids)


@dataclass(frozen=True)
class ServerEncoder:
    """Tokenizer behind the routes /tokenize and /detokenize of a server, which vLLM has as well."""

    client: ApiClient
    model: str

    async def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens if `special_tokens` is True.

        Raises:
            RequestFailed: The server has no route /tokenize or does not answer.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": special_tokens}
        answer = await self.client.fetch("POST", "/tokenize", body)
        return list(answer["tokens"])

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids.

        Raises:
            RequestFailed: The server has no route /detokenize or does not answer.
        """
        answer = await self.client.fetch("POST", "/detokenize", {"model": self.model, "tokens": ids})
        return str(answer["prompt"])


async def draw_prompts(options: argparse.Namespace, encoder: Encoder) -> list[Prompt]:
    """Return --num-prompts prompts of the dataset that the options name; equal seeds give equal prompts.

    Prompts of a file or of stories repeat if there are too few; with --no-oversample the list is shorter then.

    Raises:
        ModelError: The file of a custom dataset cannot be used, or a random prompt has no room for a word.
        RequestFailed: Random prompts need the server's tokenizer, and it has none.
    """
    generator = random.Random(options.seed)
    if options.dataset_name == "random":
        return await _draw_random(options, encoder, generator)
    if options.dataset_name == "custom":
        prompts = list(_read_custom(options))
    else:
        output_len = options.output_len or _STORY_OUTPUT_LEN
        prompts = [Prompt(text, 0, output_len) for text in _read_stories()]
    if not options.disable_shuffle:
        generator.shuffle(prompts)
    return list(islice(prompts if options.no_oversample else cycle(prompts), options.num_prompts))


async def _draw_random(
    options: argparse.Namespace, encoder: Encoder, generator: random.Random
) -> list[Prompt]:
    """Return prompts of random words of the stories.

    Lengths in tokens, special tokens included, are uniform around the options' lengths; all prompts share a prefix.

    Raises:
        ModelError: The special tokens leave no token for a word.
        RequestFailed: The server has no tokenizer.
    """
    words = sorted({word for story in _read_stories() for word in story.split()})
    num_special = len(await encoder.encode("a", True)) - len(await encoder.encode("a"))
    input_len = (options.input_len or options.random_input_len) - num_special
    output_len = options.output_len or options.random_output_len
    share = options.random_range_ratio
    if input_len * (1 - share) < 1:
        raise ModelError(
            f"--random-input-len leaves no token for a word: the tokenizer adds {num_special} special tokens, and "
            f"--random-range-ratio is {share:g}; give a longer --random-input-len"
        )

    def draw_length(mean: int) -> int:
        return generator.randint(max(1, round(mean * (1 - share))), max(1, round(mean * (1 + share))))

    def draw_words(count: int) -> str:
        return " ".join(generator.choices(words, k=count))

    prefix = ""
    if options.random_prefix_len:
        prefix, _ = await _cut_text(encoder, draw_words(options.random_prefix_len), options.random_prefix_len)
        prefix += " "
    prompts = []
    for _ in range(options.num_prompts):
        length = options.random_prefix_len + draw_length(input_len)
        text, length = await _cut_text(encoder, prefix + draw_words(length), length)
        prompts.append(Prompt(text, length + num_special, draw_length(output_len)))
    return prompts


async def _cut_text(encoder: Encoder, text: str, length: int) -> tuple[str, int]:
    """Return the start of a text that has `length` tokens, and the number of tokens that it really has.

    A text that is cut between two tokens may be encoded as other tokens, so the cut is moved until the number is right.
    After 6 attempts the number may still be off by a token or two.
    """
    ids = await encoder.encode(text)
    cut = length
    for _ in range(_MAX_CUTS):
        text = await encoder.decode(ids[:cut])
        actual = len(await encoder.encode(text))
        if actual == length:
            break
        cut = max(1, cut + length - actual)
    return text, actual


def _read_stories() -> list[str]:
    return _STORIES.read_text(encoding="utf-8").strip().split("\n\n")


def _read_custom(options: argparse.Namespace) -> Iterator[Prompt]:
    """Yield the prompts of a JSONL file with `prompt` and, for --custom-output-len -1, `output_tokens`.

    Raises:
        ModelError: There is no --dataset-path, the file has no prompt, or a line is no such object.
    """
    path = options.dataset_path
    if path is None:
        raise ModelError("--dataset-name custom needs --dataset-path FILE, with an object on each line")
    lines = read_text_file(path, "NKW-MODEL-OPTION").splitlines()
    if not any(map(str.strip, lines)):
        raise ModelError(f"{path} has no prompt; each line that is not empty is one")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
            raise ModelError(
                f'line {number} of {path} is no object with a text as "prompt"; write lines like {{"prompt": "TEXT"}}'
            )
        output_len = options.output_len or options.custom_output_len
        if output_len == -1:
            output_len = fields.get("output_tokens")
            if not isinstance(output_len, int) or output_len < 1:
                raise ModelError(
                    f'line {number} of {path} has no positive "output_tokens", which --custom-output-len -1 needs'
                )
        yield Prompt(fields["prompt"], 0, output_len)
