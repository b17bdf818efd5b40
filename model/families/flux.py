"""FLUX denoisers: blocks over the rows of an image's patches and of its text, which attend to each other.

The component is diffusers' FluxTransformer2DModel. The first blocks have weights for each stream; the others have the
same weights for both, and add attention and MLP to the same rows. A latent image of diffusers' VAE is cut into patches
of 2 x 2; diffusers calls a patch a latent pixel of four times as many channels.

The checkpoint has one output matrix for attention and MLP of a single block. It is divided here: `mlp` adds its part to
the residual while it holds the inner rows, and `output_projection` the part of attention. So the inner rows never go to
HBM, and the sum over ranks is made twice.
"""

from __future__ import annotations

from typing import Any

from model.config.component import refuse_unread
from model.config.denoisers import FluxConfig
from model.config.fields import Fields
from model.config.reading import MOST_HEAD_DIM, MOST_HEADS, read_layer_count
from model.families.denoisers import (
    POOLED,
    TEXT,
    TIMESTEPS,
    build_linear,
    build_projections,
    build_time_text_embedding,
)
from model.families.joint_blocks import JointBlocks
from model.layers.attention_heads import AttentionProjections
from model.layers.denoiser.feed_forward import ModulatedFeedForward
from model.layers.denoiser.joint_attention import JointAttention, TextLinear
from model.layers.denoiser.patches import LATENTS, PatchInput
from model.layers.denoiser.rotation import AxialRotation
from model.layers.launch import FLOAT32
from model.network import Input, Network, Section

GUIDANCE = "guidance"
"""Name of the input with the guidance times 1000, as the denoiser embeds it."""
_PATCH = 2
_TEXT_ROWS = 512
_LATENT_SIZE = 128


def read_flux(fields: Fields) -> FluxConfig:
    """Return the config of a FLUX denoiser for images of 1024 x 1024 pixels.

    Raises:
        ModelError: A field is missing or has the wrong type, or fields contradict each other.
    """
    packed = fields.count("in_channels", default=64)
    channels, remainder = divmod(packed, _PATCH * _PATCH)
    if remainder:
        raise fields.error("in_channels", f"{packed} is no multiple of 4, the latent pixels of a patch")
    if fields.count("out_channels", default=packed) != packed:
        fields.unsupported("out_channels", f"not {packed} as in_channels; no further latents are inputs")
    if fields.count("patch_size", default=1) != 1:
        fields.unsupported("patch_size", "not 1; latents are packed in patches of 2 x 2 only")
    heads = fields.count("num_attention_heads", default=24, most=MOST_HEADS)
    head_dim = fields.count("attention_head_dim", default=128, most=MOST_HEAD_DIM)
    config = FluxConfig(
        rows=(_LATENT_SIZE // _PATCH) ** 2,
        latent_rows=_LATENT_SIZE,
        latent_columns=_LATENT_SIZE,
        channels=channels,
        outputs=channels,
        patch_size=_PATCH,
        heads=heads,
        head_dim=head_dim,
        text_rows=_TEXT_ROWS,
        text_size=fields.count("joint_attention_dim", default=4096),
        double_layers=read_layer_count(fields, "num_layers"),
        single_layers=read_layer_count(fields, "num_single_layers"),
        pooled_size=fields.count("pooled_projection_dim", default=768),
        has_guidance=fields.flag("guidance_embeds", default=False),
        rotation=_read_rotation(fields, head_dim),
    )
    refuse_unread(fields)
    return config


def _read_rotation(fields: Fields, head_dim: int) -> tuple[int, int, int]:
    """Return the field `axes_dims_rope`: even numbers of elements of a head, which they add up to."""
    sizes: Any = fields.get("axes_dims_rope", [16, 56, 56])
    is_list = isinstance(sizes, list) and len(sizes) == 3
    if not is_list or not all(type(size) is int and size > 0 and size % 2 == 0 for size in sizes):
        raise fields.error("axes_dims_rope", f"{sizes!r:.60} is not three even positive numbers")
    if sum(sizes) != head_dim:
        raise fields.error(
            "axes_dims_rope", f"{sizes!r:.60} adds up to {sum(sizes)}, not to attention_head_dim, {head_dim}"
        )
    first, second, third = sizes
    return first, second, third


def compose(config: FluxConfig) -> Network:
    """Return the network of the denoiser; inputs are latents, timesteps, the guidance, and the encoded texts."""
    hidden, guidance = config.hidden_size, GUIDANCE if config.has_guidance else ""
    shape = (config.channels, config.latent_rows, config.latent_columns)
    first = (
        PatchInput("patches", "x_embedder", hidden, _PATCH, shape, None, is_matrix=True),
        TextLinear(
            "text", TEXT, build_linear("context_embedder", hidden, config.text_size), config.text_rows
        ),
        *build_time_text_embedding(hidden, config.pooled_size, guidance),
    )
    inputs = {
        LATENTS: Input(LATENTS, dtype=None),
        TIMESTEPS: Input(TIMESTEPS, dtype=FLOAT32),
        TEXT: Input(TEXT, dtype=None),
        POOLED: Input(POOLED, dtype=None),
    }
    if guidance:
        inputs[GUIDANCE] = Input(GUIDANCE, dtype=FLOAT32)
    blocks = JointBlocks(config, True, AxialRotation(config.patches, config.rotation))
    double = (
        blocks.build_double(f"double.{number}", f"transformer_blocks.{number}")
        for number in range(config.double_layers)
    )
    single = (_build_single(blocks, number) for number in range(config.single_layers))
    return Network((first, *double, *single, blocks.build_last(channel_first=True)), inputs, ("x",))


def _build_single(blocks: JointBlocks, number: int) -> Section:
    """Return the layers of a block with the same weights for both streams."""
    config = blocks.config
    hidden, name, tensor = config.hidden_size, f"single.{number}", f"single_transformer_blocks.{number}"
    chunks = (f"{name}.shift", f"{name}.scale", f"{name}.gate")
    norm = blocks.build_norm(*chunks)
    output, down = build_linear(f"{tensor}.proj_out", hidden, 5 * hidden).split_inputs((hidden, 4 * hidden))
    projections = AttentionProjections(build_projections(f"{tensor}.attn", hidden).inputs, output)
    head_norms = (f"{tensor}.attn.norm_q.weight", f"{tensor}.attn.norm_k.weight")
    up = build_linear(f"{tensor}.proj_mlp", 4 * hidden, hidden)
    streams = []
    for stream in ("image", "text"):
        # Ulysses ranks divide weights for the text's rows, and not for those of the image.
        prefix = f"{name}.text" if stream == "text" and config.ulysses_ranks > 1 else name
        attention = blocks.build_attention(f"{prefix}.attention", norm, projections, head_norms, stream)
        block = ModulatedFeedForward(
            f"{prefix}.mlp", hidden, None, None, up, down, "gelu_tanh", modulation=norm
        )
        streams.append((attention, block))
    (image, block), (text, text_block) = streams
    return (
        blocks.build_modulation(f"{name}.modulation", f"{tensor}.norm", chunks),
        JointAttention(f"{name}.attention", image, text, config.text_rows, block, text_block),
    )
