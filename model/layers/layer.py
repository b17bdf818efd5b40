"""Interface of a layer: weights, caches, constants, launches, and the reference."""

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
    """Layer of a model, for every device and for the reference.

    A layer with a true `mixes` has launches for steps that mix prompts with sequences that decode. `component` is the
    component of a model under which plans count its weights (`plan.sizes`).
    """

    component: ClassVar[str]

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights on a rank."""

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the caches that a rank keeps between steps; they are zero at the start of a sequence."""

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return arrays that are neither weights nor caches, by name; layers share arrays of the same name."""

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of one step in order; the first reads `x` and the last returns `x`."""

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Compute the layer in NumPy for one sequence, with whole weights; updates `states`.

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
    """Return the arrays of all caches of a layer."""
    return [array for cache in layer.caches(step) for array in cache.arrays]
