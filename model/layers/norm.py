"""RMSNorm: rows divided by their root mean square, times a weight.

The kernels of projections carry out the norm before them; only norms within a layer are launches of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.launch import Launch, StepShape, Tensor, Value, Weight, copied
from model.layers.shard import Row


@dataclass(frozen=True)
class RmsNorm:
    """One norm over the last axis, of `size` elements: `name` on a rank, `tensor` in the checkpoint."""

    name: str
    tensor: str
    size: int
    eps: float

    @property
    def weight(self) -> Weight:
        """The weight of the norm, a row [1, size] on every rank."""
        return Weight(self.name, (Tensor(self.tensor, (self.size,), Row()),))

    def launch(self, x: Value, step: StepShape, label: str) -> Launch:
        """The norm alone, over every `size` elements of an activation, in place of it."""
        rows = prod(x.shape) // self.size
        arguments = (x.reshaped(rows, self.size), self.weight.value(step), self.eps)
        return Launch("rmsnorm", arguments, (x.name,), copied(x), x.shape[0], label)

    def reference(self, x: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """x [..., size] normalised."""
        return numpy.norm(x, self.tensor, self.eps)
