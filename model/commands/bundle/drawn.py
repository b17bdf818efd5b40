"""One layer of a model that is known by its config.json alone, with weights that are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from math import log2, prod, sqrt

import numpy as np

from model.config import ModelConfig
from model.device.bundling import Drawn, drawn_array
from model.families import compose

_MOST_TOKENS = 1024
"""Of the vocabulary of a layer by itself, whose embedding and head do not travel."""
_NORM = "norm"


def one_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """A model of one of the layers of another, with a short vocabulary."""
    return replace(config, blocks=(config.blocks[layer],), vocab_size=min(config.vocab_size, _MOST_TOKENS))


class DrawnWeights(Mapping[str, np.ndarray]):
    """Tensors of a checkpoint that there is none of, each drawn when it is read, by a seed that follows from its name.

    A projection of n inputs has values up to 2**round(log2(sqrt(3 / n))), so that its outputs are about as large as its
    inputs; weights of norms lie from 0.5 to 1.5. The dtype is bfloat16, where the config names it, or else float32.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = compose(config).layer_tensor_shapes()
        dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        self.tensors = tuple(_drawn(name, shape, dtype) for name, shape in self._shapes.items())
        self._by_name = {each.name: each for each in self.tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        return drawn_array(self._by_name[name]).reshape(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def release(self) -> None:
        """Nothing: no tensor is kept."""


def _drawn(name: str, shape: tuple[int, ...], dtype: str) -> Drawn:
    seed = int.from_bytes(sha256(name.encode()).digest()[:4], "little")
    if len(shape) == 1 and _NORM in name:
        return Drawn(name, dtype, shape[0], seed, 0.5, 1.0)
    return Drawn(name, dtype, prod(shape), seed, 2.0 ** round(log2(sqrt(3 / shape[-1]))), 0.0)
