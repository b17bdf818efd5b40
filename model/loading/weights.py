"""Weights of the ranks: every weight of a checkpoint cut once, into the layout the kernels want."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from model.config import Config
from model.errors import ModelError, check_memory
from model.families import compose
from model.formats import Format
from model.formats import Weight as StoredWeight
from model.layers.launch import WeightDtypes
from model.layers.layer import Layer
from model.layers.precision import activation_dtype
from model.layers.shard import Shard
from model.layers.weight import Weight


@dataclass(frozen=True)
class RankWeights:
    """The weights of one rank by their names in the layers; `dtype` is that of activations and states.

    `formats` are those of the weights whose stored tensors kernels read: the arrays of such a weight have its name and
    those of its tensors, such as `layers.0.mlp.w_up` and `layers.0.mlp.w_up_scales`.
    """

    shard: Shard
    dtype: np.dtype
    arrays: Mapping[str, np.ndarray]
    formats: Mapping[str, Format] = field(default_factory=dict)

    def of(self, weight: Weight) -> dict[str, np.ndarray]:
        """Return the arrays of a weight by name."""
        return {name: self.arrays[name] for name in weight.describe(self.shard, self.dtypes)}

    @cached_property
    def dtypes(self) -> WeightDtypes:
        """The dtypes of the arrays."""
        return WeightDtypes.from_names(
            {name: array.dtype for name, array in self.arrays.items()}, self.formats
        )


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape; as the checkpoint holds it."""
    return compose(config).tensor_shapes()


def check_ranks(config: Config, ranks: int) -> None:
    """Raise ModelError where `ranks` ranks cannot share this model."""
    if ranks < 1:
        raise ModelError(f"tensor parallelism over {ranks} ranks; at least 1 is needed")
    refusal = config.refusal(ranks)
    if refusal is not None:
        raise ModelError(refusal)


def shard_weights(
    config: Config,
    weights: Mapping[str, StoredWeight],
    ranks: int,
    own: Sequence[Shard] | None = None,
    taken: Callable[[], None] = lambda: None,
    dtype: str = "float32",
    layers: Iterable[Layer] | None = None,
) -> tuple[RankWeights, ...]:
    """Cut a checkpoint for `ranks` ranks, or for the shards `own`; ModelError if they cannot share the model.

    With `layers` only the weights of these, such as those of a stage, are read and held.
    `taken` is called after each layer, so that the checkpoint can let go of what has been read. `dtype` (float32,
    bfloat16 or auto) is that of the activations; beside float32 ones weights keep the checkpoint's dtype, beside
    bfloat16 ones they are rounded to bfloat16. Ranks share what they hold alike.
    """
    check_ranks(config, ranks)
    activations = activation_dtype(dtype, config, weights)
    network = compose(config)
    shards = [Shard(rank, ranks) for rank in range(ranks)] if own is None else own
    held_layers = list(network.all_layers if layers is None else layers)
    distinct = {each.name: each for layer in held_layers for each in layer.weights}
    nbytes = (
        prod(weight.shape(shard)) * weight.held_dtype(weights, activations).itemsize
        for weight in distinct.values()
        for shard in shards
    )
    check_memory(sum(nbytes), f"the weights of {len(shards)} rank{'s' if len(shards) > 1 else ''}")
    held: list[dict[str, np.ndarray]] = [{} for _ in shards]
    formats: dict[str, Format] = {}
    for layer in held_layers:
        for weight in layer.weights:
            format = weight.kernel_format(weights, kernel_parameters)
            if format is not None:
                formats[weight.name] = format
            arrays_by_key: dict[object, dict[str, np.ndarray]] = {}
            for arrays, shard in zip(held, shards):
                key = weight.content_key(shard)
                if key not in arrays_by_key:
                    arrays_by_key[key] = _take(weight, weights, shard, activations, format)
                arrays |= arrays_by_key[key]
        taken()
    return tuple(RankWeights(shard, activations, arrays, formats) for shard, arrays in zip(shards, held))


def kernel_parameters(kernel: str) -> Collection[str]:
    """Return the names of a kernel's parameters; kernels and simulator are imported by the first call alone."""
    from model import device

    return device.kernel_parameters(kernel)


def _take(
    weight: Weight,
    weights: Mapping[str, StoredWeight],
    shard: Shard,
    activations: np.dtype,
    format: Format | None,
) -> dict[str, np.ndarray]:
    if format is None:
        return {weight.name: weight.take(weights, shard, activations)}
    return weight.take_stored(weights, shard, format)


def weight_dtypes(
    weights: Iterable[Weight], checkpoint: Mapping[str, StoredWeight], activations: np.dtype
) -> WeightDtypes:
    """Return the dtypes that the arrays of weights will have, without reading the checkpoint's tensors."""
    dtypes: dict[str, np.dtype] = {}
    formats: dict[str, Format] = {}
    for weight in weights:
        format = weight.kernel_format(checkpoint, kernel_parameters)
        if format is None:
            dtypes[weight.name] = weight.held_dtype(checkpoint, activations)
        else:
            formats[weight.name] = format
    return WeightDtypes.from_names(dtypes, formats)


def weights_of_all(config: Config, one: RankWeights) -> tuple[RankWeights, ...]:
    """Weights for dry runs of all ranks: right in shapes and dtypes, which `one` of them has, without memory."""

    def alike(weight: Weight, shard: Shard) -> dict[str, np.ndarray]:
        described = weight.describe(shard, one.dtypes)
        return {
            name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in described.items()
        }

    weights = list(compose(config).weights)
    tensor, experts = one.shard.ranks, one.shard.expert_ranks
    shards = [Shard(rank, tensor, expert, experts) for expert in range(experts) for rank in range(tensor)]
    return tuple(
        RankWeights(
            shard,
            one.dtype,
            {name: array for weight in weights for name, array in alike(weight, shard).items()},
            one.formats,
        )
        for shard in shards
    )
