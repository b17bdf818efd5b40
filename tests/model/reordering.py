"""A Llama whose float32 sums are taken in another order: what rounding alone does to its logits."""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig


def reordered(config: ModelConfig, weights: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The same function with the hidden and the MLP dimensions in another order, so every sum is taken differently."""
    generator = np.random.default_rng(seed)
    hidden, width = (generator.permutation(size) for size in (config.hidden_size, config.blocks[0].mlp.width))
    out = {}
    for name, tensor in weights.items():
        if name.endswith(("norm.weight", "o_proj.weight")):
            out[name] = tensor[hidden]
        elif name.endswith("down_proj.weight"):
            out[name] = tensor[hidden][:, width]
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            out[name] = tensor[width][:, hidden]
        else:
            out[name] = tensor[:, hidden]
    return out
