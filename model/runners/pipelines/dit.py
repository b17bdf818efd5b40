"""DiT pipelines: images of classes, without a text encoder; two passes are guided, one of them without a class.

What decides that images equal those of diffusers' DiTPipeline, beside the components:

    labels     a prompt is a name in `id2label` of model_index.json, or the number of a class
    guidance   two passes, one without a class: its label is the number of classes, for which diffusers has 1000
    variances  the learned ones, half of the denoiser's channels, are not computed
    latents    divided by scaling_factor

Latents are scaled as the schedule says. diffusers makes steps from the scaled inputs of the denoiser and does not scale
noise, so that its images are others with the schedules that scale: Euler's and Heun's methods.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from model.config.denoisers import DiTConfig
from model.config.fields import Fields
from model.config.folder import PIPELINE_INDEX
from model.errors import ModelError
from model.families.denoisers import TIMESTEPS
from model.families.dit import LABELS
from model.loading.component import LoadedComponent
from model.loading.pipeline import PipelineFolder
from model.noise_schedules.ddpm import DdpmSchedule, Variance
from model.runners.component import Arrays
from model.runners.pipelines.components import open_autoencoder, open_denoiser
from model.runners.pipelines.pipeline import Backend, ImagePipeline

_NUMBER = re.compile(r"[0-9]{1,10}")
"""Number of a class; more digits than those of any class are no number, so that int() stays cheap."""


@dataclass(frozen=True)
class DiTPipeline(ImagePipeline):
    """Opened DiT model; `classes_by_name` has the class of each name in the folder, and may be empty."""

    classes_by_name: Mapping[str, int]

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """The one size, for which the denoiser's positions are defined."""
        config = self.denoiser.config
        assert isinstance(config, DiTConfig)
        side = config.sample_size * self.autoencoder_config.spatial_scale
        return [(side, side)]

    @property
    def text_encoders(self) -> Sequence[LoadedComponent]:
        """No text encoder."""
        return ()

    @property
    def classes(self) -> int:
        """Number of classes, which is the label of no class too."""
        assert isinstance(self.denoiser.config, DiTConfig)
        return self.denoiser.config.classes

    def build_guidance(self, guidance: float, negative_prompts: Sequence[str]) -> Arrays:
        """Return no input.

        Raises:
            ModelError: There is a negative prompt.
        """
        if any(negative_prompts):
            raise ModelError(
                "a negative prompt needs a text encoder, and this model draws classes, guided away from images of no "
                "class: leave the negative prompt out",
                "NKW-MODEL-OPTION",
            )
        return {}

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise ModelError if a prompt is no name of a class, no number of a class, and not empty."""
        for prompt in prompts:
            self.find_label(prompt)

    def find_label(self, prompt: str) -> int:
        """Return the label of a prompt: the class of this name, else of this number; no class for an empty prompt.

        Raises:
            ModelError: No class has this name or number.
        """
        text = prompt.strip()
        if not text:
            return self.classes
        if text in self.classes_by_name:
            return self.classes_by_name[text]
        if _NUMBER.fullmatch(text) and int(text) < self.classes:
            return int(text)
        problem = f"{text!r:.60} is no class of this model"
        numbers = f"a number from 0 to {self.classes - 1}"
        count = len(self.classes_by_name)
        if not count:
            raise ModelError(
                f"{problem}, whose folder names no classes: give {numbers}",
                "NKW-MODEL-OPTION",
            )
        nearest = ", ".join(f"{name!r:.40}" for name in self._find_near_names(text))
        advice = f"the nearest of its {count:,} names are {nearest}" if nearest else f"it has {count:,} names"
        raise ModelError(
            f"{problem}; {advice}: give a name in id2label of {PIPELINE_INDEX}, or {numbers}",
            "NKW-MODEL-OPTION",
        )

    def _find_near_names(self, text: str) -> list[str]:
        """Return at most three names of classes that are spelt like a text, the nearest first; capitals are equal."""
        names = {name.lower(): name for name in self.classes_by_name}
        return [names[name] for name in get_close_matches(text.lower(), names)]

    def encode(self, texts: Sequence[str], backend: Backend) -> Arrays:
        """Return the labels of texts, int32 [texts, 1]; errors are those of `find_label`."""
        return {LABELS: np.array([[self.find_label(text)] for text in texts], np.int32)}

    def list_tokens(self, text: str) -> list[tuple[int, int, str]]:
        """Return no token."""
        return []

    def build_inputs(self, latents: np.ndarray, timestep: Any) -> Arrays:
        """Return the timestep of each image."""
        return {TIMESTEPS: np.full((len(latents), 1), timestep, np.float32)}


def open_dit(folder: PipelineFolder, dtype: str) -> DiTPipeline:
    """Open a folder of a DiT model; see `open_pipeline`."""
    folder.check_components(
        {"transformer": ("DiTTransformer2DModel", "Transformer2DModel"), "vae": ("AutoencoderKL",)}
    )
    denoiser, config = open_denoiser(folder, dtype, DiTConfig)
    autoencoder = open_autoencoder(folder, dtype, config)
    schedule = folder.read_schedule()
    if isinstance(schedule, DdpmSchedule) and schedule.variance in (Variance.LEARNED, Variance.LEARNED_RANGE):
        raise ModelError(
            f"{folder.path}: the scheduler has variance_type {schedule.variance.value}, and the denoiser's learned "
            "variances are not computed; use a DDIMScheduler, or variance_type fixed_small",
            "NKW-MODEL-PIPELINE",
        )
    return DiTPipeline(folder.path, schedule, denoiser, autoencoder, read_names(folder, config.classes))


def read_names(folder: PipelineFolder, classes: int) -> dict[str, int]:
    """Return the class of each name in `id2label` of model_index.json; of equal names the last one counts.

    `id2label` has names of a class, separated by commas, for the number of the class. Without it there are no names.

    Args:
        folder: The folder.
        classes: Number of classes of the denoiser.

    Raises:
        ModelError: `id2label` is no object, or an entry of it is not text or for no class.
    """
    fields = Fields(folder.path / PIPELINE_INDEX)
    if fields.get("id2label", None) == [None, None]:
        return {}
    table, classes_by_name = fields.table("id2label"), {}
    for number in table.names:
        if not _NUMBER.fullmatch(number) or int(number) >= classes:
            raise fields.error(
                "id2label",
                f"{number!r:.60} is no class of the transformer; a number from 0 to {classes - 1} is",
            )
        names = table.get(number, None)
        if not isinstance(names, str):
            raise table.error(number, f"{names!r:.60} is not text; names of a class are separated by commas")
        for name in names.split(","):
            classes_by_name[name.strip()] = int(number)
    classes_by_name.pop("", None)
    return classes_by_name
