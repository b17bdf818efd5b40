"""The folder of the image model: configs of its parts, its tokenizer, and its parts as torch modules.

Parts are those of diffusers and transformers, so a trained folder opens there.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, PixArtTransformer2DModel
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace, Sequence, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

from tools.shapes.captions import COLOURS, RELATIONS, SHAPES, SIZES

LATENT_CHANNELS = 8
WIDTH = 128
MOST_TOKENS = 16
"""Tokens of a padded caption in training; the longest has 11 with its last special token."""

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
_NEIGHBOURS = (1, 17, 2, 18)
"""Buckets of T5's biases for the last word, the next one, and those two words away: a head begins with each."""
_NEIGHBOUR_BIAS = 4.0
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
_WORD_SCORE, _LETTER_SCORE = -4.0, -12.0
"""Logarithms of probabilities in the tokenizer: a word as one token is likelier than its letters."""


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a T5 tokenizer in which every word is one token.

    Letters are tokens too, so other words are spelled.
    """
    words = {"a", *SIZES, *COLOURS, *SHAPES, *(word for relation in RELATIONS for word in relation.split())}
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS]
    pieces += [(f"\u2581{word}", _WORD_SCORE) for word in sorted(words)]
    pieces += [(letter, _LETTER_SCORE) for letter in ("\u2581", *string.ascii_lowercase)]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=SPECIAL_TOKENS.index("<unk>")))
    tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = TemplateProcessing(single="$0 </s>", special_tokens=[("</s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_ids": 0,
        "model_max_length": 120,
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
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    write_json(folder / "model_index.json", index)


def create_autoencoder() -> AutoencoderKL:
    """Return an untrained autoencoder."""
    return AutoencoderKL(**AUTOENCODER)


def create_denoiser() -> PixArtTransformer2DModel:
    """Return an untrained denoiser."""
    return PixArtTransformer2DModel(**DENOISER)


def create_text_encoder(vocabulary: int) -> T5EncoderModel:
    """Return an untrained text encoder for a number of different tokens."""
    text_config = T5Config(
        vocab_size=vocabulary,
        d_model=WIDTH,
        d_kv=WIDTH // 4,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    text_encoder = T5EncoderModel(text_config)
    biases = text_encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    nn.init.zeros_(biases)
    with torch.no_grad():
        for head, bucket in enumerate(_NEIGHBOURS):
            biases[bucket, head] = _NEIGHBOUR_BIAS
    return text_encoder


def load_tokenizer(folder: Path) -> T5TokenizerFast:
    """Return the tokenizer of a model folder."""
    return T5TokenizerFast.from_pretrained(folder / "tokenizer")


def tokenize(tokenizer: T5TokenizerFast, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded token ids of captions, int64 [captions, 16], and which are no padding, as 1 and 0 of this shape."""
    padded = tokenizer(
        captions, padding="max_length", max_length=MOST_TOKENS, truncation=True, return_tensors="pt"
    )
    return padded.input_ids, padded.attention_mask
