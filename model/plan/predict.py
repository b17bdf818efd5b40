"""Predicted times of a model's passes: dry runs of its kernel launches at few sizes, added up.

A pass computes prompts, a decode step, or both together in a step of an engine. Plans, recommendations and simulated
traffic create a `Predictor`.

Equal layers are run once and multiplied by their number. Decode attention and `lm_head` take up to 128 sequences at a
time. If a kernel refuses a launch that fuses other launches, these are timed instead. If a kernel refuses any other
launch, or no kernel computes it, the launch takes at least its roofline, and usually longer, at the share of the peaks
that kernels reach (`roofline.USUAL`). The reason for the refusal is kept.

No launch is predicted to take less time than its roofline on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.config.quantization import adapt_to_chip
from model.device import chip, find_sorted_expert_width, schedule_stages
from model.errors import ModelError
from model.execution.launch_list import list_copies, list_copy_sizes, list_launches, list_packs
from model.execution.stages import SEND, divide_stages, find_sent_values, launch_send
from model.families import compose
from model.layers.cache_formats import AUTO, CACHE_FORMATS
from model.layers.experts import RoutedExperts
from model.layers.launch import Growth, Launch, Phase, StepShape, Value, compute_table_length
from model.layers.paged import NEWEST, STATES, CacheGroup
from model.layers.sample import DRAWS
from model.loading.weights import plan_weight_dtypes
from model.mesh import Mesh
from model.network import Section
from model.plan.dry import DryTimes, Time, extrapolate
from model.plan.experts import time_few_rows, time_sorted_rows
from model.plan.roofline import compute_core_peaks
from model.plan.sizes import PLANNED_BLOCK_SIZE
from model.runners.bucket_length import bucket_length
from model.state import count_window_pages

BUBBLE = "bubble"
"""In a pass of a pipeline, the time in which a stage waits."""

MAX_MICRO_BATCHES = 16

SHORT_PROMPT = 16
"""Tokens of the prompt beside which sequences that decode are timed: the smallest size of an engine's buckets."""

PROMPTS_PERIOD = 2
"""Prompts after which their attention repeats itself: the most cores of a rank, which divide prompts."""

SEQUENCES_PERIOD = 16
"""Sequences after which attention of decoding sequences repeats itself."""

_MX_RATE = 4
"""Products in MX formats for each one in bfloat16: the Tensor engine takes four values of the contraction at once."""

_ENCODER = "encoder: "
"""Beginning of the names of an encoder's kernels."""

_DRAWS = DRAWS[1]
"""The draw of an engine's step: enough candidates for usual requests."""

CountedSections = Sequence[tuple[Section, int]]
"""Sections of a network, equal ones once with their number."""


@dataclass(frozen=True)
class LaunchTime:
    """All launches of one kernel in a pass: their number and their total time, on one rank.

    `floor_ns` is the roofline of these launches. `refusal` is empty for times from dry runs; else it is the reason why
    `time` was derived from the roofline. `cores` is the number of a rank's physical cores that work.
    """

    name: str
    launches: int
    time: Time
    floor_ns: float
    refusal: str = ""
    cores: int = 1

    @property
    def is_encoder(self) -> bool:
        """Whether the kernel is launched by the image or speech encoder, and not by the decoder."""
        return self.name.startswith(_ENCODER)

    def __add__(self, other: LaunchTime) -> LaunchTime:
        launches, time = self.launches + other.launches, self.time + other.time
        floor_ns, cores = self.floor_ns + other.floor_ns, min(self.cores, other.cores)
        return replace(self, launches=launches, time=time, floor_ns=floor_ns, cores=cores)


@dataclass(frozen=True)
class PassTime:
    """Time of one pass: `overhead` of starting and ending kernels, and the times of its kernels in order."""

    overhead: Time
    kernels: tuple[LaunchTime, ...]

    @property
    def time(self) -> Time:
        """Time of the pass, overhead included."""
        return sum((kernel.time for kernel in self.kernels), self.overhead)

    @property
    def attention(self) -> Time:
        """Time of all kernels whose name contains "attention"."""
        return sum((kernel.time for kernel in self.kernels if "attention" in kernel.name), Time())

    @property
    def floor_ns(self) -> float:
        """Sum of the rooflines of all kernels in ns."""
        return sum(kernel.floor_ns for kernel in self.kernels)

    @property
    def times_by_kernel(self) -> dict[str, float]:
        """Predicted time in ns by kernel name, without pipeline bubbles.

        " (roofline)" is appended to the name of a refused kernel.
        """
        times: dict[str, float] = {}
        for kernel in self.kernels:
            if kernel.name != BUBBLE:
                name = f"{kernel.name} (roofline)" if kernel.refusal else kernel.name
                times[name] = times.get(name, 0.0) + kernel.time.program_ns
        return times

    @property
    def refusals(self) -> tuple[str, ...]:
        """Distinct reasons for which kernels have times derived from their rooflines."""
        return tuple(dict.fromkeys(kernel.refusal for kernel in self.kernels if kernel.refusal))


class Predictor:
    """Predictor of a model's passes on one copy of its mesh, for sequences of up to `context` tokens.

    Activations, weights and cache share one dtype, unless the config names a format of weights, or `cache_dtype` one of
    caches. float16, which the kernels do not take, is planned as bfloat16.

    Args:
        config: config of the model.
        target: chip or instance; the links of an instance decide the times of collectives.
        ranks: tensor-parallel ranks of a group.
        dtype: dtype of activations, weights and cache.
        context: positions of a sequence that a decode step attends to.
        cuts_sequence: whether the ranks of a group divide the rows of prompts (sequence parallelism).
        pipeline: pipeline stages. With several, a pass is divided into the fastest number of micro-batches.
        expert: groups of `ranks` ranks that divide the routed experts; each computes its share of a batch.
        cache_dtype: name of the cache format.
        lnc: physical cores of a rank. A kernel whose work they cannot divide is launched on one of them.
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
        cache_dtype: str = AUTO,
    ) -> None:
        self.lnc = lnc
        config = adapt_to_chip(config, target)
        self._mesh = Mesh(ranks, expert, cuts_sequence, expert=expert)
        self._config, self._network, self._pipeline = config, compose(config), pipeline
        self._pairs = DryTimes(target, Mesh(2), lnc) if pipeline > 1 else None
        self._sections = self._count_sections(0, len(self._network.sections))
        self._core = compute_core_peaks(chip(target).working(self._mesh.ranks * lnc), dtype, lnc)
        # The Tensor engine multiplies fp8 rows by fp8 weights at twice the rate where it has the double-row mode.
        self._fp8_rate = 2 if chip(target).matmul_double_row else 1
        self._dry = DryTimes(target, self._mesh, lnc)
        planned_dtype = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        length = bucket_length(context, context, self._mesh.row_multiple)
        self._step = StepShape(
            *(Phase.decode, 1, 1, length, context, ranks, planned_dtype),
            plan_weight_dtypes(self._network.block_weights, config.weight_format, planned_dtype),
            cuts_sequence=cuts_sequence,
            expert_ranks=expert,
            cache_dtype=cache_dtype,
            lnc=lnc,
            sorted_expert_width=find_sorted_expert_width(target),
        )

    def predict_prompts(self, tokens: int, batch: int = 1) -> PassTime:
        """Return the time of the pass that computes `batch` prompts of `tokens` tokens each in the same launches.

        The pass includes the output projection for the last token of each prompt. With expert-parallel groups, each
        group computes its share of the prompts at the same time.
        """
        batch = self._mesh.count_group_sequences(batch)
        rows = batch * self._mesh.pad_length(tokens, batch)
        prompts = replace(self._step, phase=Phase.prefill, tokens=rows, sequences=batch)
        # Several prompts have their last rows gathered, as prompts of different lengths do.
        return self._predict_fastest(replace(prompts, padded=batch > 1))

    def predict_step(self, batch: int) -> PassTime:
        """Return the time of a decode step, which adds one token to each of `batch` sequences over all groups."""
        return self._predict_fastest(self._step.with_rows(self._mesh.count_group_sequences(batch)))

    def predict_paged(self, step: StepShape) -> PassTime:
        """Return the time of an engine's step on one group of ranks, with the sampling of a token for each sequence.

        Args:
            step: a step from `make_paged_step`, resized to the phase, tokens and sequences of the engine's step.
        """
        return self._predict_pass(replace(step, draws=_DRAWS), self._sections)

    def time_copies(self, count: int, group: CacheGroup, step: StepShape) -> Time:
        """Return the time to copy pages or slots in every layer of a cache group, without starting kernels.

        Args:
            count: number of pages or slots that are copied.
            group: cache group of the pages or slots: a window, None for attention to all positions, or `STATES`.
            step: a step from `make_paged_step`.
        """
        times = (
            self._dry.time_launch(launch) * number
            for size in list_copy_sizes(count)
            for section, number in self._sections
            for launch in list_copies(section, step, size, group)
        )
        return sum(times, Time())

    def make_paged_step(self, pages: Mapping[CacheGroup, int], block_size: int) -> StepShape:
        """Return a decode step of one sequence on a paged cache, to be resized for `predict_paged`.

        Args:
            pages: number of pages or slots of each cache group: a window, None for all positions, or `STATES`.
            block_size: positions of a page.
        """
        return replace(
            self._step,
            pages=pages.get(None, 0),
            window_pages=tuple((group, count) for group, count in pages.items() if isinstance(group, int)),
            slots=pages.get(STATES, 0),
            padded=True,
            block_size=block_size,
        )

    def _predict_fastest(self, step: StepShape) -> PassTime:
        """Return the time of a pass with the fastest number of micro-batches, among powers of two.

        Without pipeline stages, the pass is not divided.
        """
        step = self._add_pages(step)
        if self._pipeline == 1:
            return self._predict_pass(step, self._sections)
        exponents = range(min(step.sequences, MAX_MICRO_BATCHES).bit_length())
        passes = (self._predict_pipeline(step, 2**exponent) for exponent in exponents)
        return min(passes, key=lambda pass_time: pass_time.time.program_ns)

    def _add_pages(self, step: StepShape) -> StepShape:
        """Return a step with pages for its sequences if the cache format packs full pages, else the step unchanged."""
        if not CACHE_FORMATS[step.cache_dtype].packs_pages:
            return step
        length = compute_table_length(step.cache_length, PLANNED_BLOCK_SIZE)
        newest = count_window_pages(NEWEST, PLANNED_BLOCK_SIZE, step.sequences, step.tokens)
        return replace(
            step,
            cache_length=length,
            block_size=PLANNED_BLOCK_SIZE,
            pages=step.sequences * length // PLANNED_BLOCK_SIZE,
            window_pages=((NEWEST, newest),),
        )

    def _predict_pipeline(self, step: StepShape, micro_batches: int) -> PassTime:
        """Return the time of a pass of `micro_batches` micro-batches through all pipeline stages.

        The times of kernels, sends between stages and the bubble (waiting) are averages over the stages, so their sum
        is the time of the pass.
        """
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
        """For each pipeline stage, the number of the network's sections up to the end of the stage.

        A section is one decoder layer, or the layers before or after all decoder layers.
        """
        stages = divide_stages(self._network, self._pipeline, self._step)
        return list(accumulate(len(stage) for stage in stages))

    def _count_sections(self, start: int, end: int) -> CountedSections:
        """Return the distinct sections from index `start` up to, but without, `end`, each with its number.

        Decoder layers with equal configs are equal sections.
        """
        blocks = [None, *self._config.blocks, None]
        counted: dict[object, tuple[Section, int]] = {}
        for index in range(start, end):
            section, count = counted.get(blocks[index] or index, (self._network.sections[index], 0))
            counted[blocks[index] or index] = section, count + 1
        return list(counted.values())

    def _predict_pass(self, step: StepShape, sections: CountedSections) -> PassTime:
        """Return the time of a pass through sections on one rank; prompts also pass the image or speech encoder."""
        times = [*self._predict_encoder(step)]
        for section, count in sections:
            for launch in list_launches(section, step):
                times += self._time_with_fallback(section, launch, step, count)
            times += self._time_packs(section, step, count)
        return PassTime(Time.exact(self._dry.overhead_ns), tuple(times))

    def _time_packs(self, section: Section, step: StepShape, count: int) -> Iterable[LaunchTime]:
        """Yield the mean time of packing the full pages that a step fills, in `count` equal sections.

        Tokens of a decode step fill a page in one of as many steps as a page has positions.
        """
        if not CACHE_FORMATS[step.cache_dtype].packs_pages:
            return
        pages = step.tokens / step.block_size
        for size in list_copy_sizes(max(1, ceil(pages))):
            for launch in list_packs(section, step, size):
                time = self._time(launch, count, self._dry.time_launch)
                yield replace(
                    time, time=time.time * min(1.0, pages), floor_ns=time.floor_ns * min(1.0, pages)
                )

    def _predict_encoder(self, step: StepShape) -> Sequence[LaunchTime]:
        """Return the times of the encoder's kernels for one window of each prompt.

        Returns an empty sequence for a decode step or a model without such an encoder. Blocks of an encoder are equal,
        so the first one is timed for all.
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
            for launch in list_launches(section, window)
        )
        return _sum_by_name(replace(time, name=f"{_ENCODER}{time.name}") for time in times)

    def _time_with_fallback(
        self, section: Section, launch: Launch, step: StepShape, count: int
    ) -> Sequence[LaunchTime]:
        """Return the time of a launch in `count` equal sections.

        If the kernel refuses a launch that fuses others, returns the times of these other launches instead.
        """

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
        """Return the time of a launch in `count` equal sections, measured, but no shorter than the launch's roofline.

        If `measure` raises ModelError, returns the time estimated from the roofline, with the error as `refusal`.
        """
        operations = launch.work.operations
        if _has_fp8_rows(launch):
            operations /= self._fp8_rate
        elif _has_mx_rows(launch):
            operations /= _MX_RATE
        time = self._core.estimate(operations, launch.work.bytes)
        floor_ns, launches, refusal, cores = time.dataflow_ns, count * launch.repeat, "", self.lnc
        try:
            time = measure(launch).at_least(Time.exact(floor_ns))
            cores = self._dry.busy_cores
        except ModelError as error:
            refusal = str(error).removeprefix(f"{launch.kernel}: ")
        return LaunchTime(launch.title, launches, time * launches, floor_ns * launches, refusal, cores)

    def _time_slowest_rank(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the longer of the times on the first and the last rank, in each reading.

        The last rank may have fewer columns of the vocabulary, which some searches divide less evenly.
        """
        last_step = replace(step, rank=step.ranks - 1)
        last_launch = _find_launch(section, last_step, launch.title)
        first_time = self._time_rank(section, launch, step)
        if last_launch == launch:
            return first_time
        return first_time.at_least(self._time_rank(section, last_launch, last_step))

    def _time_rank(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the time of a launch on the rank of `step`, mostly from dry runs at a few other sizes.

        How sizes are extrapolated depends on `launch.growth`.

        Raises:
            ModelError: the kernel refuses the launch.
        """
        verifies_drafts = step.phase is Phase.decode and step.new_tokens > 1  # at most 128 rows
        if launch.growth is Growth.experts:
            return self._time_experts(section, launch, step)
        if launch.growth is Growth.full_step or verifies_drafts:
            return self._dry.time_launch(launch)
        if launch.growth is Growth.square:
            return self._time_prompts(section, launch, step)

        def resize(tokens: int, sequences: int) -> Launch:
            """Return the launch for a step with other tokens and sequences, without decoding sequences in it."""
            resized = replace(step, tokens=tokens, sequences=sequences, decoding=None)
            return _find_launch(section, resized, launch.title)

        def resize_rows(rows: int) -> Launch:
            """Return the launch for `rows` rows: of that many sequences in a decode step, else of one prompt."""
            return resize(rows, rows if step.tokens == step.sequences else 1)

        if launch.growth is Growth.sequences:
            return self._dry.time_rows(lambda count: resize(step.new_tokens * count, count), launch.rows)
        if launch.rows == step.local_rows:
            return self._dry.time_rows(lambda rows: resize_rows(rows * step.sequence_ranks), launch.rows)
        return self._dry.time_rows(resize_rows, launch.rows, step.sequence_ranks)

    def _time_prompts(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the time of prompts' attention, with that of the sequences that decode in the same launch.

        Raises:
            ModelError: the kernel refuses the launch, even where it takes the smaller ones that are timed.
        """
        if launch.refusal is not None:
            raise ModelError(launch.refusal)
        if step.decoding is not None:
            return self._time_mixed(section, launch, step, step.decoding)

        def measure(count: int) -> Time:
            """Return the time of attention for `count` prompts of the step's length."""

            def resize(tokens: int) -> Launch:
                """Return the launch for `count` prompts of `tokens` tokens each."""
                return _find_launch(
                    section, replace(step, tokens=count * tokens, sequences=count), launch.title
                )

            return self._dry.time_prompt(resize, step.new_tokens, launch.window)

        return extrapolate(measure, step.sequences, PROMPTS_PERIOD)

    def _time_mixed(self, section: Section, launch: Launch, step: StepShape, decoding: StepShape) -> Time:
        """Return the time of one attention launch for prompts and for sequences that decode in the same step.

        The kernel takes one sequence after another. So decoding sequences add the same time to any prompts as to a
        short one, and only that sum is run dry.
        """
        short = replace(step.prompts, tokens=SHORT_PROMPT, sequences=1, prefix=0)

        def measure(sequences: int) -> Time:
            """Return the time of attention for a prompt of `SHORT_PROMPT` tokens and `sequences` decoding sequences."""
            decoding_step = replace(decoding, tokens=sequences * decoding.new_tokens, sequences=sequences)
            mixed_step = replace(short, tokens=SHORT_PROMPT + decoding_step.tokens, decoding=decoding_step)
            return self._dry.time_launch(_find_launch(section, mixed_step, launch.title))

        mixed = extrapolate(measure, decoding.sequences, SEQUENCES_PERIOD)
        prompts, alone = (
            self._time_prompts(section, _find_square(section, step), step) for step in (step.prompts, short)
        )
        return prompts + (mixed - alone)

    def _time_experts(self, section: Section, launch: Launch, step: StepShape) -> Time:
        """Return the time of a launch of routed experts on a rank, from dry runs of fewer experts or rows."""
        layer = next(layer for layer in section if isinstance(layer, RoutedExperts))
        groups = step.expert_ranks

        def measure(rows: int, count: int, per_token: int, width: int) -> Time:
            """Return the time of a launch for `rows` rows and `count` experts of a group."""
            resized = layer.resized(count * groups, per_token, width)
            return self._dry.time_launch(resized.create_experts_launch(step, rows, launch.kernel))

        routing = replace(layer.routing, count=layer.routing.count // groups)
        time = time_sorted_rows if launch.kernel == "experts_prefill" else time_few_rows
        return time(measure, launch.rows, routing, step.ranks)


def _sum_by_name(times: Iterable[LaunchTime]) -> tuple[LaunchTime, ...]:
    """Return one entry per (name, refusal), in order of first occurrence; launches, times and rooflines are summed.

    `cores` of the sum is the smallest of its entries.
    """
    sums: dict[tuple[str, str], LaunchTime] = {}
    for time in times:
        key = time.name, time.refusal
        sums[key] = sums[key] + time if key in sums else time
    return tuple(sums.values())


def _average_stages(
    stages: Sequence[PassTime], sends: Sequence[Time], micro_batches: int, pass_time: Time
) -> PassTime:
    """Return the time of a whole pass of a pipeline, with the times of its kernels averaged over the stages.

    Appends an entry for the sends between stages and one for the bubble: `pass_time` minus all other times.

    Args:
        stages: time of one micro-batch in each stage.
        sends: times of the sends of one micro-batch from each stage to the next.
        micro_batches: number of micro-batches of the pass.
        pass_time: time of the whole pass.
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


def _has_mx_rows(launch: Launch) -> bool:
    """Return whether `mlp` rounds rows to MXFP8, beside weights in an MX format, four in an integer."""
    w_up = launch.arguments.get("w_up")
    return isinstance(w_up, Value) and w_up.dtype.name in ("uint16", "uint32")


def _has_fp8_rows(launch: Launch) -> bool:
    """Return whether a kernel rounds rows to fp8, as its weights; rows beside int8 weights are integers in bfloat16."""
    arrays = [argument for argument in launch.arguments.values() if isinstance(argument, Value)]
    is_fp8 = any(array.dtype in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn) for array in arrays)
    return is_fp8 and bool(launch.arguments.get("quantises_rows"))


def _find_launch(section: Section, step: StepShape, title: str) -> Launch:
    """Return the launch with a title in a section's launches, among those that others fuse too.

    Raises StopIteration if there is none.
    """
    return next(
        launch for launch in _iterate_with_fused(list_launches(section, step)) if launch.title == title
    )


def _find_square(section: Section, step: StepShape) -> Launch:
    """Return the launch of prompts' attention, whose work grows with the square of their length."""
    return next(launch for launch in list_launches(section, step) if launch.growth is Growth.square)


def _iterate_with_fused(launches: Iterable[Launch]) -> Iterator[Launch]:
    """Yield every launch, followed by the launches that it fuses, recursively."""
    for launch in launches:
        yield launch
        yield from _iterate_with_fused(launch.fused)
