"""Records of serving stacks: what turns predicted times of kernels into what a user of a stack measures.

A serving stack is a server with its engine and kernels, such as vLLM on Neuron. A user measures more than the kernels:
the host schedules, samples and prepares inputs between steps, and other stacks run other kernels on padded sizes. A
prediction therefore names its stack and adds two terms,

    device time = decode_scale * step                                                       (a decode step)
    device time = max(prompt_scale * other kernels + attention_scale * attention, floor / prompt_share)    (prompts)
    engine time = base + slot * slots

Here step, attention and other kernels are predicted times of this project's kernels, `floor` is their roofline, and
`slots` is the number of sequences in the pass. The records are in `stack_records`.
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
    """Rule by which a stack pads the length of prompts or of caches."""

    pages = "pages of this project's own buckets"
    powers_of_two = "powers of two from 128, at most the sequence length"
    sequence_length = "always the sequence length"


class Sampling(Enum):
    """Where a stack samples tokens."""

    device = "on the device"
    host = "on the host"


@dataclass(frozen=True)
class HostTime:
    """Time of the host's work for one pass: `base_ms`, plus `slot_ms` for each sequence in the pass."""

    base_ms: float
    slot_ms: float
    origin: Origin

    def compute_ns(self, slots: int) -> float:
        """Return the host's time in ns for a pass with `slots` sequences."""
        return 1e6 * (self.base_ms + self.slot_ms * slots)


@dataclass(frozen=True)
class Scale:
    """Factor on a predicted time, or share of the peaks; None means that the predicted time stays as it is."""

    value: float | None
    origin: Origin


@dataclass(frozen=True)
class Fact:
    """Property of a stack that is not a number: a way of padding, a place of sampling, or a text."""

    value: Padding | Sampling | str
    origin: Origin

    @property
    def text(self) -> str:
        """Property in words."""
        return self.value if isinstance(self.value, str) else self.value.value


@dataclass(frozen=True)
class Served:
    """Time that a user of a stack waits for: the device's time, and the host's time before and after it."""

    device: Time
    engine_ns: float

    @property
    def time(self) -> Time:
        """Sum of device and engine time; the engine time is added to every reading."""
        return self.device + Time.exact(self.engine_ns)


@dataclass(frozen=True)
class Ratios:
    """Range of published over predicted values of one metric over `runs` published runs: from `low` to `high`.

    `near` counts the runs whose prompt, batch and parameters are each within a factor of `MOST_RATIO` of the
    prediction's.
    """

    low: float
    high: float
    runs: int
    near: int


@dataclass(frozen=True)
class PublishedRun:
    """Published benchmark run of a stack, and its published over predicted values of the three metrics.

    The prediction came from a fit without the runs of this run's model and instance. `generation` is the generation of
    NeuronCores: 2 for trn1 and inf2. `parameters` is in thousands of millions. `prompt` is in tokens.
    """

    generation: int
    parameters: float
    batch: int
    prompt: int
    ttft: float
    tpot: float
    throughput: float

    def is_near(self, parameters: float, batch: int, prompt: int) -> bool:
        """Return whether this run's sizes are each within a factor of `MOST_RATIO` of the arguments.

        Args:
            parameters: parameters of a model, in thousands of millions.
            batch: sequences decoded together.
            prompt: tokens of each prompt.
        """
        pairs = ((self.parameters, parameters), (self.batch, batch), (self.prompt, prompt))
        return all(max(size, other) <= MOST_RATIO * min(size, other) for size, other in pairs)


METRICS = ("ttft", "tpot", "throughput")
"""The metrics of a published run: time to first token, time per output token, output tokens per second."""


@dataclass(frozen=True)
class Stack:
    """Record of a serving stack.

    `decode_scale`, `prompt_scale` and `attention_scale` divide the stack's device time by that of this project's
    kernels: in a decode step, in the kernels of prompts other than attention, and in attention of prompts.
    `prompt_share` is the share of the peaks that the stack's prompts reach at most. `step_engine` and `prompt_engine`
    are the host's times of a decode step and of a pass of prompts. `runs` are the published runs that the record was
    fitted to; the ranges that reports print come from them.
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
        """Return the length to which the stack pads a prompt; `tokens` itself if the padding is `Padding.pages`.

        Args:
            tokens: tokens of the prompt.
            sequence_length: longest sequence that the server takes; a longer prompt is not cut.
        """
        return _pad(self.prompt_padding, tokens, sequence_length)

    def pad_cache(self, tokens: int, sequence_length: int) -> int:
        """Return the number of cache positions that a decode step reads for a sequence of `tokens` tokens.

        Args:
            tokens: tokens of the sequence; returned as they are if the padding is `Padding.pages`.
            sequence_length: longest sequence that the server takes.
        """
        return _pad(self.cache_padding, tokens, sequence_length)

    def serve_step(self, time: Time, slots: int) -> Served:
        """Return what a user waits for in a decode step of `slots` sequences.

        Args:
            time: time of the step in this project's kernels.
            slots: sequences of the step.
        """
        return Served(time * (self.decode_scale.value or 1.0), self.step_engine.compute_ns(slots))

    def serve_prompts(self, predicted: PassTime, prompts: int) -> Served:
        """Return what a user waits for in a pass of `prompts` prompts.

        Args:
            predicted: time of the pass in this project's kernels.
            prompts: prompts in the pass.
        """
        attention = predicted.attention
        other = (predicted.time - attention) * (self.prompt_scale.value or 1.0)
        device = other + attention * (self.attention_scale.value or 1.0)
        return self._serve_prompts(device, predicted.floor_ns, prompts)

    def serve_roofline(self, roofline: Time, prompts: int) -> Served:
        """Return what a user waits for in a pass of `prompts` prompts of which only the roofline is known."""
        device = roofline * (self.prompt_scale.value or 1.0)
        return self._serve_prompts(device, roofline.dataflow_ns, prompts)

    def _serve_prompts(self, device: Time, floor_ns: float, prompts: int) -> Served:
        if self.prompt_share.value is not None:
            device = device.at_least(Time.exact(floor_ns / self.prompt_share.value))
        return Served(device, self.prompt_engine.compute_ns(prompts))

    def find_ratios(
        self, metric: str, target: str, parameters: float, batch: int, prompt: int
    ) -> Ratios | None:
        """Return the range of published over predicted values; None if no run used the chip's generation of cores.

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
        """Yield (field name, term) for each numeric or textual term of the record, in the order of the fields."""
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
