"""A projection as a checkpoint holds it: its tensor, or the part of a fused one, and its bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from model.layers.shard import Cut
from model.layers.weight import Tensor, Zeros


@dataclass(frozen=True)
class Projection:
    """A matrix [outputs, inputs] of tensor `tensor`, and its bias of tensor `bias` where it has one.

    A fused one is a part of a tensor of `tensor_outputs` outputs, those from `first` on; or as many from `first` on of
    `every` so many. Some checkpoints hold it `transposed`.
    """

    tensor: str
    outputs: int
    inputs: int
    bias: str | None = None
    first: int = 0
    tensor_outputs: int = 0
    transposed: bool = False
    every: int = 0

    def split(self, sizes: Sequence[int], groups: int = 1) -> tuple[Projection, ...]:
        """Return the projections that share this tensor.

        Args:
            sizes: Outputs of every projection in one group, in the order of the tensor.
            groups: Equal groups of outputs, such as heads; each has outputs of every projection.
        """
        every = self.outputs // groups if groups > 1 else 0
        return tuple(
            replace(self, outputs=groups * size, first=first, tensor_outputs=self.outputs, every=every)
            for size, first in zip(sizes, accumulate(sizes, initial=0))
        )

    def resized(self, outputs: int) -> Projection:
        """The same with another number of outputs, and of those of a tensor that holds others as well."""
        return replace(self, outputs=outputs, tensor_outputs=self.tensor_outputs * outputs // self.outputs)

    def weight(self, cut: Cut) -> Tensor:
        """The matrix, of which a rank holds what `cut` says."""
        shape = (self.tensor_outputs or self.outputs, self.inputs)
        stored = shape[::-1] if self.transposed else shape
        return Tensor(self.tensor, stored, cut, self._outputs, self.transposed)

    def bias_row(self, cut: Cut) -> Tensor:
        """The bias, of which a rank holds what `cut` says, as a row; zeros where there is none."""
        if self.bias is None:
            return Zeros("", (self.outputs,), cut)
        return Tensor(self.bias, (self.tensor_outputs or self.outputs,), cut, self._outputs)

    @property
    def _outputs(self) -> tuple[int, int, int] | None:
        if not self.tensor_outputs:
            return None
        period = self.every or self.tensor_outputs
        return self.first, self.first + self.outputs * period // self.tensor_outputs, period
