"""States of one size, however long a sequence is: where they lie, and a convolution before a recurrence.

A state is an array [slots, …]. A step says which slot each sequence has, at which position its tokens begin, and how
many of them are no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.cache import Cache
from model.layers.launch import INT32, Launch, LeastWork, StepShape, Value
from model.layers.layer import States
from model.layers.mlp import activated
from model.layers.paged import STATES
from model.layers.shard import Cut, Depthwise
from model.layers.weight import Tensor, Weight

OF_SEQUENCE = ("state_slots", "starts", "counts")
"""What a step gives recurrent kernels of each sequence, by the names of their parameters."""


def slots(step: StepShape) -> int:
    """How many slots of states there are: those of an engine, or one for each sequence."""
    return step.slots or step.sequences


def sequence_arguments(step: StepShape) -> dict[str, Value]:
    """The arguments `state_slots`, `starts` and `counts` of a recurrent kernel, [sequences, 1] int32 each."""
    return {name: Value(name, (step.sequences, 1), INT32) for name in OF_SEQUENCE}


def create_state_cache(step: StepShape, *states: Value) -> Cache:
    """Create the cache of a recurrent layer from its states [slots, ...]; slots are copied in a step that has such."""
    return Cache(states, step, STATES, is_copied=bool(step.slots))


@dataclass(frozen=True)
class Convolution:
    """A causal convolution of every channel by itself, with an activation: tensors `weight`.weight and .bias.

    `cut` says which of the channels a rank holds. A fused tensor is cut by `parts` of channels, side by side.
    """

    name: str
    tensor: str
    taps: int
    parts: tuple[tuple[int, Cut], ...]
    bias: bool
    activation: str | None = "silu"

    @property
    def channels(self) -> int:
        """Channels of all ranks."""
        return sum(size for size, _ in self.parts)

    def _tensors(self, name: str, shape: tuple[int, ...], cut: Callable[[Cut], Cut]) -> tuple[Tensor, ...]:
        """The parts of a tensor of all channels."""
        found, first = [], 0
        for size, own in self.parts:
            found.append(Tensor(name, shape, cut(own), (first, first + size, self.channels)))
            first += size
        return tuple(found)

    @property
    def _weight(self) -> Weight:
        """[taps, channels of a rank]."""
        shape = (self.channels, 1, self.taps)
        return Weight(f"{self.name}.weight", self._tensors(f"{self.tensor}.weight", shape, Depthwise))

    @property
    def _bias(self) -> Weight | None:
        """[1, channels of a rank]."""
        if not self.bias:
            return None
        tensors = self._tensors(f"{self.tensor}.bias", (self.channels,), lambda own: own)
        return Weight(f"{self.name}.bias", tensors)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weight, and the bias where there is one."""
        return (self._weight, *(() if self._bias is None else (self._bias,)))

    def state(self, step: StepShape) -> Value:
        """The last inputs of each sequence, [slots, taps - 1, channels of a rank]."""
        own = self._weight.shape(step.shard)[1]
        return Value(f"{self.name}.state", (slots(step), self.taps - 1, own), step.activations)

    def launch(self, step: StepShape, x: Value, result: str, first: int = 0) -> Launch:
        """The convolution of the columns of `x` from `first` on."""
        state, weight = self.state(step), self._weight.value(step)
        bias = None if self._bias is None else self._bias.value(step)
        size, own = step.activations.itemsize, weight.shape[1]
        moved = 2 * step.tokens * own + 2 * step.sequences * (self.taps - 1) * own
        return Launch(
            "causal_conv1d",
            {
                "x": x,
                "weight": weight,
                "bias": bias,
                "state": state,
                **sequence_arguments(step),
                "first": first,
                "activation": self.activation,
            },
            (result, state.name),
            LeastWork(2.0 * self.taps * step.tokens * own, float(size * moved + weight.nbytes)),
            step.tokens,
        )

    def reference(self, x: np.ndarray, states: States, numpy: Arithmetic) -> np.ndarray:
        """x [tokens, channels], rounded at the end; the last inputs stay in `states`."""
        name, count = f"{self.name}.state", self.taps - 1
        before = states.get(name, np.zeros((count, x.shape[1]), np.float32))
        given = np.concatenate([before, x])
        states[name] = given[len(given) - count :]
        weight = numpy.tensor(f"{self.tensor}.weight")[:, 0, :]
        summed = sum(given[tap : tap + len(x)] * weight[:, tap] for tap in range(self.taps))
        if self.bias:
            summed = summed + numpy.tensor(f"{self.tensor}.bias")
        return numpy.rounded(summed if self.activation is None else activated(summed, self.activation))
