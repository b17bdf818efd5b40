"""CPU time of dry runs of a large model: a layer of Llama-3.1-70B at tp 16 on trn2, planned, scheduled and timed.

python -m benchmarks.speed.dry
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import nki_kernels
import simulate
from benchmarks.speed.measure import Row
from model.config import ModelConfig
from model.device import DryDevice
from model.device.binding import bind_arguments
from model.execution.launch_list import list_launches
from model.families import compose, read_config
from model.layers.launch import Launch, Phase, StepShape, WeightDtypes
from model.mesh import Mesh
from model.plan.dry import DryTimes, create_stand_in
from model.plan.predict import Predictor
from model.runners.bucket_length import bucket_length
from simulate.isa import book
from simulate.timing import dependences, schedule

TARGET, RANKS, PROMPT, CONTEXT, DTYPE = "trn2", 16, 128, 256, "bfloat16"
_RUNS = 5

Call = tuple[str, list[tuple[Any, ...]]]
"""A kernel, and the arguments of every rank."""

CONFIG: dict[str, Any] = {  # the published config.json of Llama-3.1-70B, as far as it decides shapes
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": DTYPE,
}


def rows() -> Iterator[Row]:
    """Yield the CPU time of predicting a layer and the whole model, then the speed of each stage of a dry run.

    The speed is in instructions per second. Equal layers of the model are predicted once.
    """
    config = _config()
    for phase, tokens in ((f"prefill of {PROMPT}", PROMPT), ("a decode step", 1)):
        layer = _cpu(lambda: _layer(config, tokens))  # noqa: B023  (called at once)
        model = _cpu(lambda: _predict_model(config, tokens))  # noqa: B023
        yield Row(f"a layer of Llama-3.1-70B at tp {RANKS}, {phase}, dry", "CPU time", layer * 1e3, "ms")
        yield Row(f"all of Llama-3.1-70B at tp {RANKS}, {phase}, dry", "CPU time", model * 1e3, "ms")
    yield from _rates(_calls(config, PROMPT))


def _config() -> ModelConfig:
    """Return the configuration of Llama-3.1-70B, read from CONFIG as from a checkpoint's folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        return read_config(Path(folder))


def _launches(config: ModelConfig, tokens: int) -> list[Launch]:
    """Return the launches of one layer for a step of `tokens` tokens."""
    phase, dtype = Phase.decode if tokens == 1 else Phase.prefill, np.dtype(ml_dtypes.bfloat16)
    step = StepShape(
        phase, tokens, 1, bucket_length(CONTEXT, CONTEXT), CONTEXT, RANKS, dtype, WeightDtypes(dtype)
    )
    return list_launches(compose(config).blocks[0], step)


def _calls(config: ModelConfig, tokens: int) -> list[Call]:
    """Return one layer's launches on one rank, without its sums over ranks, and one such sum on all ranks."""
    one, ranks = DryDevice(TARGET, 1), DryDevice(TARGET, RANKS)
    calls: list[Call] = [(launch.kernel, [_stand_ins(launch, one)]) for launch in _launches(config, tokens)]
    partial = np.broadcast_to(np.zeros((), np.float32), (tokens, config.hidden_size))
    return [*calls, ("all_reduce", [(partial, ranks.replica_group)] * RANKS)]


def _stand_ins(launch: Launch, device: DryDevice) -> tuple[Any, ...]:
    """Return the arguments of a launch for a dry run, in the order of the kernel's parameters."""
    arguments = {
        parameter: create_stand_in(argument, device, Mesh(RANKS))
        for parameter, argument in launch.arguments.items()
    }
    return bind_arguments(launch.kernel, arguments)


def _layer(config: ModelConfig, tokens: int) -> None:
    """Dry run each kernel of a layer: planned, checked, scheduled, and timed under all readings."""
    dry = DryTimes(TARGET, Mesh(RANKS))
    for launch in _launches(config, tokens):
        dry.time_launch(launch)


def _predict_model(config: ModelConfig, tokens: int) -> None:
    """Predict a pass as `nkw plan` does: the layers are equal, so each kernel is launched once."""
    predictor = Predictor(config, TARGET, RANKS, DTYPE, CONTEXT)
    done = predictor.predict_step(1) if tokens == 1 else predictor.predict_prompts(tokens)
    assert not done.refusals, done.refusals


def _rates(calls: list[Call]) -> Iterator[Row]:
    """Yield instructions per second of CPU time of each stage, for the launches in `calls`.

    The stages are the planners alone, whole dry launches, dependences, and scheduling. Replaces `book.bind` while it
    records the calls of planners.
    """
    planned: list[tuple[Any, ...]] = []

    def kept(*call: Any) -> Any:
        planned.append(call)
        return bind(*call)

    bind, book.bind = book.bind, kept
    try:
        launches = [_launch(call) for call in calls]
    finally:
        book.bind = bind
    streams = [launch.streams for launch in launches]
    waits = [dependences(rank_streams) for rank_streams in streams]
    instructions = sum(len(stream) for rank_streams in streams for stream in rank_streams)
    steps: dict[str, Callable[[], object]] = {
        "planners": lambda: [bind(*call) for call in planned],
        "a dry launch: the kernel's Python, planned, checked, recorded, placed": lambda: [
            _launch(call) for call in calls
        ],
        "dependences of its stream": lambda: [dependences(launch_streams) for launch_streams in streams],
        "schedule, program reading": lambda: [
            schedule(launch_streams, launch.hardware, waits=wait)
            for launch_streams, launch, wait in zip(streams, launches, waits)
        ],
        "dependences and schedule": lambda: [
            schedule(launch.streams, launch.hardware) for launch in launches
        ],
    }
    for step, action in steps.items():
        yield Row(
            f"{step}, {instructions} instructions", "CPU time", instructions / _cpu(action), "instructions/s"
        )


def _launch(call: Call) -> simulate.Launch:
    """Launch a kernel dry on as many ranks as it has lists of arguments, and return the launch."""
    kernel, arguments = call
    world = simulate.World(TARGET, len(arguments))
    return world.launch(
        getattr(nki_kernels, kernel),
        [(rank, {}) for rank in arguments],
        simulate.Mode.dry,
    )


def _cpu(action: Callable[[], object]) -> float:
    """Return the least CPU time of several calls in seconds, after a warm-up.

    Other work on the machine disturbs it least.
    """
    action()
    samples = []
    for _ in range(_RUNS):
        start = time.process_time()
        action()
        samples.append(time.process_time() - start)
    return min(samples)


def main() -> int:
    """Print each row right after its measurement. Returns 0."""
    for row in rows():
        print(f"{row.work}: {row.measured:.3g} {row.unit}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
