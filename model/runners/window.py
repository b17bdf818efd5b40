"""Runner of speech models: an encoder encodes windows of speech before the tokens of their transcripts.

A window is a fixed length of audio as a log-mel spectrum.
"""

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
    """Runner of the encoder and of the token steps of a speech model."""

    def __init__(self, config: ModelConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        assert config.spectrum is not None, "a model without an encoder"
        self._silence = np.zeros(config.spectrum, np.float32)

    def encode(self, windows: Sequence[np.ndarray | None]) -> None:
        """Run the encoder on one window of each sequence; the next prompts attend to its outputs.

        Args:
            windows: The log-mel spectrum of each window, [bands, columns] float32; None for silence.
        """
        features = np.stack([self._silence if window is None else window for window in windows])
        self.network.run_before(ENCODER, {"features": features[None]})


def make_token_runner(config: ModelConfig, *arguments: Any, **options: Any) -> TokenRunner:
    """Return a `WindowRunner` for a speech model, else a `TokenRunner`, made with the same arguments."""
    runner = TokenRunner if config.spectrum is None else WindowRunner
    return runner(config, *arguments, **options)


def make_input_check(config: ModelConfig) -> InputCheck:
    """Return the function that checks a prompt's inputs: a speech model needs a window, other models take none."""
    return partial(_check_window, config.spectrum)


def _check_window(shape: tuple[int, int] | None, inputs: ModelInputs | None) -> None:
    """Check that a prompt has inputs of a shape, or none if the shape is None.

    Raises:
        ModelError: The prompt has inputs and the model takes none, or the other way round.
    """
    if (shape is None) != (inputs is None):
        raise ModelError(
            "this model transcribes speech: a prompt comes with audio" if inputs is None else WITHOUT_AUDIO
        )
    assert inputs is None or inputs.features.shape == shape, f"{inputs.features.shape}"
