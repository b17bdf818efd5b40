"""Residual block of images.

    inner = convolution_1(silu(group_norm_1(x)))
    x     = convolution_2(silu(group_norm_2(inner))) + x, or + shortcut(x) where the number of channels changes

The last convolution adds the residual, so the sum costs no launch. Nor do the norms where convolutions compute them of
the images that they read (`GroupNorm.is_fused`).
"""

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
class ResidualBlock(ImageLayer):
    """Residual block; `tensor` is the prefix of its tensors in the checkpoint, `groups` the groups of its norms."""

    tensor: str
    outputs: int
    groups: int

    @property
    def _norms(self) -> tuple[GroupNorm, GroupNorm]:
        sizes = (self.size, self.size.with_channels(self.outputs))
        first, second = (
            GroupNorm(f"{self.name}.norm_{number}", f"{self.tensor}.norm{number}", size, self.groups)
            for number, size in enumerate(sizes, 1)
        )
        return first, second

    @property
    def _convolutions(self) -> tuple[Convolution, Convolution]:
        sizes = (self.size, self.size.with_channels(self.outputs))
        first, second = (
            Convolution(f"{self.name}.w_{number}", f"{self.tensor}.conv{number}", size, self.outputs)
            for number, size in enumerate(sizes, 1)
        )
        return first, second

    @property
    def _shortcut(self) -> Convolution | None:
        """Convolution of single pixels to the number of outputs; None if images have as many channels already."""
        if self.size.channels == self.outputs:
            return None
        tensor = f"{self.tensor}.conv_shortcut"
        return Convolution(f"{self.name}.w_shortcut", tensor, self.size, self.outputs, window=1)

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights and biases of the norms, of both convolutions and of the shortcut, if there is one."""
        shortcut = (self._shortcut,) if self._shortcut else ()
        return tuple(
            weight for layer in (*self._norms, *self._convolutions, *shortcut) for weight in layer.weights
        )

    @property
    def reads_moments(self) -> bool:
        """Whether the first convolution computes the norm of x."""
        return self._norms[0].is_fused

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of norm and convolution, twice, and between them that of the shortcut, if any."""
        (first_norm, second_norm), (first, second) = self._norms, self._convolutions
        shortcut = (self._shortcut.launch(step, "x", "shortcut"),) if self._shortcut else ()
        return (
            *first_norm.launch_before(first, step, "x", "inner", measured=second_norm.is_fused),
            *shortcut,
            *second_norm.launch_before(
                second, step, "inner", "x", "shortcut" if shortcut else "x", self.measured
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the block's result for one image x [channels, rows, columns]; every launch's result is rounded."""
        (first_norm, second_norm), (first, second) = self._norms, self._convolutions
        inner = first.compute(first_norm.compute(x, numpy), numpy)
        residual = self._shortcut.compute(x, numpy) if self._shortcut else x
        return second.compute(second_norm.compute(inner, numpy), numpy, residual)
