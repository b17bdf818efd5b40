"""Interface of a layer: weights, caches, constants, launches, and the reference.

A family in `model.families` puts layers together to a `Network`. Execution, prediction and planning read a layer
through this interface; the numpy runner calls `reference`.
"""

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
"""Function that returns the array of a rank from the rank's shard."""

States = dict[str, np.ndarray]
"""Caches and intermediate results of a reference by name."""


class Layer(Protocol):
    """Layer of a model, for every device and for the reference.

    A layer with a true `mixes` has launches for steps that mix prompts with sequences that decode. `component` is the
    component of a model under which plans count its weights (`plan.sizes`).
    """

    component: ClassVar[str]

    @property
    def weights(self) -> Sequence[Weight]:
        """Descriptions of the weight arrays that a rank holds for this layer."""

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return descriptions of the caches that a rank keeps between steps; zero at the start of a sequence."""

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute a rank's arrays that are neither weights nor caches, by array name.

        Layers share arrays of the same name.
        """

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of one step in order; the first reads the array `x`, and the last returns a new `x`."""

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Compute the layer in NumPy for the new tokens of one sequence, with the weights of all ranks.

        Returns the hidden states after the layer, float32 [tokens, hidden], and updates `states` in place.

        Args:
            x: [tokens, …], hidden states in float32; token ids for an embedding.
            span: Positions of the tokens.
            states: Caches and intermediate results by name, kept between steps.
            numpy: The arithmetic.
        """


class Stateless:
    """Layer without caches and constants."""

    mixes: ClassVar[bool] = True
    component: ClassVar[str] = "mlp"

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return no caches."""
        return ()

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return no constants."""
        return {}


def list_states(layer: Layer, step: StepShape) -> list[Value]:
    """Return the arrays of all caches of a layer on a rank, as names with shapes and dtypes."""
    return [array for cache in layer.caches(step) for array in cache.arrays]
