"""RMSNorm: rows divided by their root mean square, times a weight.

The kernels of projections carry out the norm before them, and those of heads: no norm is a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.launch import Tensor, Weight
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

    def reference(self, x: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """x [..., size] normalised."""
        return numpy.norm(x, self.tensor, self.eps)
