"""Random weights for a layer of a model whose folder has a config.json and no checkpoint."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from math import log2, prod, sqrt

import numpy as np

from model.config import ModelConfig
from model.device.bundling import Drawn, draw_array
from model.families import compose
from model.loading.checkpoint import Checkpoint

_MOST_TOKENS = 1024
"""Most tokens of the vocabulary of a single layer, whose embedding and head are not in the bundle."""


def keep_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """Return the config of a model with only the layer of index `layer`, and with at most 1,024 tokens."""
    return replace(config, blocks=(config.blocks[layer],), vocab_size=min(config.vocab_size, _MOST_TOKENS))


class DrawnWeights(Checkpoint):
    """Checkpoint without files, whose tensors are drawn when they are read; the seed depends on a tensor's name.

    Values of a projection of n inputs are uniform up to 2**round(log2(sqrt(3 / n))), so that its outputs are about as
    large as its inputs. Weights of norms are uniform from 0.5 to 1.5. The dtype is bfloat16 if the config names it, and
    float32 otherwise.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Describe the tensors of the layers of a config; nothing is drawn yet."""
        shapes = compose(config).list_layer_tensor_shapes()
        super().__init__({name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()})
        dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        self.tensors = {name: _describe_tensor(name, shape, dtype) for name, shape in shapes.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """Draw the tensor of a name and return it."""
        return draw_array(self.tensors[name]).reshape(super().__getitem__(name).shape)


def _describe_tensor(name: str, shape: tuple[int, ...], dtype: str) -> Drawn:
    """Return the recipe of a drawn tensor: its dtype, number of elements, seed, scale and shift."""
    seed = int.from_bytes(sha256(name.encode()).digest()[:4], "little")
    if len(shape) == 1 and "norm" in name:
        return Drawn(name, dtype, shape[0], seed, 0.5, 1.0)
    return Drawn(name, dtype, prod(shape), seed, 2.0 ** round(log2(sqrt(3 / shape[-1]))), 0.0)
