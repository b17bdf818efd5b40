"""Group norm of images, with silu behind it or not; statistics are float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.image.convolution import Convolution, ImageSize, create_launch, name_moments
from model.layers.launch import FLOAT32, PARTITIONS, Argument, Launch, StepShape, Value
from model.layers.mlp import apply_activation
from model.layers.shard import ROW
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class GroupNorm:
    """Group norm of images of `size`, followed by silu or not; `tensor` names its tensors without suffix."""

    name: str
    tensor: str
    size: ImageSize
    groups: int
    eps: float = 1e-6
    silu: bool = True

    @property
    def weights(self) -> Sequence[Weight]:
        """Weight and bias, [1, channels] each on every rank."""
        return tuple(
            Weight(f"{self.name}.{suffix}", (Tensor(f"{self.tensor}.{suffix}", (self.size.channels,), ROW),))
            for suffix in ("weight", "bias")
        )

    @property
    def is_fused(self) -> bool:
        """Whether `conv2d` computes the norm of the images that it reads, from moments of the launch before.

        It does if the channels on the partitions at a time are whole groups. Where the partitions have room for several
        taps of the channels, `conv2d` is faster on normalised images: predicted for a batch of four images of 64 x 64
        pixels with 16 and 32 channels on trn2, the decoder of `shapes` takes 660 us with launches of `group_norm`, and
        947 us without.
        """
        channels = self.size.channels
        if channels <= PARTITIONS // 2:
            return False
        tile_channels = -(-channels // -(-channels // PARTITIONS))
        return tile_channels % (channels // self.groups) == 0

    def launch_before(
        self,
        convolution: Convolution,
        step: StepShape,
        source: str,
        output: str,
        added: str | None = None,
        measured: bool = False,
    ) -> Sequence[Launch]:
        """Return the launches of the norm and of a convolution of its result; one launch if the norm `is_fused`.

        Args:
            convolution: The convolution.
            step: The step.
            source: Name of the images that the norm reads; their moments are written if the norm `is_fused`.
            output: Name of the images that the convolution writes.
            added: Name of images that the convolution adds.
            measured: Whether the convolution writes the moments of its result.
        """
        if not self.is_fused:
            convolved = convolution.launch(step, "normed", output, added, measured=measured)
            return (self.launch(step, source, "normed"), convolved)
        weight, bias = (weight.value(step) for weight in self.weights)
        norm: dict[str, Argument] = {
            "moments": Value(name_moments(source), (step.sequences, self.size.channels, 2), FLOAT32),
            "norm_weight": weight,
            "norm_bias": bias,
            "groups": self.groups,
            "eps": self.eps,
            "norm_activation": "silu" if self.silu else None,
        }
        return (convolution.launch(step, source, output, added, norm, measured),)

    def launch(self, step: StepShape, source: str, output: str) -> Launch:
        """Return the launch of `group_norm` that reads the images `source` and writes the images `output`."""
        weight, bias = (weight.value(step) for weight in self.weights)
        x = self.size.describe(source, step)
        arguments: dict[str, Argument] = {
            "x": x,
            "weight": weight,
            "bias": bias,
            "groups": self.groups,
            "eps": self.eps,
            "activation": "silu" if self.silu else None,
        }
        return create_launch("group_norm", arguments, replace(x, name=output), 0.0, step)

    def compute(self, x: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return the norm of one image x [channels, rows, columns], rounded once, behind the activation."""
        groups = x.reshape(self.groups, -1)
        centred = groups - groups.mean(axis=1, keepdims=True)
        variance = np.mean(centred * centred, axis=1, keepdims=True)
        normalised = (centred / np.sqrt(variance + np.float32(self.eps))).reshape(x.shape)
        weight, bias = (
            numpy.load_tensor(f"{self.tensor}.{suffix}")[:, None, None] for suffix in ("weight", "bias")
        )
        y = normalised * weight + bias
        return numpy.round(apply_activation(y, "silu") if self.silu else y)
