"""Quality of generated texts against the number of passes, as another model and n-grams judge them.

The judge is `stories`, which decodes token by token: the mean loss of the generated tokens after their prompt. A text
that repeats itself has a low loss too, so the share of repeated n-grams is reported with it. The held-out texts
themselves show what a good writer has, and greedy texts of the judge what its favourites have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional

from model.families import load_config
from model.families.tasks import MASKED_TEXT
from model.loading.checkpoint import open_checkpoint
from model.runners.masked_text import ReferenceMaskPredictor
from model.runners.unmasking import UnmaskingOptions, unmask
from tools.train.corpus import EOT
from tools.train.decoder import Decoder, Sizes, load
from tools.train.masked.folder import STORIES

_PROMPT = 16
_NGRAM = 4


@dataclass(frozen=True)
class Quality:
    """Loss of continuations under the judge in nats a token, and the share of n-grams that occur earlier in a text."""

    nats: float
    repeated: float
    tokens: int


def cut_at_end(ids: Sequence[int]) -> list[int]:
    """Return the tokens up to the end of the text, its end token included."""
    tokens = list(ids)
    return tokens[: tokens.index(EOT) + 1] if EOT in tokens else tokens


def count_repeated(ids: Sequence[int]) -> tuple[int, int]:
    """Return how many n-grams of a text occur earlier in it, and how many n-grams it has."""
    ngrams = [tuple(ids[first : first + _NGRAM]) for first in range(len(ids) - _NGRAM + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


class Judge:
    """The model `stories`, which measures continuations, and writes some."""

    def __init__(self) -> None:
        self._model = Decoder(Sizes.read(STORIES)).eval()
        load(self._model, STORIES)

    @torch.no_grad()
    def write(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Return greedy continuations of prompts of one length."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        for _ in range(new_tokens):
            states, _ = self._model.compute_states(ids)
            logits = functional.linear(states[:, -1], self._model.embed_tokens.weight)
            ids = torch.cat([ids, logits.argmax(dim=1, keepdim=True)], dim=1)
        continuations: list[list[int]] = ids[:, len(prompts[0]) :].tolist()
        return continuations

    @torch.no_grad()
    def judge(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> Quality:
        """Return the quality of continuations, each up to the end of its text."""
        loss = tokens = repeated = ngrams = 0.0
        for prompt, continuation in zip(prompts, continuations):
            text = [*prompt, *cut_at_end(continuation)]
            states, _ = self._model.compute_states(torch.tensor([text[:-1]]))
            logits = functional.linear(states[0, len(prompt) - 1 :], self._model.embed_tokens.weight)
            targets = torch.tensor(text[len(prompt) :])
            loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
            tokens += len(targets)
            more, all_ngrams = count_repeated(text[len(prompt) :])
            repeated, ngrams = repeated + more, ngrams + all_ngrams
        return Quality(loss / tokens, repeated / max(1, ngrams), int(tokens))


def measure_quality(
    folder: Path,
    texts: Sequence[Sequence[int]],
    new_tokens: int,
    block_length: int,
    passes: Sequence[int],
    temperature: float,
    seed: int = 0,
) -> dict[str, Quality]:
    """Return the quality of continuations of the first tokens of texts, by writer: texts, judge, and numbers of passes.

    Args:
        folder: Folder of the model, which the numpy reference computes.
        texts: Token ids; texts that are too short are left out.
        new_tokens: Tokens of a continuation.
        block_length: Masks of a block.
        passes: Numbers of passes.
        temperature: Temperature of the predicted tokens.
        seed: Seed of the first continuation.
    """
    config = load_config(folder, MASKED_TEXT)
    predictor = ReferenceMaskPredictor(config, open_checkpoint(folder, config))
    long_texts = [list(text) for text in texts if len(text) >= _PROMPT + new_tokens]
    prompts = [text[:_PROMPT] for text in long_texts]
    judge = Judge()
    qualities = {
        "the texts": judge.judge(prompts, [text[_PROMPT : _PROMPT + new_tokens] for text in long_texts]),
        "stories, greedy": judge.judge(prompts, judge.write(prompts, new_tokens)),
    }
    seeds = range(seed, seed + len(prompts))
    for count in passes:
        options = UnmaskingOptions(new_tokens, count, block_length, temperature=temperature)
        ids = unmask(predictor, prompts, config.mask_token_id, options, seeds).ids
        qualities[f"{count} passes"] = judge.judge(prompts, ids[:, _PROMPT:].tolist())
    return qualities
