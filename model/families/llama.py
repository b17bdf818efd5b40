"""The Llama family: what its checkpoint holds, and its forward pass over the kernels.

One layer, on every rank with its own shard:

    q, k, v = qkv_projection(x)          RMSNorm fused in; heads divided over the ranks
    q, k    = rope(q), rope(k)
    o       = attention_prefill(q, k, v) for a prompt, attention_decode(q, k, v) for one token; fills the cache
    x       = output_projection(o, x)    all-reduced over the ranks, plus x
    x       = mlp(x)                     RMSNorm fused in; all-reduced, plus x

before it `embedding`, after the last one `lm_head`, which every rank computes for its part of the vocabulary.

`embedding` gives x the dtype of the activations, and every kernel after it keeps the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from model import rope
from model.cache import empty_cache
from model.config import LlamaConfig
from model.layers import (
    Shard,
    check_ranks,
    column_parallel,
    key_value_heads,
    local_key_value_heads,
    query_heads,
    row_parallel,
    vocabulary_parallel,
    vocabulary_span,
)
from model.precision import StoredWeights, activation_dtype
from model.sampling import Step

CANDIDATES = 8
"""The fewest candidates that lm_head picks; the Vector engine finds maxima eight at a time."""


class Device(Protocol):
    """Something that launches a kernel on all ranks at once.

    `own` are the ranks that this process holds: all of them, or one if the others are processes of their own.
    """

    ranks: int
    own: range
    replica_group: Any

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument, such as `nl.bfloat16`."""

    def run(self, kernel: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Launch a kernel of `nki_kernels` with each own rank's arguments; returns each own rank's outputs."""

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """An array of every rank, in their order, of those that the own ranks give."""


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape; projections are [out, in]."""
    hidden, width = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}."
        shapes |= {
            name + "input_layernorm.weight": (hidden,),
            name + "self_attn.q_proj.weight": (query, hidden),
            name + "self_attn.k_proj.weight": (key_value, hidden),
            name + "self_attn.v_proj.weight": (key_value, hidden),
            name + "self_attn.o_proj.weight": (hidden, query),
            name + "post_attention_layernorm.weight": (hidden,),
            name + "mlp.gate_proj.weight": (width, hidden),
            name + "mlp.up_proj.weight": (width, hidden),
            name + "mlp.down_proj.weight": (hidden, width),
        }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights on one rank, [in, out]; norms are [1, hidden]."""

    attention_norm: np.ndarray
    w_qkv: np.ndarray
    w_o: np.ndarray
    mlp_norm: np.ndarray
    w_gate: np.ndarray
    w_up: np.ndarray
    w_down: np.ndarray


@dataclass(frozen=True)
class RankWeights:
    """What one rank holds: the whole embedding, its shard of every layer, its part of the head.

    `dtype` is that of the activations and of the cache.
    """

    dtype: np.dtype
    table: np.ndarray
    layers: tuple[LayerWeights, ...]
    norm: np.ndarray
    w_head: np.ndarray
    first_token: np.ndarray


def shard_weights(
    config: LlamaConfig,
    weights: Mapping[str, np.ndarray],
    ranks: int,
    own: range | None = None,
    taken: Callable[[], None] = lambda: None,
    dtype: str = "float32",
) -> tuple[RankWeights, ...]:
    """Cut a checkpoint for `ranks` ranks, or for those of them in `own`; ModelError if they cannot share the model.

    Everything is copied once, into the layout the kernels want. `taken` is called after each layer, so that the
    checkpoint can let go of what has been read. `dtype` (float32, bfloat16 or auto) is that of the activations; beside
    float32 ones weights keep the checkpoint's dtype, beside bfloat16 ones they are rounded to bfloat16.
    """
    check_ranks(config, ranks)
    activations = activation_dtype(dtype, config, weights)
    weights = StoredWeights(weights, activations)
    table = np.array(weights["model.embed_tokens.weight"])
    norm = _row(weights["model.norm.weight"])
    head = table if config.tie_word_embeddings else weights["lm_head.weight"]
    shards = [Shard(rank, ranks) for rank in (range(ranks) if own is None else own)]
    heads = [vocabulary_parallel(head, shard) for shard in shards]
    layers: list[tuple[LayerWeights, ...]] = []
    for layer in range(config.num_hidden_layers):
        taken()
        layers.append(tuple(_layer(config, weights, layer, shard) for shard in shards))
    taken()
    first = [vocabulary_span(config.vocab_size, shard).start for shard in shards]
    return tuple(
        RankWeights(
            activations,
            table,
            tuple(each[rank] for each in layers),
            norm,
            heads[rank],
            np.array([[first[rank]]], np.int32),
        )
        for rank in range(len(shards))
    )


def weights_of_all(config: LlamaConfig, one: RankWeights, ranks: int) -> tuple[RankWeights, ...]:
    """Weights for dry runs of all ranks from those of one: right in shapes and dtypes, without memory of their own."""

    def head(span: slice) -> np.ndarray:
        return np.broadcast_to(one.w_head[:1, :1], (config.hidden_size, span.stop - span.start))

    spans = [vocabulary_span(config.vocab_size, Shard(rank, ranks)) for rank in range(ranks)]
    return tuple(
        replace(one, w_head=head(span), first_token=np.array([[span.start]], np.int32)) for span in spans
    )


def _layer(config: LlamaConfig, weights: Mapping[str, np.ndarray], layer: int, shard: Shard) -> LayerWeights:
    def weight(name: str) -> np.ndarray:
        return weights[f"model.layers.{layer}.{name}.weight"]

    kv_heads = config.num_key_value_heads
    projections = (
        query_heads(weight("self_attn.q_proj"), shard),
        key_value_heads(weight("self_attn.k_proj"), kv_heads, shard),
        key_value_heads(weight("self_attn.v_proj"), kv_heads, shard),
    )
    return LayerWeights(
        _row(weight("input_layernorm")),
        np.concatenate(projections, axis=1),
        row_parallel(weight("self_attn.o_proj"), shard),
        _row(weight("post_attention_layernorm")),
        column_parallel(weight("mlp.gate_proj"), shard),
        column_parallel(weight("mlp.up_proj"), shard),
        row_parallel(weight("mlp.down_proj"), shard),
    )


def _row(weight: np.ndarray) -> np.ndarray:
    return np.array(weight).reshape(1, -1)


class KernelModel:
    """A backend that computes the model with kernels on a device, one sequence at a time.

    `cache_length` positions are held per layer; `candidates` is how many of the best tokens the sampler wants picked
    out (lm_head picks a multiple of eight, and never more than a rank's part of the vocabulary holds).
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Sequence[RankWeights],
        device: Device,
        cache_length: int,
        candidates: int = 1,
        progress: Callable[[int, int], None] = lambda done, layers: None,
    ) -> None:
        assert len(weights) == len(device.own), f"weights for {len(weights)} ranks on {len(device.own)}"
        self._config = config
        self._weights = weights
        self._device = device
        self._cache_length = cache_length
        self._progress = progress
        last = vocabulary_span(config.vocab_size, Shard(device.ranks - 1, device.ranks))
        smallest = last.stop - last.start
        wanted = -(-candidates // CANDIDATES) * CANDIDATES
        self._candidates = max(CANDIDATES, min(wanted, smallest // CANDIDATES * CANDIDATES))
        positions = min(cache_length, config.max_position_embeddings)
        self._tables = rope.tables(config.rope, config.head_dim, config.max_position_embeddings, positions)
        self._reset()

    def _reset(self) -> None:
        config = self._config
        kv_heads = local_key_value_heads(config, self._device.ranks)
        self._cache = empty_cache(
            len(self._device.own),
            config.num_hidden_layers,
            kv_heads,
            config.head_dim,
            self._cache_length,
            self._weights[0].dtype,
        )

    def prefill(self, ids: Sequence[int]) -> Step:
        """Start a sequence with a prompt; says what follows it."""
        assert 0 < len(ids) <= self._cache_length, f"{len(ids)} tokens, a cache of {self._cache_length}"
        self._reset()
        return self._forward(ids, np.arange(len(ids)), "attention_prefill")

    def decode(self, token: int, position: int) -> Step:
        """Append one token at `position`; says what follows it."""
        assert 0 < position < self._cache_length, f"position {position}, a cache of {self._cache_length}"
        return self._forward([token], np.array([position]), "attention_decode", position)

    def _forward(
        self, ids: Sequence[int], positions: np.ndarray, attention: str, position: int | None = None
    ) -> Step:
        run, weights, eps = self._device.run, self._weights, self._config.rms_norm_eps
        group = self._device.replica_group
        rows = np.asarray(positions, np.int32)[:, None]
        tokens = np.asarray(ids, np.int32)[:, None]
        x = run("embedding", [(tokens, rank.table, self._device.dtype(rank.dtype.name)) for rank in weights])
        self._progress(0, self._config.num_hidden_layers)
        for layer in range(self._config.num_hidden_layers):
            own = [rank.layers[layer] for rank in weights]
            o = self._attend(layer, x, own, rows, attention, position)
            x = run("output_projection", [(part, w.w_o, into, group) for part, w, into in zip(o, own, x)])
            x = run(
                "mlp", [(part, w.mlp_norm, w.w_gate, w.w_up, w.w_down, eps, group) for part, w in zip(x, own)]
            )
            self._progress(layer + 1, self._config.num_hidden_layers)
        together = group, self._device.ranks
        heads = run(
            "lm_head",
            [
                (part[-1:], rank.norm, rank.w_head, eps, self._candidates, rank.first_token, *together)
                for part, rank in zip(x, weights)
            ],
        )
        logits = np.concatenate(self._device.gather([np.asarray(head[0])[0] for head in heads]))
        return Step(logits, np.asarray(heads[0][1])[0], np.asarray(heads[0][2])[0])

    def _attend(
        self,
        layer: int,
        x: list[Any],
        own: Sequence[LayerWeights],
        rows: np.ndarray,
        attention: str,
        position: int | None,
    ) -> list[Any]:
        run, config, ranks = self._device.run, self._config, self._device.ranks
        heads, kv_heads = config.num_attention_heads // ranks, local_key_value_heads(config, ranks)
        sizes = (heads * config.head_dim, kv_heads * config.head_dim)
        projected = run(
            "qkv_projection",
            [(part, w.attention_norm, w.w_qkv, config.rms_norm_eps, *sizes) for part, w in zip(x, own)],
        )
        q = run("rope", [(each[0], rows, *self._tables, heads) for each in projected])
        k = run("rope", [(each[1], rows, *self._tables, kv_heads) for each in projected])
        caches = [rank[layer] for rank in self._cache]
        at = () if position is None else (np.array([[position]], np.int32),)
        mixed = run(
            attention,
            [
                (q_, k_, each[2], cache.keys, cache.values, *at, config.head_dim**-0.5)
                for q_, k_, each, cache in zip(q, k, projected, caches)
            ],
        )
        for cache, (_, keys, values) in zip(caches, mixed):
            cache.keys, cache.values = keys, values
        return [each[0] for each in mixed]
