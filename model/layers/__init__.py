"""Layers of models, one type per file: weights and their sharding, caches, launches, and a NumPy reference."""

from __future__ import annotations

from collections.abc import Iterator

from model.config.blocks import Block, Experts, Mlp, ModelConfig


def find_unsupported(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of a model's features that no layer computes, such as "sparse activations"; empty if none."""
    return tuple(
        dict.fromkeys(feature for block in dict.fromkeys(config.blocks) for feature in _find_in_block(block))
    )


def _find_in_block(block: Block) -> Iterator[str]:
    if isinstance(block.mlp, Experts):
        if block.mlp.inner_norms:
            yield "norms inside routed experts"
        if not block.norms.before or block.norms.bias:
            yield "routed experts without an RMSNorm right before them"
    if isinstance(block.mlp, Mlp) and block.mlp.sparse:
        yield "sparse activations"
    if block.streams is not None:
        yield "alternating updates of several hidden states"
