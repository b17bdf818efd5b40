"""The folder of the image model: configs of its parts, its tokenizer, and its parts as torch modules.

Parts are those of diffusers and transformers, so a trained folder opens there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, PixArtTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tools.shapes.captions import COLOURS, RELATIONS, SHAPES, SIZES

LATENT_CHANNELS = 8
WIDTH = 128
MOST_TOKENS = 16
"""Tokens of a padded caption; the longest has 12 with its first and last special token."""

AUTOENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (16, 32, 32, 32),
    "layers_per_block": 1,
    "latent_channels": LATENT_CHANNELS,
    "norm_num_groups": 8,
    "sample_size": 64,
    "mid_block_add_attention": False,
}
DENOISER = {
    "num_attention_heads": 4,
    "attention_head_dim": WIDTH // 4,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "num_layers": 9,
    "cross_attention_dim": WIDTH,
    "caption_channels": WIDTH,
    "sample_size": 8,
    "patch_size": 2,
    "use_additional_conditions": False,
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": False,
}
START, END = "<|startoftext|>", "<|endoftext|>"


def write_tokenizer(folder: Path) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json of a CLIP tokenizer in which every word is one token.

    Letters are tokens too, so other words are spelled.
    """
    words = {"a", *SIZES, *COLOURS, *SHAPES, *(word for relation in RELATIONS for word in relation.split())}
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = dict.fromkeys([*letters, *(f"{letter}</w>" for letter in letters)])
    merges: dict[str, None] = {}
    # Earlier merges win: "t r" of triangle has to come before "r i" of right, "b l" of black before "l a" of large.
    for word in ("triangle", *sorted(words - {"triangle"})):
        symbols = [*word[:-1], f"{word[-1]}</w>"]
        for end in range(1, len(symbols)):
            prefix = "".join(symbols[:end])
            merges[f"{prefix} {symbols[end]}"] = None
            vocabulary[prefix + symbols[end]] = None
    tokens = [*vocabulary, START, END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(
        json.dumps({token: index for index, token in enumerate(tokens)}, indent=0) + "\n"
    )
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
        "model_max_length": MOST_TOKENS,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def create_folder(folder: Path) -> None:
    """Write the parts of the folder that training does not change: tokenizer, scheduler, model_index.json."""
    write_tokenizer(folder / "tokenizer")
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    index = {
        "_class_name": "PixArtAlphaPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    write_json(folder / "model_index.json", index)


def create_autoencoder() -> AutoencoderKL:
    """Return an untrained autoencoder."""
    return AutoencoderKL(**AUTOENCODER)


def create_denoiser(folder: Path) -> nn.ModuleDict:
    """Return an untrained denoiser with its text encoder, as the modules `transformer` and `text_encoder`.

    folder: the model folder, whose tokenizer gives the size of the vocabulary.
    """
    tokenizer = load_tokenizer(folder)
    text_config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MOST_TOKENS,
        hidden_act="gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        projection_dim=WIDTH,
    )
    return nn.ModuleDict(
        {"transformer": PixArtTransformer2DModel(**DENOISER), "text_encoder": CLIPTextModel(text_config)}
    )


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    """Return the tokenizer of a model folder."""
    return CLIPTokenizer.from_pretrained(folder / "tokenizer")


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded token ids of captions, int64 [captions, 16], and which are no padding, as 1 and 0 of this shape."""
    padded = tokenizer(
        captions, padding="max_length", max_length=MOST_TOKENS, truncation=True, return_tensors="pt"
    )
    return padded.input_ids, padded.attention_mask
