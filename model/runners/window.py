"""Token steps of a network with an encoder, which encodes windows of speech before the tokens of their transcripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.engine.inputs import InputCheck, ModelInputs
from model.errors import ModelError
from model.runners.token import TokenRunner

ENCODER = "encoder"
"""Name of the network that encodes windows, among the networks that run before the decoder."""

WITHOUT_AUDIO = "this model continues texts: a prompt comes without audio"


class WindowRunner(TokenRunner):
    """A runner of the encoder and the token steps of a model that reads windows of speech."""

    def __init__(self, config: ModelConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        assert config.spectrum is not None, "a model without an encoder"
        self._silence = np.zeros(config.spectrum, np.float32)

    def encode(self, windows: Sequence[np.ndarray | None]) -> None:
        """Encode the log-mel spectrum [bands, columns] of each sequence, None for silence.

        The next prompts attend to the encoder's outputs.
        """
        features = np.stack([self._silence if window is None else window for window in windows])
        self.network.run_before(ENCODER, {"features": features[None]})


def make_token_runner(config: ModelConfig, *arguments: Any, **options: Any) -> TokenRunner:
    """Return the runner of a model's token steps; arguments as those of `TokenRunner`."""
    runner = TokenRunner if config.spectrum is None else WindowRunner
    return runner(config, *arguments, **options)


def make_input_check(config: ModelConfig) -> InputCheck:
    """Return the check that each prompt of a model brings a window of speech, or that none does."""
    return partial(_check_window, config.spectrum)


def _check_window(shape: tuple[int, int] | None, inputs: ModelInputs | None) -> None:
    """Check that a prompt brings inputs of a shape, or none if the shape is None.

    Raises:
        ModelError: The prompt brings inputs and the model takes none, or the other way round.
    """
    if (shape is None) != (inputs is None):
        raise ModelError(
            "this model transcribes speech: a prompt comes with audio" if inputs is None else WITHOUT_AUDIO
        )
    assert inputs is None or inputs.features.shape == shape, f"{inputs.features.shape}"
