"""A model's launches on a device: the arrays that its ranks hold, and steps that walk the launch list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from model.bound_launch import Arrays, Binder, BoundLaunch, Device
from model.config import ModelConfig
from model.decoder import BlockLayers, EncoderLayers
from model.errors import check_memory
from model.expert_load import ExpertLoad
from model.families import compose
from model.launch_list import copies_of, copy_sizes, launches_of
from model.layers.cross_attention import LAST_OF_WINDOW
from model.layers.experts import EXPERT_IDS
from model.layers.launch import Phase, StepShape, Value
from model.layers.layer import Constant, Layer
from model.layers.paged import OF_KIND, Kind, of_kind, spare
from model.layers.recurrent import OF_SEQUENCE
from model.layers.sample import COLUMNS, NUMBERS, RESULTS
from model.layers.shard import vocabulary_span
from model.mesh import Mesh
from model.sampling import Drawn, StepOutput
from model.stages import send, sent, stages_of
from model.weights import RankWeights

GIVEN = (
    *("features", "ids", "own_positions", "rope_rows", "ends"),
    *(*OF_SEQUENCE, *OF_KIND, LAST_OF_WINDOW, *NUMBERS, *COLUMNS),
)
"""The arrays that come with a step."""

Progress = Callable[[int, int], None]
"""Called with the layers done, and their number, before the first and after each one."""


class LaunchedModel:
    """What the ranks of this process hold, and the steps of the model.

    `weights` are the shards of these ranks, each once; the groups of `mesh` share them. `shape` is the largest step,
    whose states and constants are held; `purpose` says in an error what the states are for. `kept` steps stay bound.
    `expert_load` counts which experts tokens choose.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[RankWeights],
        device: Device,
        shape: StepShape,
        mesh: Mesh,
        purpose: str,
        progress: Progress = lambda done, layers: None,
        kept: int = 2,
        expert_load: ExpertLoad | None = None,
    ) -> None:
        self._mesh = mesh
        self._shape = shape
        self._device = device
        self._progress = progress
        self._decoder = compose(config)
        self._vocabulary = config.vocab_size
        self._expert_load = expert_load
        shards = {each.shard: each for each in weights}
        own = [shards[mesh.shard(rank)] for rank in device.own]
        stages = stages_of(self._decoder, mesh.pipeline, shape)
        assert self._decoder.encoder is None or len(stages) == 1, "an encoder beside several stages"
        self._stages = [_Stage.of(sections, shape, self._decoder.encoder) for sections in stages]
        of_ranks = [self._stages[mesh.stage_of(rank)] for rank in device.own]
        check_memory(sum(each.state_bytes for each in of_ranks), f"{purpose} on {len(own)} ranks")
        self._held: list[Arrays] = []
        for stage, rank in zip(of_ranks, own):
            stage.held.append({name: device.hold(each) for name, each in stage.arrays(rank).items()})
            self._held.append(stage.held[-1])
        states = {each.name for stage in self._stages for each in stage.states}
        self._binder = Binder(device, mesh, states)
        self._launches = lru_cache(maxsize=kept)(self._list)
        self._copies = lru_cache(maxsize=None)(self._list_copies)
        self.clear()
        self._encoding = self._list_encoder(shape)

    def clear(self) -> None:
        """Set all states to zero."""
        for stage in self._stages:
            for arrays in stage.held:
                arrays.update(
                    {each.name: self._device.hold(np.zeros(each.shape, each.dtype)) for each in stage.states}
                )

    def copy_pages(self, pages: Sequence[Mapping[int, int]], kind: Kind) -> None:
        """Give pages or slots of every group, by their number, the contents of others, in order, in every layer.

        The last one, of padding, is copied onto itself where a launch makes more copies.
        """
        left, last = [list(own.items()) for own in pages], spare(self._shape, kind)
        names = [of_kind(name, self._shape, kind) for name in ("copy_destinations", "copy_sources")]
        for size in copy_sizes(max(map(len, left))):
            padded = np.array([own[:size] + [(last, last)] * (size - len(own)) for own in left], np.int32)
            left = [own[size:] for own in left]
            for rank, arrays in zip(self._device.own, self._held):
                of_group = padded[self._mesh.group_of(rank)]
                arrays.update(
                    {name: self._device.hold(of_group[:, place, None]) for place, name in enumerate(names)}
                )
            self._run(self._copies(size, kind))
            self._device.end_graph()

    def encode(self, features: np.ndarray) -> None:
        """Run the encoder on log-mel spectra, [groups, sequences, bands, columns]; the next prompts attend to them."""
        kind = self._shape.activations
        for rank, arrays in zip(self._device.own, self._held):
            arrays["features"] = self._device.hold(features[self._mesh.group_of(rank)].astype(kind))
        self._run(self._encoding)
        self._device.end_graph()

    def step(
        self, shape: StepShape, given: Mapping[str, np.ndarray], logits: bool = True
    ) -> list[StepOutput]:
        """One step; `given` has an array for every group of the mesh. What follows the sequences, group after group.

        Without `logits` those of the whole vocabulary stay on the device.
        """
        for rank, arrays in zip(self._device.own, self._held):
            arrays.update({name: each[self._mesh.group_of(rank)] for name, each in given.items()})
            own = (
                self._mesh.own_rows(rank, shape.tokens)
                if shape.phase is Phase.prefill
                else slice(shape.tokens)
            )
            arrays.update(ids=arrays["ids"][own], own_positions=arrays["positions"][own])
            if "ends" in given:
                arrays["ends"] = _within(arrays["ends"], own)
            for name in COLUMNS:
                if name in given:
                    part = vocabulary_span(self._vocabulary, self._mesh.shard(rank))
                    arrays[name] = np.ascontiguousarray(arrays[name][:, part])
            arrays.update({name: self._device.hold(arrays[name]) for name in (*given, "own_positions")})
        embedding, *blocks, head = self._launches(shape)
        self._run(embedding)
        self._progress(0, len(blocks))
        chosen: list[list[Any]] = []
        for done, block in enumerate(blocks, 1):
            self._run(block)
            chosen += [[own[EXPERT_IDS] for own in each.held] for each in block if EXPERT_IDS in each.results]
            self._progress(done, len(blocks))
        if shape.scores:
            outputs = self._scored(shape.tokens, head)
        else:
            self._run(head)
            self._device.end_graph()
            outputs = self._outputs(logits, shape.draws is not None)
        self._note_load(chosen, shape.sequence_ranks)
        return outputs

    def _note_load(self, chosen: Sequence[Sequence[Any]], sequence_ranks: int) -> None:
        """Count which experts the tokens of each block chose, given by its ranks in this process.

        So many ranks of a group cut its rows.
        """
        if self._expert_load is None:
            return
        for own in chosen:
            of_stage = [ids for ids in self._device.gather(own) if ids.size]  # other stages have none
            firsts = range(0, len(of_stage), self._mesh.tensor)
            self._expert_load.note(
                [np.concatenate(of_stage[first : first + sequence_ranks]) for first in firsts]
            )

    def _scored(self, tokens: int, head: Sequence[BoundLaunch]) -> list[StepOutput]:
        """What follows each token of each group, for as many at a time as the head takes."""
        rows = min(tokens, len(self._held[0]["ends"]))
        of_groups: list[list[StepOutput]] = [[] for _ in range(self._mesh.data)]
        states = [arrays["x"] for arrays in self._held]
        for first in range(0, tokens, rows):
            places = np.minimum(np.arange(first, first + rows, dtype=np.int32), tokens - 1)
            for arrays, x in zip(self._held, states):
                arrays.update(x=x, ends=self._device.hold(places[:, None]))
            self._run(head)
            self._device.end_graph()
            found = self._outputs(logits=True, draws=False)
            for group, outputs in enumerate(of_groups):
                outputs += found[group * rows : (group + 1) * rows]
        return [output for outputs in of_groups for output in outputs[:tokens]]

    def _outputs(self, logits: bool, draws: bool) -> list[StepOutput]:
        """What the head found for every row."""

        def gathered(name: str) -> list[np.ndarray]:
            own = [arrays[name] for arrays in self._stages[-1].held]
            return self._device.gather(own)[-self._mesh.stage_ranks :]

        found = [gathered(name) for name in ("values", "tokens", *(RESULTS if draws else ()))]
        whole = gathered("logits") if logits else []
        outputs = []
        # All ranks of a group have its candidates and draws.
        for first in range(0, self._mesh.stage_ranks, self._mesh.tensor):
            values, ids, *drawn = (each[first] for each in found)
            scores = np.concatenate(whole[first : first + self._mesh.tensor], axis=1) if logits else None
            for row in range(len(values)):
                outputs.append(
                    StepOutput(
                        None if scores is None else scores[row],
                        values[row],
                        ids[row],
                        _drawn(*(each[row] for each in drawn)) if draws else None,
                    )
                )
        return outputs

    def _run(self, launches: Sequence[BoundLaunch]) -> None:
        for each in launches:
            each.run(self._device)

    def _list(self, shape: StepShape) -> list[list[BoundLaunch]]:
        """The launches of a step, by the parts of the model, with what stays the same from step to step bound."""
        of_stages = [[launches_of(part, shape) for part in stage.sections] for stage in self._stages]
        launches = [launch for lists in of_stages for part in lists for launch in part]
        for launch in launches:
            assert launch.repeat == 1 or shape.scores, (
                f"{launch.kernel}: {launch.repeat} launches of other sequences"
            )
        results = (name for launch in launches for name in launch.results)
        kinds = (of_kind(name, shape, window) for name in OF_KIND for window, _ in shape.window_pages)
        changing = {*GIVEN, *kinds, *results, *self._left}
        bound_lists = [
            [self._binder.bind(launch, changing, stage.held) for launch in part]
            for stage, lists in zip(self._stages, of_stages)
            for part in lists
        ]
        for number, (own, peer) in enumerate(pairwise(self._stages), 1):
            before, after = (
                [section for stage in stages for section in stage.sections]
                for stages in (self._stages[:number], self._stages[number:])
            )
            held = [*own.held, *peer.held]
            passed = [
                self._binder.bind_send(send(value), held, number) for value in sent(before, after, shape)
            ]
            bound_lists[len(before) - 1] += passed
        return bound_lists

    def _list_encoder(self, shape: StepShape) -> list[BoundLaunch]:
        """The launches of the encoder, if any; notes what it and other steps leave behind for later ones, by name."""
        encoder = self._decoder.encoder
        parts = (
            [] if encoder is None else [launches_of(part, encoder.step(shape)) for part in encoder.sections]
        )
        launches = [launch for part in parts for launch in part]
        self._left = {each.name for stage in self._stages for each in stage.states}
        self._left.update(name for launch in launches for name in launch.results)
        return [self._binder.bind(each, {*GIVEN, *self._left}, self._held) for each in launches]

    def _list_copies(self, copies: int, kind: Kind) -> list[BoundLaunch]:
        """The launches that copy so many pages or slots."""
        launches = copies_of(self._decoder.layers, self._shape, copies, kind)
        changing = {each.name for own in launches for each in own.arguments if isinstance(each, Value)}
        return [self._binder.bind(launch, changing, self._held) for launch in launches]


@dataclass(frozen=True)
class _Stage:
    """A stage of the pipeline: its layers, the states and constants of each of its ranks, and what these hold.

    `layers` are those of its sections, and of an encoder.
    """

    sections: tuple[BlockLayers, ...]
    layers: list[Layer]
    states: list[Value]
    makers: dict[str, Constant]
    held: list[Arrays]

    @classmethod
    def of(cls, sections: tuple[BlockLayers, ...], step: StepShape, encoder: EncoderLayers | None) -> _Stage:
        """The stage of these layers, which no rank holds yet."""
        steps = [(layer, step) for section in sections for layer in section]
        if encoder is not None:
            steps += [(layer, encoder.step(step)) for layer in encoder.layers]
        makers: dict[str, Constant] = {}
        for layer, own in steps:
            for name, make in layer.constants(own).items():
                assert makers.setdefault(name, make) == make, f"two arrays are called {name}"
        states = {state.name: state for layer, own in steps for state in layer.states(own)}
        return cls(sections, [layer for layer, _ in steps], list(states.values()), makers, [])

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a rank."""
        return sum(each.nbytes for each in self.states)

    def arrays(self, rank: RankWeights) -> Arrays:
        """The weights and constants of one of its ranks, given those of a rank that holds all layers."""
        weights = (weight for layer in self.layers for weight in layer.weights)
        own = {each.name: rank.arrays[each.name] for each in weights}
        return {**own, **{name: make(rank.shard) for name, make in self.makers.items()}}


def _drawn(token: np.ndarray, logprob: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> Drawn:
    return Drawn(int(token[0]), float(logprob[0]), ids, logprobs)


def _within(rows: np.ndarray, own: slice) -> np.ndarray:
    """The numbers of rows among a rank's own ones; how many it has for a row that is not among them."""
    first, last, _ = own.indices(own.stop)
    numbers = rows - first
    return np.where((numbers >= 0) & (numbers < last - first), numbers, last - first).astype(np.int32)
