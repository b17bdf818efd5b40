"""Time of a decode step of the default model: replayed, eager, and in plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.speed.measure import Row, medians
from model.device import SimulatedDevice
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.bucket_length import bucket_length
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel

_FOLDER = Path(__file__).resolve().parents[2] / "model" / "pretrained"
_PROMPT = [0, 100, 200, 300]
_STEPS = 8


def rows() -> Iterator[Row]:
    """Yield the time in ms of a step of the default model on one simulated trn1 core, eager and replayed.

    It is the mean over one prefill of four tokens and the decode steps.
    """
    config = load_config(_FOLDER)
    weights = dict(open_checkpoint(_FOLDER, config))
    length = bucket_length(len(_PROMPT) + _STEPS, config.max_position_embeddings)

    def steps(model: KernelModel | ReferenceModel) -> Callable[[], None]:
        def run() -> None:
            model.prefill([_PROMPT])
            for step in range(_STEPS):
                model.decode([7 + step], [len(_PROMPT) + step])

        return run

    def simulated(replay: bool) -> Callable[[], None]:
        device = SimulatedDevice("trn1", 1, replay)
        return steps(KernelModel(config, shard_weights(config, weights, 1), device, length))

    replayed, eager, plain = medians(
        [simulated(True), simulated(False), steps(ReferenceModel(config, weights))], runs=5
    )
    ms_per_step = 1e3 / (_STEPS + 1)
    yield Row(
        "default model, a step, eager", "the same in plain numpy", eager * ms_per_step, "ms", eager / plain
    )
    yield Row(
        "default model, a step, replayed", "the same, eager", replayed * ms_per_step, "ms", replayed / eager
    )
