"""A projection as a checkpoint holds it: its tensor, or the part of a fused one, and its bias."""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.layers.shard import Cut
from model.layers.weight import Tensor, Zeros


@dataclass(frozen=True)
class Projection:
    """A matrix [outputs, inputs] of tensor `tensor`, and its bias of tensor `bias` where it has one.

    A fused one is a part of a tensor of `of` outputs, those from `first` on; or as many from `first` on of `every` so
    many. Some checkpoints hold it `transposed`.
    """

    tensor: str
    outputs: int
    inputs: int
    bias: str | None = None
    first: int = 0
    of: int = 0
    transposed: bool = False
    every: int = 0

    def resized(self, outputs: int) -> Projection:
        """The same with another number of outputs, and of those of a tensor that holds others as well."""
        return replace(self, outputs=outputs, of=self.of * outputs // self.outputs)

    def weight(self, cut: Cut) -> Tensor:
        """The matrix, of which a rank holds what `cut` says."""
        shape = (self.of or self.outputs, self.inputs)
        stored = shape[::-1] if self.transposed else shape
        return Tensor(self.tensor, stored, cut, self._outputs, self.transposed)

    def bias_row(self, cut: Cut) -> Tensor:
        """The bias, of which a rank holds what `cut` says, as a row; zeros where there is none."""
        if self.bias is None:
            return Zeros("", (self.outputs,), cut)
        return Tensor(self.bias, (self.of or self.outputs,), cut, self._outputs)

    @property
    def _outputs(self) -> tuple[int, int, int] | None:
        if not self.of:
            return None
        period = self.every or self.of
        return self.first, self.first + self.outputs * period // self.of, period
