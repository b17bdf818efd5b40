"""Layers of text encoders around their blocks: embedding of padded texts, final norm, projection, and named states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.cache import Cache
from model.layers.embedding import Embedding
from model.layers.launch import Argument, Launch, StepShape, Value, count_product_work
from model.layers.layer import Constant, Layer, Stateless, States
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.shard import TRANSPOSED, Shard
from model.layers.weight import Weight


@dataclass(frozen=True)
class TextPositions:
    """Constant with the positions of the rows of padded texts, which all have the same number of rows."""

    texts: int
    rows: int

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return [texts * rows, 1] int32, 0 to rows - 1 for every text, equal on all ranks."""
        return np.tile(np.arange(self.rows, dtype=np.int32), self.texts)[:, None]


@dataclass(frozen=True)
class TextEmbedding(Embedding):
    """Embedding of padded texts, whose positions are a constant and no input of the step."""

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the function that computes the positions of all rows; empty without learned positions."""
        if self.learned is None:
            return {}
        return {"own_positions": TextPositions(step.sequences, step.new_tokens)}


@dataclass(frozen=True)
class NamedStates:
    """Layer that reads hidden states from the array `source` and writes them to `target`, in place of x.

    So the hidden states before a block can be an output of the network.
    """

    layer: Layer
    source: str = "x"
    target: str = "x"
    component: ClassVar[str] = "buffers"

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the layer, counted under the layer's component."""
        component = self.layer.component
        return [replace(weight, component=weight.component or component) for weight in self.layer.weights]

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the caches of the layer."""
        return self.layer.caches(step)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the constants of the layer."""
        return self.layer.constants(step)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the layer; the last one writes `target`, and x is read from `source`.

        Only the last launch of the layer may write x.
        """
        *launches, last = (self._rename(launch) for launch in self.layer.launches(step))
        assert last.results == ("x",) and all("x" not in launch.results for launch in launches)
        return (*launches, replace(last, results=(self.target,)))

    def _rename(self, launch: Launch) -> Launch:
        """Return a launch that reads the array `source` where it read x."""
        arguments: dict[str, Argument] = {
            parameter: replace(argument, name=self.source)
            if isinstance(argument, Value) and argument.name == "x"
            else argument
            for parameter, argument in launch.arguments.items()
        }
        return replace(launch, arguments=arguments)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the result of the layer's reference, and set `states[target]` to it."""
        states[self.target] = self.layer.reference(x, span, states, numpy)
        return states[self.target]


@dataclass(frozen=True)
class FinalNorm(Stateless):
    """Norm of the hidden states after the last block: x = norm(x)."""

    norm: Norm
    component: ClassVar[str] = "norms"

    @property
    def weights(self) -> Sequence[Weight]:
        """Weight and bias of the norm."""
        return self.norm.weights

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `rmsnorm` that replaces x [rows, hidden]."""
        x = Value("x", (step.tokens, self.norm.size), step.activations)
        return (self.norm.launch(step, x, "x", "last norm", None),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the norm of x [tokens, hidden], rounded."""
        return self.norm.reference(x, numpy)


@dataclass(frozen=True)
class StateProjection(Stateless):
    """Projection of all hidden states to the array `target`; x stays.

    A pooled state is one row of the result. All rows up to 128 take as long as one, because reading the matrix is the
    bound.
    """

    name: str
    projection: Projection
    target: str
    component: ClassVar[str] = "projections"

    @property
    def _w(self) -> Weight:
        return Weight(f"{self.name}.w", (self.projection.weight(TRANSPOSED),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrix [hidden, outputs], whole on every rank."""
        return (self._w,)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `matmul` that writes `target` [rows, outputs]."""
        x, w = Value("x", (step.tokens, self.projection.inputs), step.activations), self._w.value(step)
        work = count_product_work(step.tokens, w)
        return (Launch("matmul", {"a": x, "b": w}, (self.target,), work, step.tokens),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] as it is, and set `states[target]` to its rounded projection [tokens, outputs]."""
        states[self.target] = numpy.round(numpy.multiply(x, self.projection))
        return x
