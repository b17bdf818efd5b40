"""Predicted decode steps of a model, plain and quantised, on one chip of each generation.

The quantised model is planned from its config.json as the loader reads it. Weights whose format kernels do not read
are widened when they are loaded, and such a step takes as long as a plain one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig, read_json
from model.config.folder import find_config_file
from model.families import read_config
from model.layers import find_unsupported
from model.plan.predict import Predictor
from model.plan.sizes import ModelSizes

CHIPS = ("trn1", "trn2", "trn3")
BATCHES = (1, 16)
LONGEST_CONTEXT = 4096


@dataclass(frozen=True)
class StepTime:
    """Time of a decode step in ns on a chip, for a batch: of the original and of the quantised model.

    `quantised_ns` is None if nothing in the loader reads the format.
    """

    chip: str
    batch: int
    original_ns: float
    quantised_ns: float | None


@dataclass(frozen=True)
class StepTimes:
    """Predicted steps, the assumptions, and `note`, which says how kernels read the quantised weights.

    Attributes:
        context: Positions of each sequence.
        tp: Tensor-parallel ranks.
        dtype: Dtype of activations, plain weights and caches.
        steps: The times.
        note: How the quantised weights are read.
    """

    context: int
    tp: int
    dtype: str
    steps: tuple[StepTime, ...]
    note: str


def predict_steps(path: Path, quantization_config: Mapping[str, Any], tp: int) -> StepTimes:
    """Return the predicted decode steps of a model before and after quantisation.

    Args:
        path: A config.json, or a folder that has one.
        quantization_config: The object that describes the quantised weights.
        tp: Tensor-parallel ranks.

    Raises:
        ModelError: The ranks cannot share the model, or no kernel computes it.
    """
    original = read_config(path)
    dtype = original.dtype or "bfloat16"
    context = min(LONGEST_CONTEXT, original.max_position_embeddings or LONGEST_CONTEXT)
    quantised = _read_quantised(path, quantization_config)
    note = _describe_reading(quantised)
    if find_unsupported(original):
        missing = ", ".join(find_unsupported(original))
        note = f"no kernel of this project computes {missing}, so no times are predicted"
        return StepTimes(context, tp, dtype, (), note)
    steps = []
    for chip in CHIPS:
        predictors = [
            None if config is None else Predictor(config, chip, tp, dtype, context)
            for config in (original, quantised)
        ]
        for batch in BATCHES:
            before, after = (
                None if predictor is None else predictor.predict_step(batch).time.program_ns
                for predictor in predictors
            )
            assert before is not None
            steps.append(StepTime(chip, batch, before, after))
    return StepTimes(context, tp, dtype, tuple(steps), note)


def _read_quantised(path: Path, quantization_config: Mapping[str, Any]) -> ModelConfig | None:
    """Return the config with a `quantization_config`; None if the loader has no format for it."""
    document = {**read_json(find_config_file(path)), "quantization_config": dict(quantization_config)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(document))
        config = read_config(Path(folder))
    return None if config.weight_format is None else config


def _describe_reading(quantised: ModelConfig | None) -> str:
    """Return the end of a sentence on how the loader and kernels of this project read the quantised weights."""
    if quantised is None:
        return "this project does not load the format, so no times of quantised steps are predicted"
    model = ModelSizes(quantised)
    readers_by_chip = {chip: model.on_chip(chip).list_quantised_readers() for chip in CHIPS}
    chips = [chip for chip, readers in readers_by_chip.items() if readers]
    if not chips:
        return "weights are widened when they are loaded, so that a step takes as long as a plain one"
    *kernels, last = readers_by_chip[chips[0]]
    names = f"{', '.join(kernels)} and {last} read" if kernels else f"{last} reads"
    where = "" if len(chips) == len(CHIPS) else f" on {' and '.join(chips)}"
    return f"{names} stored weights{where}; other weights are widened when they are loaded"
