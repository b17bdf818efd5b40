"""Tasks of models; a row of the registry names its task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from model.config import Config, ModelConfig
from model.config.component import ComponentConfig
from model.config.masked_text import MaskedTextConfig

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Task(Generic[C]):
    """A task of models.

    does    predicate of a sentence about a model, for error messages
    record  class of the configuration
    runner  module of the runner, for a task whose steps all have one size. It has a function `make_step(config,
            activations, weights) -> StepShape`, which `nkw plan` and `nkw bundle` call
    """

    does: str
    record: type[C]
    runner: str = ""


TEXT = Task("continues texts", ModelConfig)
SPEECH = Task("transcribes speech; nkw transcribe and nkw serve do that", ModelConfig)
MASKED_TEXT = Task("fills masks in texts; nkw generate and nkw plan do that", MaskedTextConfig)
_OF_PIPELINE = "in a folder of a diffusion model; nkw imagine takes that folder, with model_index.json"
TEXT_ENCODER = Task(f"encodes texts {_OF_PIPELINE}", ComponentConfig, "model.runners.component")
DENOISER = Task(f"denoises latents {_OF_PIPELINE}", ComponentConfig, "model.runners.component")
AUTOENCODER = Task(f"makes images of latents {_OF_PIPELINE}", ComponentConfig, "model.runners.component")
