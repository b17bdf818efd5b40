"""Reads texts and cuts them into batches of tokens for training."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

CONTEXT, EOT, IGNORE = 256, 0, -100
WIDTHS = (128, 160, 192, 224, 256)  # row lengths in training


def read(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the texts of a corpus file, each as <|endoftext|> + text + <|endoftext|>."""
    texts = path.read_text(encoding="utf-8").split("\n<|endoftext|>\n")[:-1]
    return [[EOT, *e.ids, EOT] for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def epoch(stories: list[list[int]], tokens: int, rng: np.random.Generator) -> list[Tensor]:
    """Return batches of inputs and targets, int64 (2, rows, width), for one pass over the texts in a random order.

    A row has one text, or a piece of one that is longer than a row (cut at a random position). Rows of similar length
    make a batch of about `tokens` tokens, padded to one of a few widths.
    """
    groups: dict[int, list[list[int]]] = {width: [] for width in WIDTHS}
    for i in rng.permutation(len(stories)):
        ids = stories[i]
        while len(ids) > 1:
            fits = len(ids) <= CONTEXT + 1
            end = len(ids) - 1 if fits else int(rng.integers(CONTEXT // 2, CONTEXT + 1))
            groups[min(w for w in WIDTHS if w >= end)].append(ids[: end + 1])
            ids = ids[end:]
    batches = []
    for width, pieces in groups.items():
        rows = tokens // width
        for i in range(
            0, len(pieces) - rows + 1, rows
        ):  # a rest smaller than a batch waits for the next pass
            batch = torch.full((2, rows, width), EOT)
            batch[1] = IGNORE
            for row, piece in enumerate(pieces[i : i + rows]):
                ids = torch.tensor(piece)
                batch[0, row, : len(piece) - 1], batch[1, row, : len(piece) - 1] = ids[:-1], ids[1:]
            batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]
