"""The kinds of layers of a model, one per file: weights, cut, state, launches and a reference in plain numpy."""

from __future__ import annotations

from collections.abc import Iterator

from model.config.parts import Block, Experts, GroupedAttention, HeadNorm, LatentAttention, ModelConfig


def unsupported(config: ModelConfig) -> tuple[str, ...]:
    """The needs of a model that no layer of this package computes, in words; empty where the layers compute it."""
    return tuple(
        dict.fromkeys(what for block in dict.fromkeys(config.blocks) for what in _unsupported(block))
    )


def _unsupported(block: Block) -> Iterator[str]:
    mixer, mlp = block.mixer, block.mlp
    if isinstance(mixer, GroupedAttention):
        if mixer.cross_positions:
            yield "cross-attention"
        if mixer.biases:
            yield "biases"
        if mixer.sinks:
            yield "attention sinks"
        if mixer.head_norm is HeadNorm.width:
            yield "norms of whole queries and keys"
    elif isinstance(mixer, LatentAttention):
        yield "latent attention"
    else:
        yield "state-space layers"
    if isinstance(mlp, Experts):
        yield "routed experts"
    elif mlp is not None:
        if mlp.bias:
            yield "biases"
        if mlp.activation != "silu" or not mlp.gated:
            yield f"an MLP with {mlp.activation}"
    if block.norms.after:
        yield "norms after the blocks"
    elif block.norms.bias:
        yield "LayerNorm"
