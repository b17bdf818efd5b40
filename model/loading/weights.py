"""Weights of ranks: each weight of a checkpoint is cut once, into the layout of the kernels.

A rank is one of the devices among which tensor and expert parallelism divide the weights; a `Shard` says which one.
Devices and dry runs take the resulting `RankWeights`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np

from model.config import Config
from model.errors import ModelError, check_memory
from model.families import compose
from model.formats import Container, Format, QuantisedWeight
from model.formats import Weight as StoredWeight
from model.layers.launch import WeightDtypes
from model.layers.layer import Layer
from model.layers.precision import choose_activation_dtype
from model.layers.shard import Shard
from model.layers.weight import Weight
from model.loading.cuts import describe_cuts


@dataclass(frozen=True)
class RankWeights:
    """Weights of a rank.

    shard    the rank's shard of the model
    dtype    dtype of activations and states
    arrays   arrays by name in the layers
    formats  formats of the weights whose stored tensors kernels read, by name. Such a weight has an array for each
             tensor, such as `layers.0.mlp.w_up` and `layers.0.mlp.w_up_scales`.
    """

    shard: Shard
    dtype: np.dtype
    arrays: Mapping[str, np.ndarray]
    formats: Mapping[str, Format] = field(default_factory=dict)

    def select(self, weight: Weight) -> dict[str, np.ndarray]:
        """Return the arrays of this rank for a layer's weight by name: one, or one for each stored tensor.

        Raises KeyError if the layer of the weight was not among the layers that were cut.
        """
        return {name: self.arrays[name] for name in weight.describe(self.shard, self.dtypes)}

    @cached_property
    def dtypes(self) -> WeightDtypes:
        """Dtypes of the arrays and formats of the weights, as a step's `StepShape.weights`."""
        return WeightDtypes.from_names(
            {name: array.dtype for name, array in self.arrays.items()}, self.formats
        )


def check_ranks(config: Config, ranks: int) -> None:
    """Raise ModelError if `ranks` is below 1, or if so many tensor-parallel ranks cannot share the model."""
    if ranks < 1:
        raise ModelError(f"tensor parallelism over {ranks} ranks; at least 1 is needed")
    refusal = config.refusal(ranks)
    if refusal is not None:
        raise ModelError(refusal)


def shard_weights(
    config: Config,
    weights: Mapping[str, StoredWeight],
    ranks: int,
    shards: Sequence[Shard] | None = None,
    after_layer: Callable[[], None] = lambda: None,
    dtype: str = "float32",
    layers: Iterable[Layer] | None = None,
) -> tuple[RankWeights, ...]:
    """Return copies of the parts of a checkpoint's weights that ranks hold, in the order of `shards`.

    Shards with equal elements of a weight share one array.

    Args:
        config: the model.
        weights: the checkpoint by the layers' names, of `open_checkpoint`.
        ranks: tensor-parallel ranks of the model.
        shards: the shards to cut; None for the shards of all ranks.
        after_layer: called after each layer, so that the memory of its checkpoint tensors can be released.
        dtype: dtype of activations: float32, bfloat16 or auto. With float32, weights keep the checkpoint's dtype; with
            bfloat16, they are rounded to bfloat16.
        layers: the layers whose weights are read, such as those of a pipeline stage; None for all.

    Warns:
        UserWarning: ranks cut inside blocks that share a scale, so that weights are widened. The warning lists numbers
            of ranks, up to twice `ranks`, that do not.

    Raises:
        ModelError: the ranks cannot share the model, or the weights exceed the memory of this machine.
    """
    check_ranks(config, ranks)
    activations = choose_activation_dtype(dtype, config, weights)
    network = compose(config)
    shards = [Shard(rank, ranks) for rank in range(ranks)] if shards is None else shards
    layers = list(network.all_layers if layers is None else layers)
    distinct = {weight.name: weight for layer in layers for weight in layer.weights}
    nbytes = {
        (name, weight.compute_content_key(shard)): prod(weight.shape(shard))
        * weight.choose_device_dtype(weights, activations).itemsize
        for name, weight in distinct.items()
        for shard in shards
    }
    check_memory(sum(nbytes.values()), f"the weights of {len(shards)} rank{'s' if len(shards) > 1 else ''}")
    shard_arrays: list[dict[str, np.ndarray]] = [{} for _ in shards]
    kernel_formats = {
        name: weight.find_kernel_format(weights, list_kernel_parameters) for name, weight in distinct.items()
    }
    readable = {name: format for name, format in kernel_formats.items() if format is not None}
    counts = [count for count in range(1, 2 * ranks + 1) if config.refusal(count) is None]
    for sentence in describe_cuts(distinct, readable, ranks, counts):
        warnings.warn(sentence, UserWarning, stacklevel=2)
    dtypes = WeightDtypes(activations, formats=frozenset(readable.items()))
    found_formats = {name: weight.find_format(shards[0], dtypes) for name, weight in distinct.items()}
    formats = {name: format for name, format in found_formats.items() if format is not None}
    for layer in layers:
        for weight in layer.weights:
            format = formats.get(weight.name)
            arrays_by_key: dict[object, dict[str, np.ndarray]] = {}
            for arrays, shard in zip(shard_arrays, shards):
                key = weight.compute_content_key(shard)
                if key not in arrays_by_key and format is not None:
                    arrays_by_key[key] = weight.take_stored(weights, shard, format)
                elif key not in arrays_by_key:
                    arrays_by_key[key] = {weight.name: weight.take(weights, shard, activations)}
                arrays |= arrays_by_key[key]
        after_layer()
    return tuple(
        RankWeights(shard, activations, arrays, formats) for shard, arrays in zip(shards, shard_arrays)
    )


def list_kernel_parameters(kernel: str) -> Collection[str]:
    """Return the parameter names of the kernel called `kernel` in nki_kernels.

    The first call imports the kernels and the simulator.
    """
    from model import device

    return device.list_kernel_parameters(kernel)


def plan_weight_dtypes(
    weights: Iterable[Weight], container: Container | None, dtype: np.dtype
) -> WeightDtypes:
    """Return the dtypes of weights without a checkpoint: `dtype`, and the formats of those that kernels read stored.

    `container` gives the format of each weight; None means that no weight is quantised.
    """
    planned = (
        (weight.name, weight.find_planned_format(container, list_kernel_parameters)) for weight in weights
    )
    return WeightDtypes(dtype, formats=frozenset((name, format) for name, format in planned if format))


def choose_weight_dtypes(
    weights: Iterable[Weight], checkpoint: Mapping[str, StoredWeight], activations: np.dtype
) -> WeightDtypes:
    """Return the dtypes and formats that the arrays of weights will have with a dtype of activations.

    `checkpoint` has the stored tensors by name; their elements are not read.
    """
    dtypes: dict[str, np.dtype] = {}
    formats: dict[str, Format] = {}
    for weight in weights:
        # Ranks that cut inside a block widen the weight to this dtype.
        dtypes[weight.name] = weight.choose_device_dtype(checkpoint, activations)
        format = weight.find_kernel_format(checkpoint, list_kernel_parameters)
        if format is not None:
            formats[weight.name] = format
    return WeightDtypes.from_names(dtypes, formats)


def find_row_formats(
    weights: Iterable[Weight], checkpoint: Mapping[str, StoredWeight], ranks: int
) -> dict[str, Format]:
    """Return the formats of checkpoint tensors by name before whose products kernels round rows to 8 bits.

    Kernels do not round rows of weights that they get widened, nor without the parameter `quantises_rows`.

    Args:
        weights: weights of the layers.
        checkpoint: the stored tensors by name.
        ranks: tensor-parallel ranks, which may cut a weight so that it is widened.
    """
    formats: dict[str, Format] = {}
    stored = checkpoint.values()
    if not any(isinstance(weight, QuantisedWeight) and weight.format.quantises_rows for weight in stored):
        return formats
    for weight in weights:
        if weight.reader is None or "quantises_rows" not in list_kernel_parameters(weight.reader[0]):
            continue
        format = weight.find_kernel_format(checkpoint, list_kernel_parameters)
        if format is not None and format.quantises_rows and weight.can_be_cut(format, ranks):
            formats |= {tensor.name: format for tensor in weight.tensors}
    return formats


def adapt_weights(weights: Mapping[str, StoredWeight], target: str) -> dict[str, StoredWeight]:
    """Return weights by name whose formats say what kernels read on a chip; their tensors are not read.

    target: the name of a chip or of an instance.
    """
    from model import device  # loads the simulator

    chip = device.chip(target)
    return {
        name: replace(weight, format=weight.format.adapt_to_chip(chip))
        if isinstance(weight, QuantisedWeight)
        else weight
        for name, weight in weights.items()
    }


def describe_all_ranks(
    config: Config, dtypes: WeightDtypes, activations: np.dtype, shards: Sequence[Shard]
) -> tuple[RankWeights, ...]:
    """Return the weights of ranks for dry runs: read-only zeros of the right shapes and dtypes, without memory.

    Args:
        config: the model.
        dtypes: dtypes of the arrays, and formats of the weights.
        activations: dtype of activations.
        shards: the shards of the ranks.
    """
    weights = list(compose(config).weights)
    return tuple(
        RankWeights(
            shard,
            activations,
            {
                name: np.broadcast_to(np.zeros((), dtype), shape)
                for weight in weights
                for name, (shape, dtype) in weight.describe(shard, dtypes).items()
            },
            dict(dtypes.formats),
        )
        for shard in shards
    )
