"""Recurrent layers in place of attention: input projections, a convolution, the recurrence, and the output projection.

    inner = in(norm(x))
    x     = x + output(recurrence(convolution(inner), inner))

A state is an array [slots, …] whose size does not depend on the length of sequences. Inputs of a step are the slot of
each sequence, the position of its first token, and the number of its tokens without padding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.cache import Cache
from model.layers.launch import (
    FLOAT32,
    INT32,
    Axis,
    Launch,
    LeastWork,
    StepShape,
    Value,
    count_product_work,
    list_gather_arguments,
)
from model.layers.layer import Constant, States
from model.layers.mlp import apply_activation
from model.layers.norm import Norm
from model.layers.paged import STATES
from model.layers.projection import Projection
from model.layers.shard import ROW, Cut, Depthwise, Divided
from model.layers.weight import Tensor, Weight, create_argument

SEQUENCE_ARRAYS = {
    "state_slots": "state_slots",
    "starts": "num_computed_tokens",
    "counts": "num_scheduled_tokens",
}
"""Names of arrays of a step, [sequences, 1] each, by the parameters of recurrent kernels that read them."""


def list_sequence_arguments(step: StepShape) -> dict[str, Value]:
    """Return the arguments `state_slots`, `starts` and `counts` of a recurrent kernel, [sequences, 1] int32 each."""
    shape = step.sequences, 1
    return {parameter: Value(name, shape, INT32) for parameter, name in SEQUENCE_ARRAYS.items()}


@dataclass(frozen=True)
class Convolution:
    """Depthwise causal convolution with an activation; its checkpoint tensors are `tensor`.weight and `tensor`.bias.

    `channel_cuts` has the number of channels of each group of neighbouring channels, with the cut to a rank's channels.
    """

    name: str
    tensor: str
    taps: int
    channel_cuts: tuple[tuple[int, Cut], ...]
    bias: bool
    activation: str | None = "silu"

    @property
    def channels(self) -> int:
        """Number of channels over all ranks."""
        return sum(size for size, _ in self.channel_cuts)

    def _tensors(self, name: str, shape: tuple[int, ...], cut: Callable[[Cut], Cut]) -> tuple[Tensor, ...]:
        """Return one description for each group of channels, in order, of the checkpoint tensor `name` of `shape`.

        `cut` maps the cut of a group's channels to the cut of the tensor.
        """
        starts = accumulate((size for size, _ in self.channel_cuts), initial=0)
        return tuple(
            Tensor(name, shape, cut(channel_cut), (first, first + size, self.channels))
            for first, (size, channel_cut) in zip(starts, self.channel_cuts)
        )

    @property
    def _weight(self) -> Weight:
        """Weight of the convolution, [taps, channels of a rank], with a rank's channels of each group side by side."""
        shape = (self.channels, 1, self.taps)
        return Weight(f"{self.name}.weight", self._tensors(f"{self.tensor}.weight", shape, Depthwise))

    @property
    def _bias(self) -> Weight | None:
        """Bias of the convolution, [1, channels of a rank]; None without one."""
        if not self.bias:
            return None
        tensors = self._tensors(f"{self.tensor}.bias", (self.channels,), lambda channel_cut: channel_cut)
        return Weight(f"{self.name}.bias", tensors)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Weight and bias, if there is one."""
        return (self._weight, *(() if self._bias is None else (self._bias,)))

    def state(self, step: StepShape) -> Value:
        """Return the array of the last taps - 1 inputs of each sequence, [slots, taps - 1, channels of a rank].

        Without slots the first axis counts the sequences of the step. The dtype is that of the activations.
        """
        shape = (step.slots or step.sequences, self.taps - 1, self._weight.shape(step.shard)[1])
        return Value(f"{self.name}.state", shape, step.activations)

    def launch(self, step: StepShape, x: Value, result: str, first: int = 0) -> Launch:
        """Return the launch of `causal_conv1d` that writes `result` [tokens, channels of a rank] and updates the state.

        Its input are the channels in the columns of `x` from column `first` on.
        """
        state, weight = self.state(step), self._weight.value(step)
        size, channels = step.activations.itemsize, weight.shape[1]
        moved = 2 * step.tokens * channels + 2 * step.sequences * (self.taps - 1) * channels
        return Launch(
            "causal_conv1d",
            {
                "x": x,
                "weight": weight,
                "bias": create_argument(self._bias, step),
                "state": state,
                **list_sequence_arguments(step),
                "first": first,
                "activation": self.activation,
            },
            (result, state.name),
            LeastWork(2.0 * self.taps * step.tokens * channels, float(size * moved + weight.nbytes)),
            step.tokens,
        )

    def reference(self, x: np.ndarray, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the convolution of x [tokens, channels] with its activation, computed in NumPy and rounded.

        `states` has the last taps - 1 inputs of earlier steps, zeros if absent; they are replaced by the last of x.
        """
        name, count = f"{self.name}.state", self.taps - 1
        before = states.get(name, np.zeros((count, x.shape[1]), np.float32))
        padded = np.concatenate([before, x])
        states[name] = padded[len(padded) - count :]
        weight = numpy.load_tensor(f"{self.tensor}.weight")[:, 0, :]
        summed = sum(padded[tap : tap + len(x)] * weight[:, tap] for tap in range(self.taps))
        if self.bias:
            summed = summed + numpy.load_tensor(f"{self.tensor}.bias")
        return numpy.round(summed if self.activation is None else apply_activation(summed, self.activation))


@dataclass(frozen=True)
class RecurrentBlock:
    """Recurrent layer: x + output(recurrence(convolution(inputs(norm(x))))); one launch computes all `inputs`."""

    name: str
    hidden: int
    norm: Norm
    inputs: tuple[Projection, ...]
    convolution: Convolution
    output: Projection
    component: ClassVar[str] = "mixer"

    @abstractmethod
    def _choose_cuts(self) -> tuple[Sequence[Cut], Divided]:
        """Return how ranks divide the projections: a cut of each of `inputs` by outputs, and of `output` by inputs."""

    @property
    @abstractmethod
    def _inner_weights(self) -> Sequence[Weight]:
        """Weights that kernels of the recurrence read, and the matrix of the output projection."""

    @abstractmethod
    def _find_state_shape(self, step: StepShape) -> tuple[int, ...]:
        """Return the shape of one sequence's recurrent state on a rank, without the axis of slots."""

    @abstractmethod
    def _launch_recurrence(self, step: StepShape, inner: Value, y: Value) -> Sequence[Launch]:
        """Return the launches of the convolution and the recurrence, in order.

        They read `inner`, the projected rows of all `inputs` side by side. The first result of the last launch has the
        shape and dtype of `y`, the input of the output projection.
        """

    @abstractmethod
    def _compute_recurrence(
        self, inner: Sequence[np.ndarray], states: States, numpy: Arithmetic
    ) -> np.ndarray:
        """Return the rows that the output projection reads, [tokens, …] rounded, computed in NumPy.

        `inner` has one array [tokens, outputs] for each of `inputs`, rounded. The states of the convolution and of the
        recurrence in `states` are read, or zeros if absent, and updated.
        """

    @property
    def _w_in(self) -> Weight:
        """Matrix of all input projections side by side, [hidden, outputs of a rank]."""
        tensors = (projection.weight(cut) for projection, cut in zip(self.inputs, self._choose_cuts()[0]))
        return Weight(f"{self.name}.w_in", tuple(tensors))

    @property
    def _b_in(self) -> Weight | None:
        if self.inputs[0].bias is None:
            return None
        rows = (projection.bias_row(cut) for projection, cut in zip(self.inputs, self._choose_cuts()[0]))
        return Weight(f"{self.name}.b_in", tuple(rows))

    @property
    def _w_out(self) -> Weight:
        """Matrix of the output projection, [inputs of a rank, hidden]."""
        return Weight(f"{self.name}.w_out", (self.output.weight(self._choose_cuts()[1]),))

    @property
    def _b_out(self) -> Weight | None:
        return (
            None if self.output.bias is None else Weight(f"{self.name}.b_out", (self.output.bias_row(ROW),))
        )

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norm, the projections, the convolution and the recurrence."""
        weights = (self._w_in, *self.convolution.weights, *self._inner_weights, self._b_in, self._b_out)
        return (*self.norm.weights, *(weight for weight in weights if weight is not None))

    @property
    def _state_name(self) -> str:
        return f"{self.name}.state"

    def _state(self, step: StepShape) -> Value:
        return Value(self._state_name, (step.slots or step.sequences, *self._find_state_shape(step)), FLOAT32)

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return one cache with the convolution's state and the recurrent state, in slots if the step has them."""
        states = self.convolution.state(step), self._state(step)
        return (Cache(states, step, STATES, is_copied=bool(step.slots)),)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return no constants."""
        return {}

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the input projection, the convolution, the recurrence, and the output projection."""
        w_in, w_out, tokens = self._w_in.value(step), self._w_out.value(step), step.tokens
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        inner = Value("inner", (tokens, w_in.shape[1]), step.activations)
        y = Value("scanned", (tokens, w_out.shape[0]), step.activations)
        recurrence = self._launch_recurrence(step, inner, y)
        return (
            Launch(
                "qkv_projection",
                {
                    "x": x,
                    "norm_weight": self.norm.weight.value(step),
                    "w_qkv": w_in,
                    "eps": self.norm.eps,
                    "q_size": w_in.shape[1],
                    "bias": create_argument(self._b_in, step),
                    "norm_offset": self.norm.offset,
                    **list_gather_arguments(step),
                },
                (inner.name,),
                count_product_work(tokens, w_in),
                tokens,
            ),
            *recurrence,
            Launch(
                "output_projection",
                {
                    "o": Value(recurrence[-1].results[0], y.shape, y.dtype),
                    "w_o": w_out,
                    "residual": x,
                    "replica_group": Axis.tensor,
                    "bias": create_argument(self._b_out, step),
                    "sequence_ranks": step.sequence_ranks,
                },
                ("x",),
                count_product_work(tokens, w_out),
                tokens,
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] after the layer, computed in NumPy; updates both states in `states`.

        Projected rows, rows of the recurrence, and the sum are rounded.
        """
        normed = self.norm.reference(x, numpy)
        inner = [numpy.round(numpy.multiply(normed, projection)) for projection in self.inputs]
        y = self._compute_recurrence(inner, states, numpy)
        return numpy.round(x + numpy.sum_partial_products(y, self.output, self._choose_cuts()[1].span))
