"""Layers of models, one type per file: weights and their sharding, caches, launches, and a NumPy reference."""

from __future__ import annotations

from collections.abc import Iterator

from model.config.parts import Block, Experts, Mlp, ModelConfig


def unsupported(config: ModelConfig) -> tuple[str, ...]:
    """The needs of a model that no layer of this package computes, in words; empty where the layers compute it."""
    return tuple(
        dict.fromkeys(need for block in dict.fromkeys(config.blocks) for need in _unsupported(block))
    )


def _unsupported(block: Block) -> Iterator[str]:
    mlp = block.mlp
    if isinstance(mlp, Experts):
        yield from _unsupported_experts(block, mlp)
    if isinstance(mlp, Mlp) and mlp.sparse:
        yield "sparse activations"
    if block.streams is not None:
        yield "alternating updates of several hidden states"


def _unsupported_experts(block: Block, experts: Experts) -> Iterator[str]:
    if experts.inner_norms:
        yield "norms inside routed experts"
    if not block.norms.before or block.norms.after or block.norms.bias:
        yield "routed experts without an RMSNorm right before them alone"
