"""The Llama in plain numpy, no kernel and no simulator: the measure for everything else here.

Arithmetic is float32 throughout. With bfloat16 activations its results are rounded to bfloat16 where a device stores
them between engines: every norm, q, k and v before and after their rotation, the exponentials of a softmax, attention's
output, the gated product, and both sums with the residual. Logits stay float32. Exponentials are relative to the
largest score of all; in a prompt of more than 512 tokens the kernel rounds them relative to the largest so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from model import rope
from model.config import LlamaConfig
from model.precision import FLOAT32, StoredWeights, activation_dtype
from model.sampling import Step

_WIDENED_BYTES = 2**30


class ReferenceLlama:
    """One sequence at a time, with a key/value cache; `dtype` is that of the activations: float32, bfloat16 or auto.

    Weights of two bytes are widened once, when it is made, if that takes no more than 1 GiB, else at every use.
    """

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, np.ndarray], dtype: str = "float32"
    ) -> None:
        self._config = config
        self._dtype = activation_dtype(dtype, config, weights)
        weights = StoredWeights(weights, self._dtype)
        small = sum(tensor.size for tensor in weights.values()) * 4 <= _WIDENED_BYTES
        self._weights = {name: _widened(tensor) for name, tensor in weights.items()} if small else weights
        self._head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self._cos = self._sin = np.empty((0, config.head_dim // 2), np.float32)
        self._keys: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def prefill(self, ids: Sequence[int]) -> Step:
        """Start a sequence: what follows `ids`."""
        config = self._config
        empty = np.empty((config.num_key_value_heads, 0, config.head_dim), np.float32)
        self._keys = [empty] * config.num_hidden_layers
        self._values = [empty] * config.num_hidden_layers
        return Step(self._forward(ids, 0)[-1])

    def decode(self, token: int, position: int) -> Step:
        """Append one token at `position`, which is the number of tokens before it."""
        assert position == self._keys[0].shape[1], (
            f"position {position} after {self._keys[0].shape[1]} tokens"
        )
        return Step(self._forward([token], position)[-1])

    def _forward(self, ids: Sequence[int], start: int) -> np.ndarray:
        config = self._config
        x = _widened(self._weights["model.embed_tokens.weight"][np.asarray(ids)])
        cos, sin = self._rotation(start, len(ids))
        for layer in range(config.num_hidden_layers):
            name = f"model.layers.{layer}."
            normed = self._norm(x, name + "input_layernorm.weight")
            x = self._rounded(x + self._attention(layer, normed, cos, sin))
            normed = self._norm(x, name + "post_attention_layernorm.weight")
            x = self._rounded(x + self._mlp(name + "mlp.", normed))
        return self._norm(x, "model.norm.weight") @ self._transposed(self._head)

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        """Values as the activations' dtype holds them, in float32."""
        return x if self._dtype == FLOAT32 else _widened(x.astype(self._dtype))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self._config.rms_norm_eps))
        return self._rounded(x / root * _widened(self._weights[name]))

    def _transposed(self, name: str) -> np.ndarray:
        return _widened(self._weights[name]).T

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = x @ self._transposed(name + "gate_proj.weight")
        up = x @ self._transposed(name + "up_proj.weight")
        with np.errstate(
            over="ignore"
        ):  # exp of a large negative gate is inf, and the quotient 0 as it should be
            gate = gate / (1 + np.exp(-gate))
        return self._rounded(gate * up) @ self._transposed(name + "down_proj.weight")

    def _attention(self, layer: int, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        config = self._config
        name = f"model.layers.{layer}.self_attn."
        query, key, value = (
            self._rounded(x @ self._transposed(f"{name}{part}_proj.weight"))
            .reshape(len(x), -1, config.head_dim)
            .swapaxes(0, 1)
            for part in "qkv"
        )
        query, key = (self._rounded(_rotated(each, cos, sin)) for each in (query, key))
        keys = self._keys[layer] = np.concatenate([self._keys[layer], key], axis=1)
        values = self._values[layer] = np.concatenate([self._values[layer], value], axis=1)
        group = config.num_attention_heads // config.num_key_value_heads
        scores = query @ np.repeat(keys, group, axis=0).swapaxes(1, 2)
        scores *= np.float32(config.head_dim**-0.5)
        tokens, length = scores.shape[1:]
        future = np.arange(length) > np.arange(length - tokens, length)[:, None]
        scores[:, future] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = self._rounded(scores) @ np.repeat(values, group, axis=0) / scores.sum(axis=-1, keepdims=True)
        mixed = self._rounded(mixed).swapaxes(0, 1).reshape(tokens, -1)
        return mixed @ self._transposed(name + "o_proj.weight")

    def _rotation(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of `count` positions, [count, head_dim / 2]; the tables grow as they are needed."""
        config = self._config
        if start + count > len(self._cos):
            limit = config.max_position_embeddings
            room = max(start + count, min(2 * len(self._cos), limit))
            self._cos, self._sin = rope.tables(config.rope, config.head_dim, limit, room)
        return self._cos[start : start + count], self._sin[start : start + count]


def _rotated(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Each pair (i, i + head_dim/2) of [heads, tokens, head_dim] turned by its position's angle."""
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _widened(tensor: np.ndarray) -> np.ndarray:
    return np.asarray(tensor).astype(np.float32, copy=False)
