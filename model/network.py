"""Networks: sections of layers with named inputs and outputs, for execution, prediction and planning.

`compose` in `model.families` puts a network together from a config. A stack is one checkpoint tensor that holds the
tensors of several experts or layers along its first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain

import numpy as np

from model.layers.launch import INT32, Phase, StepShape
from model.layers.layer import Layer
from model.layers.shard import Shape
from model.layers.weight import Tensor, Weight, Zeros

Section = tuple[Layer, ...]
"""Consecutive layers that are launched together, such as attention and MLP of one decoder layer."""


class Sharding(Enum):
    """Division of a host array of a step among the ranks of a data-parallel group."""

    replicated = "every rank has the whole array"
    rows = "a rank has its rows of the array, where ranks cut the rows of a prefill step"
    row_indices = (
        "a rank has the indices of rows as indices among its rows; the number of its rows for other rows"
    )
    vocabulary = "a rank has the columns of its part of the vocabulary"


@dataclass(frozen=True)
class Input:
    """Host array of a step: its name in the launch list, its sharding, and its dtype on the device.

    A dtype of None means the dtype of the activations. Integers that are drawn for a step are 1 to `most`.
    """

    name: str
    sharding: Sharding = Sharding.replicated
    dtype: np.dtype | None = INT32
    most: int = 1


@dataclass(frozen=True)
class Network:
    """Layers in sections, the host arrays that a step needs, and its results.

    sections         layers in order; a pipeline is cut between inner sections
    inputs           the host arrays of a step by name
    outputs          names of the results that are copied to the host
    before           networks on the same ranks that run before this one and write states for it, by name
    window           rows of each sequence if all steps have the same number; 0 if the step determines it
    unread           tensors that a checkpoint may hold although no layer reads them
    unread_prefixes  beginnings of the names of more such tensors
    bare_prefix      prefix of tensor names that checkpoints without the last section may omit
    stacks           checkpoint tensors that contain tensors of several layers, and the names of these
    """

    sections: tuple[Section, ...]
    inputs: Mapping[str, Input]
    outputs: tuple[str, ...]
    before: Mapping[str, Network] = field(default_factory=dict)
    window: int = 0
    unread: tuple[str, ...] = ()
    unread_prefixes: tuple[str, ...] = ()
    bare_prefix: str = ""
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def exact(self) -> frozenset[str]:
        """Names of the checkpoint tensors that are float32 on a device with any dtype of activations."""
        return frozenset(tensor.name for weight in self.weights for tensor in weight.tensors if tensor.exact)

    def is_unread(self, name: str) -> bool:
        """Return whether a checkpoint may have a tensor called `name` although no layer reads it."""
        return name in self.unread or name.startswith(self.unread_prefixes)

    @property
    def blocks(self) -> tuple[Section, ...]:
        """Sections without the first and the last one: the layers of a decoder between its embedding and its head."""
        return self.sections[1:-1]

    @property
    def layers(self) -> Iterator[Layer]:
        """Layers of this network in order, without the networks in `before`."""
        return chain.from_iterable(self.sections)

    @property
    def mixes(self) -> bool:
        """Whether all layers of this network support steps that compute prompts and decode other sequences."""
        return all(getattr(layer, "mixes", False) for layer in self.layers)

    @property
    def all_layers(self) -> Iterator[Layer]:
        """Layers in order; the layers of networks in `before` come first."""
        return chain(*(network.layers for network in self.before.values()), self.layers)

    @property
    def weights(self) -> Iterator[Weight]:
        """Weights of all layers in order, with the networks in `before`."""
        return (weight for layer in self.all_layers for weight in layer.weights)

    @property
    def block_weights(self) -> Iterator[Weight]:
        """Weights of the layers in `blocks`, in order; embedding, head and networks in `before` are left out."""
        return (weight for section in self.blocks for layer in section for weight in layer.weights)

    def step(self, step: StepShape) -> StepShape:
        """Return the sizes with which this network runs in a step of the model with the sizes `step`.

        These are the same sizes, or for a network with a `window`, such as a speech encoder, a prefill of all rows of
        the window of each sequence, without pages, slots and sampling.
        """
        if not self.window:
            return step
        return replace(
            step,
            phase=Phase.prefill,
            tokens=self.window * step.sequences,
            cache_length=self.window,
            context=self.window,
            padded=False,
            pages=0,
            window_pages=(),
            block_size=0,
            prefix=0,
            slots=0,
            draws=None,
        )

    def list_layer_tensor_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors that layers read, by name; members of stacks are separate tensors.

        A member's name is that of `name_in_stack`. Tensors of networks in `before` are included.
        """
        tensors: Iterator[Tensor] = (tensor for weight in self.weights for tensor in weight.tensors)
        return {tensor.name: tensor.shape for tensor in tensors if not isinstance(tensor, Zeros)}

    def list_tensor_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensors that a checkpoint must have, by name, with each stack as one tensor."""
        shapes = self.list_layer_tensor_shapes()
        for stack, names in self.stacks.items():
            shape, *_ = (shapes.pop(name) for name in names)
            shapes[stack] = (len(names), *shape)
        return shapes


def name_in_stack(stack: str, index: int) -> str:
    """Return the name, "<stack>[<index>]", that layers use for one tensor of a stacked checkpoint tensor."""
    return f"{stack}[{index}]"
