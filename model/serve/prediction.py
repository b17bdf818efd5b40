"""The predicted clock of a server: how long its steps would take on the target, from dry launches of their parts.

The engine counts which shapes it launched; each shape is predicted once, in a process of its own and while nobody
waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.families import SPEECH, TEXT, load_config
from model.layers.launch import Phase, StepShape
from model.layers.paged import CacheGroup
from model.layers.precision import activation_dtype
from model.loading.checkpoint import open_checkpoint
from model.plan.predict import Predictor
from model.serve.aside import Aside


@dataclass(frozen=True)
class Deployed:
    """What steps are predicted for: a model folder on ranks of a chip.

    There are `expert_ranks` groups of `ranks`. `pages` are those of each group's cache, and its slots, by cache group.
    """

    folder: Path
    target: str
    ranks: int
    expert_ranks: int
    dtype: str
    max_model_len: int
    pages: Mapping[CacheGroup, int]
    block_size: int


class StepTimes:
    """Predicted times of steps."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed = deployed
        self._executor = ThreadPoolExecutor(1, "prediction")
        self._aside: Aside | None = None
        self._seconds: dict[StepShape, float | None] = {}
        self._asked: set[StepShape] = set()

    def seconds(self, steps: Mapping[StepShape, int]) -> tuple[float, int]:
        """Return the predicted seconds of all launched steps, and the number of steps without a prediction.

        `steps` counts the launches of each shape. A new shape is predicted in the background, for later calls. Shapes
        that verify drafts are not predicted.
        """
        total, missing = 0.0, 0
        for shape, count in steps.items():
            seconds = self._seconds.get(shape)
            if seconds is None:
                missing += count
                self._ask(shape)
            else:
                total += seconds * count
        return total, missing

    def stop(self) -> None:
        """End the process and the thread that asks it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._aside is not None:
            self._aside.stop()

    def _ask(self, shape: StepShape) -> None:
        decoding = shape if shape.phase is Phase.decode else shape.decoding
        if shape not in self._asked and (decoding is None or decoding.new_tokens == 1):
            self._asked.add(shape)
            self._executor.submit(self._predict, shape)

    def _predict(self, shape: StepShape) -> None:
        self._aside = self._aside or Aside(_Answers, self._deployed)
        try:
            self._seconds[shape] = 1e-9 * self._aside.ask(*shape.sizes)
        except ModelError:
            self._seconds[shape] = None


class _Answers:
    """The process's side: the nanoseconds of a shape."""

    def __init__(self, deployed: Deployed) -> None:
        config = load_config(deployed.folder, TEXT, SPEECH)
        dtype = activation_dtype(deployed.dtype, config, open_checkpoint(deployed.folder, config))
        self._predictor = Predictor(
            *(config, deployed.target, deployed.ranks, dtype.name, deployed.max_model_len),
            expert=deployed.expert_ranks,
        )
        self._step = self._predictor.on_pages(deployed.pages, deployed.block_size)

    def __call__(self, *sizes: Any) -> float:
        return float(self._predictor.paged(self._step.resize(sizes)).time.program_ns)
