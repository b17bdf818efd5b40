"""Feed-forward block, gated or plain: one launch of `mlp` with the norm before it and the all-reduce after it.

    gated   x + down(activation(gate(norm(x))) * up(norm(x)))
    plain   x + down(activation(up(norm(x))))

Ranks divide the intermediate size, and `mlp` all-reduces their partial sums. A norm after the block is a separate
launch, which also adds x. With sequence parallelism a rank has some rows of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import Argument, Axis, Launch, StepShape, Value, count_product_work
from model.layers.layer import Stateless, States
from model.layers.norm import Norm, Scale, add_residual
from model.layers.projection import Projection
from model.layers.shard import COLUMN_PARALLEL, ROW, ROW_PARALLEL, TRANSPOSED, slice_evenly
from model.layers.weight import Weight, create_argument, list_row_arguments


@dataclass(frozen=True)
class FeedForward(Stateless):
    """Feed-forward block over rows [tokens, `hidden`]; it is plain without a `gate` projection.

    An intermediate size that the ranks do not divide is padded with zeros. `norm` normalises the input of the block,
    and `after` its result. `scale` multiplies the sum of `after` and the residual. `row_gate` [1, hidden] computes one
    number for each row, whose sigmoid multiplies the result.
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

    def _projection_weights(self) -> dict[str, Weight]:
        """Return the matrices and biases that the block has on a rank, by parameter name of `mlp`.

        `w_gate` and `w_up` are [hidden, width of the rank], `w_down` is [width of the rank, hidden]. `b_gate` and
        `b_up` are [1, width of the rank], `b_down` is [1, hidden].
        """
        weights: dict[str, Weight] = {}
        for matrix, bias, projection, matrix_cut, bias_cut in (
            ("w_gate", "b_gate", self.gate, COLUMN_PARALLEL, COLUMN_PARALLEL),
            ("w_up", "b_up", self.up, COLUMN_PARALLEL, COLUMN_PARALLEL),
            ("w_down", "b_down", self.down, ROW_PARALLEL, ROW),
        ):
            if projection is None:
                continue
            tensors = (projection.weight(matrix_cut),)
            weights[matrix] = Weight(f"{self.name}.{matrix}", tensors, reader=("mlp", matrix))
            if projection.bias is not None:
                weights[bias] = Weight(f"{self.name}.{bias}", (projection.bias_row(bias_cut),))
        matrices = [weight for weight in weights.values() if weight.reader is not None]
        return {
            name: weight if weight.reader is None else _bind_to_partners(weight, matrices)
            for name, weight in weights.items()
        }

    @property
    def _row_gate_weight(self) -> Weight | None:
        """Matrix of the row gate, [hidden, 1] on every rank; None without one."""
        if self.row_gate is None:
            return None
        return Weight(f"{self.name}.w_row_gate", (self.row_gate.weight(TRANSPOSED),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norms, the projections with their biases, the scale and the row gate, as far as present."""
        norms = [norm for norm in (self.norm, self.after) if norm is not None]
        weights = [weight for norm in norms for weight in norm.weights]
        weights += self._projection_weights().values()
        gates = (None if self.scale is None else self.scale.weight, self._row_gate_weight)
        return [*weights, *(weight for weight in gates if weight is not None)]

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `mlp`, and the launch of the norm `after` if there is one.

        The last launch writes x [rows of the rank, hidden] with the residual added. With a norm after it, `mlp` writes
        the array "mlp" without the residual.
        """
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        projections: dict[str, Value] = {}
        for name, weight in self._projection_weights().items():
            projections |= weight.arguments(name, step)
        arguments: dict[str, Argument] = {
            "x": x,
            **projections,
            "replica_group": Axis.tensor,
            "activation": self.activation,
            "residual": self.after is None,
            "sequence_ranks": step.sequence_ranks,
            "row_gate": create_argument(self._row_gate_weight, step),
        }
        weights = self._projection_weights().values()
        arguments |= list_row_arguments(step, *weights, divides_columns=True)
        arguments |= self._list_norm_arguments(step)
        result = x if self.after is None else Value("mlp", x.shape, x.dtype)
        matrices = [projections[name] for name in ("w_gate", "w_up", "w_down") if name in projections]
        launches = [
            Launch("mlp", arguments, (result.name,), count_product_work(step.tokens, *matrices), step.tokens)
        ]
        if self.after is not None:
            launches.append(self.after.launch(step, result, "x", "after the MLP", x, self.scale))
        return launches

    def _list_norm_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments of `mlp` for the norm before the block."""
        if self.norm is not None:
            return self.norm.list_arguments(step)
        return {} if self.after is None else {"eps": self.after.eps}

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] after the block, residual included, computed in NumPy.

        The input of `down`, the input of the norm after it and the result are rounded.
        """
        y = self.compute_output(x, numpy)
        if self.after is not None:
            y = self.after.reference(numpy.round(y), numpy)
        return add_residual(x, y, self.scale, numpy)

    def compute_output(self, x: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return what the block adds to x [tokens, hidden], before the norm after it; the result is not rounded."""
        return self.multiply_normed(x if self.norm is None else self.norm.reference(x, numpy), numpy)

    def multiply_normed(self, unrounded: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return what the block adds for normalised rows [tokens, hidden]; the result is not rounded."""
        normed = numpy.quantise_rows(unrounded, self.up, *([] if self.gate is None else [self.gate]))
        inner = numpy.multiply(normed, self.up)
        if self.gate is None:
            inner = apply_activation(inner, self.activation)
        else:
            inner = apply_activation(numpy.multiply(normed, self.gate), self.activation) * inner
        y = numpy.sum_partial_products(numpy.round(inner), self.down, slice_evenly)
        if self.row_gate is not None:
            # The gate of a row is a product of the row before it becomes MXFP8, and of the rounded row otherwise.
            gated = numpy.round_to_bfloat16(unrounded) if numpy.rounds_to_mx(self.up) else normed
            y = y / (1 + np.exp(-numpy.multiply(gated, self.row_gate)))
        return y


def _bind_to_partners(weight: Weight, matrices: Sequence[Weight]) -> Weight:
    """Return a matrix of the block with its partners among all `matrices`; gate and up multiply the same rows."""
    partners = [matrix for matrix in matrices if matrix is not weight]
    cuts = [matrix.tensors[0].cut for matrix in (weight, *partners)]
    row_partners = tuple(partner for partner, cut in zip(partners, cuts[1:]) if cut == cuts[0])
    return replace(weight, partners=tuple(partners), row_partners=row_partners)


def apply_activation(x: np.ndarray, activation: str) -> np.ndarray:
    """Return an activation of every element of x, by its name in the kernel `mlp`; KeyError for another name."""
    # exp of a large positive number overflows to inf, and x / inf is the right result, 0.
    with np.errstate(over="ignore"):
        return _ACTIVATIONS[activation](x)


def _gelu(x: np.ndarray) -> np.ndarray:
    erf_values = (math.erf(element) for element in (x.astype(np.float64) / math.sqrt(2)).ravel())
    erf = np.fromiter(erf_values, np.float64, x.size).reshape(x.shape)
    return (x * (1 + erf) / 2).astype(np.float32)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_sigmoid": lambda x: x / (1 + np.exp(np.float32(-1.702) * x)),
    "relu": lambda x: np.maximum(x, 0),
}
