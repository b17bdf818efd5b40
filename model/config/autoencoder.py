"""Config of an autoencoder of images: the sizes of its two halves, and which half is composed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from model.config.component import ComponentConfig
from model.errors import ModelError


class Half(Enum):
    """Half of an autoencoder: the decoder makes images of latents, the encoder makes latents of images."""

    decoder = "decoder"
    encoder = "encoder"


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(ComponentConfig):
    """Config of one half of an AutoencoderKL of diffusers, for one size of its latents.

    The fields are those of diffusers' config.json, with these additions.

        half          the half that `compose` makes; both halves read the same checkpoint
        latent_rows, latent_columns
                      size of a latent, for which the network is composed; `rows` is their product
        force_upcast  whether diffusers runs the autoencoder in float32. A network has the dtype of its activations; a
                      runner opens the component with dtype "float32" where it wants what diffusers does

    A runner divides latents by `scaling_factor` and adds `shift_factor` before the decoder, and does the opposite
    behind the encoder.
    """

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    sample_size: int
    scaling_factor: float
    shift_factor: float
    force_upcast: bool
    use_quant_conv: bool
    use_post_quant_conv: bool
    mid_block_add_attention: bool
    latent_rows: int
    latent_columns: int
    half: Half = Half.decoder

    @property
    def spatial_scale(self) -> int:
        """Rows of an image for each row of its latent; columns alike."""
        return 2 ** (len(self.block_out_channels) - 1)

    def with_size(self, latent_rows: int, latent_columns: int) -> AutoencoderConfig:
        """Return the config for another size of latents.

        Raises:
            ModelError: A size is less than 1.
        """
        if min(latent_rows, latent_columns) < 1:
            raise ModelError(
                f"a latent has {latent_rows} rows and {latent_columns} columns; it has at least 1 of both",
                "NKW-MODEL-CONFIG",
            )
        rows = latent_rows * latent_columns
        return replace(self, latent_rows=latent_rows, latent_columns=latent_columns, rows=rows)

    def with_half(self, half: Half) -> AutoencoderConfig:
        """Return the config of the decoder or of the encoder of the same autoencoder."""
        return replace(self, half=half)

    def refusal(self, ranks: int) -> str | None:
        """Return None: every rank computes all of an image, so any number of ranks can share the component."""
        return None
