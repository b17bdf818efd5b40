"""Dry runs of a large model: a layer of Llama-3.1-70B at tp 16 on trn2, planned, placed and timed.

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

import nki_kernels
import simulate
from benchmarks.speed.measure import Row
from model.device import kernel_limit
from model.plan.calls import Call, RankCalls
from model.plan.dry import DryTimes
from model.plan.families import load_model
from model.plan.parameters import Model
from model.plan.predict import Predictor
from simulate.isa import book
from simulate.timing import dependences, schedule

TARGET, RANKS, PROMPT, CONTEXT, DTYPE = "trn2", 16, 128, 256, "bfloat16"
_RUNS = 5

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
    """Time of a layer and of the model, equal layers once; instructions per second of each step of a dry run."""
    model = _model()
    for what, tokens in ((f"prefill of {PROMPT}", PROMPT), ("a decode step", 1)):
        layer = _cpu(lambda: _layer(model, tokens))  # noqa: B023  (called at once)
        whole = _cpu(lambda: _whole(model, tokens))  # noqa: B023
        yield Row(f"a layer of Llama-3.1-70B at tp {RANKS}, {what}, dry", "CPU time", layer * 1e3, "ms")
        yield Row(f"all of Llama-3.1-70B at tp {RANKS}, {what}, dry", "CPU time", whole * 1e3, "ms")
    yield from _rates(_calls(model, PROMPT))


def _model() -> Model:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        return load_model(Path(folder))


def _calls(model: Model, tokens: int) -> list[Call]:
    """The launches of one layer, the sum over ranks once: it is the same twice."""
    assert model.kernels is not None
    group = DryTimes(TARGET, RANKS).replica_group
    searched = kernel_limit("top_k", "MAX_SEARCHED")
    calls = RankCalls(model, model.kernels, RANKS, DTYPE, CONTEXT, group, searched)
    return [
        calls.qkv_projection(tokens),
        calls.rope(calls.heads)(tokens),
        calls.rope(calls.kv_heads)(tokens),
        calls.attention_decode() if tokens == 1 else calls.attention_prefill(tokens),
        calls.output_projection(tokens),
        calls.mlp(tokens),
        calls.all_reduce(tokens),
    ]


def _layer(model: Model, tokens: int) -> None:
    """Every kernel of a layer planned, checked, placed, and timed in all readings."""
    dry = DryTimes(TARGET, RANKS)
    for call in _calls(model, tokens):
        dry.launch(call)


def _whole(model: Model, tokens: int) -> None:
    """The pass as `nkw plan` has it: the layers are equal, so each kernel is launched once."""
    assert model.kernels is not None
    predictor = Predictor(model, model.kernels, TARGET, RANKS, DTYPE, CONTEXT)
    done = predictor.step(1) if tokens == 1 else predictor.first_token(tokens)
    assert not done.refusals, done.refusals


def _rates(calls: list[Call]) -> Iterator[Row]:
    """Instructions per second of CPU time: planners alone, whole dry launches, dependences, placing in time."""
    planned: list[tuple[Any, ...]] = []

    def kept(*call: Any) -> Any:
        planned.append(call)
        return plan(*call)

    plan, book.plan = book.plan, kept
    try:
        launches = [_launch(call) for call in calls]
    finally:
        book.plan = plan
    streams = [launch.streams for launch in launches]
    waits = [dependences(each) for each in streams]
    instructions = sum(len(stream) for each in streams for stream in each)
    steps: dict[str, Callable[[], object]] = {
        "planners": lambda: [plan(*call) for call in planned],
        "a dry launch: the kernel's Python, planned, checked, recorded, placed": lambda: [
            _launch(call) for call in calls
        ],
        "dependences of its stream": lambda: [dependences(each) for each in streams],
        "schedule, program reading": lambda: [
            schedule(each, launch.hardware, waits=wait)
            for each, launch, wait in zip(streams, launches, waits)
        ],
        "dependences and schedule": lambda: [
            schedule(launch.streams, launch.hardware) for launch in launches
        ],
    }
    for what, action in steps.items():
        yield Row(
            f"{what}, {instructions} instructions", "CPU time", instructions / _cpu(action), "instructions/s"
        )


def _launch(call: Call) -> simulate.Launch:
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(tuple(each), {}) for each in call.arguments]
    world = simulate.World(TARGET, len(arguments))
    return world.launch(getattr(nki_kernels, call.kernel), arguments, simulate.Mode.dry)


def _cpu(action: Callable[[], object]) -> float:
    """The least CPU time of several calls, in seconds: what other work on the machine disturbs least."""
    action()
    samples = []
    for _ in range(_RUNS):
        start = time.process_time()
        action()
        samples.append(time.process_time() - start)
    return min(samples)


def main() -> int:
    """Print every row as it is measured."""
    for row in rows():
        print(f"{row.work}: {row.measured:.3g} {row.unit}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
