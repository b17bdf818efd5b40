"""Predicted times of the steps that an engine has launched, by dry runs of their kernels on its target.

`LLM.predict_steps` and the server's metrics use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config.quantization import RANK, quantise_config
from model.device import choose_lnc
from model.engine import Engine
from model.errors import ModelError
from model.families import SPEECH, TEXT, load_config
from model.layers.cache_formats import AUTO
from model.layers.launch import Phase, StepShape
from model.layers.paged import STATES, CacheGroup
from model.llm.engine_args import EngineArgs
from model.llm.loaded import LoadedModel
from model.loading.shipped import find_model_path
from model.plan.predict import Predictor


@dataclass(frozen=True)
class Deployment:
    """Deployment whose steps are predicted: a model folder on ranks of a chip, each of `lnc` physical cores.

    There are `expert_ranks` groups of `ranks` ranks. Each group has a cache; `pages` has its number of pages or slots
    by cache group.
    """

    folder: Path
    target: str
    lnc: int
    ranks: int
    expert_ranks: int
    dtype: str
    max_model_len: int
    pages: Mapping[CacheGroup, int]
    block_size: int
    quantization: str | None = None
    row_scales: str = RANK
    kv_cache_dtype: str = AUTO

    @classmethod
    def from_engine(cls, engine: Engine, args: EngineArgs) -> Deployment:
        """Return the deployment that an engine and its arguments describe.

        Raises:
            ModelError: The target does not have `lnc` physical cores a rank, or NEURON_LOGICAL_NC_CONFIG is neither 1
                nor 2.
        """
        cache = engine.scheduler.cache
        pages: dict[CacheGroup, int] = {None: cache.pages, **dict(cache.window_pages)}
        if cache.slots is not None:
            pages[STATES] = cache.slots.count
        return cls(
            folder=find_model_path(args.model),
            target=args.target,
            lnc=choose_lnc(args.target, args.lnc),
            ranks=args.tensor_parallel_size,
            expert_ranks=args.expert_parallel_size,
            dtype=args.dtype,
            quantization=args.quantization,
            row_scales=args.row_scales,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=engine.limits.max_model_len,
            pages=pages,
            block_size=cache.block_size,
        )


@dataclass(frozen=True)
class StepsPrediction:
    """Sum of the predicted times, in seconds, of an engine's steps on `target`, whose ranks have `lnc` physical cores.

    `unpredicted` counts launches without a prediction, such as those that verify draft tokens.
    """

    target: str
    lnc: int
    seconds: float
    unpredicted: int

    def __str__(self) -> str:
        without = f", without {self.unpredicted:,} parts of steps" if self.unpredicted else ""
        return f"{1e3 * self.seconds:,.3f} ms on {self.target} (LNC {self.lnc}){without}"


class StepPredictor:
    """Predictor of the steps of a deployment, which predicts each shape of a step once."""

    def __init__(self, deployment: Deployment) -> None:
        """Read the config and the dtypes of the deployment's folder.

        Raises:
            ModelError: Files of the folder disagree.
        """
        self._deployment = deployment
        config = load_config(deployment.folder, TEXT, SPEECH)
        config = quantise_config(config, deployment.quantization, deployment.row_scales)
        model = LoadedModel.open(deployment.folder, deployment.dtype, config, deployment.target)
        self._predictor = Predictor(
            *(model.config, deployment.target, deployment.ranks),
            *(model.activations.name, deployment.max_model_len),
            expert=deployment.expert_ranks,
            lnc=deployment.lnc,
            cache_dtype=deployment.kv_cache_dtype,
        )
        self._step = self._predictor.make_paged_step(deployment.pages, deployment.block_size)
        self._seconds: dict[StepShape, float | None] = {}

    def predict(self, sizes: Sequence[Any]) -> float | None:
        """Return the predicted time of a step in seconds.

        Returns None for a step that verifies draft tokens, and for a step that a kernel refuses.

        Args:
            sizes: The `sizes` of the step's shape.
        """
        step = self._step.resize(sizes)
        if step not in self._seconds:
            self._seconds[step] = None
            if not verifies_drafts(step):
                with suppress(ModelError):
                    self._seconds[step] = 1e-9 * float(self._predictor.predict_paged(step).time.program_ns)
        return self._seconds[step]

    def add_up(self, launch_counts: Mapping[StepShape, int]) -> StepsPrediction:
        """Return the sum of the predicted times of all launched steps.

        Args:
            launch_counts: How often each shape was launched.
        """
        total, missing = 0.0, 0
        for shape, count in launch_counts.items():
            seconds = self.predict(shape.sizes)
            if seconds is None:
                missing += count
            else:
                total += seconds * count
        return StepsPrediction(self._deployment.target, self._deployment.lnc, total, missing)


def verifies_drafts(shape: StepShape) -> bool:
    """Return whether a step computes several tokens of each decoding sequence, as it does to verify draft tokens."""
    decoding = shape if shape.phase is Phase.decode else shape.decoding
    return decoding is not None and decoding.new_tokens > 1
