"""SD3 and SD3.5 pipelines: two CLIP text encoders, a T5 text encoder that may be absent, and two guided passes.

What decides that images equal those of diffusers' StableDiffusion3Pipeline, beside the components:

    texts      rows of CLIP: penultimate hidden states of both text encoders side by side, padded with zeros to the size
               of T5's; then 256 rows of T5, whose padding is not masked, or zeros without a T5
    pooled     projected states of the end tokens of both CLIP text encoders side by side
    guidance   two passes, one with the negative prompt
    timesteps  1000 sigma
    sigmas     shifted by a constant, the lowest one twice, or by the number of patches
    latents    divided by scaling_factor; then shift_factor is added
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.config.denoisers import SD3Config
from model.config.text_encoders import PENULTIMATE, ClipTextConfig
from model.errors import ModelError
from model.families.denoisers import POOLED, TEXT, TIMESTEPS
from model.layers.precision import FLOAT32
from model.loading import clip_tokenizer, t5_tokenizer
from model.loading.component import LoadedComponent
from model.loading.pipeline import PipelineFolder
from model.noise_schedules import Trajectory
from model.noise_schedules.flow import FlowSchedule
from model.noise_schedules.flow_euler import FlowEulerSchedule
from model.runners.component import Arrays
from model.runners.pipelines.components import (
    PromptEncoder,
    check_text_size,
    open_autoencoder,
    open_denoiser,
    open_prompt_encoder,
)
from model.runners.pipelines.joint import JointPipeline
from model.runners.pipelines.pipeline import Backend

_CLIP_NAMES, _T5_NAME = ("text_encoder", "text_encoder_2"), "text_encoder_3"
_T5_ROWS = 256
"""Rows of T5's part of an encoded text, the default of diffusers; zeros without a T5."""
_CODE = "NKW-MODEL-PIPELINE"


@dataclass(frozen=True)
class StableDiffusion3Pipeline(JointPipeline):
    """Opened SD3 model with its text encoders.

    clip_encoders  the two CLIP text encoders, for texts of as many rows
    t5_encoder     the T5 text encoder, whose padding is not masked; None if the folder has none
    """

    clip_encoders: tuple[PromptEncoder, PromptEncoder]
    t5_encoder: PromptEncoder | None

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """The square size in the denoiser's config; other multiples of a patch are taken too."""
        config, scale = self._config, self.autoencoder_config.spatial_scale
        return [(config.sample_size * scale, config.sample_size * scale)]

    @property
    def most_side_patches(self) -> int:
        """Most patches of a side of an image: the checkpoint has positions for as many."""
        return self._config.most_patches

    @property
    def text_encoders(self) -> Sequence[LoadedComponent]:
        """The text encoders, at most three."""
        t5 = () if self.t5_encoder is None else (self.t5_encoder.model,)
        return (*(encoder.model for encoder in self.clip_encoders), *t5)

    def encode(self, texts: Sequence[str], backend: Backend) -> Arrays:
        """Return the encoded texts [texts, rows, size] and the pooled texts [texts, size]."""
        clip = [encoder.encode(texts, backend) for encoder in self.clip_encoders]
        states = np.concatenate([encoded.outputs[PENULTIMATE] for encoded in clip], axis=2)
        padding = self._config.text_size - states.shape[2]
        states = np.pad(states, ((0, 0), (0, 0), (0, padding)))
        if self.t5_encoder is None:
            t5_states = np.zeros((len(texts), _T5_ROWS, self._config.text_size), FLOAT32)
        else:
            t5_states = self.t5_encoder.encode(texts, backend).outputs["x"]
        return {
            TEXT: np.concatenate([states, t5_states], axis=1),
            POOLED: np.concatenate([encoded.pooled for encoded in clip], axis=1),
        }

    def list_tokens(self, text: str) -> list[tuple[int, int, str]]:
        """Return (row, id, text) of each token of the first CLIP text encoder, whose rows both share, then of T5."""
        first, _ = self.clip_encoders
        tokens = first.list_tokens(text)
        if self.t5_encoder is not None:
            tokens += self.t5_encoder.list_tokens(text, first.config.rows)
        return tokens

    def build_inputs(self, latents: np.ndarray, timestep: Any) -> Arrays:
        """Return the timestep of each image."""
        return {TIMESTEPS: np.full((len(latents), 1), timestep, np.float32)}

    def plan(self, steps: int) -> Trajectory:
        """Return the passes of the denoiser; a constant shift moves the last noise level twice.

        Noise levels are evenly spaced from 1 to the shifted lowest level of the training, and then shifted, as in SD3's
        own sampler and in diffusers.
        """
        trajectory, schedule = super().plan(steps), self.schedule
        assert isinstance(schedule, FlowSchedule)
        if isinstance(schedule, FlowEulerSchedule) and schedule.dynamic_shift is not None:
            return trajectory
        lowest = schedule.shift_sigmas(np.float64(1 / schedule.num_train_timesteps))
        return schedule.plan(steps, self._config.rows, np.linspace(1, lowest, steps).tolist())

    @property
    def _config(self) -> SD3Config:
        """Config of the denoiser."""
        assert isinstance(self.denoiser.config, SD3Config)
        return self.denoiser.config


def open_sd3(folder: PipelineFolder, dtype: str) -> StableDiffusion3Pipeline:
    """Open a folder of an SD3 or SD3.5 model; see `open_pipeline`."""
    has_t5 = _T5_NAME in folder.components
    folder.check_components(
        {
            "transformer": ("SD3Transformer2DModel",),
            "vae": ("AutoencoderKL",),
            **dict.fromkeys(_CLIP_NAMES, ("CLIPTextModelWithProjection",)),
            **dict.fromkeys(("tokenizer", "tokenizer_2"), clip_tokenizer.CLASSES),
            **({_T5_NAME: ("T5EncoderModel",), "tokenizer_3": t5_tokenizer.CLASSES} if has_t5 else {}),
        }
    )
    first, second = (open_prompt_encoder(folder, dtype, name) for name in _CLIP_NAMES)
    t5_encoder = open_prompt_encoder(folder, dtype, _T5_NAME, _T5_ROWS) if has_t5 else None
    denoiser, config = open_denoiser(folder, dtype, SD3Config)
    _check_widths(folder, config, (first, second), t5_encoder)
    config = config.with_size(config.latent_rows, config.latent_columns, first.config.rows + _T5_ROWS)
    autoencoder = open_autoencoder(folder, dtype, config)
    schedule = folder.read_schedule()
    if not isinstance(schedule, FlowSchedule):
        raise ModelError(
            f"{folder.path}: the scheduler is not one of a flow; {folder.class_name} needs "
            "FlowMatchEulerDiscreteScheduler or FlowMatchHeunDiscreteScheduler",
            _CODE,
        )
    return StableDiffusion3Pipeline(
        folder.path, schedule, denoiser.resize(config), autoencoder, (first, second), t5_encoder
    )


def _check_widths(
    folder: PipelineFolder,
    config: SD3Config,
    clip_encoders: Sequence[PromptEncoder],
    t5_encoder: PromptEncoder | None,
) -> None:
    """Raise ModelError if texts of the text encoders do not fit together, or not to the denoiser."""
    first, second = (encoder.config for encoder in clip_encoders)
    assert isinstance(first, ClipTextConfig) and isinstance(second, ClipTextConfig)
    if first.rows != second.rows:
        raise ModelError(
            f"{folder.path}: texts have {first.rows} tokens in text_encoder and {second.rows} in text_encoder_2; "
            "they must be equal",
            _CODE,
        )
    width, pooled = first.hidden_size + second.hidden_size, first.projected + second.projected
    if width > config.text_size:
        raise ModelError(
            f"{folder.path}: text_encoder and text_encoder_2 return {width} elements together; transformer takes "
            f"encoded texts of {config.text_size}, so they must be at most as many",
            _CODE,
        )
    if pooled != config.pooled_size:
        raise ModelError(
            f"{folder.path}: text_encoder and text_encoder_2 return pooled texts of {pooled} elements together and "
            f"transformer takes {config.pooled_size}; they must be equal",
            _CODE,
        )
    if t5_encoder is not None:
        check_text_size(folder, _T5_NAME, t5_encoder.config.hidden_size, config.text_size)
