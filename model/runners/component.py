"""Runners of the components of a diffusion model, in NumPy or with kernels on a device.

The first input of a component's network is the `x` of its first layer, and the first output is the `x` of its last
layer. In a reference further inputs and outputs are states. A batch has one row of each input and output for each
image or text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from model.config.component import ComponentConfig
from model.errors import ModelError
from model.execution.bound_launch import Device
from model.execution.launched_network import LaunchedNetwork, Progress, RankArrays
from model.layers.arithmetic import Arithmetic, Span
from model.layers.denoiser.attention import ImageAttention
from model.layers.denoiser.joint_attention import JointAttention
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import States
from model.layers.precision import FLOAT32
from model.layers.shard import Shard
from model.loading.component import LoadedComponent
from model.loading.weights import RankWeights, find_row_formats
from model.network import Network
from model.runners.image_mesh import count_ulysses_ranks, create_mesh, divide_rows, join_rows

WIDENED_BYTES = 2**30
"""Most memory of the float32 copies of a component's weights that a reference keeps."""

Arrays = dict[str, np.ndarray]


class Component(Protocol):
    """Component that computes a batch of images or texts."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs of the component's network by name, float32 [batch, ...] each.

        Args:
            inputs: The inputs of the network by name, [batch, ...] each.
        """


class ReferenceComponent:
    """Component in NumPy, which computes one image or text after another.

    Args:
        model: The opened component, whose config has the size of its inputs.
        ranks: Activations are rounded as on a device of so many ranks.
        arithmetic: Class of the arithmetic, or a function with the same arguments, to observe what layers compute.
    """

    def __init__(
        self, model: LoadedComponent, ranks: int = 1, arithmetic: Callable[..., Arithmetic] = Arithmetic
    ) -> None:
        self._network = model.network
        assert model.checkpoint is not None, "a component that is planned only"
        mesh = create_mesh(model.config, ranks)
        row_formats = find_row_formats(self._network.weights, model.checkpoint, mesh.tensor)
        self._numpy = arithmetic(
            model.checkpoint,
            model.activations,
            WIDENED_BYTES,
            mesh.tensor,
            self._network.exact,
            row_formats=row_formats,
            ulysses_ranks=mesh.ulysses,
        )
        self._span = Span(0, model.config.rows)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs by name, float32 [batch, ...] each; see `Component`."""
        batch = [
            self._run_one({name: array[index] for name, array in inputs.items()})
            for index in range(len(next(iter(inputs.values()))))
        ]
        return {name: np.stack([outputs[name] for outputs in batch]) for name in self._network.outputs}

    def _run_one(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs of one image or text by name."""
        states: States = {}
        (x,) = deque(self.iterate_layers(inputs, states), maxlen=1)
        first_output, *_ = self._network.outputs
        return {**states, first_output: x}

    def iterate_layers(self, inputs: Mapping[str, np.ndarray], states: States) -> Iterator[np.ndarray]:
        """Yield the `x` of one image or text after each layer.

        Args:
            inputs: The inputs of the image or text by name.
            states: Receives the further inputs, and what layers set.
        """
        first, *state_names = self._network.inputs
        states.update({name: np.asarray(inputs[name]) for name in state_names})
        x = np.asarray(inputs[first])
        for layer in self._network.layers:
            x = layer.reference(x, self._span, states, self._numpy)
            yield x


class KernelComponent:
    """Component with kernels on a device, for batches of one size.

    Args:
        model: The opened component, whose config has the size of its inputs.
        device: The device, whose ranks divide the component.
        batch: Number of images or texts.
        shards: Weights of all tensor-parallel ranks; None to load them.
        progress: Called when sections of the network are finished.
        groups: Data-parallel groups of the device's ranks, which share the batch; each has all weights.

    Raises:
        ModelError: A kernel refuses a launch of the component, or weights or states exceed the memory of this machine.
    """

    def __init__(
        self,
        model: LoadedComponent,
        device: Device,
        batch: int,
        shards: Sequence[RankWeights] | None = None,
        progress: Progress = lambda done, sections: None,
        groups: int = 1,
    ) -> None:
        mesh, network = create_mesh(model.config, device.ranks, groups), model.network
        shards = model.load_shards(mesh) if shards is None else shards
        group_batch = mesh.count_group_sequences(batch)
        step = make_step(model.config, shards[0].dtype, shards[0].dtypes, group_batch, mesh.tensor)
        step = replace(step, bounded=_find_bounded_layers(model, shards[0].arrays))
        _check_launches(network, step, batch)
        self._device, self._mesh, self._step, self._batch = device, mesh, step, batch
        self._local_shapes = _list_input_shapes(network, step)
        whole_step = replace(step, tokens=step.tokens * mesh.ulysses, ulysses_ranks=1)
        self._shapes = _list_input_shapes(network, whole_step)
        self._launched = LaunchedNetwork(network, shards, device, step, mesh, f"a batch of {batch}", progress)

    def create_inputs(self) -> Arrays:
        """Return zeros as the inputs of a batch, for dry runs."""
        rows = self._batch, self._step.sequences
        return {
            name: np.zeros((rows[0], shape[0] // rows[1], *shape[1:]), FLOAT32)
            for name, shape in self._shapes.items()
        }

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs by name, float32 [batch, ...] each; see `Component`."""
        groups = self._mesh.data // self._mesh.ulysses
        padding = groups * self._step.sequences - self._batch
        arrays = {}
        for name, array in inputs.items():
            batch = np.concatenate([array, *[array[-1:]] * padding]).reshape(groups, *self._shapes[name])
            arrays[name] = divide_rows(batch, self._local_shapes[name], self._mesh.ulysses)
        with self._device.session():
            outputs = self._launched.run(self._step, arrays)
        return {name: self._join_groups(arrays) for name, arrays in outputs.items()}

    def _join_groups(self, arrays: RankArrays) -> np.ndarray:
        """Return an output as float32 [batch, ...] from its arrays on the ranks; ranks of a group have equal arrays.

        Ulysses ranks have rows of its images. A dry run has the array of rank 0 alone, which stands for those of all
        groups.
        """
        first_ranks = range(0, self._mesh.ranks, self._mesh.tensor)
        groups = [arrays[rank if rank < len(arrays) else 0] for rank in first_ranks]
        batches = [_split_batch(np.asarray(group).astype(FLOAT32), self._step.sequences) for group in groups]
        return join_rows(batches, self._mesh.ulysses)[: self._batch]


def make_step(
    config: ComponentConfig,
    activations: np.dtype,
    weights: WeightDtypes,
    batch: int = 1,
    ranks: int = 1,
) -> StepShape:
    """Return the step of a component: one pass over a batch of images or texts.

    Args:
        config: The component with the size of its inputs.
        activations: Dtype of activations.
        weights: Dtypes of weights.
        batch: Number of images or texts.
        ranks: Tensor-parallel ranks. A denoiser's config has its Ulysses ranks.
    """
    ulysses = count_ulysses_ranks(config)
    return StepShape(
        Phase.prefill,
        tokens=batch * config.rows // ulysses,
        sequences=batch,
        cache_length=config.rows,
        context=config.rows,
        ranks=ranks,
        activations=activations,
        weights=weights,
        ulysses_ranks=ulysses,
    )


def _find_bounded_layers(model: LoadedComponent, arrays: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Return the names of layers of attention whose norms of heads bound scores.

    The weights of the norms are those of the checkpoint, in dry runs too. A component that is planned only has none:
    its `arrays` are zeros, to which 1 is added, so that scores of heads of up to 4,096 elements are bounded.

    Args:
        model: The component.
        arrays: Weights of a rank by name.
    """
    layers = [layer for layer in model.network.layers if isinstance(layer, ImageAttention | JointAttention)]
    if model.checkpoint is not None:
        norms = [weight for layer in layers for weight in layer.weights if weight.component == "norms"]
        arrays = {weight.name: weight.take(model.checkpoint, Shard(0, 1)) for weight in norms}
    return frozenset(name for layer in layers for name in layer.list_bounded_layers(arrays))


def count_activation_bytes(model: LoadedComponent, batch: int = 1, ranks: int = 1) -> int:
    """Return the bytes of the arrays that the launches of a pass read beside weights and constants, on one rank.

    Arrays of one name share memory, so the largest counts. Results that no launch reads are not counted.

    Args:
        model: The opened component, whose config has the size of its inputs.
        batch: Number of images or texts.
        ranks: Tensor-parallel ranks.
    """
    network, activations = model.network, model.activations
    step = make_step(model.config, activations, WeightDtypes(activations), batch, ranks)
    lasting = {weight.name for layer in network.layers for weight in layer.weights}
    lasting |= {name for layer in network.layers for name in layer.constants(step)}
    largest: dict[str, int] = {}
    for layer in network.layers:
        for launch in layer.launches(step):
            for array in launch.values:
                if array.name not in lasting:
                    largest[array.name] = max(largest.get(array.name, 0), array.nbytes)
    return sum(largest.values())


def _check_launches(network: Network, step: StepShape, batch: int) -> None:
    """Raise ModelError if a kernel refuses a launch of a pass over a batch."""
    for layer in network.layers:
        for launch in layer.launches(step):
            if launch.refusal is not None:
                raise ModelError(f"a batch of {batch}: {launch.refusal}", "NKW-MODEL-OPTION")


def _list_input_shapes(network: Network, step: StepShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes in which launches read the inputs of a network, by name."""
    launches = (launch for layer in network.layers for launch in layer.launches(step))
    arrays = (array for launch in launches for array in launch.values)
    return {array.name: array.shape for array in arrays if array.name in network.inputs}


def _split_batch(array: np.ndarray, batch: int) -> np.ndarray:
    """Return an array whose first axis is the batch, or the rows of all images, as [batch, ...]."""
    return array if len(array) == batch else array.reshape(batch, len(array) // batch, *array.shape[1:])
