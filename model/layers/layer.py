"""The interface of a layer: weights, states, constants, launches, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.cache import Cache
from model.layers.launch import Launch, StepShape, Value
from model.layers.shard import Shard
from model.layers.weight import Weight

Constant = Callable[[Shard], np.ndarray]
States = dict[str, np.ndarray]


class Layer(Protocol):
    """One layer of a model, for every device and for the reference.

    One with a true `mixes` has launches for steps in which sequences decode beside prompts. `component` is the
    component of a model that plans count its weights to (`plan.sizes`).
    """

    component: ClassVar[str]

    @property
    def weights(self) -> Sequence[Weight]:
        """The arrays of the checkpoint that a rank holds."""

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """The caches that a rank keeps from step to step; zeros at the start of a sequence."""

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Arrays that are neither weights nor state, by name; layers that share a name share the array."""

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """The kernels of one step, in order; the first reads and the last returns the value `x`."""

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """The layer in plain numpy: `x` [tokens, …] at the positions of `span`, whole weights, one sequence."""


class Stateless:
    """A layer that keeps nothing from step to step and needs nothing but its weights."""

    mixes: ClassVar[bool] = True
    component: ClassVar[str] = "mlp"

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """None."""
        return ()

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """None."""
        return {}


def states_of(layer: Layer, step: StepShape) -> list[Value]:
    """Return the arrays of a layer's caches."""
    return [array for cache in layer.caches(step) for array in cache.arrays]
