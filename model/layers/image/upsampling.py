"""Layer that doubles images: a convolution of the images with each pixel repeated, computed on the small images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.image.convolution import Convolution, ImageLayer, ImageSize, create_launch, sum_taps
from model.layers.launch import Launch, StepShape
from model.layers.layer import States
from model.layers.weight import Weight

_PHASE_TAPS = 16
"""Products of a pixel and a pair of channels: windows of 2 x 2 for even and odd rows and columns of the result."""


@dataclass(frozen=True)
class Upsampling(ImageLayer):
    """Layer that doubles rows and columns: each pixel is repeated, then a window of 3 x 3 convolves the images.

    `tensor` names the tensors of the convolution without suffix; its results have as many channels as the images.
    """

    tensor: str

    @property
    def _convolution(self) -> Convolution:
        return Convolution(self.name, self.tensor, self.size, self.size.channels)

    @property
    def weights(self) -> Sequence[Weight]:
        """Weight and bias of the convolution."""
        return self._convolution.weights

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `upsample_conv2d`."""
        size, x = self.size, self.size.describe("x", step)
        weight, bias = (weight.value(step) for weight in self.weights)
        doubled = ImageSize(size.channels, 2 * size.rows, 2 * size.columns)
        products = step.sequences * size.rows * size.columns * _PHASE_TAPS * size.channels**2
        arguments = {"x": x, "w": weight, "bias": bias}
        output = doubled.describe("x", step)
        return (create_launch("upsample_conv2d", arguments, output, 2.0 * products, step, self.measured),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the doubled image of x [channels, rows, columns].

        Even and odd rows and columns of the result have windows of 2 x 2 of their own on x. Their weights are sums of
        weights that meet one pixel, rounded to the dtype of the activations.
        """
        weight = numpy.load_tensor(f"{self.tensor}.weight")
        rows, columns = x.shape[1:]
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
        y = np.empty((len(weight), 2 * rows, 2 * columns), np.float32)
        for row, column in np.ndindex(2, 2):
            window = numpy.round(_merge_taps(_merge_taps(weight, 2, row), 3, column))
            y[:, row::2, column::2] = sum_taps(padded[:, row:, column:], window, (rows, columns))
        return numpy.round(y + numpy.load_tensor(f"{self.tensor}.bias")[:, None, None])


def _merge_taps(weight: np.ndarray, axis: int, phase: int) -> np.ndarray:
    """Return the two taps along an axis of windows on repeated pixels; phase 0 is even rows or columns, 1 odd ones."""
    first, middle, last = np.split(weight, 3, axis)
    return np.concatenate((first + middle, last) if phase else (first, middle + last), axis)
