"""Inputs that every layer gets of a token beside the hidden states, and what a layer makes of its own.

    inputs = norm(x @ projection) + scale * rows[ids]      once for all layers, L * P elements of a token
    x      = (x + norm((activation(x @ gate) * inputs of the layer) @ output)) * factor

The norm of the projected embedding goes over the P elements of each layer, as over heads: `qkv_projection` computes it,
and `embedding` adds rows of the table. The model multiplies the projection by 1 / sqrt(hidden) and the sum by
1 / sqrt(2). A factor of its input changes nothing in a norm but eps, which is divided here by the factor's square.

Every rank does the whole: the projections are small, and a rank's columns would need the norm over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.embedding import Embedding
from model.layers.launch import Argument, Launch, LeastWork, StepShape, Value, product
from model.layers.layer import Stateless, States
from model.layers.mlp import activated
from model.layers.norm import Norm, Scale, scaled_sum
from model.layers.projection import Projection
from model.layers.shard import TRANSPOSED
from model.layers.weight import Weight


@dataclass(frozen=True)
class Columns:
    """The columns of an array [tokens, `width`] of a step that are a layer's own, from `first` on."""

    array: str
    width: int
    first: int

    def value(self, step: StepShape) -> Value:
        """The whole array as an argument of a launch."""
        return Value(self.array, (step.local_rows, self.width), step.activations)


@dataclass(frozen=True)
class PerLayerInputs(Stateless):
    """The embedding of tokens, and with it the inputs of every layer, an array `name` of the step.

    `rows` is the table of the inputs, `projection` that of the embedding, and `norm` goes over those of a layer.
    """

    name: str
    embedding: Embedding
    rows: Embedding
    projection: Projection
    norm: Norm
    component: ClassVar[str] = "embedding"

    @property
    def _w(self) -> Weight:
        return Weight(f"{self.name}.w", (self.projection.weight(TRANSPOSED),), component="projections")

    @property
    def weights(self) -> Sequence[Weight]:
        """Both tables, the projection and the norm."""
        rows = (replace(weight, component="rows") for weight in self.rows.weights)
        return (*self.embedding.weights, *rows, self._w, *self.norm.weights)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Three kernels."""
        hidden, width = self.embedding.hidden, self.rows.hidden
        x, w = Value("x", (step.local_rows, hidden), step.activations), self._w.value(step)
        projected = Value(f"{self.name}.projected", (step.local_rows, width), step.activations)
        arguments: dict[str, Argument] = {
            "x": x,
            "w_qkv": w,
            "eps": self.norm.eps * hidden,
            "q_size": width,
            "head_dim": self.norm.size,
            "q_norm": self.norm.weight.value(step),
        }
        label = "inputs of the layers"
        (lookup,) = self.rows.launches(step)
        added = replace(
            lookup,
            arguments={**lookup.arguments, "added": projected},
            results=(self.name,),
            work=LeastWork(0.0, lookup.work.bytes + projected.nbytes),
            label=label,
        )
        project = Launch(
            "qkv_projection",
            arguments,
            (projected.name,),
            product(step.local_rows, w),
            step.local_rows,
            label,
        )
        return (*self.embedding.launches(step), project, added)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """ids [tokens] -> [tokens, hidden]; the inputs of the layers are left in `states`."""
        embedded = self.embedding.reference(x, span, states, numpy)
        projected = numpy.product(embedded, self.projection).reshape(len(x), -1, self.norm.size)
        eps = self.norm.eps * self.embedding.hidden
        normed = numpy.norm(projected, self.norm.tensor, eps).reshape(len(x), -1)
        rows = numpy.rows(self.rows.tensor, x) * np.float32(self.rows.scale)
        states[self.name] = numpy.rounded(normed + rows)
        return embedded


@dataclass(frozen=True)
class GatedInput(Stateless):
    """A layer's input times a gate, projected, normalised and added to the hidden states, times `scale`."""

    name: str
    hidden: int
    inputs: Columns
    gate: Projection
    output: Projection
    activation: str
    after: Norm
    scale: Scale | None

    @property
    def _w_gate(self) -> Weight:
        return Weight(f"{self.name}.w_gate", (self.gate.weight(TRANSPOSED),))

    @property
    def _w_output(self) -> Weight:
        return Weight(f"{self.name}.w_output", (self.output.weight(TRANSPOSED),))

    @property
    def _after(self) -> Norm:
        """The norm of a sum that was not multiplied by 1 / sqrt(2)."""
        return replace(self.after, eps=2 * self.after.eps)

    @property
    def weights(self) -> Sequence[Weight]:
        """Both projections, the norm, and the factor."""
        factor = () if self.scale is None else (self.scale.weight,)
        return (self._w_gate, self._w_output, *self.after.weights, *factor)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """One kernel, and the norm after it."""
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        w_gate, w_output = self._w_gate.value(step), self._w_output.value(step)
        arguments: dict[str, Argument] = {
            "x": x,
            "w_gate": w_gate,
            "inputs": self.inputs.value(step),
            "w_output": w_output,
            "first": self.inputs.first,
            "activation": self.activation,
        }
        y = Value("gated_input", x.shape, x.dtype)
        work = product(step.local_rows, w_gate, w_output)
        return (
            Launch("per_layer_input", arguments, (y.name,), work, step.local_rows),
            self._after.launch(step, y, "x", "after the layer's input", x, self.scale),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """The gated input is rounded, the projected one, and the sum with the residual."""
        first = self.inputs.first
        layer_inputs = states[self.inputs.array][:, first : first + self.gate.outputs]
        gated = numpy.rounded(activated(numpy.product(x, self.gate), self.activation) * layer_inputs)
        y = self._after.reference(numpy.rounded(numpy.product(gated, self.output)), numpy)
        return scaled_sum(x, y, self.scale, numpy)
