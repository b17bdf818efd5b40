"""Attention among all pixels of an image, with one head of all channels.

    queries, keys, values = linear(group_norm(x))    rows of hidden states, one for each pixel
    x                     = linear(attention(queries, keys, values)) + x

Rows are made by `conv1d`, whose results lie as attention takes them. The last linear is a convolution of single pixels,
which reads rows, adds the residual and writes images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from model.config.mixers import GroupedAttention
from model.layers.arithmetic import Arithmetic, Span
from model.layers.image.convolution import ImageLayer, create_launch
from model.layers.image.normalization import GroupNorm
from model.layers.launch import Argument, Launch, StepShape, Value
from model.layers.layer import States
from model.layers.shard import ROW, Taps
from model.layers.softmax import attend
from model.layers.weight import Tensor, Weight

_INPUTS = {"queries": "to_q", "keys": "to_k", "values": "to_v"}
"""Names of the linears before attention in the checkpoint, by the arrays of rows that they make."""


@dataclass(frozen=True)
class PixelAttention(ImageLayer):
    """Attention layer; `tensor` is the prefix of its tensors in the checkpoint, `groups` the groups of its norm."""

    tensor: str
    groups: int

    @property
    def _norm(self) -> GroupNorm:
        tensor = f"{self.tensor}.group_norm"
        return GroupNorm(f"{self.name}.norm", tensor, self.size, self.groups, silu=False)

    def _list_linear(self, name: str, linear: str, window_axes: int) -> tuple[Weight, Weight]:
        """Return weight [1, ..., channels, channels] and bias of a linear, as a window with so many axes of size 1."""
        channels = self.size.channels
        tensor = f"{self.tensor}.{linear}"
        weight = Tensor(f"{tensor}.weight", (channels, channels), Taps(window_axes))
        bias = Tensor(f"{tensor}.bias", (channels,), ROW)
        return Weight(f"{self.name}.{name}", (weight,)), Weight(f"{self.name}.{name}.bias", (bias,))

    @property
    def _inputs(self) -> dict[str, tuple[Weight, Weight]]:
        return {name: self._list_linear(name, linear, 1) for name, linear in _INPUTS.items()}

    @property
    def _output(self) -> tuple[Weight, Weight]:
        return self._list_linear("output", "to_out.0", 2)

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights and biases of the norm and of the linears."""
        linears = (*self._inputs.values(), self._output)
        return (*self._norm.weights, *(weight for linear in linears for weight in linear))

    @property
    def _mixer(self) -> GroupedAttention:
        return GroupedAttention(1, 1, self.size.channels, causal=False)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the norm, three linears, attention, and the linear that adds the residual."""
        x = self.size.describe("x", step)
        images, channels, height, width = x.shape
        normed = self.size.describe("normed", step)
        rows = {
            name: Value(name, (images * height * width, channels), step.activations)
            for name in (*_INPUTS, "attended")
        }
        products = 2.0 * prod(x.shape) * channels
        linears = (
            create_launch(
                "conv1d",
                {"x": normed, "w": weight.value(step), "bias": bias.value(step), "as_rows": True},
                rows[name],
                products,
                step,
            )
            for name, (weight, bias) in self._inputs.items()
        )
        attention: dict[str, Argument] = {
            "q": rows["queries"],
            "k_cache": None,
            "v_cache": None,
            "scale": self._mixer.score_scale,
            "k": rows["keys"],
            "v": rows["values"],
            "num_kv_heads": 1,
            "causal": False,
            "sequences": images,
        }
        weight, bias = (weight.value(step) for weight in self._output)
        output: dict[str, Argument] = {
            "x": rows["attended"],
            "w": weight,
            "bias": bias,
            "added": x,
            "image": (height, width),
        }
        scores = 4.0 * prod(x.shape) * height * width
        return (
            self._norm.launch(step, "x", "normed"),
            *linears,
            create_launch("attention_prefill", attention, rows["attended"], scores, step),
            create_launch("conv2d", output, x, products, step, self.measured),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [channels, rows, columns] plus the attention of its pixels; rows and the sum are rounded."""
        rows = self._norm.compute(x, numpy).reshape(len(x), -1).T
        queries, keys, values = (
            numpy.round(self._project(rows, linear, numpy))[None] for linear in _INPUTS.values()
        )
        attended = attend(queries, keys, values, self._mixer, Span(0, len(rows)), numpy)
        return numpy.round(self._project(attended, "to_out.0", numpy).T.reshape(x.shape) + x)

    def _project(self, rows: np.ndarray, linear: str, numpy: Arithmetic) -> np.ndarray:
        """Return the product of rows [pixels, channels] with a linear's weight, plus its bias."""
        weight, bias = (
            numpy.load_tensor(f"{self.tensor}.{linear}.{suffix}") for suffix in ("weight", "bias")
        )
        return rows @ weight.T + bias
