"""Interface of pipelines: components of a diffusion model, and what its denoiser gets beside the latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from model.config.autoencoder import AutoencoderConfig
from model.config.denoisers import DenoiserConfig
from model.config.folder import PIPELINE_INDEX
from model.errors import ModelError
from model.loading.component import LoadedComponent
from model.noise_schedules import NoiseSchedule, Trajectory
from model.runners.component import Arrays, Component

_MOST_LISTED = 4
"""Most sizes of images that a refusal lists."""
DEFAULT_GUIDANCE = 4.0
"""Guidance of images for which no other is asked for."""
P = TypeVar("P", bound="ImagePipeline")


class Backend(Protocol):
    """What creates the components that compute: in NumPy, with kernels, or dry."""

    def create(self, model: LoadedComponent, batch: int, name: str) -> Component:
        """Return a component for batches of one size.

        Args:
            model: The opened component, whose config has the size of its inputs.
            batch: Number of images or texts.
            name: Name of the component in the folder.
        """


@dataclass(frozen=True)
class ImagePipeline(ABC):
    """Opened components of a diffusion model for images of one size.

    `denoiser` and `autoencoder` have configs for this size. `is_guided_by_passes` says whether guidance is the factor
    of the difference between two passes of the denoiser; a distilled denoiser takes one pass.
    """

    is_guided_by_passes: ClassVar[bool] = True

    folder: Path
    schedule: NoiseSchedule
    denoiser: LoadedComponent
    autoencoder: LoadedComponent

    @property
    def denoiser_config(self) -> DenoiserConfig:
        """Config of the denoiser."""
        assert isinstance(self.denoiser.config, DenoiserConfig)
        return self.denoiser.config

    @property
    def autoencoder_config(self) -> AutoencoderConfig:
        """Config of the autoencoder."""
        assert isinstance(self.autoencoder.config, AutoencoderConfig)
        return self.autoencoder.config

    @property
    def files(self) -> list[Path]:
        """Paths of the model's files, which no output may replace: configs, tokenizers, schedule and weights."""
        folders = {component.folder for component in self.components}
        folders |= {self.folder / "scheduler", *self.folder.glob("tokenizer*")}
        return [self.folder / PIPELINE_INDEX, *(file for folder in folders for file in folder.glob("*"))]

    @property
    def components(self) -> Sequence[LoadedComponent]:
        """All components: text encoders, denoiser, autoencoder."""
        return (*self.text_encoders, self.denoiser, self.autoencoder)

    @property
    def image_size(self) -> tuple[int, int]:
        """Rows and columns of an image in pixels."""
        scale, config = self.autoencoder_config.spatial_scale, self.denoiser_config
        return config.latent_rows * scale, config.latent_columns * scale

    @property
    @abstractmethod
    def sizes(self) -> Sequence[tuple[int, int]]:
        """Sizes of images that the model was made for, as rows and columns in pixels, the default first."""

    @property
    @abstractmethod
    def text_encoders(self) -> Sequence[LoadedComponent]:
        """Text encoders."""

    def resize(self: P, rows: int, columns: int) -> P:
        """Return the pipeline for latent images of another size."""
        config = self.denoiser_config.with_size(rows, columns, self.denoiser_config.text_rows)
        autoencoder = self.autoencoder.resize(self.autoencoder_config.with_size(rows, columns))
        return replace(self, denoiser=self.denoiser.resize(config), autoencoder=autoencoder)

    def with_ulysses_ranks(self: P, ranks: int) -> P:
        """Return the pipeline with so many Ulysses ranks, which divide the rows of the denoiser's images."""
        config = replace(self.denoiser_config, ulysses_ranks=ranks)
        return replace(self, denoiser=self.denoiser.resize(config))

    def with_image_size(self: P, rows: int, columns: int) -> P:
        """Return the pipeline for images of another size in pixels.

        Raises:
            ModelError: The size is none of this model.
        """
        if not self.has_size(rows, columns):
            raise ModelError(
                f"{columns}x{rows} pixels is no size of this model; {self.describe_sizes(rows / columns)}",
                "NKW-MODEL-OPTION",
            )
        return self.resize(
            rows // self.autoencoder_config.spatial_scale, columns // self.autoencoder_config.spatial_scale
        )

    def has_size(self, rows: int, columns: int) -> bool:
        """Return whether images of a size in pixels can be drawn; by default those of `sizes` can."""
        return (rows, columns) in self.sizes

    def describe_sizes(self, aspect_ratio: float) -> str:
        """Return the sizes in words, or only the one with the nearest ratio of rows to columns if they are many."""
        if len(self.sizes) <= _MOST_LISTED:
            return "its sizes are " + ", ".join(f"{width}x{height}" for height, width in self.sizes)
        height, width = min(self.sizes, key=lambda size: abs(size[0] / size[1] - aspect_ratio))
        return f"of its {len(self.sizes)} sizes, {width}x{height} has the nearest aspect ratio"

    def build_guidance(self, guidance: float, negative_prompts: Sequence[str]) -> Arrays:
        """Return the guidance as an input of the denoiser, [images, ...]; a denoiser guided by passes has none.

        Args:
            guidance: The guidance of all images.
            negative_prompts: The negative prompt of each image.

        Raises:
            ModelError: The model cannot be guided so.
        """
        return {}

    def check_prompts(self, prompts: Sequence[str]) -> None:  # noqa: B027
        """Raise ModelError if the model does not draw a prompt; models with a text encoder draw every prompt."""

    @abstractmethod
    def encode(self, texts: Sequence[str], backend: Backend) -> Arrays:
        """Return inputs of the denoiser that depend on the text, by name, [texts, ...] each.

        Each text encoder runs once, on a batch of all texts.
        """

    @abstractmethod
    def list_tokens(self, text: str) -> list[tuple[int, int, str]]:
        """Return the tokens of a text among the encoded rows that the denoiser reads: (row, id, text) of each.

        Rows of padding are left out.
        """

    @abstractmethod
    def build_inputs(self, latents: np.ndarray, timestep: Any) -> Arrays:
        """Return the further inputs of the denoiser by name, [images, ...] each.

        Args:
            latents: Noisy latent images as the schedule scales them, [images, channels, rows, columns] float32.
            timestep: The timestep of all images, a number of `Trajectory.timesteps`.
        """

    def plan(self, steps: int) -> Trajectory:
        """Return the passes of the denoiser for a number of steps; errors are those of `NoiseSchedule.plan`."""
        return self.schedule.plan(steps, self.denoiser_config.rows)

    def unscale(self, latents: np.ndarray) -> np.ndarray:
        """Return latent images as the autoencoder decodes them."""
        return latents / np.float32(self.autoencoder_config.scaling_factor)
