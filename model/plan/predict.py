"""Predicted times of a model's passes: dry runs of its launch list at few sizes, added up.

Equal blocks are launched once and multiplied by their number. Decode attention and `lm_head` take up to 128 sequences
at a time. If a kernel refuses a launch that fuses others, these others are timed instead. If a kernel refuses any other
launch, or no kernel computes it, the launch takes at least its roofline, and usually longer, at the share of the peaks
that kernels reach (`roofline.USUAL`); the reason is kept.

No launch is taken as shorter than its work on the core's peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.device import chip, find_sorted_expert_width, schedule_stages
from model.errors import ModelError
from model.execution.launch_list import copies_of, copy_sizes, launches_of
from model.execution.stages import SEND, divide_stages, find_sent_values, launch_send
from model.families import compose
from model.layers.experts import RoutedExperts
from model.layers.launch import Growth, Launch, Phase, StepShape, WeightDtypes
from model.layers.paged import STATES, CacheGroup
from model.layers.sample import DRAWS
from model.mesh import Mesh
from model.network import Section
from model.plan.dry import DryTimes, Time, extrapolate
from model.plan.experts import time_few_rows, time_sorted_rows
from model.plan.roofline import compute_core_peaks
from model.runners.bucket_length import bucket_length

BUBBLE = "bubble"
"""In a pass of a pipeline, the time in which a stage waits."""

MAX_MICRO_BATCHES = 16

SHORT_PROMPT = 16
"""Tokens of the prompt beside which sequences that decode are timed: the smallest size of an engine's buckets."""

PROMPTS_PERIOD = 2
"""Prompts after which their attention repeats itself: the most cores of a rank, which divide prompts."""

SEQUENCES_PERIOD = 16
"""Sequences after which attention of decoding sequences repeats itself."""

_ENCODER = "encoder: "
"""Beginning of the names of an encoder's kernels."""

_DRAWS = DRAWS[1]
"""The draw of an engine's step: enough candidates for usual requests."""

CountedSections = Sequence[tuple[Section, int]]
"""Sections of a network, equal ones once with their number."""


@dataclass(frozen=True)
class LaunchTime:
    """One kernel of a pass: how often it is launched, and the time of all launches, on one rank.

    `floor_ns` is the time of their work on the core's peaks. `refusal` is empty for dry runs; else it is the reason why
    `time` is an estimate, at least the floor. `cores` are the physical cores of a rank that work.
    """

    name: str
    launches: int
    time: Time
    floor_ns: float
    refusal: str = ""
    cores: int = 1

    @property
    def is_encoder(self) -> bool:
        """Whether an encoder launches the kernel, not the decoder."""
        return self.name.startswith(_ENCODER)

    def __add__(self, other: LaunchTime) -> LaunchTime:
        launches, time = self.launches + other.launches, self.time + other.time
        floor_ns, cores = self.floor_ns + other.floor_ns, min(self.cores, other.cores)
        return replace(self, launches=launches, time=time, floor_ns=floor_ns, cores=cores)


@dataclass(frozen=True)
class PassTime:
    """A pass of the model over all ranks: starting and ending a kernel once, and the kernels."""

    overhead: Time
    kernels: tuple[LaunchTime, ...]

    @property
    def time(self) -> Time:
        """Time of the pass."""
        return sum((kernel.time for kernel in self.kernels), self.overhead)

    @property
    def attention(self) -> Time:
        """Time of the kernels of attention."""
        return sum((kernel.time for kernel in self.kernels if "attention" in kernel.name), Time())

    @property
    def floor_ns(self) -> float:
        """Time of the work of all kernels on the core's peaks."""
        return sum(kernel.floor_ns for kernel in self.kernels)

    @property
    def times_by_kernel(self) -> dict[str, float]:
        """Time in ns of each kernel by its name; the name of a kernel that takes its roofline says so."""
        times: dict[str, float] = {}
        for kernel in self.kernels:
            if kernel.name != BUBBLE:
                name = f"{kernel.name} (roofline)" if kernel.refusal else kernel.name
                times[name] = times.get(name, 0.0) + kernel.time.program_ns
        return times

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which kernels take their rooflines."""
        return tuple(dict.fromkeys(kernel.refusal for kernel in self.kernels if kernel.refusal))


class Predictor:
    """Times of a model over `ranks` ranks of one chip, for sequences that end at `context` tokens.

    A rank has `lnc` physical cores. Kernels whose work they do not divide are launched on one of them.

    Activations, weights and cache share one dtype. float16, which the kernels do not take, is planned as bfloat16.

    With `cuts_sequence` the ranks cut the rows of prompts among them. A `pipeline` has so many stages of `ranks` cores;
    its passes are in the number of micro-batches that is fastest. With `expert` parallelism so many groups of `ranks`
    divide the routed experts, and each group computes its share of a batch. The parts of an engine's steps are those
    of one group.
    """

    def __init__(
        self,
        config: ModelConfig,
        target: str,
        ranks: int,
        dtype: str,
        context: int,
        cuts_sequence: bool = False,
        pipeline: int = 1,
        expert: int = 1,
        lnc: int = 1,
    ) -> None:
        self.lnc = lnc
        self._mesh = Mesh(ranks, expert, cuts_sequence, expert=expert)
        self._config, self._network, self._pipeline = config, compose(config), pipeline
        self._pairs = DryTimes(target, Mesh(2), lnc) if pipeline > 1 else None
        self._sections = self._count_sections(0, len(self._network.sections))
        self._core = compute_core_peaks(chip(target).working(self._mesh.ranks * lnc), dtype, lnc)
        self._dry = DryTimes(target, self._mesh, lnc)
        planned_dtype = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        length = bucket_length(context, context, self._mesh.row_multiple)
        self._step = StepShape(
            *(Phase.decode, 1, 1, length, context, ranks, planned_dtype, WeightDtypes(planned_dtype)),
            cuts_sequence=cuts_sequence,
            expert_ranks=expert,
            lnc=lnc,
            sorted_expert_width=find_sorted_expert_width(target),
        )

    def predict_prompts(self, tokens: int, batch: int = 1) -> PassTime:
        """Predict the pass of `batch` prompts of `tokens` tokens each, packed into the same launches.

        The pass includes the head for the last token of each prompt.
        """
        batch = self._mesh.sequences_of_group(batch)
        rows = batch * self._mesh.padded_length(tokens, batch)
        prompts = replace(self._step, phase=Phase.prefill, tokens=rows, sequences=batch)
        # Several prompts have their last rows gathered, as prompts of different lengths do.
        return self._predict_fastest(replace(prompts, padded=batch > 1))

    def predict_step(self, batch: int) -> PassTime:
        """Predict a decode step: one token for each of `batch` sequences."""
        return self._predict_fastest(self._step.resized(self._mesh.sequences_of_group(batch)))

    def paged(self, step: StepShape) -> PassTime:
        """Predict a step of an engine, of `on_pages` and its sizes; each sequence draws a token."""
        return self._predict_pass(replace(step, draws=_DRAWS), self._sections)

    def time_copies(self, count: int, group: CacheGroup, step: StepShape) -> Time:
        """Return the time to copy pages or slots in every layer of a cache group, without starting a kernel.

        Args:
            count: how many pages or slots are copied.
            group: the cache group of the pages or slots.
            step: the step of `on_pages`.
        """
        times = (
            self._dry.time_launch(launch) * number
            for size in copy_sizes(count)
            for section, number in self._sections
            for launch in copies_of(section, step, size, group)
        )
        return sum(times, Time())

    def on_pages(self, pages: Mapping[CacheGroup, int], block_size: int) -> StepShape:
        """Return the step that decides the sizes of states in an engine with so many pages or slots of each group."""
        return replace(
            self._step,
            pages=pages.get(None, 0),
            window_pages=tuple((group, count) for group, count in pages.items() if isinstance(group, int)),
            slots=pages.get(STATES, 0),
            padded=True,
            block_size=block_size,
        )

    def _predict_fastest(self, step: StepShape) -> PassTime:
        """Predict a pass in the number of micro-batches, a power of two, that is fastest."""
        if self._pipeline == 1:
            return self._predict_pass(step, self._sections)
        exponents = range(min(step.sequences, MAX_MICRO_BATCHES).bit_length())
        passes = (self._predict_pipeline(step, 2**exponent) for exponent in exponents)
        return min(passes, key=lambda pass_time: pass_time.time.program_ns)

    def _predict_pipeline(self, step: StepShape, micro_batches: int) -> PassTime:
        """Predict a pass through all stages; kernels, sends and bubble are averages over the stages."""
        assert self._pairs is not None, "one stage sends nothing"
        sequences = -(-step.sequences // micro_batches)
        step = replace(step, tokens=sequences * step.new_tokens, sequences=sequences)
        ends, count = self._stage_ends, len(self._network.sections)
        stages = [
            self._predict_pass(step, self._count_sections(start, end)) for start, end in zip([0, *ends], ends)
        ]
        sends = []
        for end in ends[:-1]:
            before, after = (
                [section for section, _ in self._count_sections(*bounds)]
                for bounds in ((0, end), (end, count))
            )
            values = find_sent_values(before, after, step)
            sends.append(sum((self._pairs.time_launch(launch_send(value)) for value in values), Time()))
        pass_time = Time.from_readings(
            lambda read_ns: (
                schedule_stages(
                    [[read_ns(stage.time) for stage in stages]] * micro_batches,
                    [[read_ns(time) for time in sends]] * micro_batches,
                ).length_ns
            )
        )
        return _average_stages(stages, sends, micro_batches, pass_time)

    @cached_property
    def _stage_ends(self) -> list[int]:
        """The numbers of sections up to the end of each stage; of a step, they depend on its ranks alone."""
        stages = divide_stages(self._network, self._pipeline, self._step)
        return list(accumulate(len(stage) for stage in stages))

    def _count_sections(self, start: int, end: int) -> CountedSections:
        """Return the sections from `start` up to `end`; decoder layers with equal blocks are counted as one section."""
        blocks = [None, *self._config.blocks, None]
        counted: dict[object, tuple[Section, int]] = {}
        for index in range(start, end):
            section, count = counted.get(blocks[index] or index, (self._network.sections[index], 0))
            counted[blocks[index] or index] = section, count + 1
        return list(counted.values())

    def _predict_pass(self, step: StepShape, sections: CountedSections) -> PassTime:
        """Predict a pass through sections."""
        times = [*self._predict_encoder(step)]
        for section, count in sections:
            for launch in launches_of(section, step):
                times += self._time_with_fallback(section, launch, step, count)
        return PassTime(Time.exact(self._dry.overhead_ns), tuple(times))

    def _predict_encoder(self, step: StepShape) -> Sequence[LaunchTime]:
        """Predict the encoder of a model that has one: a window for each prompt, one after another.

        The blocks of an encoder are equal, so the first one stands for all.
        """
        encoder = self._network.before.get("encoder")
        if encoder is None or step.phase is not Phase.prefill:
            return ()
        window = encoder.step(replace(step, sequences=1))
        first, *blocks, last = encoder.sections
        sections = [(first, 1), *((block, len(blocks)) for block in blocks[:1]), (last, 1)]
        times = (
            self._time(launch, count * step.sequences, self._dry.time_launch)
            for section, count in sections
            for launch in launches_of(section, window)
        )
        return _sum_by_name(replace(time, name=f"{_ENCODER}{time.name}") for time in times)

    def _time_with_fallback(
        self, section: Section, launch: Launch, step: StepShape, count: int
    ) -> Sequence[LaunchTime]:
        """Return the time of a launch of `count` equal sections, or of the launches that it fuses if it is refused."""

        def measure(launch: Launch) -> Time:
            return self._time_slowest_rank(section, launch, step)

        time = self._time(launch, count, measure)
        if not time.refusal or not launch.fused:
            return [time]
        return [
            fused_time
            for fused in launch.fused
            for fused_time in self._time_with_fallback(section, fused, step, count)
        ]

    def _time(self, launch: Launch, count: int, measure: Callable[[Launch], Time]) -> LaunchTime:
        """Return the measured time of a launch of `count` equal sections, or at least its roofline if it is refused."""
        time = self._core.estimate(launch.work.operations, launch.work.bytes)
        floor_ns, launches, refusal, cores = time.dataflow_ns, count * launch.repeat, "", self.lnc
        try:
            time = measure(launch).at_least(Time.exact(floor_ns))
            cores = self._dry.busy_cores
        except ModelError as error:
            refusal = str(error).removeprefix(f"{launch.kernel}: ")
        return LaunchTime(launch.title, launches, time * launches, floor_ns * launches, refusal, cores)

    def _time_slowest_rank(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the time of the slowest rank in each reading.

        The last rank may have fewer columns of the vocabulary, which some searches divide less evenly.
        """
        last_step = replace(step, rank=step.ranks - 1)
        last_launch = _find_launch(section, last_step, launch.title)
        first_time = self._time_rank(section, launch, step)
        if last_launch == launch:
            return first_time
        return first_time.at_least(self._time_rank(section, last_launch, last_step))

    def _time_rank(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the time of a launch on the rank of a step, from few launches at other sizes."""
        verifies_drafts = step.phase is Phase.decode and step.new_tokens > 1  # at most 128 rows
        if launch.growth is Growth.experts:
            return self._time_experts(section, launch, step)
        if launch.growth is Growth.full_step or verifies_drafts:
            return self._dry.time_launch(launch)
        if launch.growth is Growth.square:
            return self._time_prompts(section, launch, step)

        def resize(tokens: int, sequences: int) -> Launch:
            """Build the launch for a step of other sizes, without sequences that decode beside prompts."""
            resized = replace(step, tokens=tokens, sequences=sequences, decoding=None)
            return _find_launch(section, resized, launch.title)

        def resize_rows(rows: int) -> Launch:
            """Build the launch for rows of one prompt, or of as many sequences that decode."""
            return resize(rows, rows if step.tokens == step.sequences else 1)

        if launch.growth is Growth.sequences:
            return self._dry.time_rows(lambda count: resize(step.new_tokens * count, count), launch.rows)
        if launch.rows == step.local_rows:
            return self._dry.time_rows(lambda rows: resize_rows(rows * step.sequence_ranks), launch.rows)
        return self._dry.time_rows(resize_rows, launch.rows, step.sequence_ranks)

    def _time_prompts(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the time of attention of prompts, and of the sequences that decode beside them.

        Raises:
            ModelError: the kernel refuses the launch, even where it takes the smaller ones that are timed.
        """
        if launch.refusal is not None:
            raise ModelError(launch.refusal)
        if step.decoding is not None:
            return self._time_mixed(section, launch, step, step.decoding)

        def measure(count: int) -> Time:
            """Time the launch of so many prompts."""

            def resize(tokens: int) -> Launch:
                """Build the launch for a length of the prompts."""
                return _find_launch(
                    section, replace(step, tokens=count * tokens, sequences=count), launch.title
                )

            return self._dry.time_prompt(resize, step.new_tokens, launch.window)

        return extrapolate(measure, step.sequences, PROMPTS_PERIOD)

    def _time_mixed(self, section: Section, launch: Launch, step: StepShape, decoding: StepShape) -> Time:
        """Return the time of attention of prompts and of the sequences that decode beside them.

        The kernel takes one sequence after another. So sequences that decode add to any prompts what they add to a
        short one.
        """
        short = replace(step.prompts, tokens=SHORT_PROMPT, sequences=1, prefix=0)

        def measure(sequences: int) -> Time:
            """Time the launch of a short prompt beside so many sequences that decode."""
            decoding_step = replace(decoding, tokens=sequences * decoding.new_tokens, sequences=sequences)
            mixed_step = replace(short, tokens=SHORT_PROMPT + decoding_step.tokens, decoding=decoding_step)
            return self._dry.time_launch(_find_launch(section, mixed_step, launch.title))

        mixed = extrapolate(measure, decoding.sequences, SEQUENCES_PERIOD)
        prompts, alone = (
            self._time_prompts(section, _find_square(section, step), step) for step in (step.prompts, short)
        )
        return prompts + (mixed - alone)

    def _time_experts(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the time of routed experts on a rank."""
        layer = next(layer for layer in section if isinstance(layer, RoutedExperts))
        groups = step.expert_ranks

        def measure(rows: int, count: int, per_token: int, width: int) -> Time:
            """Time a launch of so many rows and local experts."""
            resized = layer.resized(count * groups, per_token, width)
            return self._dry.time_launch(resized.experts_launch(step, rows, launch.kernel))

        routing = replace(layer.routing, count=layer.routing.count // groups)
        time = time_sorted_rows if launch.kernel == "experts_prefill" else time_few_rows
        return time(measure, launch.rows, routing, step.ranks)


def _sum_by_name(times: Iterable[LaunchTime]) -> tuple[LaunchTime, ...]:
    """Return the sums of times with equal names and refusals, in the order of the first of each."""
    sums: dict[tuple[str, str], LaunchTime] = {}
    for time in times:
        key = time.name, time.refusal
        sums[key] = sums[key] + time if key in sums else time
    return tuple(sums.values())


def _average_stages(
    stages: Sequence[PassTime], sends: Sequence[Time], micro_batches: int, pass_time: Time
) -> PassTime:
    """Return the average over stages of a pass of so many micro-batches.

    Args:
        stages: the pass of one micro-batch through each stage.
        sends: the sends of one micro-batch from each stage to the next.
        micro_batches: number of micro-batches.
        pass_time: time of the pass; the bubble is its remainder.
    """
    share = micro_batches / len(stages)
    kernels = _sum_by_name(
        replace(
            kernel,
            launches=kernel.launches * micro_batches,
            time=kernel.time * share,
            floor_ns=kernel.floor_ns * share,
        )
        for stage in stages
        for kernel in stage.kernels
    )
    sending = LaunchTime(SEND, len(sends) * micro_batches, sum(sends, Time()) * (2 * share), 0.0)
    overhead = stages[0].overhead * micro_batches
    busy = sum((kernel.time for kernel in kernels), overhead + sending.time)
    return PassTime(overhead, (*kernels, sending, LaunchTime(BUBBLE, 0, pass_time - busy, 0.0)))


def _find_launch(section: Section, step: StepShape, title: str) -> Launch:
    """Return the launch of a title in a step, which another launch may have fused."""
    return next(launch for launch in _with_fused(launches_of(section, step)) if launch.title == title)


def _find_square(section: Section, step: StepShape) -> Launch:
    """Return the launch of a step whose work grows with the square of its prompts."""
    return next(launch for launch in launches_of(section, step) if launch.growth is Growth.square)


def _with_fused(launches: Iterable[Launch]) -> Iterator[Launch]:
    """Yield launches, each with the launches that it fuses after it."""
    for launch in launches:
        yield launch
        yield from _with_fused(launch.fused)
