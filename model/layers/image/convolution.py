"""Convolutions of images, and the images that layers pass to each other.

Images are [images, channels, rows, columns] in launches, and [channels, rows, columns] in references, which compute one
image. Every rank computes all of them, so no rank waits for another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import Argument, Launch, LeastWork, StepShape, Value
from model.layers.layer import Stateless, States
from model.layers.shard import ROW, TAPS
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class ImageSize:
    """Channels, rows and columns of the images that a layer reads or returns."""

    channels: int
    rows: int
    columns: int

    def describe(self, name: str, step: StepShape) -> Value:
        """Return the array `name` of a step's images as an argument or result of a launch."""
        return Value(name, (step.sequences, self.channels, self.rows, self.columns), step.activations)

    def with_channels(self, channels: int) -> ImageSize:
        """Return images of the same rows and columns with other channels."""
        return replace(self, channels=channels)


@dataclass(frozen=True)
class ImageLayer(Stateless):
    """Layer of images. `name` is the prefix of its arrays on a rank, and `size` the size of the images it reads.

    A layer that is `measured` also writes the moments of its images, mean and variance of each channel of an image, for
    the group norm at the begin of the next layer, if that layer `reads_moments`.
    """

    name: str
    size: ImageSize
    measured: bool = field(default=False, kw_only=True)

    @property
    def reads_moments(self) -> bool:
        """Whether the layer reads the moments of its images from the layer before."""
        return False


@dataclass(frozen=True)
class Convolution:
    """Convolution with a square window and a bias, for images of `size`; `tensor` names its tensors without suffix.

    With `stride` 2 an image gets one row of zeros below and one column on the right, and is halved. Otherwise half of
    the window is padded on all sides, and the size stays.
    """

    name: str
    tensor: str
    size: ImageSize
    outputs: int
    window: int = 3
    stride: int = 1

    @property
    def output_size(self) -> ImageSize:
        """Size of the images that the convolution writes."""
        rows, columns = (side // self.stride for side in (self.size.rows, self.size.columns))
        return ImageSize(self.outputs, rows, columns)

    @property
    def weight(self) -> Weight:
        """Weight, [window, window, channels, outputs] on every rank."""
        shape = (self.outputs, self.size.channels, self.window, self.window)
        return Weight(self.name, (Tensor(f"{self.tensor}.weight", shape, TAPS),))

    @property
    def bias(self) -> Weight:
        """Bias, [1, outputs] on every rank."""
        return Weight(f"{self.name}.bias", (Tensor(f"{self.tensor}.bias", (self.outputs,), ROW),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weight and bias."""
        return (self.weight, self.bias)

    @property
    def _padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Padding of rows and columns before images, and after them."""
        margin = self.window // 2
        return ((0, 0), (1, 1)) if self.stride == 2 else ((margin, margin), (margin, margin))

    def launch(
        self,
        step: StepShape,
        source: str,
        output: str,
        added: str | None = None,
        norm: Mapping[str, Argument] = MappingProxyType({}),
        measured: bool = False,
    ) -> Launch:
        """Return the launch of `conv2d` that convolves the images `source` and adds the images `added`.

        Args:
            step: The step.
            source: Name of the images that are read.
            output: Name of the images that are written.
            added: Name of images of the result's size, which are added before the sum is rounded.
            norm: Arguments for the group norm of the images that are read, if the launch computes it.
            measured: Whether the moments of the result are written too.
        """
        before, after = self._padding
        sums = self.output_size.describe(output, step)
        arguments: dict[str, Argument] = {
            "x": self.size.describe(source, step),
            "w": self.weight.value(step),
            "bias": self.bias.value(step),
            "stride": (self.stride, self.stride),
            "padding": before,
            "padding_end": after,
        }
        if added is not None:
            arguments["added"] = replace(sums, name=added)
        arguments |= norm
        pixels = step.sequences * self.output_size.rows * self.output_size.columns
        operations = 2.0 * pixels * prod(self.weight.shape(step.shard))
        return create_launch("conv2d", arguments, sums, operations, step, measured)

    def compute(self, x: np.ndarray, numpy: Arithmetic, added: np.ndarray | None = None) -> np.ndarray:
        """Return the convolution of one image x [channels, rows, columns] plus bias and `added`, rounded once."""
        weight = numpy.load_tensor(f"{self.tensor}.weight")
        padded = np.pad(x, ((0, 0), *zip(*self._padding)))
        sums = sum_taps(padded, weight, (self.output_size.rows, self.output_size.columns), self.stride)
        sums += numpy.load_tensor(f"{self.tensor}.bias")[:, None, None]
        return numpy.round(sums if added is None else sums + added)


@dataclass(frozen=True)
class ConvolutionLayer(ImageLayer):
    """Layer of one convolution, such as one with stride 2, which halves images.

    `source` names the images in a launch: "x", or an input of the step. `tensor`, `outputs`, `window` and `stride` are
    those of `Convolution`.
    """

    tensor: str
    outputs: int
    window: int = 3
    stride: int = 1
    source: str = "x"

    @property
    def _convolution(self) -> Convolution:
        return Convolution(self.name, self.tensor, self.size, self.outputs, self.window, self.stride)

    @property
    def weights(self) -> Sequence[Weight]:
        """Weight and bias of the convolution."""
        return self._convolution.weights

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `conv2d`."""
        return (self._convolution.launch(step, self.source, "x", measured=self.measured),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the convolution of an image x [channels, rows, columns]; an input of the step is rounded first."""
        return self._convolution.compute(numpy.round(x), numpy)


def name_moments(images: str) -> str:
    """Return the name of the moments of the images of a name."""
    return f"{images}_moments"


def create_launch(
    kernel: str,
    arguments: Mapping[str, Argument],
    output: Value,
    operations: float,
    step: StepShape,
    measured: bool = False,
) -> Launch:
    """Return the launch of a kernel on images, which at least reads its arrays once and writes `output` once.

    If it is `measured`, the launch also writes the moments of the output, whose few bytes do not count.
    """
    outputs = (output.name, name_moments(output.name)) if measured else (output.name,)
    arguments = {**arguments, "returns_moments": True} if measured else arguments
    arrays = [argument for argument in arguments.values() if isinstance(argument, Value)]
    moved_bytes = float(sum(array.nbytes for array in (*arrays, output)))
    return Launch(kernel, arguments, outputs, LeastWork(operations, moved_bytes), step.tokens)


def sum_taps(x: np.ndarray, weight: np.ndarray, size: tuple[int, int], stride: int = 1) -> np.ndarray:
    """Return the sums of windows of x [channels, rows, columns] with weight [outputs, channels, rows, columns].

    Args:
        x: An image with its padding.
        weight: The window of each pair of channels.
        size: (rows, columns) of the result.
        stride: Distance of windows.
    """
    rows, columns = size
    sums = np.zeros((len(weight), rows * columns), np.float32)
    for row, column in np.ndindex(*weight.shape[2:]):
        tap = x[:, row::stride, column::stride][:, :rows, :columns]
        sums += weight[:, :, row, column] @ tap.reshape(len(x), -1)
    return sums.reshape(len(weight), rows, columns)
