"""A Llama whose float32 sums are taken in another order: what rounding alone does to its logits."""

from __future__ import annotations

import numpy as np

from model.config import ModelConfig
from model.layers.shard import Shard, slice_evenly


def reordered(
    config: ModelConfig, weights: dict[str, np.ndarray], seed: int, ranks: int = 1
) -> dict[str, np.ndarray]:
    """Return weights of the same function with the hidden and the MLP dimensions in another order.

    What one of `ranks` ranks holds of the MLP dimension stays there: partial sums over it are rounded.
    """
    generator = np.random.default_rng(seed)
    hidden = generator.permutation(config.hidden_size)
    size = config.blocks[0].mlp.width
    spans = [np.arange(size)[slice_evenly(size, Shard(rank, ranks))] for rank in range(ranks)]
    width = np.concatenate([generator.permutation(span) for span in spans])
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
