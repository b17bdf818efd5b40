"""Per-layer inputs of Gemma: P more elements of a token for each of L layers, and the block that adds them to x.

    inputs = norm(x @ projection) + scale * rows[ids]      once for all layers, [tokens, L * P]
    x      = (x + norm((activation(x @ gate) * inputs[layer]) @ output)) * factor

The norm of the projected embedding is over the P elements of each layer. `qkv_projection` computes it like a norm of
heads, and `embedding` adds the rows of the table. The original model also multiplies the projection by 1 / sqrt(hidden)
and the sum by 1 / sqrt(2). A norm cancels a factor of its input except in eps, so eps is divided by the square of the
factor.

Every rank computes all of it: the projections are small, and a norm over divided columns would need an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.embedding import Embedding
from model.layers.launch import Launch, LeastWork, StepShape, Value, count_product_work
from model.layers.layer import Stateless, States
from model.layers.mlp import apply_activation
from model.layers.norm import Norm, Scale, add_residual
from model.layers.projection import Projection
from model.layers.shard import TRANSPOSED
from model.layers.weight import Weight


@dataclass(frozen=True)
class Columns:
    """Columns of a layer in an array [tokens, `width`] of a step, beginning with column `first`."""

    array: str
    width: int
    first: int

    def value(self, step: StepShape) -> Value:
        """Return the whole array [rows of the rank, width], with the columns of all layers, as a launch's argument."""
        return Value(self.array, (step.local_rows, self.width), step.activations)


@dataclass(frozen=True)
class PerLayerInputs(Stateless):
    """Layer that computes the token embedding x, and the inputs of all layers as the array `name` of the step.

    `rows` is the table of inputs, `projection` the projection of the embedding, and `norm` the norm over the elements
    of a layer.
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
        """Weights of both tables, the projection and the norm."""
        rows = (replace(weight, component="rows") for weight in self.rows.weights)
        return (*self.embedding.weights, *rows, self._w, *self.norm.weights)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the embedding, of its projection, and of the lookup that adds the projection.

        The first writes x, and the last writes the inputs of all layers to the array `name`.
        """
        hidden, width = self.embedding.hidden, self.rows.hidden
        x, w = Value("x", (step.local_rows, hidden), step.activations), self._w.value(step)
        projected = Value(f"{self.name}.projected", (step.local_rows, width), step.activations)
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
            {
                "x": x,
                "w_qkv": w,
                "eps": self.norm.eps * hidden,
                "q_size": width,
                "head_dim": self.norm.size,
                "q_norm": self.norm.weight.value(step),
            },
            (projected.name,),
            count_product_work(step.local_rows, w),
            step.local_rows,
            label,
        )
        return (*self.embedding.launches(step), project, added)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the embeddings [tokens, hidden] of the token ids x [tokens], rounded.

        Also sets `states[name]` to the rounded inputs of all layers, [tokens, layers * elements of a layer].
        """
        embedded = self.embedding.reference(x, span, states, numpy)
        projected = numpy.multiply(embedded, self.projection).reshape(len(x), -1, self.norm.size)
        eps = self.norm.eps * self.embedding.hidden
        normed = numpy.normalise(projected, self.norm.tensor, eps).reshape(len(x), -1)
        rows = numpy.load_rows(self.rows.tensor, x) * np.float32(self.rows.scale)
        states[self.name] = numpy.round(normed + rows)
        return embedded


@dataclass(frozen=True)
class GatedInput(Stateless):
    """Block that adds a layer's input to x: (x + after((activation(gate(x)) * input) @ output)) * scale."""

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
        """Norm `after` with twice the eps, because its inputs are not multiplied by 1 / sqrt(2) as in the original."""
        return replace(self.after, eps=2 * self.after.eps)

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of both projections, of the norm, and of the scale if there is one."""
        factor = () if self.scale is None else (self.scale.weight,)
        return (self._w_gate, self._w_output, *self.after.weights, *factor)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `per_layer_input`, and the launch of the norm, which adds x and writes the new x."""
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        w_gate, w_output = self._w_gate.value(step), self._w_output.value(step)
        y = Value("gated_input", x.shape, x.dtype)
        return (
            Launch(
                "per_layer_input",
                {
                    "x": x,
                    "w_gate": w_gate,
                    "inputs": self.inputs.value(step),
                    "w_output": w_output,
                    "first": self.inputs.first,
                    "activation": self.activation,
                },
                (y.name,),
                count_product_work(step.local_rows, w_gate, w_output),
                step.local_rows,
            ),
            self._after.launch(step, y, "x", "after the layer's input", x, self.scale),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] after the block, computed in NumPy from the layer's inputs in `states`.

        The gated input, its projection, the norm and the sum are rounded.
        """
        first = self.inputs.first
        layer_inputs = states[self.inputs.array][:, first : first + self.gate.outputs]
        gated = numpy.round(apply_activation(numpy.multiply(x, self.gate), self.activation) * layer_inputs)
        y = self._after.reference(numpy.round(numpy.multiply(gated, self.output)), numpy)
        return add_residual(x, y, self.scale, numpy)
