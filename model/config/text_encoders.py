"""Configs of the text encoders of diffusion models, with what pipelines take from their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from model.config.blocks import MOST_POSITIONS, Block
from model.config.component import ComponentConfig
from model.errors import ModelError

E = TypeVar("E", bound="TextEncoderConfig")

PENULTIMATE = "penultimate"
"""Output with the hidden states before the last block, [batch, rows, hidden]."""
PROJECTED = "projected"
"""Output with the projected last hidden states, [batch, rows, projected]."""
_LEGACY_END = 2
"""End token in configs that name a wrong one; transformers takes the largest id of a text for it."""


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(ComponentConfig):
    """Config of a text encoder of `layers` equal blocks; `rows` is the number of tokens of a padded text."""

    vocab_size: int
    hidden_size: int
    block: Block
    layers: int

    @property
    def most_rows(self) -> int:
        """Most tokens of a text."""
        return MOST_POSITIONS

    def with_rows(self: E, rows: int) -> E:
        """Return the config of the encoder for texts padded to `rows` tokens.

        Raises:
            ModelError: The number is below 1 or above `most_rows`.
        """
        if not 1 <= rows <= self.most_rows:
            raise ModelError(f"texts of {rows} tokens; this text encoder takes 1 to {self.most_rows}")
        return replace(self, rows=rows)

    def refusal(self, ranks: int) -> str | None:
        """Return why `ranks` tensor-parallel ranks cannot share this encoder, and how many can; None if they can."""
        most = self.block.mixer.divided[0]
        if ranks <= most:
            return None
        return f"{ranks} ranks for {most} heads; each rank needs one, so this encoder takes 1 to {most} ranks"


@dataclass(frozen=True, kw_only=True)
class ClipTextConfig(TextEncoderConfig):
    """Config of a CLIP text encoder.

    positions     rows of the table of learned positions, the most tokens of a text
    eos_token_id  end token, whose hidden state is the pooled state of a text
    projected     width of a projection of the pooled state; 0 without a projection
    """

    positions: int
    eos_token_id: int
    projected: int = 0

    @property
    def most_rows(self) -> int:
        """Most tokens of a text: the learned positions."""
        return self.positions

    def pool(self, ids: np.ndarray, outputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the pooled state of each text, float32 [batch, hidden], or [batch, projected] with a projection.

        It is the last hidden state of the first end token, or of the first token without an end token.

        Args:
            ids: Token ids, [batch, rows].
            outputs: Outputs of the encoder for these ids.
        """
        is_end = ids == (
            ids.max(axis=1, keepdims=True) if self.eos_token_id == _LEGACY_END else self.eos_token_id
        )
        states = outputs[PROJECTED if self.projected else "x"]
        return states[np.arange(len(ids)), is_end.argmax(axis=1)]


@dataclass(frozen=True, kw_only=True)
class T5Config(TextEncoderConfig):
    """Config of a T5 encoder, whose biases of scores have `buckets` of distances up to `most_distance`."""

    buckets: int
    most_distance: int
