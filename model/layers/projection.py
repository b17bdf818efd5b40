"""Projections - matrices of layers with an optional bias - and the checkpoint tensors in which they are stored.

Families create projections, layers turn them into weights. Several projections may share one checkpoint tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from model.layers.shard import Cut
from model.layers.weight import Tensor, Zeros


@dataclass(frozen=True)
class Projection:
    """Matrix [outputs, inputs] in the checkpoint tensor `tensor`, with its bias in the tensor `bias` if it has one.

    first           index of the first output in a tensor that several projections share
    tensor_outputs  outputs of the shared tensor; 0 for a tensor of one projection
    transposed      whether the checkpoint stores [inputs, outputs]
    every           outputs of one group of a shared tensor with several groups, such as heads; 0 for one group
    first_input     index of the first input in a matrix whose inputs several projections share
    tensor_inputs   inputs of the shared matrix; 0 for a matrix of one projection
    """

    tensor: str
    outputs: int
    inputs: int
    bias: str | None = None
    first: int = 0
    tensor_outputs: int = 0
    transposed: bool = False
    every: int = 0
    first_input: int = 0
    tensor_inputs: int = 0

    def split(self, sizes: Sequence[int], groups: int = 1) -> tuple[Projection, ...]:
        """Return the projections that share this projection's tensor, which must be a tensor of one projection.

        Args:
            sizes: Outputs of every projection in one group, in the order of the tensor.
            groups: Equal groups of outputs, such as heads. Each group has outputs of every projection.
        """
        every = self.outputs // groups if groups > 1 else 0
        return tuple(
            replace(self, outputs=groups * size, first=first, tensor_outputs=self.outputs, every=every)
            for size, first in zip(sizes, accumulate(sizes, initial=0))
        )

    def split_inputs(self, sizes: Sequence[int]) -> tuple[Projection, ...]:
        """Return projections of consecutive inputs, whose products add up to this one's; the first has the bias.

        Args:
            sizes: Inputs of every projection.
        """
        return tuple(
            replace(self, inputs=size, first_input=first, tensor_inputs=self.inputs, bias=bias)
            for size, first, bias in zip(
                sizes, accumulate(sizes, initial=0), (self.bias, *[None] * len(sizes))
            )
        )

    def resized(self, outputs: int) -> Projection:
        """Return the projection with `outputs` outputs; the outputs of a shared tensor are resized in proportion."""
        return replace(self, outputs=outputs, tensor_outputs=self.tensor_outputs * outputs // self.outputs)

    def weight(self, cut: Cut) -> Tensor:
        """Return the description of the matrix as a tensor of a weight, divided among ranks by `cut`."""
        shape = (self.tensor_outputs or self.outputs, self.tensor_inputs or self.inputs)
        stored = shape[::-1] if self.transposed else shape
        inputs = (self.first_input, self.first_input + self.inputs) if self.tensor_inputs else None
        return Tensor(self.tensor, stored, cut, self._outputs, self.transposed, inputs=inputs)

    def bias_row(self, cut: Cut) -> Tensor:
        """Return the description of the bias [outputs], divided among ranks by `cut`; `Zeros` if there is no bias."""
        if self.bias is None:
            return Zeros("", (self.outputs,), cut)
        return Tensor(self.bias, (self.tensor_outputs or self.outputs,), cut, self._outputs)

    @property
    def _outputs(self) -> tuple[int, int, int] | None:
        """Outputs in a shared tensor as (first, end, period) of `Tensor`; None for a tensor of one projection."""
        if not self.tensor_outputs:
            return None
        period = self.every or self.tensor_outputs
        return self.first, self.first + self.outputs * period // self.tensor_outputs, period
