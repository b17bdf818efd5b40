"""RMSNorm and LayerNorm: rows divided by their root mean square, or by their deviation from the mean, times a weight.

The kernels of projections carry out the norm before them, and those of heads. A norm after a projection is a launch of
its own, which adds the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.launch import Argument, Axis, Launch, LeastWork, StepShape, Value
from model.layers.shard import ROW, Cut, Divided
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class Norm:
    """One norm over the last axis, of `size` elements: `name` on a rank, `tensor` and `bias` in the checkpoint.

    One with a bias is LayerNorm. `offset` is added to the weight. `cut` is of rows that the ranks hold in parts.
    """

    name: str
    tensor: str
    size: int
    eps: float
    bias: str | None = None
    offset: float = 0.0
    cut: Cut = ROW

    @property
    def weight(self) -> Weight:
        """The weight of the norm, a row [1, size] on every rank."""
        return Weight(self.name, (Tensor(self.tensor, (self.size,), self.cut),), component="norms")

    @property
    def bias_weight(self) -> Weight | None:
        """The bias of a LayerNorm, a row like the weight."""
        if self.bias is None:
            return None
        return Weight(f"{self.name}.bias", (Tensor(self.bias, (self.size,), ROW),), component="norms")

    @property
    def weights(self) -> Sequence[Weight]:
        """The weight, and the bias where there is one."""
        return (self.weight, *((self.bias_weight,) if self.bias_weight else ()))

    def launch(
        self,
        step: StepShape,
        x: Value,
        result: str,
        label: str,
        residual: Value | None,
        scale: Scale | None = None,
    ) -> Launch:
        """The norm of `x` as a launch of its own, plus a residual, and that sum times a number of the checkpoint."""
        moved = x.nbytes * (2 if residual is None else 3)
        arguments: dict[str, Argument] = {
            "x": x,
            "weight": self.weight.value(step),
            "eps": self.eps,
            "residual": residual,
            "norm_offset": self.offset,
        }
        if isinstance(self.cut, Divided):
            row_elements = self.cut.held_elements(self.size, step.ranks)
            arguments |= {"replica_group": Axis.tensor, "row_elements": row_elements}
        if scale is not None:
            arguments |= {"scale": scale.weight.value(step)}
        return Launch("rmsnorm", arguments, (result,), LeastWork(0.0, float(moved)), x.shape[0], label)

    def reference(self, x: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """x [..., size] normalised."""
        return numpy.norm(x, self.tensor, self.eps, self.bias, self.offset)


@dataclass(frozen=True)
class Scale:
    """A number of the checkpoint that multiplies hidden states: `name` on a rank, `tensor` in the checkpoint."""

    name: str
    tensor: str

    @property
    def weight(self) -> Weight:
        """The number, [1, 1] on every rank."""
        return Weight(self.name, (Tensor(self.tensor, (1,), ROW),), component="buffers")


def scaled_sum(x: np.ndarray, y: np.ndarray, scale: Scale | None, numpy: Arithmetic) -> np.ndarray:
    """The sum with the residual, times the number where there is one; rounded once."""
    return numpy.rounded(x + y if scale is None else (x + y) * numpy.tensor(scale.tensor))


def bias_of(norm: Norm | None, step: StepShape) -> Value | None:
    """The bias of a norm as an argument of a launch."""
    weight = None if norm is None else norm.bias_weight
    return None if weight is None else weight.value(step)
