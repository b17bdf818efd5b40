"""Layers that denoisers of diffusers have in common, by the names of their tensors."""

from __future__ import annotations

from model.config.denoisers import DenoiserConfig
from model.config.mixers import GroupedAttention
from model.layers.attention_heads import AttentionProjections
from model.layers.denoiser.conditions import FREQUENCIES, PooledEmbedding, TimestepEmbedding
from model.layers.denoiser.feed_forward import ModulatedFeedForward
from model.layers.denoiser.modulation import ModulatedNorm
from model.layers.denoiser.patches import PatchOutput
from model.layers.projection import Projection

EPS = 1e-6
"""Epsilon of norms that no field of config.json changes."""
TIMESTEPS, TEXT, LENGTHS, POOLED = "timesteps", "text", "text_lengths", "pooled"
EMBEDDING = "timestep_embedding"
CHUNKS = ("attention_shift", "attention_scale", "attention_gate", "mlp_shift", "mlp_scale", "mlp_gate")
"""Modulation rows of a block of attention and MLP, in the order of a checkpoint."""


def build_linear(tensor: str, outputs: int, inputs: int, bias: bool = True) -> Projection:
    """Return a linear layer whose tensors' names begin with `tensor`."""
    return Projection(f"{tensor}.weight", outputs, inputs, f"{tensor}.bias" if bias else None)


def describe_heads(heads: int, head_dim: int, bias: bool = True) -> GroupedAttention:
    """Return attention of all rows to all rows with as many key/value heads as query heads.

    Args:
        heads: Number of heads.
        head_dim: Elements of a head.
        bias: Whether the projections of queries, keys and values have biases.
    """
    return GroupedAttention(
        heads,
        heads,
        head_dim,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=True,
        causal=False,
    )


def build_projections(
    tensor: str,
    hidden: int,
    bias: bool = True,
    inputs: tuple[str, str, str] = ("to_q", "to_k", "to_v"),
    output: str = "to_out.0",
) -> AttentionProjections:
    """Return the projections of attention.

    Args:
        tensor: Beginning of the names of the tensors.
        hidden: Elements of a hidden state.
        bias: Whether the projections of queries, keys and values have biases.
        inputs: Names of the projections of queries, keys and values.
        output: Name of the output projection.
    """
    projections = tuple(build_linear(f"{tensor}.{name}", hidden, hidden, bias) for name in inputs)
    return AttentionProjections(projections, build_linear(f"{tensor}.{output}", hidden, hidden))


def build_feed_forward(name: str, tensor: str, hidden: int, norm: ModulatedNorm) -> ModulatedFeedForward:
    """Return a modulated feed-forward block with four times as many inner elements, and GELU by tanh."""
    return ModulatedFeedForward(
        name,
        hidden,
        None,
        None,
        build_linear(f"{tensor}.net.0.proj", 4 * hidden, hidden),
        build_linear(f"{tensor}.net.2", hidden, 4 * hidden),
        "gelu_tanh",
        modulation=norm,
    )


def build_output(
    config: DenoiserConfig, tensor: str, norm: ModulatedNorm, channel_first: bool = False
) -> PatchOutput:
    """Return the layer that makes images of rows; variances in the checkpoint's result are left out.

    Args:
        config: The denoiser.
        tensor: Beginning of the names of the linear layer's tensors.
        norm: The last norm.
        channel_first: Whether outputs of the linear layer begin with the channel of a patch.
    """
    cells, channels = config.patch_size**2, config.channels
    projection = build_linear(tensor, cells * config.outputs, config.hidden_size)
    if config.outputs > channels:
        projection, _ = projection.split((channels, channels), groups=cells)
    return PatchOutput("last", norm, projection, config.patches, config.patch_size, channels, channel_first)


def build_pair(tensor: str, hidden: int, inputs: int) -> tuple[Projection, Projection]:
    """Return the linear layers of an embedding from `inputs` elements."""
    return (
        build_linear(f"{tensor}.linear_1", hidden, inputs),
        build_linear(f"{tensor}.linear_2", hidden, hidden),
    )


def build_time_text_embedding(
    hidden: int, pooled: int, guidance: str = ""
) -> list[PooledEmbedding | TimestepEmbedding]:
    """Return the layers that add up embeddings of the pooled text, of the guidance if it is one, and of the timestep.

    Ranks divide the elements of the sum, `EMBEDDING`.

    Args:
        hidden: Elements of the embedding.
        pooled: Elements of a pooled text.
        guidance: Name of the guidance among the inputs of the step; "" without.
    """
    tensor, numbers = "time_text_embed", {TIMESTEPS: "timestep_embedder"}
    if guidance:
        numbers = {guidance: "guidance_embedder", **numbers}
    added = "pooled_embedding"
    layers: list[PooledEmbedding | TimestepEmbedding] = [
        PooledEmbedding(
            "pooled", POOLED, added, build_pair(f"{tensor}.text_embedder", hidden, pooled), is_divided=True
        )
    ]
    for source, embedder in numbers.items():
        output = EMBEDDING if source == TIMESTEPS else f"{source}_embedding"
        pair = build_pair(f"{tensor}.{embedder}", hidden, FREQUENCIES)
        layers.append(TimestepEmbedding(source, source, output, pair, added, is_divided=True))
        added = output
    return layers
