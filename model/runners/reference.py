"""The reference model in plain numpy, without kernels or simulator, which every other computation is compared with.

Arithmetic is float32 throughout. bfloat16 activations are rounded where a device stores them between engines: every
norm, q, k and v before and after their rotation, the exponentials of a softmax, the output of attention, the gated
product, and both residual sums; with several ranks also the partial products and their sum. Logits stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.config import ModelConfig
from model.families import compose
from model.formats import Weight
from model.layers.arithmetic import Arithmetic, Span
from model.layers.cache_formats import PLAIN_CACHING, CacheRounding
from model.layers.layer import States
from model.layers.precision import choose_activation_dtype
from model.loading.weights import find_row_formats
from model.runners.window import ENCODER
from model.sampling import StepOutput


class ReferenceModel:
    """Backend in NumPy that computes one sequence after another, each with states of its own.

    Args:
        config: The model.
        weights: The weights of the checkpoint by name.
        dtype: The dtype of activations: float32, bfloat16 or auto, the checkpoint's.
        widened_bytes: Weights of two bytes are widened to float32 once if they take at most so many bytes then, else at
            every use.
        ranks: Activations are rounded as on a device of so many ranks.
        caching: Format and scales of the caches.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        dtype: str = "float32",
        widened_bytes: int = 2**30,
        ranks: int = 1,
        caching: CacheRounding = PLAIN_CACHING,
    ) -> None:
        activations = choose_activation_dtype(dtype, config, weights)
        self._network = compose(config)
        row_formats = find_row_formats(self._network.weights, weights, ranks)
        self._numpy = Arithmetic(
            weights, activations, widened_bytes, ranks, self._network.exact, caching, row_formats
        )
        self._sequences: list[ReferenceSequence] = []
        self._encoded: list[ReferenceSequence] = []
        self._longest_short = config.longest_short

    def encode(self, features: Sequence[np.ndarray]) -> None:
        """Run the encoder on one window of speech for each of the next prompts.

        Args:
            features: The log-mel spectrum of each window, [bands, columns] each.
        """
        self._encoded = [self.start(spectrum) for spectrum in features]

    def start(self, features: np.ndarray | None = None) -> ReferenceSequence:
        """Return a new sequence without tokens; with `features`, the encoder is run on them and its states are in it.

        Args:
            features: The log-mel spectrum of a window of speech, [bands, columns]; None for a model of texts.
        """
        sequence = ReferenceSequence()
        if features is not None:
            encoder, x = self._network.before[ENCODER], features
            for layer in encoder.layers:
                x = layer.reference(x, Span(0, encoder.window), sequence.states, self._numpy)
        return sequence

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Start a sequence with each prompt, and return the output after each prompt's last token."""
        encoded = self._encoded or [self.start() for _ in prompts]
        self._sequences = [sequence.copy() for sequence, _ in zip(encoded, prompts, strict=True)]
        return [self.extend(sequence, ids) for sequence, ids in zip(self._sequences, prompts)]

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        """Append a token to each sequence that has not ended, and return the outputs.

        Args:
            tokens: The token of each sequence; None if it has ended, and its output is empty then.
            positions: The number of tokens of each sequence before the appended one.
        """
        lengths = [len(sequence.ids) for sequence, token in zip(self._sequences, tokens) if token is not None]
        expected = [position for position, token in zip(positions, tokens) if token is not None]
        assert lengths == expected, f"positions {expected} after {lengths} tokens"
        return [
            StepOutput() if token is None else self.extend(sequence, [token])
            for sequence, token in zip(self._sequences, tokens)
        ]

    def extend(self, sequence: ReferenceSequence, ids: Sequence[int]) -> StepOutput:
        """Append tokens to a sequence, compute them, and return the output after the last one.

        The output has logits, [vocabulary] float32.
        """
        if sequence.ids and len(sequence.ids) == self._longest_short:
            # Longer sequences have other rotations, also of the cached keys.
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
    """One sequence: the states of its layers, its token ids, and the output after its last token."""

    states: States = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    output: StepOutput = field(default_factory=StepOutput)

    def copy(self) -> ReferenceSequence:
        """Return a copy of the sequence that shares no state with it."""
        states = {name: state.copy() for name, state in self.states.items()}
        return ReferenceSequence(states, [*self.ids], self.output)
