"""Sizes of a model from the shapes of its layers: parameters by component, what ranks hold, caches, and multiply-adds.

Components, as weights and layers name theirs:

    embedding   token table, learned positions, table of the inputs of every layer, projections around the layers
    attention   projections of queries, keys, values and outputs, with their biases and sinks
    mlp         feed-forward blocks that every token passes, shared experts, routers and gated inputs among them
    experts     routed experts, of which a token passes a few
    mixer       state spaces and the gated delta rule, which stand where a transformer has attention
    norms       weights of every norm
    head        the output projection; 0 where it is the embedding's table
    aside       what a generated token does not pass: a vision tower, the encoder of speech

Buffers of a checkpoint are no parameters. Equal decoder layers are walked once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.config.parts import Block, Experts
from model.errors import ModelError
from model.families import compose, read_config
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import Layer
from model.layers.paged import CacheGroup, Slots
from model.layers.shard import Shard
from model.network import Network, Section

COMPONENTS = {
    "embedding": ("embedding", "rows", "projections"),
    **{name: (name,) for name in ("attention", "mlp", "experts", "mixer", "norms", "head", "aside")},
}
"""The components of weights by those that plans show."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_MOST_PARAMETERS = 10**15
"""Far beyond any model, and far from what float64 and an array's shape cannot hold."""


class LayerSizes:
    """The sizes of neighbouring layers, of which a model has `count` equal ones; `experts` are the routed ones in them.

    `component` is that of all weights, where it is not empty.
    """

    def __init__(
        self, layers: Sequence[Layer], count: int = 1, experts: Experts | None = None, component: str = ""
    ) -> None:
        self.count, self.experts, self._layers = count, experts, layers
        self._weights = [
            (component or weight.component or layer.component, weight)
            for layer in layers
            for weight in layer.weights
        ]
        self.elements = lru_cache(maxsize=None)(self._elements)
        self.page_bytes = lru_cache(maxsize=None)(self._page_bytes)
        self.products = lru_cache(maxsize=None)(self._products)

    @cached_property
    def tensors(self) -> dict[str, tuple[str, int]]:
        """The component and the elements of each tensor of the checkpoint, by its name."""
        sizes = ((component, weight.tensor_sizes()) for component, weight in self._weights)
        return {name: (component, size) for component, tensors in sizes for name, size in tensors.items()}

    @cached_property
    def parameters(self) -> Counter[str]:
        """Parameters of one of the equal layers, by component."""
        counts = Counter[str]()
        for component, size in self.tensors.values():
            counts[component] += size if component != "buffers" else 0
        return counts

    def share_of_experts(self, tokens: int) -> float:
        """The share of the experts that `tokens` tokens reach, each choosing its experts evenly and by itself."""
        experts = self.experts
        return 0.0 if experts is None else 1 - (1 - experts.per_token / experts.count) ** tokens

    def active(self, tokens: int) -> float:
        """Parameters that `tokens` tokens reach."""
        experts = self.parameters["experts"]
        return self.parameters.total() - experts + experts * self.share_of_experts(tokens)

    def _elements(self, tp: int, ep: int = 1) -> Counter[str]:
        """Elements of weights on a rank, by component; `ep` groups of ranks hold routed experts once."""
        counts = Counter[str]()
        for component, weight in self._weights:
            counts[component] += prod(weight.shape(Shard(0, tp, 0, ep)))
        return counts

    def _page_bytes(self, tp: int, dtype: str, read: bool = False) -> Counter[CacheGroup]:
        """Bytes of a position or slot on a rank, by cache group: of the caches that layers keep, or that they read."""
        step = replace(_step(Phase.decode, 1, tp, dtype), pages=1, block_size=1, slots=1)
        counts = Counter[CacheGroup]()
        for layer in self._layers:
            for cache in (getattr(layer, "read_caches", layer.caches) if read else layer.caches)(step):
                counts[cache.group] += cache.page_bytes
        return counts

    def cache_bytes(self, tokens: int, tp: int, dtype: str, read: bool = False) -> int:
        """Bytes of a sequence of `tokens` tokens on a rank: a window holds no more, and a slot is one."""
        positions = {
            group: 1 if isinstance(group, Slots) else tokens if group is None else min(tokens, group)
            for group in self.page_bytes(tp, dtype, read)
        }
        return sum(positions[group] * size for group, size in self.page_bytes(tp, dtype, read).items())

    def _products(self, phase: Phase, tokens: int) -> float:
        """Multiply-adds without weights: of a prompt of `tokens` tokens, or of one token at their end."""
        step = _step(phase, tokens, 1, "bfloat16")
        mixers = (layer for layer in self._layers if layer.component in ("attention", "mixer"))
        launches = (launch for layer in mixers for launch in layer.launches(step))
        return sum(launch.work.beside_weights for launch in launches) / 2


def _step(phase: Phase, tokens: int, tp: int, dtype: str) -> StepShape:
    """A prompt of `tokens` tokens, or one token at their end."""
    elements = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = tokens if phase is Phase.prefill else 1
    return StepShape(phase, rows, 1, tokens, tokens, tp, elements, WeightDtypes(elements))


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of one model."""

    config: ModelConfig

    @cached_property
    def network(self) -> Network:
        """Its layers."""
        return compose(self.config)

    @cached_property
    def blocks(self) -> tuple[LayerSizes, ...]:
        """The decoder layers, equal ones once."""
        return tuple(
            LayerSizes(layers, count, block.mlp if isinstance(block.mlp, Experts) else None)
            for block, layers, count in equal_blocks(self.config, self.network)
        )

    @cached_property
    def embedding(self) -> LayerSizes:
        """The layer before them."""
        return LayerSizes(self.network.sections[0])

    @cached_property
    def head(self) -> LayerSizes:
        """The layer behind them."""
        return LayerSizes(self.network.sections[-1])

    @cached_property
    def aside(self) -> LayerSizes:
        """What a generated token does not pass; no layers in most models."""
        before = self.network.before.values()
        return LayerSizes([layer for network in before for layer in network.layers], component="aside")

    @property
    def sections(self) -> tuple[LayerSizes, ...]:
        """All of these."""
        return (self.embedding, *self.blocks, self.head, self.aside)

    @property
    def num_layers(self) -> int:
        """Decoder layers of all kinds."""
        return len(self.config.blocks)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Parameters by component, in the order of `COMPONENTS`."""
        counts = Counter[str]()
        for section in self.sections:
            for component, size in section.parameters.items():
                counts[component] += section.count * size
        if self.config.tie_word_embeddings:
            counts["head"] = 0
        return {
            shown: sum(counts[component] for component in components)
            for shown, components in COMPONENTS.items()
        }

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, the embedding's table where the two are tied."""
        return self.head.parameters["head"]

    def passed(self, tokens: int) -> float:
        """Parameters read when `tokens` tokens go through the model together, the embedding's table included.

        The table counts as read, although a lookup reads one row of it, because published estimates divide all
        parameters by the bandwidth. That of the inputs of every layer does not: it may be most of a model.
        """
        blocks = sum(section.count * section.active(tokens) for section in self.blocks)
        around = self.embedding.parameters.total() - self.embedding.parameters["rows"]
        return blocks + around + self.parameters["head"] + self.head.parameters["norms"]

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with, but for the head."""
        blocks = sum(section.count * section.active(1) for section in self.blocks)
        return round(blocks) + self.embedding.parameters["projections"]

    def cache_bytes(self, tokens: int, dtype: str, tp: int = 1, read: bool = False) -> int:
        """Bytes of the cache of one sequence of `tokens` tokens on a rank.

        With `read` they are those that one token reads at the end of `tokens`, some of them in several layers.
        """
        return sum(section.count * section.cache_bytes(tokens, tp, dtype, read) for section in self.blocks)

    def page_bytes(self, tp: int, dtype: str) -> Counter[CacheGroup]:
        """Bytes of a position or slot on a rank, by cache group."""
        counts = Counter[CacheGroup]()
        for section in self.blocks:
            for group, size in section.page_bytes(tp, dtype).items():
                counts[group] += section.count * size
        return counts

    def products(self, phase: Phase, tokens: int) -> float:
        """Multiply-adds without weights: of a prompt of `tokens` tokens, or of one token at their end."""
        return sum(section.count * section.products(phase, tokens) for section in self.blocks)


def equal_blocks(config: ModelConfig, network: Network) -> list[tuple[Block, Section, int]]:
    """The kinds of decoder layers: the block of each in the config, the layers of its first, and their number."""
    first = dict(zip(reversed(config.blocks), reversed(network.blocks)))
    return [(block, first[block], count) for block, count in Counter(config.blocks).items()]


def load_model(path: Path, config: ModelConfig | None = None) -> ModelSizes:
    """Read the model of a config.json, or of a folder that holds one; ModelError for what cannot be read.

    A `config` that was read from the path is not read again.
    """
    model = ModelSizes(config or read_config(path))
    if model.total > _MOST_PARAMETERS:
        raise ModelError(
            f"{path} describes more than {_MOST_PARAMETERS:.0e} parameters; a plan takes no more"
        )
    return model
