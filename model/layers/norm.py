"""RMSNorm and LayerNorm.

The kernels of projections compute the norm of their input and the norms of heads. A norm after a projection is a
separate launch, which adds the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.launch import Argument, Axis, Launch, LeastWork, StepShape, Value
from model.layers.shard import ROW, Cut, Divided
from model.layers.weight import Tensor, Weight, create_argument


@dataclass(frozen=True)
class Norm:
    """Norm over the last axis of `size` elements: RMSNorm, or LayerNorm if it has a bias.

    `name` is the name on a rank; `tensor` and `bias` are the tensors of the checkpoint. `offset` is added to the
    weight. `cut` is a `Divided` if the ranks divide the axis.
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
        """Weight of the norm, [1, size] on every rank, or with a dividing `cut` [1, elements of a rank]."""
        return Weight(self.name, (Tensor(self.tensor, (self.size,), self.cut),), component="norms")

    @property
    def bias_weight(self) -> Weight | None:
        """Bias of a LayerNorm, [1, size] on every rank; None for RMSNorm."""
        if self.bias is None:
            return None
        return Weight(f"{self.name}.bias", (Tensor(self.bias, (self.size,), ROW),), component="norms")

    @property
    def weights(self) -> Sequence[Weight]:
        """Weight and bias, if there is one."""
        return (self.weight, *((self.bias_weight,) if self.bias_weight else ()))

    def list_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments of the norm of a kernel that normalises its input."""
        return {
            "norm_weight": self.weight.value(step),
            "norm_bias": create_argument(self.bias_weight, step),
            "norm_offset": self.offset,
            "eps": self.eps,
        }

    def launch(
        self,
        step: StepShape,
        x: Value,
        result: str,
        label: str,
        residual: Value | None,
        scale: Scale | None = None,
    ) -> Launch:
        """Return a launch of `rmsnorm` that writes (norm(x) + residual) * scale to an array with the shape of `x`.

        A LayerNorm has no residual.

        Args:
            step: The step.
            x: Rows to normalise, [rows, size] or a rank's columns of them.
            result: Name of the array that the launch writes; it may be an array that the launch reads.
            label: Distinguishes launches of the kernel in reports.
            residual: Rows that are added after the norm; None adds nothing.
            scale: Factor of the sum; None for 1.
        """
        moved_bytes = x.nbytes * (2 if residual is None else 3)
        arguments: dict[str, Argument] = {
            "x": x,
            "weight": self.weight.value(step),
            "eps": self.eps,
            "residual": residual,
            "norm_offset": self.offset,
        }
        if self.bias_weight is not None:
            arguments |= {"norm_bias": self.bias_weight.value(step)}
        if isinstance(self.cut, Divided):
            row_elements = self.cut.count_elements(self.size, step.ranks)
            arguments |= {"replica_group": Axis.tensor, "row_elements": row_elements}
        if scale is not None:
            arguments |= {"scale": scale.weight.value(step)}
        return Launch("rmsnorm", arguments, (result,), LeastWork(0.0, float(moved_bytes)), x.shape[0], label)

    def reference(self, x: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return the norm of x [..., size] with the whole weight, rounded; no residual is added."""
        return numpy.normalise(x, self.tensor, self.eps, self.bias, self.offset)


@dataclass(frozen=True)
class Scale:
    """Factor of hidden states from a checkpoint: `name` on a rank, `tensor` in the checkpoint."""

    name: str
    tensor: str

    @property
    def weight(self) -> Weight:
        """Factor as a weight, [1, 1] on every rank."""
        return Weight(self.name, (Tensor(self.tensor, (1,), ROW),), component="buffers")


def add_residual(x: np.ndarray, y: np.ndarray, scale: Scale | None, numpy: Arithmetic) -> np.ndarray:
    """Return (x + y) * scale, or x + y if `scale` is None, rounded once to the dtype of the activations."""
    return numpy.round(x + y if scale is None else (x + y) * numpy.load_tensor(scale.tensor))
