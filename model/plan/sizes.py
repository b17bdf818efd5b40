"""Sizes of a model from the shapes of its layers: parameters by component, bytes of ranks and caches, multiply-adds.

All files of `model.plan` take the sizes from here. Components, as weights and layers name them:

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
from model.config.quantization import RANK, adapt_to_chip, quantise_config
from model.errors import ModelError
from model.families import compose, read_config
from model.families.packed_pages import check_packed_pages
from model.formats import Container
from model.layers.cache_formats import AUTO, CACHE_FORMATS, check_cache_dtype
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import Layer
from model.layers.paged import NEWEST, CacheGroup, Slots
from model.layers.shard import Shard
from model.loading.cuts import describe_cuts
from model.loading.weights import plan_weight_dtypes
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
    """Sizes of a section: one decoder layer, or all layers before or after the decoder layers.

    | attribute | meaning |
    |---|---|
    | `count` | number of equal sections in the model; sizes are those of one of them |
    | `experts` | config of the routed experts in the section; None without them |
    | `component` | component of all weights; if empty, each weight has its own |
    | `count_elements(tp, ep=1)` | elements of weights on a rank by component; see `_count_elements` |
    | `count_weight_bytes(tp, ep, dtype)` | bytes of weights on a rank; see `_count_weight_bytes` |
    | `count_saved_bytes(tp, ep, dtype)` | bytes that stored weights save; see `_count_saved_bytes` |
    | `count_page_bytes(tp, dtype, read=False)` | cache bytes of one position or slot; see `_count_page_bytes` |
    | `count_products(phase, tokens, tp=1)` | multiply-adds without weights; see `_count_products` |
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        count: int = 1,
        experts: Experts | None = None,
        component: str = "",
        weight_format: Container | None = None,
        cache_dtype: str = AUTO,
    ) -> None:
        self.count, self.experts, self._layers, self._weight_format = count, experts, layers, weight_format
        self._cache_dtype = cache_dtype
        self._weights = [
            (component or weight.component or layer.component, weight)
            for layer in layers
            for weight in layer.weights
        ]
        self.count_elements = lru_cache(maxsize=None)(self._count_elements)
        self.count_weight_bytes = lru_cache(maxsize=None)(self._count_weight_bytes)
        self.count_saved_bytes = lru_cache(maxsize=None)(self._count_saved_bytes)
        self.count_page_bytes = lru_cache(maxsize=None)(self._count_page_bytes)
        self.count_products = lru_cache(maxsize=None)(self._count_products)

    @cached_property
    def tensors(self) -> dict[str, tuple[str, int]]:
        """Component and number of elements of each checkpoint tensor, by the tensor's name."""
        sizes = ((component, weight.count_tensor_elements()) for component, weight in self._weights)
        return {name: (component, size) for component, tensors in sizes for name, size in tensors.items()}

    @cached_property
    def parameters(self) -> Counter[str]:
        """Number of parameters of one section, by component."""
        counts = Counter[str]()
        for component, size in self.tensors.values():
            counts[component] += size if component != "buffers" else 0
        return counts

    def compute_share_of_experts(self, tokens: int) -> float:
        """Return the expected share of the routed experts that `tokens` tokens use together.

        Each token is assumed to choose its experts at random. The share is 0 for a section without routed experts.
        """
        experts = self.experts
        return 0.0 if experts is None else 1 - (1 - experts.per_token / experts.count) ** tokens

    def count_active(self, tokens: int) -> float:
        """Return the expected number of parameters of one section that `tokens` tokens use together."""
        experts = self.parameters["experts"]
        return self.parameters.total() - experts + experts * self.compute_share_of_experts(tokens)

    def _count_elements(self, tp: int, ep: int = 1) -> Counter[str]:
        """Return the number of weight elements on a rank, by component, padding included.

        Args:
            tp: tensor-parallel ranks.
            ep: groups of `tp` ranks that divide the routed experts among them.
        """
        counts = Counter[str]()
        for component, weight in self._weights:
            counts[component] += prod(weight.shape(Shard(0, tp, 0, ep)))
        return counts

    def _count_weight_bytes(self, tp: int, ep: int, dtype: str) -> int:
        """Return the bytes of weights on a rank, padding included.

        Weights that kernels read in the model's weight format count as stored, all others in `dtype`.

        Args:
            tp: tensor-parallel ranks.
            ep: groups of `tp` ranks that divide the routed experts among them.
            dtype: float32, float16 or bfloat16.
        """
        plain = self.count_elements(tp, ep).total() * DTYPE_BYTES[dtype]
        return plain - self.count_saved_bytes(tp, ep, dtype).total()

    def _count_saved_bytes(self, tp: int, ep: int, dtype: str) -> Counter[str]:
        """Return how many bytes fewer than in `dtype` the weights of a rank take as they are stored, by component.

        The arguments are those of `_count_weight_bytes`.
        """
        saved = Counter[str]()
        if self._weight_format is None:
            return saved
        shard = Shard(0, tp, 0, ep)
        weights = [weight for _, weight in self._weights]
        dtypes = plan_weight_dtypes(weights, self._weight_format, np.dtype(np.float32))
        for component, weight in self._weights:
            if weight.find_format(shard, dtypes) is not None:
                arrays = weight.describe(shard, dtypes).values()
                stored = sum(prod(shape) * element.itemsize for shape, element in arrays)
                saved[component] += prod(weight.shape(shard)) * DTYPE_BYTES[dtype] - stored
        return saved

    def count_saved_bytes_read(self, tokens: int, tp: int, ep: int, dtype: str) -> float:
        """Return how many bytes fewer than in `dtype` a rank reads of the weights that `tokens` tokens use together.

        The other arguments are those of `_count_weight_bytes`.
        """
        saved = self.count_saved_bytes(tp, ep, dtype)
        return saved.total() - saved["experts"] * (1 - self.compute_share_of_experts(tokens))

    def _count_page_bytes(self, tp: int, dtype: str, read: bool = False) -> Counter[CacheGroup]:
        """Return the cache bytes of one position or slot on a rank, by cache group.

        Full pages of four bits have PLANNED_BLOCK_SIZE positions.

        Args:
            tp: tensor-parallel ranks.
            dtype: dtype of activations, and of caches without a format.
            read: count the caches that the section reads, those of earlier layers included, and not those that it
                keeps.
        """
        block = PLANNED_BLOCK_SIZE if CACHE_FORMATS[self._cache_dtype].packs_pages else 1
        step = replace(
            _make_step(Phase.decode, 1, tp, dtype),
            pages=1,
            window_pages=((NEWEST, 1),) if block > 1 else (),
            block_size=block,
            slots=1,
            cache_dtype=self._cache_dtype,
        )
        counts = Counter[CacheGroup]()
        for layer in self._layers:
            for cache in (getattr(layer, "read_caches", layer.caches) if read else layer.caches)(step):
                counts[cache.group] += cache.page_bytes // block
        return counts

    def count_cache_bytes(self, tokens: int, tp: int, dtype: str, read: bool = False) -> int:
        """Return the cache bytes of one sequence on a rank.

        An attention window limits the number of positions; a slot for a recurrent state counts once. Beside full pages
        of four bits a sequence has one newest page.

        Args:
            tokens: tokens of the sequence.
            tp: tensor-parallel ranks.
            dtype: dtype of the cache.
            read: count the caches that the section reads, those of earlier layers included, and not those that it
                keeps.
        """
        page_bytes = self.count_page_bytes(tp, dtype, read)
        positions = {
            group: 1 if isinstance(group, Slots) else tokens if group is None else min(tokens, group)
            for group in page_bytes
        }
        if NEWEST in page_bytes:
            positions[NEWEST] = min(tokens, PLANNED_BLOCK_SIZE)
        return sum(positions[group] * size for group, size in self.count_page_bytes(tp, dtype, read).items())

    def _count_products(self, phase: Phase, tokens: int, tp: int = 1) -> float:
        """Return the multiply-adds on a rank that involve no weights, such as queries times keys; padding included.

        Args:
            phase: prefill counts a prompt of `tokens` tokens, decode one token after `tokens` - 1 others.
            tokens: tokens of the sequence.
            tp: tensor-parallel ranks.
        """
        step = _make_step(phase, tokens, tp, "bfloat16")
        mixers = (layer for layer in self._layers if layer.component in ("attention", "mixer"))
        launches = (launch for layer in mixers for launch in layer.launches(step))
        return sum(launch.work.beside_weights for launch in launches) / 2


def _make_step(phase: Phase, tokens: int, tp: int, dtype: str) -> StepShape:
    """Return the step of one sequence on one of `tp` ranks, without pages.

    Args:
        phase: prefill for a prompt of `tokens` tokens, decode for the last token of a sequence of `tokens` tokens.
        tokens: tokens of the sequence.
        tp: tensor-parallel ranks.
        dtype: dtype of activations and weights.
    """
    elements = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = tokens if phase is Phase.prefill else 1
    return StepShape(phase, rows, 1, tokens, tokens, tp, elements, WeightDtypes(elements))


PLANNED_BLOCK_SIZE = 16
"""Positions of a page for which caches of full pages in four bits are planned, the default of an engine."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one model: parameters, cache bytes and multiply-adds, over all layers.

    `cache_dtype` is the name of the cache format, one of `CACHE_FORMATS`.
    """

    config: ModelConfig
    cache_dtype: str = AUTO

    def on_chip(self, target: str) -> ModelSizes:
        """Return the sizes of the model on a chip, some of which multiply formats that others widen when they load."""
        return replace(self, config=adapt_to_chip(self.config, target))

    @cached_property
    def network(self) -> Network:
        """Layers of the model."""
        return compose(self.config)

    @cached_property
    def blocks(self) -> tuple[LayerSizes, ...]:
        """Sizes of the distinct decoder layers, each with the number of equal ones."""
        first = dict(zip(reversed(self.config.blocks), reversed(self.network.blocks)))
        return tuple(
            LayerSizes(
                first[block],
                count,
                block.mlp if isinstance(block.mlp, Experts) else None,
                weight_format=self.config.weight_format,
                cache_dtype=self.cache_dtype,
            )
            for block, count in Counter(self.config.blocks).items()
        )

    def list_quantised_readers(self) -> list[str]:
        """Return the names of the kernels that read weights of decoder layers as quantised, each once."""
        format = self.config.weight_format
        if format is None:
            return []
        weights = list(self.network.block_weights)
        planned = plan_weight_dtypes(weights, format, np.dtype(np.float32))
        readers = (
            w.reader[0] for w in weights if w.reader is not None and planned.find_format(w.name) is not None
        )
        return list(dict.fromkeys(readers))

    def describe_cuts(self, tp: int, counts: Sequence[int]) -> list[str]:
        """Return sentences on weights of decoder layers that `tp` ranks cut inside blocks that share a scale.

        Of the numbers of ranks in `counts`, a sentence names those that cut between blocks.
        """
        if self.config.weight_format is None:
            return []
        weights = {weight.name: weight for weight in self.network.block_weights}
        planned = plan_weight_dtypes(weights.values(), self.config.weight_format, np.dtype(np.float32))
        return list(describe_cuts(weights, dict(planned.formats), tp, counts))

    @cached_property
    def embedding(self) -> LayerSizes:
        """Sizes of the layers before the decoder layers."""
        return LayerSizes(self.network.sections[0])

    @cached_property
    def head(self) -> LayerSizes:
        """Sizes of the layers after the decoder layers."""
        return LayerSizes(self.network.sections[-1])

    @cached_property
    def aside(self) -> LayerSizes:
        """Sizes of the vision tower or speech encoder, which a generated token does not pass.

        Most models have no such layers; all sizes are then 0.
        """
        before = self.network.before.values()
        return LayerSizes([layer for network in before for layer in network.layers], component="aside")

    @property
    def sections(self) -> tuple[LayerSizes, ...]:
        """All layers: embedding, distinct decoder layers, head and aside."""
        return (self.embedding, *self.blocks, self.head, self.aside)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.config.blocks)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Number of parameters by component, in the order of `COMPONENTS`; a tied head counts 0."""
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

    def count_component_bytes(self, dtype: str) -> dict[str, int]:
        """Return the bytes of the weights of a rank alone, by component, in the order of `parameters`.

        Weights that kernels read in the model's weight format count as stored, all others in `dtype`.
        """
        saved = Counter[str]()
        for section in self.sections:
            for component, nbytes in section.count_saved_bytes(1, 1, dtype).items():
                saved[component] += section.count * nbytes
        return {
            shown: count * DTYPE_BYTES[dtype] - sum(saved[component] for component in COMPONENTS[shown])
            for shown, count in self.parameters.items()
        }

    @property
    def total(self) -> int:
        """Number of all parameters; a tied head counts once, as the embedding."""
        return sum(self.parameters.values())

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the output projection; of a tied one, those of the embedding's table."""
        return self.head.parameters["head"]

    def count_parameters_read(self, tokens: int) -> float:
        """Return the expected number of parameters that a pass of `tokens` tokens reads from memory.

        The embedding's table counts as read, although a lookup reads one row of it, because published estimates divide
        all parameters by the bandwidth. The table of the inputs of every layer does not count.
        """
        blocks = sum(section.count * section.count_active(tokens) for section in self.blocks)
        embedding = self.embedding.parameters.total() - self.embedding.parameters["rows"]
        return blocks + embedding + self.parameters["head"] + self.head.parameters["norms"]

    def count_bytes_read(self, tokens: int, dtype: str) -> float:
        """Return the expected bytes of weights that a pass of `tokens` tokens reads from memory.

        Weights that kernels read in the model's weight format count as stored, all others in `dtype`. The parameters
        are those of `count_parameters_read`.
        """
        saved = self.head.count_saved_bytes_read(tokens, 1, 1, dtype) + sum(
            section.count * section.count_saved_bytes_read(tokens, 1, 1, dtype) for section in self.blocks
        )
        return DTYPE_BYTES[dtype] * self.count_parameters_read(tokens) - saved

    @property
    def active(self) -> int:
        """Expected number of parameters that one token is multiplied with, without the output projection."""
        blocks = sum(section.count * section.count_active(1) for section in self.blocks)
        return round(blocks) + self.embedding.parameters["projections"]

    def count_cache_bytes(self, tokens: int, dtype: str, tp: int = 1, read: bool = False) -> int:
        """Return the cache bytes of one sequence of `tokens` tokens on one of `tp` ranks.

        Args:
            tokens: tokens of the sequence.
            dtype: dtype of the cache.
            tp: tensor-parallel ranks.
            read: return the bytes that a decode step reads. Layers that share a cache each read it, and each counts.
        """
        return sum(
            section.count * section.count_cache_bytes(tokens, tp, dtype, read) for section in self.blocks
        )

    def count_page_bytes(self, tp: int, dtype: str) -> Counter[CacheGroup]:
        """Return the cache bytes of one position or slot on one of `tp` ranks, by cache group.

        A cache group is an attention window, None for attention to all positions, or `STATES` for recurrent layers.
        """
        counts = Counter[CacheGroup]()
        for section in self.blocks:
            for group, size in section.count_page_bytes(tp, dtype).items():
                counts[group] += section.count * size
        return counts

    def count_products(self, phase: Phase, tokens: int) -> float:
        """Return the multiply-adds of all layers that involve no weights, such as queries times keys.

        Args:
            phase: prefill counts a prompt of `tokens` tokens, decode one token after `tokens` - 1 others.
            tokens: tokens of the sequence.
        """
        return sum(section.count * section.count_products(phase, tokens) for section in self.blocks)


def load_model(
    path: Path,
    config: ModelConfig | None = None,
    family: str | None = None,
    quantization: str | None = None,
    cache_dtype: str = AUTO,
    row_scales: str = RANK,
) -> ModelSizes:
    """Return the sizes of the model that a config describes.

    Args:
        path: a config.json, or a folder that contains one.
        config: the config of that path if it has been read before.
        family: model type of a family, under which the config is read in place of its own; None: its own.
        quantization: the scheme by which plain weights are quantised, see `quantise_config`; None: as the config says.
        cache_dtype: name of the cache format.
        row_scales: scales of quantised rows whose columns ranks divide, see `quantise_config`.

    Raises:
        ModelError: the config cannot be read, the scheme does not fit it, no cache format has the name, the format is
            not for the model, or the model has more than 10**15 parameters.
    """
    check_cache_dtype(cache_dtype)
    config = quantise_config(config or read_config(path, family), quantization, row_scales)
    model = ModelSizes(config, cache_dtype)
    check_packed_pages(model.config, cache_dtype)
    if model.total > _MAX_PARAMETERS:
        raise ModelError(
            f"{path} describes more than {_MAX_PARAMETERS:.0e} parameters; a plan takes no more: check its sizes"
        )
    return model
