"""Tasks of models; a row of the registry names its task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from model.config import Config, ModelConfig

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
