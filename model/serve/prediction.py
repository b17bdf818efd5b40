"""The predicted clock of a server: how long its steps would take on the target, from dry launches of their parts.

The engine counts which shapes it launched; each shape is predicted once, in a process of its own and while nobody
waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from model.engine.buckets import PartShape
from model.errors import ModelError
from model.families import SPEECH, TEXT, load_config
from model.layers.launch import WindowPages
from model.layers.precision import activation_dtype
from model.loading.checkpoint import open_checkpoint
from model.plan.predict import Predictor
from model.serve.aside import Aside


@dataclass(frozen=True)
class Deployed:
    """What steps are predicted for: a model folder on ranks of a chip, and the pages and slots of its cache.

    There are `expert_ranks` groups of `ranks`, each with such a cache.
    """

    folder: Path
    target: str
    ranks: int
    expert_ranks: int
    dtype: str
    max_model_len: int
    pages: int
    block_size: int
    window_pages: WindowPages = ()
    slots: int = 0


class StepTimes:
    """Predicted times of the parts of steps."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed = deployed
        self._executor = ThreadPoolExecutor(1, "prediction")
        self._aside: Aside | None = None
        self._seconds: dict[PartShape, float | None] = {}
        self._asked: set[PartShape] = set()

    def seconds(self, parts: Mapping[PartShape, int]) -> tuple[float, int]:
        """The predicted seconds of all launched parts, and the number of parts without a prediction.

        `parts` counts the launches of each shape. A new shape is predicted in the background, for later calls. Shapes
        that verify drafts are not predicted.
        """
        total, missing = 0.0, 0
        for shape, count in parts.items():
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

    def _ask(self, shape: PartShape) -> None:
        if shape not in self._asked and not any(
            own is not None and own.decodes and own.tokens > 1 for own in (shape, shape.beside)
        ):
            self._asked.add(shape)
            self._executor.submit(self._predict, shape)

    def _predict(self, shape: PartShape) -> None:
        self._aside = self._aside or Aside(_Answers, self._deployed)
        try:
            self._seconds[shape] = 1e-9 * self._aside.ask(*astuple(shape))
        except ModelError:
            self._seconds[shape] = None


class _Answers:
    """The process's side: the nanoseconds of a shape."""

    def __init__(self, deployed: Deployed) -> None:
        config = load_config(deployed.folder, TEXT, SPEECH)
        dtype = activation_dtype(deployed.dtype, config, open_checkpoint(deployed.folder, config))
        self._pages = deployed.pages, deployed.block_size, deployed.window_pages, deployed.slots
        self._predictor = Predictor(
            *(config, deployed.target, deployed.ranks, dtype.name, deployed.max_model_len),
            expert=deployed.expert_ranks,
        )

    def __call__(self, *shape: Any) -> float:
        part = PartShape(*shape)
        if part.beside is not None:
            part = replace(part, beside=PartShape(*shape[-1]))
        return float(self._predictor.paged(part, *self._pages).time.program_ns)
