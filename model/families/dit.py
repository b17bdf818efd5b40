"""DiT denoisers: blocks of attention to all patches and MLP, conditioned on the timestep and a class (adaLN-zero).

The component is diffusers' DiTTransformer2DModel, or in older folders a Transformer2DModel with `ada_norm_zero`. Every
block has an embedding of timestep and class of its own.
"""

from __future__ import annotations

from model.config.component import refuse_unread
from model.config.denoisers import DiTConfig, check_only, read_square_images
from model.config.fields import Fields
from model.families.denoisers import (
    CHUNKS,
    EPS,
    TIMESTEPS,
    build_feed_forward,
    build_linear,
    build_output,
    build_pair,
    build_projections,
    describe_heads,
)
from model.layers.denoiser.attention import ImageAttention
from model.layers.denoiser.conditions import FREQUENCIES, ConditionRows, LabelEmbedding, TimestepEmbedding
from model.layers.denoiser.modulation import ModulatedNorm
from model.layers.denoiser.patches import LATENTS, PatchInput, PositionTable
from model.layers.launch import FLOAT32, INT32
from model.network import Input, Network, Section

LABELS = "labels"
"""Name of the input with the class of each image, int32 [images, 1]; the number of classes stands for no class."""
_EMBEDDING = "blocks.{}.embedding"
_WITHOUT_EFFECT = ("dropout", "norm_num_groups", "upcast_attention")
_OTHER_KINDS = ("double_self_attention", "only_cross_attention", "use_linear_projection")
"""Fields of Transformer2DModel that are true in models of another kind."""


def read_dit(fields: Fields) -> DiTConfig:
    """Return the config of a DiT denoiser for images of the size in `sample_size`.

    Raises:
        ModelError: A field is missing or has the wrong type, or patches do not divide the image.
    """
    check_only(fields, "norm_type", "ada_norm_zero", "norms")
    config = DiTConfig(
        **read_square_images(fields, 32, None),
        text_rows=0,
        text_size=0,
        eps=fields.number("norm_eps", default=1e-5),
        classes=fields.count("num_embeds_ada_norm", default=1000),
    )
    refuse_unread(fields, *_WITHOUT_EFFECT)
    return config


def read_transformer(fields: Fields) -> DiTConfig:
    """Return the config of a DiT denoiser from the fields of a Transformer2DModel, which has other kinds too.

    Raises:
        ModelError: A field is missing or has the wrong type, or patches do not divide the image.
    """
    if fields.get("norm_type", None) != "ada_norm_zero":
        fields.unsupported(
            "norm_type", "not ada_norm_zero; a Transformer2DModel is computed if it is a DiT only"
        )
    check_only(fields, "attention_type", "default", "attention")
    for name in _OTHER_KINDS:
        if fields.flag(name):
            fields.unsupported(name, "true; a Transformer2DModel is computed if it is a DiT only")
    return read_dit(fields)


def compose(config: DiTConfig) -> Network:
    """Return the network of the denoiser; inputs are latents, timesteps, and the labels of classes."""
    hidden = config.hidden_size
    shape = (config.channels, config.latent_rows, config.latent_columns)
    positions = PositionTable(config.patches, hidden, config.sample_size // config.patch_size, 1.0)
    first = PatchInput("patches", "pos_embed.proj", hidden, config.patch_size, shape, positions)
    sections = (_build_block(config, number) for number in range(config.layers))
    return Network(
        ((first,), *sections, _build_last(config)),
        {
            LATENTS: Input(LATENTS, dtype=None),
            TIMESTEPS: Input(TIMESTEPS, dtype=FLOAT32),
            LABELS: Input(LABELS, dtype=INT32),
        },
        ("x",),
    )


def _build_block(config: DiTConfig, number: int) -> Section:
    """Return the layers of block `number`."""
    hidden, name, tensor = config.hidden_size, f"blocks.{number}", f"transformer_blocks.{number}"
    rows = tuple(f"{name}.{chunk}" for chunk in CHUNKS)
    embedder, label = f"{tensor}.norm1.emb", f"{name}.label_embedding"
    attention_norm, mlp_norm = (
        ModulatedNorm(hidden, eps, shift, scale, gate)
        for eps, (shift, scale, gate) in ((EPS, rows[:3]), (config.eps, rows[3:]))
    )
    return (
        LabelEmbedding(
            f"{name}.label",
            f"{embedder}.class_embedder.embedding_table.weight",
            config.classes + 1,
            hidden,
            LABELS,
            label,
        ),
        TimestepEmbedding(
            f"{name}.timestep",
            TIMESTEPS,
            _EMBEDDING.format(number),
            build_pair(f"{embedder}.timestep_embedder", hidden, FREQUENCIES),
            label,
            frequency_shift=1.0,
        ),
        ConditionRows(
            f"{name}.modulation",
            _EMBEDDING.format(number),
            build_linear(f"{tensor}.norm1.linear", 6 * hidden, hidden),
            rows,
        ),
        ImageAttention(
            f"{name}.attention",
            hidden,
            describe_heads(config.heads, config.head_dim, config.bias),
            None,
            build_projections(f"{tensor}.attn1", hidden, config.bias),
            modulation=attention_norm,
        ),
        build_feed_forward(f"{name}.mlp", f"{tensor}.ff", hidden, mlp_norm),
    )


def _build_last(config: DiTConfig) -> Section:
    """Return the modulation of the last norm, and the layer that makes images of rows.

    The modulation is computed from the embedding of the first block.
    """
    hidden, chunks = config.hidden_size, ("last_shift", "last_scale")
    linear = build_linear("proj_out_1", 2 * hidden, hidden)
    return (
        ConditionRows("last.modulation", _EMBEDDING.format(0), linear, chunks),
        build_output(config, "proj_out_2", ModulatedNorm(hidden, EPS, *chunks)),
    )
