"""CPU time of a step of this project's engine on the host, without the time of any kernel.

The engine schedules requests, prepares the inputs of the step, and updates the requests with their tokens, as it does
when it serves. The step of the device is replaced by one that returns sampled tokens at once. So a step has everything
that the host does between the launches of a device that samples: scheduling, input arrays, stop conditions, and
detokenizing. Launches themselves are part of the predicted device time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np

from model.engine import SamplingParams
from model.layers.launch import StepShape
from model.llm.llm import LLM
from model.sampling import Drawn, StepOutput

SLOTS = (1, 2, 4, 8, 16, 32, 64)
_CANDIDATES = 64
_STEPS = 60
_PROMPT = 128
_REPEATS = 4


def _return_sampled(shape: StepShape, inputs: Mapping[str, Any], logits: bool = True) -> list[StepOutput]:
    """Return a sampled token for every row of the head, instead of running the step."""
    ids = np.arange(100, 100 + _CANDIDATES)
    values = np.linspace(9.0, 0.0, _CANDIDATES, dtype=np.float32)
    return [
        StepOutput(values=values, ids=ids, drawn=Drawn(101, -1.0, ids, values))
        for _ in range(shape.head_rows)
    ]


def measure_steps(slots: int, prompt: int = _PROMPT) -> tuple[float, float]:
    """Return the CPU time in ms of the step that computes `slots` prompts, and the median of their decode steps."""
    engine = LLM(max_num_seqs=slots, max_num_batched_tokens=slots * prompt, max_model_len=256).engine
    engine._model._runner.step = _return_sampled  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=_STEPS + 2, temperature=0.7, top_k=20, ignore_eos=True)
    samples = []
    for _ in range(_REPEATS):
        for number in range(slots):
            engine.submit(str(number), [number % 50 + 3, *range(3, prompt + 2)], params)
        samples.append([_measure_ms(engine.step) for _ in range(_STEPS)])
        while engine.busy:
            engine.step()
        engine.scheduler.reset_prefix_cache()
    return median(sample[0] for sample in samples[1:]), min(median(sample[1:]) for sample in samples)


def _measure_ms(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return 1e3 * (time.process_time() - begun)


def fit_line(times_ms: Mapping[int, float]) -> tuple[float, float]:
    """Return the time of a step without slots and the time of a slot, in ms, by least squares of relative errors."""
    slots = np.array(list(times_ms), dtype=np.float64)
    times = np.array(list(times_ms.values()))
    columns = np.stack([np.ones_like(slots), slots], axis=1) / times[:, None]
    base, slope = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)[0]
    return float(base), float(slope)
