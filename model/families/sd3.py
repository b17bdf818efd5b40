"""SD3 denoisers: blocks over the rows of an image's patches and of its texts, which attend to each other (MM-DiT).

The component is diffusers' SD3Transformer2DModel. Every block has weights for each stream. In some blocks of
SD3.5-medium the image attends to itself too. No layer reads the text's rows after the last block, so that block has
neither an output projection nor an MLP for them; `attention_prefill` computes their outputs nevertheless.
"""

from __future__ import annotations

from typing import Any

from model.config.component import refuse_unread
from model.config.denoisers import SD3Config, check_divisible
from model.config.fields import Fields
from model.config.reading import MOST_HEAD_DIM, MOST_HEADS, read_layer_count
from model.families.denoisers import POOLED, TEXT, TIMESTEPS, build_linear, build_time_text_embedding
from model.families.joint_blocks import JointBlocks
from model.layers.denoiser.joint_attention import TextLinear
from model.layers.denoiser.patches import LATENTS, PatchInput, StoredPositions
from model.layers.launch import FLOAT32
from model.network import Input, Network

_TEXT_ROWS = 77 + 256
"""Rows of the encoded text: those of the CLIP encoders, then those of the T5 encoder."""


def read_sd3(fields: Fields) -> SD3Config:
    """Return the config of an SD3 denoiser for images of the size in `sample_size`.

    Raises:
        ModelError: A field is missing or has the wrong type, or fields contradict each other.
    """
    sample, patch = fields.count("sample_size", default=128), fields.count("patch_size", default=2)
    check_divisible(fields, "sample_size", sample, patch)
    channels = fields.count("in_channels", default=16)
    outputs = fields.count("out_channels", default=16 if "out_channels" not in fields else channels)
    if outputs != channels:
        raise fields.error("out_channels", f"{outputs} is not in_channels, {channels}")
    heads = fields.count("num_attention_heads", default=18, most=MOST_HEADS)
    head_dim = fields.count("attention_head_dim", default=64, most=MOST_HEAD_DIM)
    hidden = heads * head_dim
    width = fields.count("caption_projection_dim", default=1152)
    if width != hidden:
        raise fields.error("caption_projection_dim", f"{width} is not the hidden size, {hidden}")
    norm = fields.get("qk_norm", None)
    if norm not in (None, "rms_norm"):
        fields.unsupported("qk_norm", f"{norm!r:.60}; the only norm of queries and keys computed is rms_norm")
    layers, most = (
        read_layer_count(fields, "num_layers"),
        fields.count("pos_embed_max_size", default=96),
    )
    if sample // patch > most:
        raise fields.error("pos_embed_max_size", f"{most} is below {sample // patch}, the patches of a row")
    config = SD3Config(
        rows=(sample // patch) ** 2,
        latent_rows=sample,
        latent_columns=sample,
        channels=channels,
        outputs=outputs,
        patch_size=patch,
        heads=heads,
        head_dim=head_dim,
        text_rows=_TEXT_ROWS,
        text_size=fields.count("joint_attention_dim", default=4096),
        layers=layers,
        second_layers=_read_second_layers(fields, layers),
        pooled_size=fields.count("pooled_projection_dim", default=2048),
        has_head_norms=norm is not None,
        sample_size=sample,
        most_patches=most,
    )
    refuse_unread(fields)
    return config


def _read_second_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the field `dual_attention_layers`: numbers of blocks."""
    numbers: Any = fields.get("dual_attention_layers", [])
    is_list = isinstance(numbers, list) and all(type(number) is int for number in numbers)
    if not is_list or not all(0 <= number < layers for number in numbers):
        raise fields.error("dual_attention_layers", f"{numbers!r:.60} is no list of numbers below {layers}")
    return tuple(numbers)


def compose(config: SD3Config) -> Network:
    """Return the network of the denoiser; inputs are latents, timesteps, and the encoded and the pooled text."""
    hidden = config.hidden_size
    shape = (config.channels, config.latent_rows, config.latent_columns)
    positions = StoredPositions("pos_embed.pos_embed", config.most_patches, config.patches, hidden)
    linear = build_linear("context_embedder", hidden, config.text_size)
    first = (
        PatchInput("patches", "pos_embed.proj", hidden, config.patch_size, shape, positions),
        TextLinear("text", TEXT, linear, config.text_rows),
        *build_time_text_embedding(hidden, config.pooled_size),
    )
    blocks = JointBlocks(config, config.has_head_norms)
    sections = (
        blocks.build_double(
            f"blocks.{number}",
            f"transformer_blocks.{number}",
            has_second=number in config.second_layers,
            drops_text=number == config.layers - 1,
        )
        for number in range(config.layers)
    )
    return Network(
        (first, *sections, blocks.build_last()),
        {
            LATENTS: Input(LATENTS, dtype=None),
            TIMESTEPS: Input(TIMESTEPS, dtype=FLOAT32),
            TEXT: Input(TEXT, dtype=None),
            POOLED: Input(POOLED, dtype=None),
        },
        ("x",),
    )
