"""The gated feed-forward block: x + down(silu(gate(norm(x))) * up(norm(x))), one kernel with its norm and the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import (
    Argument,
    Axis,
    Launch,
    StepShape,
    Tensor,
    Value,
    Weight,
    product,
)
from model.layers.layer import Stateless, States
from model.layers.norm import RmsNorm
from model.layers.shard import COLUMN_PARALLEL, ROW_PARALLEL


@dataclass(frozen=True)
class MlpTensors:
    """Names of the projections in a checkpoint, each [out, in]."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class GatedMlp(Stateless):
    """A width that the ranks do not divide is padded with zeros."""

    name: str
    hidden: int
    width: int
    norm: RmsNorm
    tensors: MlpTensors

    def _projections(self) -> tuple[Weight, Weight, Weight]:
        up, down = (self.width, self.hidden), (self.hidden, self.width)
        return (
            Weight(f"{self.name}.w_gate", (Tensor(self.tensors.gate, up, COLUMN_PARALLEL),)),
            Weight(f"{self.name}.w_up", (Tensor(self.tensors.up, up, COLUMN_PARALLEL),)),
            Weight(f"{self.name}.w_down", (Tensor(self.tensors.down, down, ROW_PARALLEL),)),
        )

    @property
    def weights(self) -> Sequence[Weight]:
        """The norm, gate and up [hidden, width], down [width, hidden]."""
        return (self.norm.weight, *self._projections())

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """One kernel; partial sums are all-reduced over the ranks."""
        x = Value("x", (step.tokens, self.hidden), step.activations)
        norm, projections = self.norm.weight.value(step), [each.value(step) for each in self._projections()]
        work = product(step.tokens, *projections)
        arguments: tuple[Argument, ...] = (x, norm, *projections, self.norm.eps, Axis.tensor)
        return (Launch("mlp", arguments, ("x",), work, step.tokens),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """The gated product is rounded, and the sum with the residual."""
        normed = self.norm.reference(x, numpy)
        gate, up = (numpy.product(normed, name) for name in (self.tensors.gate, self.tensors.up))
        with np.errstate(
            over="ignore"
        ):  # exp of a large negative gate is inf, and the quotient 0 as it should be
            gate = gate / (1 + np.exp(-gate))
        return numpy.rounded(x + numpy.summed_product(numpy.rounded(gate * up), self.tensors.down))
