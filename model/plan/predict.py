"""Predicted times of a model's passes: dry runs of its launch list at few sizes, added up.

Equal blocks are launched once and counted as often as they are there. Decode attention and `lm_head` take up to 128
sequences at a time. A launch that its kernel refuses is replaced by the launches that do the same one after another, if
there are such. Else it is replaced by its roofline, like one that no kernel computes, and the reason is kept.

No launch is taken as shorter than its work on the core's peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.device import chip, schedule_stages
from model.errors import ModelError
from model.execution.launch_list import copies_of, copy_sizes, launches_of
from model.execution.stages import send, sent, stages_of
from model.families import compose
from model.layers.experts import RoutedExperts
from model.layers.launch import Growth, Launch, Phase, StepShape, WeightDtypes
from model.layers.paged import STATES, CacheGroup
from model.layers.sample import DRAWS
from model.mesh import Mesh
from model.network import Network, Section
from model.plan.dry import DryTimes, Sized, Time
from model.plan.experts import by_experts
from model.plan.roofline import core
from model.plan.sizes import equal_blocks
from model.runners.bucket_length import bucket_length

BUBBLE = "bubble"
"""In a pass of a pipeline, the time in which a stage waits."""

MOST_MICRO_BATCHES = 16

_ENCODER = "encoder: "
"""Before the names of kernels of an encoder."""

_DRAWS = DRAWS[1]
"""What an engine's step draws from: enough candidates for usual requests."""


@dataclass(frozen=True)
class LaunchTime:
    """One kernel of a pass: how often it is launched, and the time of all launches, on one rank.

    `floor_ns` is their work on the core's peaks. `refusal` is empty for dry runs; else it is why `time` is the floor.
    """

    name: str
    launches: int
    time: Time
    floor_ns: float
    refusal: str = ""

    @property
    def of_encoder(self) -> bool:
        """Whether an encoder launches it, not the decoder."""
        return self.name.startswith(_ENCODER)

    def and_more(self, other: LaunchTime | None) -> LaunchTime:
        """These launches and others of the kernel."""
        if other is None:
            return self
        launches, time = self.launches + other.launches, self.time + other.time
        return replace(self, launches=launches, time=time, floor_ns=self.floor_ns + other.floor_ns)


@dataclass(frozen=True)
class PassTime:
    """A pass of the model over all ranks: its kernels, and starting and ending a kernel once."""

    overhead: Time
    parts: tuple[LaunchTime, ...]

    @property
    def time(self) -> Time:
        """The whole pass."""
        return sum((part.time for part in self.parts), self.overhead)

    @property
    def floor_ns(self) -> float:
        """The work of all kernels on the core's peaks."""
        return sum(part.floor_ns for part in self.parts)

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which parts are rooflines."""
        return tuple(dict.fromkeys(part.refusal for part in self.parts if part.refusal))


class Predictor:
    """Times of a model over `ranks` cores of one chip, for sequences that end at `context` tokens.

    Activations, weights and cache share one dtype; float16, which the kernels do not take, is planned as bfloat16, of
    the same width. With `cuts_sequence` the ranks cut the rows of prompts among them. A `pipeline` has so many stages
    of as many cores; its passes are in the number of micro-batches that takes least. With `expert` parallelism so many
    groups of `ranks` divide the routed experts, and each computes its part of a batch; parts of an engine's steps are
    those of each group.
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
    ) -> None:
        self._mesh = Mesh(ranks, expert, cuts_sequence, expert=expert)
        self._config, self._network, self._pipeline = config, compose(config), pipeline
        self._pairs = DryTimes(target, Mesh(2)) if pipeline > 1 else None
        start, *_, end = self._network.sections
        kinds = [(layers, count) for _, layers, count in equal_blocks(config, self._network)]
        self._parts: list[tuple[Section, int]] = [(start, 1), *kinds, (end, 1)]
        self._encoder = _kinds(self._network.before.get("encoder"))
        self._core = core(chip(target) if self._mesh.ranks > 1 else chip(target).alone(), dtype)
        self._dry = DryTimes(target, self._mesh)
        held = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        length = bucket_length(context, context, self._mesh.row_multiple)
        self._step = StepShape(
            *(Phase.decode, 1, 1, length, context, ranks, held, WeightDtypes(held)),
            cuts_sequence=cuts_sequence,
            expert_ranks=expert,
        )

    def first_token(self, tokens: int) -> PassTime:
        """One prompt, and the head for its last token."""
        return self.first_tokens(tokens, 1)

    def first_tokens(self, tokens: int, batch: int) -> PassTime:
        """`batch` prompts of as many tokens each, packed into the same launches, and the head for their last tokens."""
        batch = self._mesh.sequences_of_group(batch)
        rows = batch * self._mesh.padded_length(tokens, batch)
        prompts = replace(self._step, phase=Phase.prefill, tokens=rows, sequences=batch)
        # Their last rows are gathered, as where they differ.
        return self._least(replace(prompts, padded=batch > 1))

    def step(self, batch: int) -> PassTime:
        """One token for each of `batch` sequences."""
        return self._least(self._step.resized(self._mesh.sequences_of_group(batch)))

    def paged(self, step: StepShape) -> PassTime:
        """Return the time of an engine's step of `on_pages` and its sizes; each sequence draws a token."""
        return self._pass(replace(step, draws=_DRAWS))

    def copies(self, count: int, kind: CacheGroup, step: StepShape) -> Time:
        """Return the time to copy pages or slots in every layer that has them, without starting a kernel."""
        total = Time()
        for size in copy_sizes(count):
            for part, number in self._parts:
                for launch in copies_of(part, step, size, kind):
                    total += self._dry.launch(launch) * number
        return total

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

    def _least(self, step: StepShape) -> PassTime:
        """A pass in the number of micro-batches, a power of two, that takes least."""
        if self._pipeline == 1:
            return self._pass(step)
        most = min(step.sequences, MOST_MICRO_BATCHES).bit_length()
        found = (self._piped(step, 2**exponent) for exponent in range(most))
        return min(found, key=lambda each: each.time.program_ns)

    def _piped(self, step: StepShape, micro_batches: int) -> PassTime:
        """A pass through all stages; kernels, sends and the bubble as a stage has them, on average."""
        assert self._pairs is not None, "one stage sends nothing"
        sequences = -(-step.sequences // micro_batches)
        step = replace(step, tokens=sequences * step.new_tokens, sequences=sequences)
        ends, sections = self._stage_ends, len(self._network.sections)
        passes = [self._pass(step, self._parts_of(start, end)) for start, end in zip([0, *ends], ends)]
        sends = [
            [send(value) for value in sent(self._kinds_of(0, end), self._kinds_of(end, sections), step)]
            for end in ends[:-1]
        ]
        sent_times = [sum(map(self._pairs.launch, own), Time()) for own in sends]
        whole = Time.of(
            lambda reading: (
                schedule_stages(
                    [[reading(each.time) for each in passes]] * micro_batches,
                    [[reading(each) for each in sent_times]] * micro_batches,
                ).length_ns
            )
        )
        return _mean(passes, sends[0][0], sent_times, micro_batches, whole)

    @cached_property
    def _stage_ends(self) -> list[int]:
        """The numbers of sections up to the end of each stage, which the ranks of a step alone decide."""
        stages = stages_of(self._network, self._pipeline, self._step)
        return list(accumulate(len(stage) for stage in stages))

    def _kinds_of(self, start: int, end: int) -> list[Section]:
        """Neighbouring sections, equal ones once."""
        return [part for part, _ in self._parts_of(start, end)]

    def _parts_of(self, start: int, end: int) -> list[tuple[Section, int]]:
        """The parts of the model in neighbouring sections, equal ones once."""
        blocks = self._config.blocks
        kinds = [None, *blocks, None]
        sections = self._network.sections
        found: dict[object, tuple[Section, int]] = {}
        for number in range(start, end):
            kind = kinds[number] or number
            found[kind] = (sections[number], found.get(kind, (sections[number], 0))[1] + 1)
        return list(found.values())

    def _pass(self, step: StepShape, parts: Sequence[tuple[Section, int]] = ()) -> PassTime:
        """A pass through some parts, or all."""
        times = (() if parts else self._encoded(step)) + tuple(
            time
            for part, count in parts or self._parts
            for launch in launches_of(part, step)
            for time in self._times(part, launch, step, count)
        )
        return PassTime(Time.exact(self._dry.overhead_ns), times)

    def _encoded(self, step: StepShape) -> tuple[LaunchTime, ...]:
        """The encoder of a model that has one: a window for each sequence of a prompt, one after another."""
        if self._encoder is None or step.phase is not Phase.prefill:
            return ()
        encoder, kinds = self._encoder
        one = encoder.step(replace(step, sequences=1))
        found: dict[str, LaunchTime] = {}
        for part, count in kinds:
            for launch in launches_of(part, one):
                time = self._launched(launch, count * step.sequences)
                found[time.name] = time.and_more(found.get(time.name))
        return tuple(found.values())

    def _launched(self, launch: Launch, count: int) -> LaunchTime:
        """A launch whose size does not depend on the step."""
        floor_ns = 1e9 * self._core.seconds(launch.work.operations, launch.work.bytes)
        time = self._dry.launch(launch).at_least(Time.exact(floor_ns))
        return LaunchTime(f"{_ENCODER}{launch.title}", count, time * count, floor_ns * count)

    def _times(self, part: Section, launch: Launch, step: StepShape, count: int) -> tuple[LaunchTime, ...]:
        time = self._part(part, launch, step, count)
        if not time.refusal or not launch.fused:
            return (time,)
        return tuple(self._part(part, each, step, count) for each in launch.fused)

    def _part(self, part: Section, launch: Launch, step: StepShape, count: int) -> LaunchTime:
        floor_ns = 1e9 * self._core.seconds(launch.work.operations, launch.work.bytes)
        launches, time, refusal = count * launch.repeat, Time.exact(floor_ns), ""
        try:
            time = self._measured(part, launch, step).at_least(Time.exact(floor_ns))
        except ModelError as error:
            refusal = str(error).removeprefix(f"{launch.kernel}: ")
        return LaunchTime(launch.title, launches, time * launches, floor_ns * launches, refusal)

    def _measured(self, part: Section, launch: Launch, step: StepShape) -> Time:
        """The time of the slowest rank in each reading.

        The last rank may have a smaller part of the vocabulary, whose columns some searches divide less evenly.
        """
        last = replace(step, rank=step.ranks - 1)
        last_launch = _titled(part, last, launch.title)
        first_time = self._of_rank(part, launch, step)
        if last_launch == launch:
            return first_time
        return first_time.at_least(self._of_rank(part, last_launch, last))

    def _of_rank(self, part: Section, launch: Launch, step: StepShape) -> Time:
        def resized(rows: int) -> Launch:
            """The launch of this title in a step of `rows` rows: of one prompt, or of as many sequences."""
            sequences = rows if step.tokens == step.sequences else 1
            sized = replace(step, tokens=rows, sequences=sequences, decoding=None)
            return _titled(part, sized, launch.title)

        def of_own_rows(rows: int) -> Launch:
            """The launch of this title in a step that leaves `rows` rows to each rank."""
            return resized(rows * step.sequence_ranks)

        def of_sequences(count: int) -> Launch:
            """The launch of this title in a step of `count` sequences as long as this step's."""
            tokens = step.new_tokens * count
            return _titled(part, replace(step, tokens=tokens, sequences=count, decoding=None), launch.title)

        if launch.growth is Growth.full_step:
            return self._dry.launch(launch)
        if launch.growth is Growth.experts:
            return self._of_experts(part, launch, step)
        if step.phase is Phase.decode and step.new_tokens > 1:
            return self._dry.launch(launch)  # it verifies drafts; a part has at most 128 rows
        if launch.growth is Growth.sequences:
            return self._dry.by_rows(of_sequences, launch.rows)
        if launch.growth is Growth.rows:
            if launch.rows == step.local_rows:
                return self._dry.by_rows(of_own_rows, launch.rows)
            return self._dry.by_rows(resized, launch.rows, step.sequence_ranks)
        return self._of_prompts(part, launch, step)

    def _of_prompts(self, part: Section, launch: Launch, step: StepShape) -> Time:
        """Attention of prompts, and of what decodes beside them."""
        if launch.refusal is not None:
            raise ModelError(launch.refusal)
        tokens = step.new_tokens
        rows = 0 if step.decoding is None else step.decoding.tokens

        def prompts(count: int) -> Sized:
            """The launch of this title for so many prompts of a length."""
            return lambda tokens: _titled(
                part, replace(step, tokens=rows + count * tokens, sequences=count), launch.title
            )

        one = self._dry.by_tokens(prompts(1), tokens, launch.window)
        if step.sequences == 1:
            return one
        # A prompt packed behind another adds what the second one adds to the first.
        two = self._dry.by_tokens(prompts(2), tokens, launch.window)
        return one + (two - one) * (step.sequences - 1)

    def _of_experts(self, part: Section, launch: Launch, step: StepShape) -> Time:
        layer = next(each for each in part if isinstance(each, RoutedExperts))
        groups = step.expert_ranks
        routing = replace(layer.routing, count=layer.routing.count // groups)

        def sized(rows: int, count: int, chosen: int, width: int) -> Launch:
            """The launch for so many rows and experts of a rank, of which each row chooses so many, of a width."""
            return layer.resized(count * groups, chosen, width).experts_launch(step, rows)

        return by_experts(self._dry.launch, sized, launch.rows, routing, step.ranks)


def _kinds(encoder: Network | None) -> tuple[Network, list[tuple[Section, int]]] | None:
    """An encoder and its sections with their counts; its blocks are equal, so one stands for all."""
    if encoder is None:
        return None
    first, *blocks, last = encoder.sections
    return encoder, [(first, 1), *([(blocks[0], len(blocks))] if blocks else []), (last, 1)]


def _mean(
    passes: Sequence[PassTime], send: Launch, sends: Sequence[Time], micro_batches: int, whole: Time
) -> PassTime:
    """What a stage does in a pass of so many micro-batches, on average; the bubble is the rest of the `whole` time."""
    share = micro_batches / len(passes)
    kernels: dict[tuple[str, str], LaunchTime] = {}
    for each in (part for one in passes for part in one.parts):
        known = kernels.get((each.name, each.refusal), LaunchTime(each.name, 0, Time(), 0.0, each.refusal))
        kernels[each.name, each.refusal] = replace(
            known,
            launches=known.launches + each.launches * micro_batches,
            time=known.time + each.time * share,
            floor_ns=known.floor_ns + each.floor_ns * share,
        )
    sent = LaunchTime(send.title, len(sends) * micro_batches, sum(sends, Time()) * (2 * share), 0.0)
    overhead = passes[0].overhead * micro_batches
    busy = sum((part.time for part in kernels.values()), overhead + sent.time)
    return PassTime(overhead, (*kernels.values(), sent, LaunchTime(BUBBLE, 0, whole - busy, 0.0)))


def _titled(part: Section, step: StepShape, title: str) -> Launch:
    """The launch of a title in a step, alone or as a part of another."""
    launches = (launch for joint in launches_of(part, step) for launch in (joint, *joint.fused))
    return next(launch for launch in launches if launch.title == title)
