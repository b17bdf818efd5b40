"""Device times of published runs, and a search for the constants of a stack that fit the published values best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.stacks.entries import Run
from model.plan.dry import Time
from model.plan.predict import PassTime, Predictor
from model.plan.stacks import HostTime, Scale, Served, Stack

_STEP_GRID = (np.arange(1.0, 1.41, 0.01), np.arange(0.0, 8.01, 0.1), np.arange(0.0, 1.01, 0.1))
"""decode_scale, and base and slot of step_engine in ms."""

_PROMPT_GRID = (
    np.arange(1.0, 3.01, 0.1),
    np.arange(0.0, 40.01, 2.0),
    np.arange(0.0, 20.01, 2.0),
    np.arange(0.0, 8.01, 1.0),
)
"""prompt_scale, attention_scale, and base and slot of prompt_engine in ms."""


@dataclass(frozen=True)
class DeviceTimes:
    """Predicted device times of a run with this project's kernels.

    parameters: billions of parameters of the model. prompt: one prompt. prompts: all prompts of the batch packed into
    one pass. step: the last decode step.
    """

    run: Run
    parameters: float
    prompt: PassTime
    prompts: PassTime
    step: Time

    def serve(self, stack: Stack) -> Prediction:
        """Return the times that a user of a serving stack sees."""
        return Prediction(
            self.run,
            stack.serve_prompts(self.prompt, 1),
            stack.serve_prompts(self.prompts, self.run.batch),
            stack.serve_step(self.step, self.run.batch),
            self.prompts.floor_ns,
        )


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a run on a stack; `floor_ns` is the time of all its prompts at the peaks of the cores."""

    run: Run
    prompt: Served
    prompts: Served
    step: Served
    floor_ns: float

    @property
    def values(self) -> dict[str, float]:
        """Predicted values by metric as in `nkw plan`: ttft and tpot in ms, throughput in output tokens/s."""
        prompt_ms, prompts_ms, step_ms = (
            served.time.program_ns / 1e6 for served in (self.prompt, self.prompts, self.step)
        )
        batch, generate = self.run.batch, self.run.generate
        throughput = 1e3 * batch * generate / (prompt_ms * batch + step_ms * (generate - 1))
        return {"ttft": prompts_ms, "tpot": step_ms, "throughput": throughput}

    @property
    def ratios(self) -> dict[str, float]:
        """Published over predicted value by metric; metrics that are not published are missing."""
        published = {"ttft": self.run.ttft_ms, "tpot": self.run.tpot_ms, "throughput": self.run.throughput}
        return {metric: value / self.values[metric] for metric, value in published.items() if value}


def predict_device(run: Run) -> DeviceTimes:
    """Predict the device times of a run by dry runs of its model's kernels."""
    model = run.load()
    context = run.stack.pad_cache(run.sequence, run.sequence)
    predictor = Predictor(model.config, run.instance, run.cores, "bfloat16", context, lnc=run.lnc)
    tokens = run.stack.pad_prompt(run.prompt, run.sequence)
    prompt = predictor.predict_prompts(tokens)
    return DeviceTimes(
        run=run,
        parameters=model.total / 1e9,
        prompt=prompt,
        prompts=predictor.predict_prompts(tokens, run.batch) if run.batch > 1 else prompt,
        step=predictor.predict_step(run.batch).time,
    )


def fit_stack(stack: Stack, times: Sequence[DeviceTimes]) -> Stack:
    """Return the stack with the constants, taken from a grid, that fit the runs' published times best.

    The fit minimises the mean square of log(predicted / published), for steps and for prompts separately.
    """
    batch = np.array([device_times.run.batch for device_times in times])
    step = np.array([device_times.step.program_ns for device_times in times]) / 1e6
    attention = np.array([device_times.prompts.attention.program_ns for device_times in times]) / 1e6
    other = np.array([device_times.prompts.time.program_ns for device_times in times]) / 1e6 - attention
    decode_scale, step_base, step_slot = _search(
        lambda scale, base, slot: scale * step + base + slot * batch,
        _STEP_GRID,
        np.array([device_times.run.tpot_ms for device_times in times]),
    )
    prompt_scale, attention_scale, prompt_base, prompt_slot = _search(
        lambda scale, scores, base, slot: scale * other + scores * attention + base + slot * batch,
        _PROMPT_GRID,
        np.array([device_times.run.ttft_ms for device_times in times]),
    )
    return replace(
        stack,
        decode_scale=Scale(decode_scale, stack.decode_scale.origin),
        step_engine=HostTime(step_base, step_slot, stack.step_engine.origin),
        prompt_scale=Scale(prompt_scale, stack.prompt_scale.origin),
        attention_scale=Scale(attention_scale, stack.attention_scale.origin),
        prompt_engine=HostTime(prompt_base, prompt_slot, stack.prompt_engine.origin),
    )


def cross_validate(stack: Stack, times: Sequence[DeviceTimes]) -> list[dict[str, float]]:
    """Return published over predicted values of each run, by metric and in order.

    The constants for a run are fitted to the runs of other models or instances.
    """
    ratios = []
    for device_times in times:
        group = device_times.run.model, device_times.run.instance
        fitted = [fitted for fitted in times if (fitted.run.model, fitted.run.instance) != group]
        ratios.append(device_times.serve(fit_stack(stack, fitted)).ratios)
    return ratios


def _search(
    predict: Callable[..., np.ndarray], grid: Sequence[np.ndarray], published: np.ndarray
) -> tuple[float, ...]:
    """Return the first point of a grid with the least mean square of log(predicted / published)."""
    columns = [column[..., None] for column in np.meshgrid(*grid, indexing="ij")]
    errors = (np.log(predict(*columns) / published) ** 2).mean(axis=-1)
    index = np.unravel_index(int(errors.argmin()), errors.shape)
    return tuple(round(float(column[index][0]), 2) for column in columns)
