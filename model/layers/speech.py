"""Input layer of a speech encoder: two convolutions of a log-mel spectrogram, and position embeddings.

    waves = gelu(convolution(features))               three taps, stride 1
    x     = gelu(convolution(waves)) + positions      three taps, stride 2, transposed to rows of hidden states

Every rank computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import Argument, Launch, LeastWork, StepShape, Value
from model.layers.layer import Stateless, States
from model.layers.mlp import apply_activation
from model.layers.shard import ROW, TAPS, WHOLE
from model.layers.weight import Tensor, Weight

_NUM_TAPS = 3
_STRIDES = (1, 2)


@dataclass(frozen=True)
class SpeechInput(Stateless):
    """Layer that computes hidden states from `features` [sequences, mel_bins, 2 * positions], an input of the step.

    `convolutions` are the names of the checkpoint tensors without `.weight` and `.bias`. `table` is the tensor of
    position embeddings.
    """

    name: str
    mel_bins: int
    hidden: int
    positions: int
    convolutions: tuple[str, str]
    table: str

    def _weight(self, index: int) -> Weight:
        shape = (self.hidden, self.hidden if index else self.mel_bins, _NUM_TAPS)
        tensor = Tensor(f"{self.convolutions[index]}.weight", shape, TAPS)
        return Weight(f"{self.name}.w_{index + 1}", (tensor,))

    def _bias(self, index: int) -> Weight:
        tensor = Tensor(f"{self.convolutions[index]}.bias", (self.hidden,), ROW)
        return Weight(f"{self.name}.b_{index + 1}", (tensor,))

    @property
    def _table(self) -> Weight:
        return Weight(f"{self.name}.positions", (Tensor(self.table, (self.positions, self.hidden), WHOLE),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights and biases of both convolutions, and the table of position embeddings."""
        return (self._weight(0), self._bias(0), self._weight(1), self._bias(1), self._table)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return two launches of `conv1d`: from `features` to `waves`, and from `waves` to x, which adds positions."""
        columns, dtype = 2 * self.positions, step.activations
        features = Value("features", (step.sequences, self.mel_bins, columns), dtype)
        waves = Value("waves", (step.sequences, self.hidden, columns), dtype)
        x = Value("x", (step.tokens, self.hidden), dtype)
        return (
            self._convolve(step, 0, features, waves),
            self._convolve(step, 1, waves, x, added=self._table.value(step)),
        )

    def _convolve(
        self, step: StepShape, index: int, source: Value, result: Value, added: Value | None = None
    ) -> Launch:
        """Return the launch of `conv1d` that writes gelu(convolution(source)) to `result`; `index` is 0 or 1.

        Without `added`, `result` is [sequences, channels, columns]. With it, `result` is transposed to rows [tokens,
        hidden], and `added` [positions, hidden] is added to the rows of every sequence.
        """
        weight = self._weight(index).value(step)
        arguments: dict[str, Argument] = {
            "x": source,
            "w": weight,
            "bias": self._bias(index).value(step),
            "stride": _STRIDES[index],
            "padding": 1,
            "activation": "gelu",
        }
        if added is not None:
            arguments |= {"as_rows": True, "added": added}
        arrays = [argument for argument in arguments.values() if isinstance(argument, Value)]
        positions = step.tokens * 2 // _STRIDES[index]
        work = LeastWork(
            2.0 * positions * prod(weight.shape),
            float(sum(array.nbytes for array in (*arrays, result))),
        )
        label = ("spectrum", "every second place")[index]
        return Launch("conv1d", arguments, (result.name,), work, step.tokens, label)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the hidden states [positions, hidden] of the features x [mel_bins, 2 * positions] of one window.

        Rounded are the features, the result of each convolution, and the sum with the position embeddings.
        """
        x = numpy.round(x)
        for name, stride in zip(self.convolutions, _STRIDES):
            windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (1, 1))), _NUM_TAPS, 1)
            windows = windows[:, ::stride].swapaxes(0, 1).reshape(-1, x.shape[0] * _NUM_TAPS)
            weight = numpy.load_tensor(f"{name}.weight").reshape(self.hidden, -1)
            y = apply_activation(windows @ weight.T + numpy.load_tensor(f"{name}.bias"), "gelu")
            x = numpy.round(y).T
        return numpy.round(y + numpy.load_tensor(self.table))
