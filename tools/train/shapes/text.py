"""Training of the text encoder: every word of a figure learns to tell what the caption says of that figure.

Its states stay fixed while the denoiser learns. Trained with the denoiser alone, the encoder kept the words of a
caption and lost which colour belongs to which shape: attributes of two figures were exchanged in half of the pictures.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import T5EncoderModel, T5TokenizerFast

from tools.shapes.captions import (
    COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    Caption,
    draw_training_figures,
    drop_sizes,
    list_held_out_captions,
    make_split,
)
from tools.train.shapes.folder import WIDTH, create_text_encoder, load_tokenizer, tokenize

_ATTRIBUTES = {
    "side": ("", *RELATIONS),
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "size": ("", *SIZES),
}
"""Values that a word predicts of its figure; the side is its relation to the other figure, "" for one figure."""
_OPPOSITES = {"": "", "left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_SPLIT = make_split()
_NO_FIGURE = -100
"""Label of tokens outside figures, which `cross_entropy` leaves out."""


def load_text_encoder(folder: Path) -> T5EncoderModel:
    """Return the trained text encoder of a model folder; its weights stay fixed."""
    return T5EncoderModel.from_pretrained(folder / "text_encoder").float().eval().requires_grad_(False)


def train_text_encoder(folder: Path, steps: int = 600, batch: int = 128, seed: int = 0) -> None:
    """Fit a text encoder and a linear layer for each attribute, and write the encoder to `folder`.

    Captions are those of training pictures, so held-out combinations are new to the encoder too.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = load_tokenizer(folder)
    encoder = create_text_encoder(len(tokenizer))
    heads = nn.ModuleDict({name: nn.Linear(WIDTH, len(values)) for name, values in _ATTRIBUTES.items()})
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
    for _ in range(steps):
        scenes = [draw_training_figures(rng, _SPLIT) for _ in range(batch)]
        captions = [Caption(drop_sizes(rng, figures), relation) for figures, relation in scenes]
        logits, targets = _compute_logits(encoder, heads, tokenizer, captions)
        loss = sum(cross_entropy(scores, target) for scores, target in zip(logits, targets, strict=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    print(
        steps,
        f"{_measure_labels(encoder, heads, tokenizer):.4f} of the labels of held-out captions are right",
    )
    encoder.to(torch.bfloat16).save_pretrained(folder / "text_encoder")


@torch.no_grad()
def _measure_labels(encoder: T5EncoderModel, heads: nn.ModuleDict, tokenizer: T5TokenizerFast) -> float:
    """Return the share of right labels of held-out captions."""
    logits, targets = _compute_logits(encoder, heads, tokenizer, list_held_out_captions())
    chosen = targets[0] != _NO_FIGURE
    right = [(scores.argmax(1) == target)[chosen] for scores, target in zip(logits, targets, strict=True)]
    return float(torch.stack(right).float().mean())


def _compute_logits(
    encoder: T5EncoderModel, heads: nn.ModuleDict, tokenizer: T5TokenizerFast, captions: list[Caption]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return logits [tokens, values] and labels [tokens] of each attribute for the tokens of all captions."""
    ids, mask = tokenize(tokenizer, [caption.text for caption in captions])
    labels = torch.tensor([_label_tokens(caption, ids.shape[1]) for caption in captions])
    states = encoder(ids, attention_mask=mask).last_hidden_state
    return [head(states).flatten(0, 1) for head in heads.values()], list(labels.flatten(0, 1).unbind(1))


def _label_tokens(caption: Caption, tokens: int) -> list[tuple[int, ...]]:
    """Return the index of each attribute's value for each of the padded tokens; each word is one token."""
    none = (_NO_FIGURE,) * len(_ATTRIBUTES)
    labels: list[tuple[int, ...]] = []
    for figure, side in zip(caption.figures, (caption.relation, _OPPOSITES[caption.relation])):
        values = (side, figure.colour, figure.shape, figure.size)
        indices = tuple(names.index(word) for names, word in zip(_ATTRIBUTES.values(), values, strict=True))
        labels += [none] * len(caption.relation.split()) if labels else []
        labels += [indices] * len(figure.text.split())
    return labels + [none] * (tokens - len(labels))
