"""Works of convolutions and poolings on one rank, with images and windows of well-known vision models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from benchmarks.kernels.works import BFLOAT16, Work
from model.layers.launch import Argument, Launch, LeastWork, Value


@dataclass(frozen=True)
class Images:
    """Sizes of a convolution or pooling of square images.

    images: number of images. channels: input channels. size: height and width. outputs: output channels. window:
    height and width of the filter or pooling window. stride and padding: along both axes.
    """

    name: str
    images: int
    channels: int
    size: int
    outputs: int
    window: int
    stride: int
    padding: int

    @property
    def results(self) -> int:
        """Height of the result, which equals its width."""
        return (self.size + 2 * self.padding - self.window) // self.stride + 1


CONVOLUTIONS = (
    Images("patches of 16, ViT-B", 8, 3, 224, 768, 16, 16, 0),
    Images("patches of 14, ViT-L", 8, 3, 224, 1024, 14, 14, 0),
    Images("first layer, ResNet-50", 8, 3, 224, 64, 7, 2, 3),
    Images("first layer, VGG-16", 4, 3, 224, 64, 3, 1, 1),
    Images("3 x 3 of 64, ResNet-50", 8, 64, 56, 64, 3, 1, 1),
    Images("3 x 3 of 128, ResNet-50", 8, 128, 28, 128, 3, 1, 1),
    Images("3 x 3 of 256, ResNet-50", 16, 256, 14, 256, 3, 1, 1),
    Images("1 x 1 of 256 to 64, ResNet-50", 8, 256, 56, 64, 1, 1, 0),
)
POOLINGS = (
    ("max_pool", Images("3 x 3, ResNet-50", 8, 64, 112, 64, 3, 2, 1)),
    ("max_pool", Images("2 x 2, VGG-16", 4, 64, 224, 64, 2, 2, 0)),
    ("average_pool", Images("2 x 2, DenseNet", 8, 128, 56, 128, 2, 2, 0)),
    ("average_pool", Images("3 x 3, Inception-v3", 8, 192, 35, 192, 3, 1, 1)),
)


def _value(name: str, *sizes: int) -> Value:
    """Return a bfloat16 tensor argument of a name and shape."""
    return Value(name, sizes, BFLOAT16)


def convolution_works() -> Iterator[Work]:
    """Yield the works of the convolutions, then those of the poolings."""
    for sizes in CONVOLUTIONS:
        x = _value("x", sizes.images, sizes.channels, sizes.size, sizes.size)
        w = _value("w", sizes.window, sizes.window, sizes.channels, sizes.outputs)
        bias = _value("bias", 1, sizes.outputs)
        pixels = sizes.images * sizes.results**2
        operations = 2.0 * pixels * prod(w.shape)
        least = LeastWork(
            operations, x.nbytes + w.nbytes + bias.nbytes + BFLOAT16.itemsize * pixels * sizes.outputs
        )
        arguments: dict[str, Argument] = {
            "x": x,
            "w": w,
            "bias": bias,
            "stride": (sizes.stride,) * 2,
            "padding": (sizes.padding,) * 2,
        }
        launch = Launch("conv2d", arguments, ("y",), least, pixels)
        yield Work(f"convolution, {sizes.name}", None, 0, least, (launch,))
    for kernel, sizes in POOLINGS:
        x = _value("x", sizes.images, sizes.channels, sizes.size, sizes.size)
        written = BFLOAT16.itemsize * sizes.images * sizes.channels * sizes.results**2
        least = LeastWork(0.0, float(x.nbytes + written))
        arguments = {
            "x": x,
            "window": (sizes.window,) * 2,
            "stride": (sizes.stride,) * 2,
            "padding": (sizes.padding,) * 2,
        }
        launch = Launch(kernel, arguments, ("y",), least, 1)
        yield Work(f"{kernel.replace('_', ' ')}, {sizes.name}", None, 0, least, (launch,))
