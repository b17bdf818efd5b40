"""Group norm of images, with silu behind it or not; statistics are float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.image.convolution import ImageSize, create_launch
from model.layers.launch import Argument, Launch, StepShape
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
