"""A model in plain numpy, no kernel and no simulator: the measure for everything else here.

Arithmetic is float32 throughout. With bfloat16 activations its results are rounded to bfloat16 where a device stores
them between engines: every norm, q, k and v before and after their rotation, the exponentials of a softmax, attention's
output, the gated product, and both sums with the residual; over ranks also the partial products and their sum. Logits
stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.config import ModelConfig
from model.families import compose
from model.formats import Weight
from model.layers.arithmetic import Arithmetic, Span
from model.layers.layer import States
from model.layers.precision import activation_dtype
from model.runners.window import ENCODER
from model.sampling import StepOutput


class ReferenceModel:
    """Sequences one after another, each with its states; `dtype` is that of the activations: float32, bfloat16 or auto.

    Weights of two bytes are widened once, when it is made, if that takes at most `widened_bytes`, else at every use.
    Activations are rounded as on a device of `ranks` ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        dtype: str = "float32",
        widened_bytes: int = 2**30,
        ranks: int = 1,
    ) -> None:
        activations = activation_dtype(dtype, config, weights)
        self._network = compose(config)
        self._numpy = Arithmetic(weights, activations, widened_bytes, ranks, self._network.exact)
        self._sequences: list[ReferenceSequence] = []
        self._encoded: list[ReferenceSequence] = []
        self._longest_short = config.longest_short

    def encode(self, features: Sequence[np.ndarray]) -> None:
        """Run the encoder on the log-mel spectrum of a window of speech for each of the next prompts."""
        self._encoded = [self.start(spectrum) for spectrum in features]

    def start(self, features: np.ndarray | None = None) -> ReferenceSequence:
        """A sequence without tokens, behind a window of speech where `features` [bands, columns] are its spectrum."""
        sequence = ReferenceSequence()
        if features is not None:
            encoder, x = self._network.before[ENCODER], features
            for layer in encoder.layers:
                x = layer.reference(x, Span(0, encoder.window), sequence.states, self._numpy)
        return sequence

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Start a sequence with each prompt; says what follows each."""
        encoded = self._encoded or [self.start() for _ in prompts]
        self._sequences = [sequence.copy() for sequence, _ in zip(encoded, prompts, strict=True)]
        return [self.extend(sequence, ids) for sequence, ids in zip(self._sequences, prompts)]

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        """Append a token to each sequence that has not ended, at the position that is its length."""
        outputs = []
        for sequence, token, position in zip(self._sequences, tokens, positions):
            if token is None:
                outputs.append(StepOutput())
                continue
            assert position == len(sequence.ids), f"position {position} after {len(sequence.ids)} tokens"
            outputs.append(self.extend(sequence, [token]))
        return outputs

    def extend(self, sequence: ReferenceSequence, ids: Sequence[int]) -> StepOutput:
        """Append tokens to a sequence; returns its output: the logits of what follows the last one."""
        if sequence.ids and len(sequence.ids) == self._longest_short:
            # From here on other rotations, also of what was cached.
            ids, sequence.states, sequence.ids = [*sequence.ids, *ids], {}, []
        span = Span(len(sequence.ids), len(ids))
        x = np.asarray(ids)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the sampler looks at the logits
            for layer in self._network.layers:
                x = layer.reference(x, span, sequence.states, self._numpy)
        sequence.ids.extend(ids)
        sequence.output = StepOutput(x[-1])
        return sequence.output


@dataclass(eq=False)
class ReferenceSequence:
    """The states of a sequence, its tokens, and the output of the last one."""

    states: States = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    output: StepOutput = field(default_factory=StepOutput)

    def copy(self) -> ReferenceSequence:
        """A sequence with the same tokens, which goes on by itself."""
        states = {name: state.copy() for name, state in self.states.items()}
        return ReferenceSequence(states, [*self.ids], self.output)
