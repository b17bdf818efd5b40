"""The feed-forward block, gated or plain, one kernel with the norm before it and the sum over the ranks.

    x + down(activation(gate(norm(x))) * up(norm(x)))

A norm after it is a launch of its own, which adds x. Where rows are cut over the ranks, each has its own rows of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import Argument, Axis, Launch, StepShape, Value, product
from model.layers.layer import Stateless, States
from model.layers.norm import Norm, Scale, bias_of, scaled_sum
from model.layers.projection import Projection
from model.layers.shard import COLUMN_PARALLEL, ROW, ROW_PARALLEL, TRANSPOSED, Cut, even_span
from model.layers.weight import Weight


@dataclass(frozen=True)
class FeedForward(Stateless):
    """Without a gate the block is plain. A width that the ranks do not divide is padded with zeros.

    `scale` multiplies the sum of a norm after it and the residual. The sigmoid of a `row_gate`, one
    number for each row, multiplies the sum of the ranks.
    """

    name: str
    hidden: int
    norm: Norm | None
    gate: Projection | None
    up: Projection
    down: Projection
    activation: str = "silu"
    after: Norm | None = None
    scale: Scale | None = None
    row_gate: Projection | None = None

    def _parts(self) -> dict[str, Weight | None]:
        """The arrays of the projections by their names in the kernel: [hidden, width], [width, hidden], rows."""
        given: tuple[tuple[str, Projection | None, Cut, Cut], ...] = (
            ("gate", self.gate, COLUMN_PARALLEL, COLUMN_PARALLEL),
            ("up", self.up, COLUMN_PARALLEL, COLUMN_PARALLEL),
            ("down", self.down, ROW_PARALLEL, ROW),
        )
        parts: dict[str, Weight | None] = {}
        for name, own, cut, bias_cut in given:
            parts[f"w_{name}"] = parts[f"b_{name}"] = None
            if own is not None:
                parts[f"w_{name}"] = Weight(f"{self.name}.w_{name}", (own.weight(cut),))
            if own is not None and own.bias is not None:
                parts[f"b_{name}"] = Weight(f"{self.name}.b_{name}", (own.bias_row(bias_cut),))
        return parts

    @property
    def _row_gate(self) -> Weight | None:
        """[hidden, 1], on every rank."""
        own = self.row_gate
        return None if own is None else Weight(f"{self.name}.w_row_gate", (own.weight(TRANSPOSED),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The norms, the projections and their biases."""
        norms = [each for each in (self.norm, self.after) if each is not None]
        return (
            *(weight for norm in norms for weight in norm.weights),
            *(each for each in self._parts().values() if each is not None),
            *(() if self.scale is None else (self.scale.weight,)),
            *(() if self._row_gate is None else (self._row_gate,)),
        )

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """One kernel, whose partial sums are added up over the ranks, and the norm after it."""
        x = Value("x", (step.own_rows, self.hidden), step.activations)
        parts = {name: None if each is None else each.value(step) for name, each in self._parts().items()}
        matrices = [each for name, each in parts.items() if name.startswith("w_") and each is not None]
        before = self.norm or self.after
        arguments: tuple[Argument, ...] = (
            *(x, None if self.norm is None else self.norm.weight.value(step)),
            *(parts["w_gate"], parts["w_up"], parts["w_down"]),
            *(0.0 if before is None else before.eps, Axis.tensor, self.activation),
            *(parts["b_gate"], parts["b_up"], parts["b_down"], bias_of(self.norm, step)),
            *(0.0 if self.norm is None else self.norm.offset, self.after is None),
            *((step.sequence_ranks,) if step.sequence_ranks > 1 or self._row_gate else ()),
            *(() if self._row_gate is None else (self._row_gate.value(step),)),
        )
        result = "x" if self.after is None else "mlp"
        launches = [Launch("mlp", arguments, (result,), product(step.tokens, *matrices), step.tokens)]
        if self.after is not None:
            y = Value(result, x.shape, x.dtype)
            launches.append(self.after.launch(step, y, "x", "after the MLP", x, self.scale))
        return launches

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """The gated product is rounded, and the sum with the residual."""
        normed = x if self.norm is None else self.norm.reference(x, numpy)
        inner = numpy.product(normed, self.up)
        if self.gate is None:
            inner = activated(inner, self.activation)
        else:
            inner = activated(numpy.product(normed, self.gate), self.activation) * inner
        y = numpy.summed_product(numpy.rounded(inner), self.down, even_span)
        if self.row_gate is not None:
            y = y / (1 + np.exp(-numpy.product(normed, self.row_gate)))
        if self.after is not None:
            y = self.after.reference(numpy.rounded(y), numpy)
        return scaled_sum(x, y, self.scale, numpy)


def activated(x: np.ndarray, activation: str) -> np.ndarray:
    """The activation of every element."""
    with np.errstate(
        over="ignore"
    ):  # exp of a large negative value is inf, and the quotient 0 as it should be
        return _ACTIVATIONS[activation](x)


def _gelu(x: np.ndarray) -> np.ndarray:
    terms = (math.erf(each) for each in (x.astype(np.float64) / math.sqrt(2)).ravel())
    erf = np.fromiter(terms, np.float64, x.size).reshape(x.shape)
    return (x * (1 + erf) / 2).astype(np.float32)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}
