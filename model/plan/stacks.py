"""Serving stacks: what a user measures, from the predicted times of the kernels.

A user measures more than the kernels: the host schedules, samples and prepares inputs between steps, and other stacks
run other kernels on padded sizes. A prediction therefore names its stack and has two terms,

    device time = decode_scale * step                                                       (a decode step)
    device time = max(prompt_scale * other kernels + attention_scale * attention, floor / prompt_share)    (prompts)
    engine time = base + slot * slots

where the times of kernels are those of this project. The records are in `stack_records`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum

from model.device import chip
from model.plan.dry import Time
from model.plan.origin import Origin
from model.plan.predict import PassTime

MOST_RATIO = 4
"""A published run is near a prediction if prompt, batch and parameters each differ by at most this factor."""

_SMALLEST_BUCKET = 128


class Padding(Enum):
    """The lengths to which a stack pads prompts or caches."""

    pages = "pages of this project's own buckets"
    powers_of_two = "powers of two from 128, at most the sequence length"
    sequence_length = "always the sequence length"


class Sampling(Enum):
    """Where a stack samples tokens."""

    device = "on the device"
    host = "on the host"


@dataclass(frozen=True)
class HostTime:
    """The host's time in ms: `base_ms` of every pass, and `slot_ms` of each sequence in the pass."""

    base_ms: float
    slot_ms: float
    origin: Origin

    def compute_ns(self, slots: int) -> float:
        """Return the host's time of a pass with so many sequences, in ns."""
        return 1e6 * (self.base_ms + self.slot_ms * slots)


@dataclass(frozen=True)
class Scale:
    """A factor on a predicted time, or a share of a bound; None if the stack has none."""

    value: float | None
    origin: Origin


@dataclass(frozen=True)
class Fact:
    """A property of a stack that is no number."""

    value: Padding | Sampling | str
    origin: Origin

    @property
    def text(self) -> str:
        """The property in words."""
        return self.value if isinstance(self.value, str) else self.value.value


@dataclass(frozen=True)
class Served:
    """What a user waits for: the time of the device, and the host's time before and after it."""

    device: Time
    engine_ns: float

    @property
    def time(self) -> Time:
        """Sum of both terms."""
        return self.device + Time.exact(self.engine_ns)


@dataclass(frozen=True)
class Ratios:
    """Published over predicted values of one metric: the smallest and the largest of `runs` published runs.

    `near` counts those whose sizes are near the prediction.
    """

    low: float
    high: float
    runs: int
    near: int


@dataclass(frozen=True)
class PublishedRun:
    """A published run of a stack, and its values over those predicted by a fit without its model and instance.

    `generation` is that of the NeuronCores that ran it: 2 for trn1 and inf2. `parameters` are those of the model in
    thousands of millions.
    """

    generation: int
    parameters: float
    batch: int
    prompt: int
    ttft: float
    tpot: float
    throughput: float

    def is_near(self, parameters: float, batch: int, prompt: int) -> bool:
        """Return whether the sizes of a prediction are within `MOST_RATIO`."""
        pairs = ((self.parameters, parameters), (self.batch, batch), (self.prompt, prompt))
        return all(max(size, other) <= MOST_RATIO * min(size, other) for size, other in pairs)


METRICS = ("ttft", "tpot", "throughput")
"""The metrics of a published run: time to first token, time per output token, output tokens per second."""


@dataclass(frozen=True)
class Stack:
    """The record of a serving stack.

    `decode_scale`, `prompt_scale` and `attention_scale` are the stack's device time over that of this project's
    kernels: in a decode step, in the kernels of prompts other than attention, and in attention of prompts.
    `prompt_share` is the share of the peaks of the cores that prompts reach at most. `runs` are the published runs
    that the record was fitted to; the ranges that reports print come from them.
    """

    name: str
    title: str
    date: str
    prompt_padding: Fact
    cache_padding: Fact
    sampling: Fact
    experts: Fact
    step_engine: HostTime
    prompt_engine: HostTime
    decode_scale: Scale
    prompt_scale: Scale
    attention_scale: Scale
    prompt_share: Scale
    runs: tuple[PublishedRun, ...] = ()
    note: str = ""

    def pad_prompt(self, tokens: int, sequence_length: int) -> int:
        """Return the length that a prompt is padded to; `pages` leaves it to the launches of this project."""
        return _pad(self.prompt_padding, tokens, sequence_length)

    def pad_cache(self, tokens: int, sequence_length: int) -> int:
        """Return the length of the cache that a step reads for a sequence of so many tokens."""
        return _pad(self.cache_padding, tokens, sequence_length)

    def serve_step(self, time: Time, slots: int) -> Served:
        """Return the times of a decode step that takes `time` in this project's kernels."""
        return Served(time * (self.decode_scale.value or 1.0), self.step_engine.compute_ns(slots))

    def serve_prompts(self, predicted: PassTime, prompts: int) -> Served:
        """Return the times of a pass of `prompts` prompts that this project's kernels compute as predicted."""
        attention = predicted.attention
        other = (predicted.time - attention) * (self.prompt_scale.value or 1.0)
        device = other + attention * (self.attention_scale.value or 1.0)
        return self._serve_prompts(device, predicted.floor_ns, prompts)

    def serve_roofline(self, roofline: Time, prompts: int) -> Served:
        """Return the times of a pass of `prompts` prompts of which only the roofline is known."""
        device = roofline * (self.prompt_scale.value or 1.0)
        return self._serve_prompts(device, roofline.dataflow_ns, prompts)

    def _serve_prompts(self, device: Time, floor_ns: float, prompts: int) -> Served:
        if self.prompt_share.value is not None:
            device = device.at_least(Time.exact(floor_ns / self.prompt_share.value))
        return Served(device, self.prompt_engine.compute_ns(prompts))

    def find_ratios(
        self, metric: str, target: str, parameters: float, batch: int, prompt: int
    ) -> Ratios | None:
        """Return the published over predicted values of a metric; None without a run on the generation of a chip.

        Args:
            metric: one of `METRICS`.
            target: the chip.
            parameters: parameters of the model, in thousands of millions.
            batch: sequences decoded together.
            prompt: tokens of each prompt.
        """
        runs = [run for run in self.runs if run.generation == chip(target).generation]
        if not runs:
            return None
        ratios = [getattr(run, metric) for run in runs]
        near = sum(run.is_near(parameters, batch, prompt) for run in runs)
        return Ratios(min(ratios), max(ratios), len(runs), near)

    def list_terms(self) -> Iterator[tuple[str, HostTime | Scale | Fact]]:
        """Yield the terms of the record by name."""
        for field in fields(self):
            term = getattr(self, field.name)
            if isinstance(term, (HostTime, Scale, Fact)):
                yield field.name, term


def _pad(padding: Fact, tokens: int, sequence_length: int) -> int:
    if padding.value is Padding.pages:
        return tokens
    if padding.value is Padding.sequence_length:
        return max(tokens, sequence_length)
    bucket = max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())
    return max(tokens, min(bucket, sequence_length))
