"""Conditions of a denoiser: embeddings of the timestep and of a pooled text, and modulation rows of blocks from them.

embedding = linear_2(silu(linear_1(sinusoids(timestep)))) [+ further embeddings]
rows      = linear(silu(embedding))

Where embeddings are divided, each rank has some elements of them, and rows of the matrices that multiply them. Partial
products are all-reduced, so that no rank reads all of a large denoiser's modulation weights. Ulysses ranks divide them
as tensor-parallel ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.denoiser.ulysses import flatten_weights
from model.layers.launch import (
    FLOAT32,
    INT32,
    Argument,
    Axis,
    Launch,
    StepShape,
    Value,
    count_copy_work,
    count_product_work,
)
from model.layers.layer import Stateless, States
from model.layers.mlp import apply_activation
from model.layers.projection import Projection
from model.layers.shard import (
    COLUMN_PARALLEL,
    ROW,
    ROW_PARALLEL,
    TRANSPOSED,
    WHOLE,
    Cut,
    MatrixCut,
    slice_evenly,
)
from model.layers.weight import Tensor, Weight, Zeros, create_argument

FREQUENCIES = 256
"""Sinusoids of a timestep, half of them cosines; diffusers' denoisers all have this number."""
_MAX_PERIOD = 10000.0


def create_matrix(name: str, projection: Projection, cut: MatrixCut = TRANSPOSED) -> Weight:
    """Return the matrix of a projection as a weight, [inputs, outputs]; by default whole on every rank."""
    return Weight(name, (projection.weight(cut),))


def create_bias(name: str, projection: Projection, cut: Cut = ROW) -> Weight | None:
    """Return the bias of a projection as a weight, [1, outputs], by default whole; None without a bias."""
    return None if projection.bias is None else Weight(name, (projection.bias_row(cut),))


@dataclass(frozen=True)
class Embedding(Stateless):
    """Embedding of a condition by two linear layers with SiLU between them.

    source       name of the condition, an input of the step, [images, ...]
    output       name of the embedding, [images, outputs of the second projection] or a rank's elements of them
    projections  the linear layers
    added        name of an array of the embedding's shape that is added; "" for none
    is_divided   whether ranks divide the embedding's elements
    padding      zeros before and after the outputs of the second projection, for one part of an embedding
    """

    name: str
    source: str
    output: str
    projections: tuple[Projection, Projection]
    added: str = ""
    is_divided: bool = False
    padding: tuple[int, int] = (0, 0)
    component: ClassVar[str] = "embedding"

    def _list_weights(self) -> tuple[Weight | None, ...]:
        """Return first matrix, first bias, second matrix, second bias."""
        first, second = self.projections
        cut, bias_cut = (COLUMN_PARALLEL, COLUMN_PARALLEL) if self.is_divided else (TRANSPOSED, ROW)
        return (
            create_matrix(f"{self.name}.w_1", first),
            create_bias(f"{self.name}.b_1", first),
            self._pad(create_matrix(f"{self.name}.w_2", second, cut)),
            self._pad(create_bias(f"{self.name}.b_2", second, bias_cut)),
        )

    def _pad(self, weight: Weight | None) -> Weight | None:
        """Return a weight with columns of zeros for `padding`."""
        if weight is None or not any(self.padding):
            return weight
        assert not self.is_divided, "a part of an embedding is whole on every rank"
        (tensor,) = weight.tensors
        before, after = ((Zeros("", (n, *tensor.shape[1:]), tensor.cut),) if n else () for n in self.padding)
        return replace(weight, tensors=(*before, tensor, *after))

    @property
    def weights(self) -> Sequence[Weight]:
        """Both matrices and their biases."""
        return flatten_weights(weight for weight in self._list_weights() if weight is not None)

    def _launch(
        self,
        step: StepShape,
        kernel: str,
        arguments: Mapping[str, Argument],
        parameters: tuple[str, str, str, str],
    ) -> Sequence[Launch]:
        """Return the launch of a kernel that computes the embedding.

        Args:
            step: The step.
            kernel: Name of the kernel.
            arguments: Its arguments beside weights.
            parameters: Its parameters of the weights in the order of `_list_weights`.
        """
        weights = {
            parameter: create_argument(weight, step.flattened)
            for parameter, weight in zip(parameters, self._list_weights())
        }
        matrices = [weight.value(step) for weight in self.weights]
        work = count_product_work(step.sequences, *matrices)
        return (Launch(kernel, {**arguments, **weights}, (self.output,), work, step.sequences),)


@dataclass(frozen=True)
class TimestepEmbedding(Embedding):
    """Embedding of the sinusoids of one number of each image, such as its timestep, float32 [images, 1].

    frequency_shift  `downscale_freq_shift` of diffusers: frequency i is 10000^(-i / (128 - shift))
    """

    frequency_shift: float = 0.0

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `timestep_embedding`."""
        images = step.sequences
        arguments: dict[str, Argument] = {
            "t": Value(self.source, (images, 1), FLOAT32),
            "dtype": step.activations,
            "downscale_freq_shift": self.frequency_shift,
        }
        if self.added:
            outputs = self.weights[-1].shape(step.shard)[1]
            arguments["added"] = Value(self.added, (images, outputs), step.activations)
        return self._launch(step, "timestep_embedding", arguments, ("w_1", "b_1", "w_2", "b_2"))

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the embedding in `states`, [1, outputs].

        Rounded are the sinusoids, the result of silu, and the sum.
        """
        first, second = self.projections
        waves = numpy.round(compute_sinusoids(states[self.source].reshape(1, 1), self.frequency_shift))
        inner = numpy.round(apply_activation(numpy.multiply(waves, first), "silu"))
        y = np.pad(numpy.multiply(inner, second), ((0, 0), self.padding))
        states[self.output] = numpy.round(y + states[self.added] if self.added else y)
        return x


@dataclass(frozen=True)
class PooledEmbedding(Embedding):
    """Embedding of a pooled text of each image, [images, inputs of the first projection]; nothing is added."""

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `mlp`, without residual and without a sum over ranks."""
        pooled = Value(self.source, (step.sequences, self.projections[0].inputs), step.activations)
        arguments: dict[str, Argument] = {"x": pooled, "activation": "silu", "residual": False}
        return self._launch(step, "mlp", arguments, ("w_up", "b_up", "w_down", "b_down"))

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the embedding in `states`, [1, outputs]. Rounded are silu's result and the sum."""
        first, second = self.projections
        pooled = numpy.round(states[self.source].reshape(1, -1))
        inner = numpy.round(apply_activation(numpy.multiply(pooled, first), "silu"))
        states[self.output] = numpy.round(numpy.multiply(inner, second))
        return x


def compute_sinusoids(numbers: np.ndarray, shift: float = 0.0) -> np.ndarray:
    """Return cosines, then sines of numbers [images, 1] times 128 frequencies, [images, 256].

    Frequency i is 10000^(-i / (128 - shift)).
    """
    half = FREQUENCIES // 2
    exponents = np.float32(-log(_MAX_PERIOD)) * np.arange(half, dtype=np.float32) / np.float32(half - shift)
    angles = numbers.astype(np.float32) * np.exp(exponents)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


@dataclass(frozen=True)
class LabelEmbedding(Stateless):
    """Rows of a table that the labels of images name.

    tensor  table [labels, size] of the checkpoint
    source  name of the labels, int32 [images, 1], an input of the step
    output  name of the rows, [images, size]
    """

    name: str
    tensor: str
    labels: int
    size: int
    source: str
    output: str
    component: ClassVar[str] = "embedding"

    @property
    def _table(self) -> Weight:
        return Weight(f"{self.name}.table", (Tensor(self.tensor, (self.labels, self.size), WHOLE),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The table."""
        return (self._table,)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `embedding` that writes the rows."""
        images = step.sequences
        arguments: dict[str, Argument] = {
            "ids": Value(self.source, (images, 1), INT32),
            "table": self._table.value(step),
            "dtype": step.activations,
        }
        work = count_copy_work(Value(self.output, (images, self.size), step.activations))
        return (Launch("embedding", arguments, (self.output,), work, images, "of labels"),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the row in `states`, [1, size], rounded."""
        states[self.output] = numpy.round(numpy.load_rows(self.tensor, states[self.source].reshape(1)))
        return x


@dataclass(frozen=True)
class ConditionRows(Stateless):
    """Rows linear(silu(source)) of each image, such as the modulation of a block; one result for each of `chunks`.

    source      name of an embedding, [images, inputs of the projection]
    chunks      names of the results: equal runs of the projection's outputs, [images, outputs / chunks] each
    is_divided  whether ranks divide the embedding's elements
    """

    name: str
    source: str
    projection: Projection
    chunks: tuple[str, ...]
    is_divided: bool = False
    component: ClassVar[str] = "norms"

    @property
    def _matrix(self) -> Weight:
        cut = ROW_PARALLEL if self.is_divided else TRANSPOSED
        return create_matrix(f"{self.name}.w", self.projection, cut)

    @property
    def _bias(self) -> Weight | None:
        return create_bias(f"{self.name}.b", self.projection)

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrix and bias."""
        return flatten_weights(weight for weight in (self._matrix, self._bias) if weight is not None)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `modulation`."""
        matrix = self._matrix.value(step.flattened)
        return (
            Launch(
                "modulation",
                {
                    "x": Value(self.source, (step.sequences, matrix.shape[0]), step.activations),
                    "w": matrix,
                    "bias": create_argument(self._bias, step),
                    "chunks": len(self.chunks),
                    "replica_group": Axis.flattened if self.is_divided else None,
                },
                self.chunks,
                count_product_work(step.sequences, matrix),
                step.sequences,
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the results in `states`, [1, outputs / chunks] each. silu and results are rounded."""
        inner = numpy.round(apply_activation(states[self.source], "silu"))
        if self.is_divided:
            rows = numpy.round(numpy.flattened.sum_partial_products(inner, self.projection, slice_evenly))
        else:
            rows = numpy.round(numpy.multiply(inner, self.projection))
        states |= dict(zip(self.chunks, np.split(rows, len(self.chunks), axis=-1)))
        return x
