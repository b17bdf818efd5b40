"""Input layer of a speech encoder: two convolutions of a log-mel spectrogram, and position embeddings.

    waves = gelu(convolution(features))               three taps, stride 1
    x     = gelu(convolution(waves)) + positions      three taps, stride 2, transposed to rows of hidden states

Every rank computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import Argument, Launch, LeastWork, StepShape, Value
from model.layers.layer import Stateless, States
from model.layers.mlp import activated
from model.layers.shard import ROW, TAPS, WHOLE
from model.layers.weight import Tensor, Weight

TAPS_OF_BOTH = 3
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

    def _weight(self, number: int) -> Weight:
        shape = (self.hidden, self._inputs(number), TAPS_OF_BOTH)
        tensor = Tensor(f"{self.convolutions[number]}.weight", shape, TAPS)
        return Weight(f"{self.name}.w_{number + 1}", (tensor,))

    def _bias(self, number: int) -> Weight:
        tensor = Tensor(f"{self.convolutions[number]}.bias", (self.hidden,), ROW)
        return Weight(f"{self.name}.b_{number + 1}", (tensor,))

    def _inputs(self, number: int) -> int:
        return self.hidden if number else self.mel_bins

    @property
    def _table(self) -> Weight:
        return Weight(f"{self.name}.positions", (Tensor(self.table, (self.positions, self.hidden), WHOLE),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights and biases of both convolutions, and the table of position embeddings."""
        return (
            *(create_weight(number) for number in (0, 1) for create_weight in (self._weight, self._bias)),
            self._table,
        )

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the two convolutions; the second one adds the position embeddings."""
        columns, dtype = 2 * self.positions, step.activations
        features = Value("features", (step.sequences, self.mel_bins, columns), dtype)
        waves = Value("waves", (step.sequences, self.hidden, columns), dtype)
        x = Value("x", (step.tokens, self.hidden), dtype)
        return (
            self._launch(step, 0, features, waves),
            self._launch(step, 1, waves, x, added=self._table.value(step)),
        )

    def _launch(
        self, step: StepShape, number: int, source: Value, result: Value, added: Value | None = None
    ) -> Launch:
        """One convolution; with `added` its result is rows, to which that table is added."""
        arguments: dict[str, Argument] = {
            "x": source,
            "w": self._weight(number).value(step),
            "bias": self._bias(number).value(step),
            "stride": _STRIDES[number],
            "padding": 1,
            "activation": "gelu",
        }
        if added is not None:
            arguments |= {"as_rows": True, "added": added}
        read = [argument for argument in arguments.values() if isinstance(argument, Value)]
        positions = step.tokens * 2 // _STRIDES[number]
        work = LeastWork(
            2.0 * positions * TAPS_OF_BOTH * self._inputs(number) * self.hidden,
            float(sum(value.nbytes for value in (*read, result))),
        )
        label = ("spectrum", "every second place")[number]
        return Launch("conv1d", arguments, (result.name,), work, step.tokens, label)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Compute hidden states [positions, hidden] of the features x [mel_bins, columns].

        Rounded are the features, the result of each convolution, and the sum with the position embeddings.
        """
        x = numpy.rounded(x)
        for number, stride in enumerate(_STRIDES):
            windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (1, 1))), TAPS_OF_BOTH, 1)
            windows = windows[:, ::stride].swapaxes(0, 1).reshape(-1, x.shape[0] * TAPS_OF_BOTH)
            name = self.convolutions[number]
            weight = numpy.tensor(f"{name}.weight").reshape(self.hidden, -1)
            y = activated(windows @ weight.T + numpy.tensor(f"{name}.bias"), "gelu")
            x = numpy.rounded(y).T
        return numpy.rounded(y + numpy.tensor(self.table))
