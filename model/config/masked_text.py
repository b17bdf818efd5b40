"""Config of a masked-diffusion text model: a decoder without causal mask, and the token of unknown positions."""

from __future__ import annotations

from dataclasses import dataclass

from model.config.blocks import ModelConfig
from model.config.record import Config


@dataclass(frozen=True)
class MaskedTextConfig(Config):
    """Config of a model that predicts the masked tokens of a text from all other tokens.

    decoder        sizes and blocks; attention of every block is without causal mask
    mask_token_id  token at positions that are still to be predicted
    """

    decoder: ModelConfig
    mask_token_id: int

    @property
    def context(self) -> int:
        """Most tokens of a text, prompt included."""
        return self.decoder.context

    def refusal(self, ranks: int) -> str | None:
        """Return why `ranks` tensor-parallel ranks cannot share this model, and how many can; None if they can."""
        return self.decoder.refusal(ranks)
