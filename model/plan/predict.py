"""Predicted times of a model's passes: dry runs of its launch list at few sizes, added up.

Equal blocks are launched once and counted as often as they are there. Decode attention and `lm_head` take up to 128
sequences at a time. A launch that its kernel refuses is replaced by the launches that do the same one after another, if
there are such. Else it is replaced by its roofline, like one that no kernel computes, and the reason is kept.

No launch is taken as shorter than its work on the core's peaks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from model.cache import bucket_length
from model.config import ModelConfig
from model.decoder import BlockLayers
from model.device import chip, kernel_limit
from model.engine.buckets import PartShape
from model.errors import ModelError
from model.families import compose
from model.launched import copies_of, copy_sizes, launches_of
from model.layers.experts import RoutedExperts
from model.layers.launch import Growth, Launch, Phase, StepShape, WindowPages
from model.layers.sample import DRAWS
from model.mesh import Mesh
from model.paged_model import step_of
from model.plan.dry import DryTimes, Time
from model.plan.experts import by_experts
from model.plan.roofline import core

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
    the same width. With `cuts_sequence` the ranks cut the rows of prompts among them.
    """

    def __init__(
        self,
        config: ModelConfig,
        target: str,
        ranks: int,
        dtype: str,
        context: int,
        cuts_sequence: bool = False,
    ) -> None:
        self._mesh = Mesh(ranks, sequence=cuts_sequence)
        decoder = compose(config)
        first = dict(zip(reversed(config.blocks), reversed(decoder.blocks)))
        kinds = [(first[kind], count) for kind, count in Counter(config.blocks).items()]
        self._parts: list[tuple[BlockLayers, int]] = [((decoder.embedding,), 1), *kinds, ((decoder.head,), 1)]
        self._core = core(chip(target) if ranks > 1 else chip(target).alone(), dtype)
        self._dry = DryTimes(target, ranks)
        held = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        length = bucket_length(context, context, self._mesh.row_multiple)
        self._step = StepShape(
            Phase.decode, 1, 1, length, context, ranks, held, held, cuts_sequence=cuts_sequence
        )

    def first_token(self, tokens: int) -> PassTime:
        """One prompt, and the head for its last token."""
        return self.first_tokens(tokens, 1)

    def first_tokens(self, tokens: int, batch: int) -> PassTime:
        """`batch` prompts of as many tokens each, packed into the same launches, and the head for their last tokens."""
        rows = batch * self._mesh.padded_length(tokens, batch)
        prompts = replace(self._step, phase=Phase.prefill, tokens=rows, sequences=batch)
        return self._pass(
            replace(prompts, padded=batch > 1)
        )  # their last rows are gathered, as where they differ

    def step(self, batch: int) -> PassTime:
        """One token for each of `batch` sequences."""
        return self._pass(self._step.resized(batch))

    def paged(self, part: PartShape, pages: int, block_size: int, window_pages: WindowPages = ()) -> PassTime:
        """A part of an engine's step, on that many pages; the head and a draw for the last token of each sequence."""
        shape = replace(self._on_pages(pages, block_size, window_pages), draws=_DRAWS)
        return self._pass(step_of(part, shape))

    def copies(
        self, count: int, window: int | None, pages: int, block_size: int, window_pages: WindowPages = ()
    ) -> Time:
        """Copies of so many pages of one kind, in every layer that has them, without starting and ending a kernel."""
        step, total = self._on_pages(pages, block_size, window_pages), Time()
        for size in copy_sizes(count):
            for part, number in self._parts:
                for launch in copies_of(part, step, size, window):
                    total += self._dry.launch(launch) * number
        return total

    def _on_pages(self, pages: int, block_size: int, window_pages: WindowPages) -> StepShape:
        return replace(self._step, padded=True, pages=pages, block_size=block_size, window_pages=window_pages)

    def _pass(self, step: StepShape) -> PassTime:
        times = tuple(
            time
            for part, count in self._parts
            for launch in launches_of(part, step)
            for time in self._times(part, launch, step, count)
        )
        return PassTime(Time.exact(self._dry.overhead_ns), times)

    def _times(
        self, part: BlockLayers, launch: Launch, step: StepShape, count: int
    ) -> tuple[LaunchTime, ...]:
        time = self._part(part, launch, step, count)
        if not time.refusal or not launch.parts:
            return (time,)
        return tuple(self._part(part, each, step, count) for each in launch.parts)

    def _part(self, part: BlockLayers, launch: Launch, step: StepShape, count: int) -> LaunchTime:
        floor_ns = 1e9 * self._core.seconds(launch.work.operations, launch.work.bytes)
        launches, time, refusal = count * launch.repeat, Time.exact(floor_ns), ""
        try:
            time = self._measured(part, launch, step).at_least(Time.exact(floor_ns))
        except ModelError as error:
            refusal = str(error).removeprefix(f"{launch.kernel}: ")
        return LaunchTime(launch.title, launches, time * launches, floor_ns * launches, refusal)

    def _measured(self, part: BlockLayers, launch: Launch, step: StepShape) -> Time:
        """The time of the slowest rank in each reading.

        The last rank may have a smaller part of the vocabulary, whose columns some searches divide less evenly.
        """
        last = replace(step, rank=step.ranks - 1)
        last_launch = _titled(part, last, launch.title)
        first_time = self._of_rank(part, launch, step)
        if last_launch == launch:
            return first_time
        return first_time.at_least(self._of_rank(part, last_launch, last))

    def _of_rank(self, part: BlockLayers, launch: Launch, step: StepShape) -> Time:
        def resized(rows: int) -> Launch:
            """The launch of this title in a step of `rows` rows: of one prompt, or of as many sequences."""
            sequences = rows if step.tokens == step.sequences else 1
            return _titled(part, replace(step, tokens=rows, sequences=sequences), launch.title)

        def of_own_rows(rows: int) -> Launch:
            """The launch of this title in a step that leaves `rows` rows to each rank."""
            return resized(rows * step.sequence_ranks)

        def of_sequences(count: int) -> Launch:
            """The launch of this title in a step of `count` sequences as long as this step's."""
            tokens = step.tokens // step.sequences * count
            return _titled(part, replace(step, tokens=tokens, sequences=count), launch.title)

        if launch.growth is Growth.experts:
            return self._of_experts(part, launch, step)
        if step.phase is Phase.decode and step.new_tokens > 1:
            return self._dry.launch(launch)  # it verifies drafts; a part has at most 128 rows
        if launch.growth is Growth.sequences:
            return self._dry.by_rows(of_sequences, launch.rows)
        if launch.growth is Growth.rows:
            if launch.rows == step.own_rows:
                return self._dry.by_rows(of_own_rows, launch.rows)
            return self._dry.by_rows(resized, launch.rows, step.sequence_ranks)
        most, tokens = kernel_limit(launch.kernel, "MAX_TOKENS"), launch.rows // step.sequences
        if tokens > most:
            raise ModelError(f"{launch.kernel} takes at most {most} tokens, not {tokens}")
        one = self._dry.by_tokens(resized, tokens, launch.window)
        if step.sequences == 1:
            return one

        def two_sequences(rows: int) -> Launch:
            """The launch of this title for two sequences of `rows` rows each."""
            return _titled(part, replace(step, tokens=2 * rows, sequences=2), launch.title)

        # A prompt packed behind another adds what the second one adds to the first.
        two = self._dry.by_tokens(two_sequences, tokens, launch.window)
        return one + (two - one) * (step.sequences - 1)

    def _of_experts(self, part: BlockLayers, launch: Launch, step: StepShape) -> Time:
        layer = next(each for each in part if isinstance(each, RoutedExperts))

        def sized(tokens: int, count: int, chosen: int, width: int) -> Launch:
            """The launch for so many tokens and experts, of which each token chooses so many, of a width."""
            return layer.resized(count, chosen, width).launches(replace(step, tokens=tokens))[1]

        return by_experts(self._dry.launch, sized, launch.rows, layer.routing, step.ranks)


def _titled(part: BlockLayers, step: StepShape, title: str) -> Launch:
    """The launch of a title in a step, alone or as a part of another."""
    found = (each for joint in launches_of(part, step) for each in (joint, *joint.parts))
    return next(each for each in found if each.title == title)
