"""Conditions of a denoiser from the timestep: its embedding, and rows from which blocks take their modulation.

embedding = linear_2(silu(linear_1(sinusoids(timestep)))) [+ further embeddings]
rows      = linear(silu(embedding))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import FLOAT32, Argument, Launch, StepShape, Value, count_product_work
from model.layers.layer import Stateless, States
from model.layers.mlp import apply_activation
from model.layers.projection import Projection
from model.layers.shard import ROW, TRANSPOSED
from model.layers.weight import Weight, create_argument

FREQUENCIES = 256
"""Sinusoids of a timestep, half of them cosines; diffusers' denoisers all have this number."""
_MAX_PERIOD = 10000.0


def create_matrix(name: str, projection: Projection) -> Weight:
    """Return the whole matrix of a projection as a weight, [inputs, outputs] on every rank."""
    return Weight(name, (projection.weight(TRANSPOSED),))


def create_bias(name: str, projection: Projection) -> Weight | None:
    """Return the whole bias of a projection as a weight, [1, outputs] on every rank; None without a bias."""
    return None if projection.bias is None else Weight(name, (projection.bias_row(ROW),))


@dataclass(frozen=True)
class TimestepEmbedding(Stateless):
    """Embedding of one number of each image, such as its timestep.

    source  name of the numbers, float32 [images, 1], an input of the step
    output  name of the embedding, [images, outputs of the second projection]
    added   name of an array of this shape that is added; "" for none
    """

    name: str
    source: str
    output: str
    projections: tuple[Projection, Projection]
    added: str = ""
    component: ClassVar[str] = "embedding"

    def _list_weights(self) -> dict[str, Weight | None]:
        weights: dict[str, Weight | None] = {}
        for index, projection in enumerate(self.projections, 1):
            weights[f"w_{index}"] = create_matrix(f"{self.name}.w_{index}", projection)
            weights[f"b_{index}"] = create_bias(f"{self.name}.b_{index}", projection)
        return weights

    @property
    def weights(self) -> Sequence[Weight]:
        """Both matrices and their biases."""
        return [weight for weight in self._list_weights().values() if weight is not None]

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `timestep_embedding`."""
        images, outputs = step.sequences, self.projections[1].outputs
        arguments: dict[str, Argument] = {
            "t": Value(self.source, (images, 1), FLOAT32),
            "dtype": step.activations,
        }
        arguments |= {
            parameter: create_argument(weight, step) for parameter, weight in self._list_weights().items()
        }
        if self.added:
            arguments["added"] = Value(self.added, (images, outputs), step.activations)
        matrices = [weight.value(step) for weight in self.weights]
        return (
            Launch(
                "timestep_embedding",
                arguments,
                (self.output,),
                count_product_work(images, *matrices),
                images,
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the embedding in `states`, [1, outputs].

        Rounded are the sinusoids, the result of silu, and the sum.
        """
        first, second = self.projections
        waves = numpy.round(compute_sinusoids(states[self.source].reshape(1, 1)))
        inner = numpy.round(apply_activation(numpy.multiply(waves, first), "silu"))
        y = numpy.multiply(inner, second)
        states[self.output] = numpy.round(y + states[self.added] if self.added else y)
        return x


def compute_sinusoids(numbers: np.ndarray) -> np.ndarray:
    """Return cosines, then sines of numbers [images, 1] times 128 frequencies from 1 down to 1e-4, [images, 256]."""
    half = FREQUENCIES // 2
    exponents = np.float32(-log(_MAX_PERIOD)) * np.arange(half, dtype=np.float32) / np.float32(half)
    angles = numbers.astype(np.float32) * np.exp(exponents)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


@dataclass(frozen=True)
class ConditionRows(Stateless):
    """Rows linear(silu(source)) of each image, such as the modulation of a block; one result for each of `chunks`.

    source  name of an embedding, [images, inputs of the projection]
    chunks  names of the results: equal runs of the projection's outputs, [images, outputs / chunks] each
    """

    name: str
    source: str
    projection: Projection
    chunks: tuple[str, ...]
    component: ClassVar[str] = "norms"

    @property
    def _matrix(self) -> Weight:
        return create_matrix(f"{self.name}.w", self.projection)

    @property
    def _bias(self) -> Weight | None:
        return create_bias(f"{self.name}.b", self.projection)

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrix and bias."""
        return [weight for weight in (self._matrix, self._bias) if weight is not None]

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `modulation`."""
        matrix = self._matrix.value(step)
        return (
            Launch(
                "modulation",
                {
                    "x": Value(self.source, (step.sequences, matrix.shape[0]), step.activations),
                    "w": matrix,
                    "bias": create_argument(self._bias, step),
                    "chunks": len(self.chunks),
                },
                self.chunks,
                count_product_work(step.sequences, matrix),
                step.sequences,
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the results in `states`, [1, outputs / chunks] each. silu and results are rounded."""
        inner = numpy.round(apply_activation(states[self.source], "silu"))
        rows = numpy.round(numpy.multiply(inner, self.projection))
        states |= dict(zip(self.chunks, np.split(rows, len(self.chunks), axis=-1)))
        return x
