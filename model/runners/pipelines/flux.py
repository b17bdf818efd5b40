"""FLUX pipelines: a pooled text of CLIP, rows of T5 with their padding, and guidance distilled into the denoiser.

What decides that images equal those of diffusers' FluxPipeline, beside the components:

    texts      CLIP's pooled state of 77 tokens; T5's rows of 512 tokens (dev) or 256 (schnell), padding is not masked
    guidance   an input of the denoiser, times 1000 (dev), or none (schnell); a step takes one pass
    timesteps  1000 sigma, divided by 1000 and multiplied again in float32
    sigmas     evenly spaced from 1 to 1 / steps, shifted once by the number of patches, if the schedule says so
    latents    divided by scaling_factor; then shift_factor is added

The denoiser packs patches of 2 x 2 latent pixels and turns queries and keys by row and column of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from model.config.denoisers import FluxConfig
from model.config.text_encoders import ClipTextConfig
from model.errors import ModelError
from model.families.denoisers import POOLED, TEXT, TIMESTEPS
from model.families.flux import GUIDANCE
from model.loading.component import LoadedComponent
from model.loading.pipeline import PipelineFolder
from model.noise_schedules import Trajectory
from model.noise_schedules.flow_euler import FlowEulerSchedule
from model.runners.component import Arrays
from model.runners.pipelines.components import (
    TOKENIZERS,
    PromptEncoder,
    check_text_size,
    open_autoencoder,
    open_denoiser,
    open_prompt_encoder,
)
from model.runners.pipelines.joint import JointPipeline
from model.runners.pipelines.pipeline import DEFAULT_GUIDANCE, Backend

_TEXT_ROWS = {True: 512, False: 256}
"""Tokens of T5's padded text, by whether the denoiser takes the guidance: dev and schnell."""
_MOST_SIDE = 128
"""Most patches of a side of an image."""
_DEFAULT_LATENTS = 128
"""Rows and columns of the latents of an image of the default size."""
_THOUSAND = np.float32(1000)


@dataclass(frozen=True)
class FluxPipeline(JointPipeline):
    """Opened FLUX model: `pooled_encoder` is CLIP's text encoder, `row_encoder` T5's."""

    pooled_encoder: PromptEncoder
    row_encoder: PromptEncoder
    is_guided_by_passes: ClassVar[bool] = False

    @property
    def _config(self) -> FluxConfig:
        """Config of the denoiser."""
        assert isinstance(self.denoiser.config, FluxConfig)
        return self.denoiser.config

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """The default size, for an autoencoder of scale 8 1024 x 1024; other multiples of a patch are taken too."""
        side = _DEFAULT_LATENTS * self.autoencoder_config.spatial_scale
        return [(side, side)]

    @property
    def most_side_patches(self) -> int:
        """Most patches of a side of an image."""
        return _MOST_SIDE

    @property
    def text_encoders(self) -> Sequence[LoadedComponent]:
        """CLIP's and T5's text encoders."""
        return self.pooled_encoder.model, self.row_encoder.model

    def encode(self, texts: Sequence[str], backend: Backend) -> Arrays:
        """Return the pooled texts [texts, size] and the rows of the padded texts [texts, rows, size]."""
        pooled = self.pooled_encoder.encode(texts, backend).pooled
        return {POOLED: pooled, TEXT: self.row_encoder.encode(texts, backend).outputs["x"]}

    def list_tokens(self, text: str) -> list[tuple[int, int, str]]:
        """Return (row, id, text) of each token of T5; those of CLIP are pooled."""
        return self.row_encoder.list_tokens(text)

    def build_guidance(self, guidance: float, negative_prompts: Sequence[str]) -> Arrays:
        """Return the guidance times 1000, float32 [images, 1], if the denoiser takes it.

        Raises:
            ModelError: There is a negative prompt, or a guidance for a denoiser that does not take it.
        """
        if any(negative_prompts):
            raise ModelError(
                "a negative prompt needs two passes of guidance; the guidance of this model is distilled into one: "
                "leave the negative prompt out",
                "NKW-MODEL-OPTION",
            )
        if self._config.has_guidance:
            return {GUIDANCE: np.full((len(negative_prompts), 1), np.float32(guidance) * _THOUSAND)}
        if guidance not in (1.0, DEFAULT_GUIDANCE):
            raise ModelError(
                f"guidance {guidance:g}; the denoiser of this model takes no guidance: leave it out",
                "NKW-MODEL-OPTION",
            )
        return {}

    def build_inputs(self, latents: np.ndarray, timestep: Any) -> Arrays:
        """Return the timestep of each image, float32 [images, 1], rounded as diffusers divides and multiplies it."""
        return {TIMESTEPS: np.full((len(latents), 1), np.float32(timestep) / _THOUSAND * _THOUSAND)}

    def plan(self, steps: int) -> Trajectory:
        """Return the passes of the denoiser, whose noise levels before the shift go down to 1 / steps.

        Raises:
            ModelError: As `NoiseSchedule.plan`.
        """
        is_possible = 1 <= steps <= self.schedule.most_steps
        sigmas = np.linspace(1.0, 1 / steps, steps).tolist() if is_possible else None
        return self.schedule.plan(steps, self._config.rows, sigmas)


def open_flux(folder: PipelineFolder, dtype: str) -> FluxPipeline:
    """Open a folder of a FLUX model; see `open_pipeline`."""
    folder.check_components(
        {
            "transformer": ("FluxTransformer2DModel",),
            "vae": ("AutoencoderKL",),
            "text_encoder": ("CLIPTextModel",),
            "tokenizer": TOKENIZERS["CLIPTextModel"],
            "text_encoder_2": ("T5EncoderModel",),
            "tokenizer_2": TOKENIZERS["T5EncoderModel"],
        }
    )
    denoiser, config = open_denoiser(folder, dtype, FluxConfig)
    pooled_encoder = open_prompt_encoder(folder, dtype)
    row_encoder = open_prompt_encoder(folder, dtype, "text_encoder_2", _TEXT_ROWS[config.has_guidance])
    assert isinstance(pooled_encoder.config, ClipTextConfig)
    check_text_size(folder, "text_encoder", pooled_encoder.config.hidden_size, config.pooled_size)
    check_text_size(folder, "text_encoder_2", row_encoder.config.hidden_size, config.text_size)
    config = config.with_size(config.latent_rows, config.latent_columns, row_encoder.config.rows)
    autoencoder = open_autoencoder(folder, dtype, config)
    schedule = folder.read_schedule()
    if not isinstance(schedule, FlowEulerSchedule):
        raise ModelError(
            f"{folder.path}: the scheduler takes no noise levels with a shift by image tokens; FluxPipeline needs a "
            "FlowMatchEulerDiscreteScheduler",
            "NKW-MODEL-PIPELINE",
        )
    return FluxPipeline(
        folder.path, schedule, denoiser.resize(config), autoencoder, pooled_encoder, row_encoder
    )
