"""Last layer of a network over images: norm, silu and a convolution to the channels of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.image.convolution import Convolution, ImageLayer
from model.layers.image.normalization import GroupNorm
from model.layers.launch import Launch, StepShape
from model.layers.layer import States
from model.layers.weight import Weight


@dataclass(frozen=True)
class ImageOutput(ImageLayer):
    """Layer that computes convolution(silu(group_norm(x))); `tensors` name the norm's and the convolution's tensors."""

    tensors: tuple[str, str]
    outputs: int
    groups: int

    @property
    def _norm(self) -> GroupNorm:
        return GroupNorm(f"{self.name}.norm", self.tensors[0], self.size, self.groups)

    @property
    def _convolution(self) -> Convolution:
        return Convolution(f"{self.name}.w", self.tensors[1], self.size, self.outputs)

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights and biases of norm and convolution."""
        return (*self._norm.weights, *self._convolution.weights)

    @property
    def reads_moments(self) -> bool:
        """Whether the convolution computes the norm of x."""
        return self._norm.is_fused

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the norm and the convolution."""
        return self._norm.launch_before(self._convolution, step, "x", "x")

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the convolution of the normalised image x [channels, rows, columns]."""
        return self._convolution.compute(self._norm.compute(x, numpy), numpy)
