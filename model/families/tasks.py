"""What models are for; a row of the registry names its task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from model.config import Config, ModelConfig

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Task(Generic[C]):
    """A task: what a model does, as errors say it, and the record of its configuration.

    A task whose every step has one size names the module of its runner. The module has a function `make_step(config,
    activations, weights) -> StepShape`, with which `nkw plan` and `nkw bundle` take models of the task.
    """

    does: str
    record: type[C]
    runner: str = ""


TEXT = Task("continues texts", ModelConfig)
SPEECH = Task("transcribes speech; nkw transcribe and nkw serve do that", ModelConfig)
