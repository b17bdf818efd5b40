"""PixArt denoisers: blocks of attention to all patches, attention to a text, and a feed-forward block (adaLN-single).

The component is diffusers' PixArtTransformer2DModel. All blocks take their modulation from the same rows of the
timestep, to which each adds a table of its own.
"""

from __future__ import annotations

from model.config.component import refuse_unread
from model.config.denoisers import PixArtConfig, check_only, read_square_images
from model.config.fields import Fields
from model.families.denoisers import (
    CHUNKS,
    EMBEDDING,
    EPS,
    LENGTHS,
    TEXT,
    TIMESTEPS,
    build_feed_forward,
    build_linear,
    build_output,
    build_pair,
    build_projections,
    describe_heads,
)
from model.layers.denoiser.attention import ImageAttention, TextAttention
from model.layers.denoiser.conditions import FREQUENCIES, ConditionRows, TimestepEmbedding
from model.layers.denoiser.feed_forward import TextProjection
from model.layers.denoiser.modulation import ModulatedNorm, TableModulation
from model.layers.denoiser.patches import LATENTS, PatchInput, PositionTable
from model.layers.launch import FLOAT32
from model.layers.layer import Layer
from model.layers.mlp import FeedForward
from model.network import Input, Network, Section

_IMAGE_SIZE = ("height", "width", "aspect_ratio")
"""Names of inputs for denoisers whose images' sizes in pixels are a condition, float32 [images, 1] each."""
_ROWS, _TEXT_STATES = "timestep_rows", "text_states"
_WITHOUT_EFFECT = ("dropout", "norm_num_groups", "upcast_attention", "num_embeds_ada_norm")
_DEFAULT_TEXT_ROWS = 120


def read_pixart(fields: Fields) -> PixArtConfig:
    """Return the config of a PixArt denoiser for images of the size in `sample_size`.

    Raises:
        ModelError: A field is missing or has the wrong type, or patches do not divide the image.
    """
    common = read_square_images(fields, 128, 8)
    hidden, sample = common["heads"] * common["head_dim"], common["sample_size"]
    check_only(fields, "norm_type", "ada_norm_single", "norms")
    check_only(fields, "attention_type", "default", "attention")
    for name in ("double_self_attention", "only_cross_attention", "use_linear_projection"):
        if fields.flag(name, default=False):
            fields.unsupported(name, "true; blocks attend to the image, then to the text")
    has_image_size = fields.flag("use_additional_conditions", default=sample == 128)
    if has_image_size and hidden % 3:
        fields.unsupported(
            "use_additional_conditions", f"true; {hidden} elements of a hidden state are no multiple of 3"
        )
    text = fields.count("caption_channels", default=hidden)
    cross = fields.count("cross_attention_dim", default=hidden)
    if cross != hidden:
        raise fields.error("cross_attention_dim", f"{cross} is not the hidden size, {hidden}")
    config = PixArtConfig(
        **common,
        text_rows=_DEFAULT_TEXT_ROWS,
        text_size=text,
        eps=fields.number("norm_eps", default=EPS),
        interpolation=fields.number("interpolation_scale", default=max(sample // 64, 1)),
        projects_text="caption_channels" in fields,
        has_image_size=has_image_size,
    )
    refuse_unread(fields, *_WITHOUT_EFFECT)
    return config


def compose(config: PixArtConfig) -> Network:
    """Return the network of the denoiser; inputs are latents, timesteps, the encoded text, its lengths, and sizes."""
    hidden = config.hidden_size
    first: list[Layer] = [
        PatchInput(
            "patches",
            "pos_embed.proj",
            hidden,
            config.patch_size,
            (config.channels, config.latent_rows, config.latent_columns),
            PositionTable(
                config.patches, hidden, config.sample_size // config.patch_size, config.interpolation
            ),
        ),
        *_build_embeddings(config),
        ConditionRows(
            "timestep_rows", EMBEDDING, build_linear("adaln_single.linear", 6 * hidden, hidden), (_ROWS,)
        ),
    ]
    if config.projects_text:
        first.append(_build_text_projection(config))
    blocks = (_build_block(config, number) for number in range(config.layers))
    return Network(
        (tuple(first), *blocks, _build_last(config)),
        {
            LATENTS: Input(LATENTS, dtype=None),
            TIMESTEPS: Input(TIMESTEPS, dtype=FLOAT32),
            TEXT: Input(TEXT, dtype=None),
            LENGTHS: Input(LENGTHS),
            **{name: Input(name, dtype=FLOAT32) for name in _IMAGE_SIZE if config.has_image_size},
        },
        ("x",),
    )


def _build_embeddings(config: PixArtConfig) -> list[TimestepEmbedding]:
    """Return the layers that embed the timestep, with thirds for height, width and aspect ratio added if it has them.

    A third is an embedding of the hidden size, of which other elements are zeros, so that each layer adds the sum of
    those before it.
    """
    hidden, tensor, added = config.hidden_size, "adaln_single.emb", ""
    layers = []
    third = hidden // 3
    embedders = ("resolution_embedder", "resolution_embedder", "aspect_ratio_embedder")
    for index, (name, embedder) in enumerate(zip(_IMAGE_SIZE, embedders) if config.has_image_size else ()):
        pair = build_pair(f"{tensor}.{embedder}", third, FREQUENCIES)
        padding = index * third, (2 - index) * third
        layers.append(TimestepEmbedding(name, name, f"{name}_embedding", pair, added, padding=padding))
        added = f"{name}_embedding"
    pair = build_pair(f"{tensor}.timestep_embedder", hidden, FREQUENCIES)
    return [*layers, TimestepEmbedding("timestep", TIMESTEPS, EMBEDDING, pair, added)]


def _build_text_projection(config: PixArtConfig) -> TextProjection:
    """Return the layer that projects the encoded text to rows of the hidden size."""
    hidden, tensor = config.hidden_size, "caption_projection.linear"
    block = FeedForward(
        "text_projection",
        hidden,
        None,
        None,
        build_linear(f"{tensor}_1", hidden, config.text_size),
        build_linear(f"{tensor}_2", hidden, hidden),
        "gelu_tanh",
    )
    return TextProjection(block, TEXT, _TEXT_STATES, config.text_rows)


def _build_block(config: PixArtConfig, number: int) -> Section:
    """Return the layers of block `number`."""
    hidden, name, tensor = config.hidden_size, f"blocks.{number}", f"transformer_blocks.{number}"
    chunks = tuple(f"{name}.{chunk}" for chunk in CHUNKS)
    heads = describe_heads(config.heads, config.head_dim, config.bias)
    attention_norm, mlp_norm = (
        ModulatedNorm(hidden, config.eps, shift, scale, gate)
        for shift, scale, gate in (chunks[:3], chunks[3:])
    )
    return (
        TableModulation(f"{name}.modulation", f"{tensor}.scale_shift_table", hidden, _ROWS, chunks),
        ImageAttention(
            f"{name}.attention",
            hidden,
            heads,
            None,
            build_projections(f"{tensor}.attn1", hidden, config.bias),
            modulation=attention_norm,
        ),
        TextAttention(
            f"{name}.text_attention",
            hidden,
            heads,
            build_projections(f"{tensor}.attn2", hidden, config.bias),
            _TEXT_STATES if config.projects_text else TEXT,
            LENGTHS,
            config.text_rows,
        ),
        build_feed_forward(f"{name}.mlp", f"{tensor}.ff", hidden, mlp_norm),
    )


def _build_last(config: PixArtConfig) -> Section:
    """Return the modulation of the last norm, and the layer that makes images of rows."""
    hidden, chunks = config.hidden_size, ("last_shift", "last_scale")
    return (
        TableModulation("last.modulation", "scale_shift_table", hidden, EMBEDDING, chunks, is_shared=True),
        build_output(config, "proj_out", ModulatedNorm(hidden, EPS, *chunks)),
    )
