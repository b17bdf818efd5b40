"""CPU time of a step of this project's engine on the host, without the time of any kernel.

The device's step is replaced by a function that returns sampled tokens at once. What remains is the host's work
between launches when the device samples: scheduling, input arrays, stop conditions, and detokenizing. Launches belong
to the predicted device time.
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
    """Return one fixed sampled token for each row of the head; replaces the runner's `step`."""
    ids = np.arange(100, 100 + _CANDIDATES)
    values = np.linspace(9.0, 0.0, _CANDIDATES, dtype=np.float32)
    return [
        StepOutput(values=values, ids=ids, drawn=Drawn(101, -1.0, ids, values))
        for _ in range(shape.head_rows)
    ]


def measure_steps(slots: int, prompt: int = _PROMPT) -> tuple[float, float]:
    """Return two CPU times in ms: of the step that computes `slots` prompts, and of a decode step of `slots` sequences.

    The prompts' time is a median over repetitions; the step's is the least of the repetitions' medians.
    """
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
    """Return the CPU time of a call in ms."""
    begun = time.process_time()
    call()
    return 1e3 * (time.process_time() - begun)


def fit_line(times_ms: Mapping[int, float]) -> tuple[float, float]:
    """Return the intercept and the slope in ms of a line through step times by number of slots.

    The fit minimises the squares of relative errors.
    """
    slots = np.array(list(times_ms), dtype=np.float64)
    times = np.array(list(times_ms.values()))
    columns = np.stack([np.ones_like(slots), slots], axis=1) / times[:, None]
    base, slope = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)[0]
    return float(base), float(slope)
