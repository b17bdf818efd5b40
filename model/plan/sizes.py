"""Sizes of a model from the shapes of its layers: parameters by component, bytes of ranks and caches, multiply-adds.

Components, as weights and layers name them:

    embedding   token table, learned positions, table of the inputs of every layer, projections around the layers
    attention   projections of queries, keys, values and outputs, with their biases and sinks
    mlp         feed-forward blocks that every token passes, shared experts, routers and gated inputs among them
    experts     routed experts, of which a token passes a few
    mixer       state spaces and the gated delta rule, in layers without attention
    norms       weights of every norm
    head        the output projection; 0 if it is the embedding's table
    aside       layers that a generated token does not pass: a vision tower, an encoder of speech

Buffers of a checkpoint are no parameters. Equal decoder layers are counted once and multiplied by their number.
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
from model.config.blocks import Experts
from model.errors import ModelError
from model.families import compose, read_config
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import Layer
from model.layers.paged import CacheGroup, Slots
from model.layers.shard import Shard
from model.network import Network

COMPONENTS = {
    "embedding": ("embedding", "rows", "projections"),
    **{name: (name,) for name in ("attention", "mlp", "experts", "mixer", "norms", "head", "aside")},
}
"""The components of weights, by the components that plans show."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_MAX_PARAMETERS = 10**15
"""More than any model has, and few enough for float64 and the shape of an array."""


class LayerSizes:
    """Sizes of neighbouring layers, of which a model has `count` equal ones; `experts` are the routed ones in them.

    `component`, if it is not empty, replaces the components of all weights.
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
        self.elements = lru_cache(maxsize=None)(self._count_elements)
        self.page_bytes = lru_cache(maxsize=None)(self._count_page_bytes)
        self.products = lru_cache(maxsize=None)(self._count_products)

    @cached_property
    def tensors(self) -> dict[str, tuple[str, int]]:
        """Component and number of elements of each tensor of the checkpoint, by its name."""
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
        """Return the share of the experts that so many tokens reach, if each chooses its experts at random."""
        experts = self.experts
        return 0.0 if experts is None else 1 - (1 - experts.per_token / experts.count) ** tokens

    def active(self, tokens: int) -> float:
        """Return the number of parameters that so many tokens reach."""
        experts = self.parameters["experts"]
        return self.parameters.total() - experts + experts * self.share_of_experts(tokens)

    def _count_elements(self, tp: int, ep: int = 1) -> Counter[str]:
        """Count the elements of weights on a rank, by component; `ep` groups of ranks hold routed experts once."""
        counts = Counter[str]()
        for component, weight in self._weights:
            counts[component] += prod(weight.shape(Shard(0, tp, 0, ep)))
        return counts

    def _count_page_bytes(self, tp: int, dtype: str, read: bool = False) -> Counter[CacheGroup]:
        """Count the bytes of a position or slot on a rank, by cache group.

        The caches are those that the layers keep, or with `read` those that they read.
        """
        step = replace(_make_step(Phase.decode, 1, tp, dtype), pages=1, block_size=1, slots=1)
        counts = Counter[CacheGroup]()
        for layer in self._layers:
            for cache in (getattr(layer, "read_caches", layer.caches) if read else layer.caches)(step):
                counts[cache.group] += cache.page_bytes
        return counts

    def cache_bytes(self, tokens: int, tp: int, dtype: str, read: bool = False) -> int:
        """Return the bytes of a sequence on a rank; a window limits the positions, and a slot counts once."""
        positions = {
            group: 1 if isinstance(group, Slots) else tokens if group is None else min(tokens, group)
            for group in self.page_bytes(tp, dtype, read)
        }
        return sum(positions[group] * size for group, size in self.page_bytes(tp, dtype, read).items())

    def _count_products(self, phase: Phase, tokens: int, tp: int = 1) -> float:
        """Count the multiply-adds without weights on a rank, those of padding included.

        They are those of a prompt of so many tokens, or of one token at their end.
        """
        step = _make_step(phase, tokens, tp, "bfloat16")
        mixers = (layer for layer in self._layers if layer.component in ("attention", "mixer"))
        launches = (launch for layer in mixers for launch in layer.launches(step))
        return sum(launch.work.beside_weights for launch in launches) / 2


def _make_step(phase: Phase, tokens: int, tp: int, dtype: str) -> StepShape:
    """Return the step of a prompt of so many tokens, or of one token at their end."""
    elements = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = tokens if phase is Phase.prefill else 1
    return StepShape(phase, rows, 1, tokens, tokens, tp, elements, WeightDtypes(elements))


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one model."""

    config: ModelConfig

    @cached_property
    def network(self) -> Network:
        """Layers of the model."""
        return compose(self.config)

    @cached_property
    def blocks(self) -> tuple[LayerSizes, ...]:
        """Decoder layers, equal ones once."""
        first = dict(zip(reversed(self.config.blocks), reversed(self.network.blocks)))
        return tuple(
            LayerSizes(first[block], count, block.mlp if isinstance(block.mlp, Experts) else None)
            for block, count in Counter(self.config.blocks).items()
        )

    @cached_property
    def embedding(self) -> LayerSizes:
        """The layers before the decoder layers."""
        return LayerSizes(self.network.sections[0])

    @cached_property
    def head(self) -> LayerSizes:
        """The layers after the decoder layers."""
        return LayerSizes(self.network.sections[-1])

    @cached_property
    def aside(self) -> LayerSizes:
        """The layers that a generated token does not pass; none in most models."""
        before = self.network.before.values()
        return LayerSizes([layer for network in before for layer in network.layers], component="aside")

    @property
    def sections(self) -> tuple[LayerSizes, ...]:
        """All layers, equal decoder layers once."""
        return (self.embedding, *self.blocks, self.head, self.aside)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
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
        """Number of all parameters."""
        return sum(self.parameters.values())

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection; the embedding's table if the two are tied."""
        return self.head.parameters["head"]

    def parameters_read(self, tokens: int) -> float:
        """Return the number of parameters read when so many tokens go through the model together.

        The embedding's table counts as read, although a lookup reads one row of it, because published estimates divide
        all parameters by the bandwidth. The table of the inputs of every layer does not count.
        """
        blocks = sum(section.count * section.active(tokens) for section in self.blocks)
        embedding = self.embedding.parameters.total() - self.embedding.parameters["rows"]
        return blocks + embedding + self.parameters["head"] + self.head.parameters["norms"]

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with, without the head."""
        blocks = sum(section.count * section.active(1) for section in self.blocks)
        return round(blocks) + self.embedding.parameters["projections"]

    def cache_bytes(self, tokens: int, dtype: str, tp: int = 1, read: bool = False) -> int:
        """Return the bytes of the cache of one sequence of `tokens` tokens on a rank.

        With `read`, return the bytes that the last token reads; several layers may read the same bytes.
        """
        return sum(section.count * section.cache_bytes(tokens, tp, dtype, read) for section in self.blocks)

    def page_bytes(self, tp: int, dtype: str) -> Counter[CacheGroup]:
        """Return the bytes of a position or slot on a rank, by cache group."""
        counts = Counter[CacheGroup]()
        for section in self.blocks:
            for group, size in section.page_bytes(tp, dtype).items():
                counts[group] += section.count * size
        return counts

    def products(self, phase: Phase, tokens: int) -> float:
        """Return the multiply-adds without weights: of a prompt of `tokens` tokens, or of one token at their end."""
        return sum(section.count * section.products(phase, tokens) for section in self.blocks)


def load_model(path: Path, config: ModelConfig | None = None, family: str | None = None) -> ModelSizes:
    """Read the model of a config.json, or of a folder that holds one; a given `config` of the path is not read again.

    `family` is the model type of a family under which the config is read in place of its own.

    Raises:
        ModelError: the config cannot be read, or the model has more than 10**15 parameters.
    """
    model = ModelSizes(config or read_config(path, family))
    if model.total > _MAX_PARAMETERS:
        raise ModelError(f"{path} describes more than {_MAX_PARAMETERS:.0e} parameters; a plan takes no more")
    return model
