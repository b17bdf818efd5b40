"""A model on a device: the arrays that its ranks hold, and the steps that run its launch list on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.errors import check_memory
from model.execution.bound_launch import Arrays, Binder, BoundLaunch, Device
from model.execution.expert_load import ExpertLoad
from model.execution.launch_list import copies_of, copy_sizes, launches_of
from model.execution.stages import send, sent, stages_of
from model.families import compose
from model.layers.cross_attention import LAST_OF_WINDOW
from model.layers.experts import EXPERT_IDS
from model.layers.launch import Launch, Phase, StepShape, Value
from model.layers.layer import Constant, Layer, states_of
from model.layers.paged import GROUP_ARRAYS, CacheGroup, name_in_group, spare
from model.layers.recurrent import SEQUENCE_ARRAYS
from model.layers.sample import COLUMNS, NUMBERS, RESULTS
from model.layers.shard import vocabulary_span
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.network import BlockLayers, EncoderLayers
from model.sampling import Drawn, StepOutput

STEP_INPUTS = (
    *("features", "ids", "own_positions", "rope_rows", "logits_indices"),
    *(*SEQUENCE_ARRAYS, *GROUP_ARRAYS, LAST_OF_WINDOW, *NUMBERS, *COLUMNS),
)
"""The names of the arrays that the host computes for each step. Those of `GROUP_ARRAYS` come once per cache group."""

Progress = Callable[[int, int], None]
"""Called with the number of layers done and the number of all, before the first layer and after each one."""


class LaunchedModel:
    """The model on the ranks of this process: weights, constants and states on the device, and the steps.

    `weights` has one entry for each distinct shard of these ranks; data-parallel groups of `mesh` share them.
    `largest_step` decides the sizes of states and constants. `purpose` names the states in an error about memory.
    `max_bound_steps` is how many step shapes keep their bound launches. `expert_load` counts which experts tokens
    choose.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[RankWeights],
        device: Device,
        largest_step: StepShape,
        mesh: Mesh,
        purpose: str,
        progress: Progress = lambda done, layers: None,
        max_bound_steps: int = 2,
        expert_load: ExpertLoad | None = None,
    ) -> None:
        self._mesh = mesh
        self._largest_step = largest_step
        self._device = device
        self._progress = progress
        self._decoder = compose(config)
        self._vocab_size = config.vocab_size
        self._expert_load = expert_load
        stages = stages_of(self._decoder, mesh.pipeline, largest_step)
        assert self._decoder.encoder is None or len(stages) == 1, "an encoder beside several stages"
        self._stages = [_Stage.of(sections, largest_step, self._decoder.encoder) for sections in stages]
        rank_stages = [self._stages[mesh.stage_of(rank)] for rank in device.local_ranks]
        state_bytes = sum(stage.state_bytes for stage in rank_stages)
        check_memory(state_bytes, f"{purpose} on {len(rank_stages)} ranks")
        shard_weights = {rank_weights.shard: rank_weights for rank_weights in weights}
        self._rank_arrays: list[Arrays] = []
        for rank, stage in zip(device.local_ranks, rank_stages):
            host_arrays = stage.weights_and_constants(shard_weights[mesh.shard(rank)])
            arrays = {name: device.hold(array) for name, array in host_arrays.items()}
            stage.rank_arrays.append(arrays)
            self._rank_arrays.append(arrays)
        state_names = {state.name for stage in self._stages for state in stage.states}
        self._binder = Binder(device, mesh, state_names)
        self._bound_step = lru_cache(maxsize=max_bound_steps)(self._bind_step)
        self._bound_copies = lru_cache(maxsize=None)(self._bind_copies)
        self.clear()
        encoder_launches = self._encoder_launches()
        encoder_results = {result for launch in encoder_launches for result in launch.results}
        self._lasting_names = state_names | encoder_results
        inputs_and_lasting = {*STEP_INPUTS, *self._lasting_names}
        self._bound_encoder = [
            self._binder.bind(launch, inputs_and_lasting, self._rank_arrays) for launch in encoder_launches
        ]

    def clear(self) -> None:
        """Set all states to zero."""
        for stage in self._stages:
            for arrays in stage.rank_arrays:
                zeros = {state.name: np.zeros(state.shape, state.dtype) for state in stage.states}
                arrays.update({name: self._device.hold(array) for name, array in zeros.items()})

    def copy_pages(self, group_copies: Sequence[Mapping[int, int]], cache_group: CacheGroup) -> None:
        """Copy pages or slots of one cache group in every layer that has them.

        `group_copies` maps, for each data-parallel group, the number of a destination to that of its source. Copies
        are made in order, some at a time; a launch that has room for more copies the padding page onto itself.
        """
        pending = [list(copies.items()) for copies in group_copies]
        padding_page = spare(self._largest_step, cache_group)
        destinations_name, sources_name = (
            name_in_group(name, self._largest_step, cache_group)
            for name in ("copy_destinations", "copy_sources")
        )
        for size in copy_sizes(max(map(len, pending))):
            padded = [
                copies[:size] + [(padding_page, padding_page)] * (size - len(copies)) for copies in pending
            ]
            pending = [copies[size:] for copies in pending]
            pairs = np.array(padded, np.int32)  # [groups, size, 2]
            for rank, arrays in zip(self._device.local_ranks, self._rank_arrays):
                destinations, sources = np.split(pairs[self._mesh.group_of(rank)], 2, axis=1)
                arrays[destinations_name] = self._device.hold(destinations)
                arrays[sources_name] = self._device.hold(sources)
            self._run(self._bound_copies(size, cache_group))
            self._device.end_graph()

    def encode(self, features: np.ndarray) -> None:
        """Run the encoder on log-mel spectra [groups, sequences, bands, columns]; the next prompts attend to them."""
        for rank, arrays in zip(self._device.local_ranks, self._rank_arrays):
            group_features = features[self._mesh.group_of(rank)].astype(self._largest_step.activations)
            arrays["features"] = self._device.hold(group_features)
        self._run(self._bound_encoder)
        self._device.end_graph()

    def step(
        self, shape: StepShape, inputs: Mapping[str, np.ndarray], logits: bool = True
    ) -> list[StepOutput]:
        """Run one step; returns one output for each row of the head, data-parallel group after group.

        `inputs` has the arrays of the step by name; their first axis is the data-parallel group. With `logits` an
        output has those of the whole vocabulary; without, they stay on the device.
        """
        for rank, arrays in zip(self._device.local_ranks, self._rank_arrays):
            rank_inputs = self._rank_inputs(rank, shape, inputs)
            arrays.update({name: self._device.hold(array) for name, array in rank_inputs.items()})
        embedding, *blocks, head = self._bound_step(shape)
        self._run(embedding)
        self._progress(0, len(blocks))
        expert_ids: list[list[Any]] = []
        for done, block in enumerate(blocks, 1):
            self._run(block)
            expert_ids += [
                [arrays[EXPERT_IDS] for arrays in launch.rank_arrays]
                for launch in block
                if EXPERT_IDS in launch.results
            ]
            self._progress(done, len(blocks))
        if shape.scores:
            outputs = self._score_all_tokens(shape.tokens, head)
        else:
            self._run(head)
            self._device.end_graph()
            outputs = self._outputs(logits, draws=shape.draws is not None)
        self._note_load(expert_ids, shape.sequence_ranks)
        return outputs

    def _rank_inputs(
        self, rank: int, shape: StepShape, inputs: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The inputs of one rank: those of its group, of which it takes its own rows and its part of the vocabulary.

        `ids` and `own_positions` are [rows of the rank, 1], `positions` stay those of all rows of the group.
        """
        group = self._mesh.group_of(rank)
        rank_inputs = {name: array[group] for name, array in inputs.items()}
        rows = slice(shape.tokens)
        if shape.phase is Phase.prefill:
            rows = self._mesh.own_rows(rank, shape.tokens)
        rank_inputs["ids"] = rank_inputs["ids"][rows]
        rank_inputs["own_positions"] = rank_inputs["positions"][rows]
        if "logits_indices" in rank_inputs:
            rank_inputs["logits_indices"] = _indices_in_rows(rank_inputs["logits_indices"], rows)
        vocabulary = vocabulary_span(self._vocab_size, self._mesh.shard(rank))
        for name in COLUMNS:
            if name in rank_inputs:
                rank_inputs[name] = np.ascontiguousarray(rank_inputs[name][:, vocabulary])
        return rank_inputs

    def _note_load(self, expert_ids: Sequence[Sequence[Any]], sequence_ranks: int) -> None:
        """Count the experts that tokens chose; `expert_ids` has the array of each local rank, block by block.

        The first `sequence_ranks` ranks of a group have its rows, each some of them.
        """
        if self._expert_load is None:
            return
        for block_ids in expert_ids:
            # Ranks of other pipeline stages have none.
            gathered = [ids for ids in self._device.gather(block_ids) if ids.size]
            first_ranks = range(0, len(gathered), self._mesh.tensor)
            group_ids = [np.concatenate(gathered[first : first + sequence_ranks]) for first in first_ranks]
            self._expert_load.note(group_ids)

    def _score_all_tokens(self, tokens: int, head: Sequence[BoundLaunch]) -> list[StepOutput]:
        """One output for each of the `tokens` rows of each group; the head takes as many at a time as it can."""
        rows = min(tokens, len(self._rank_arrays[0]["logits_indices"]))
        group_outputs: list[list[StepOutput]] = [[] for _ in range(self._mesh.data)]
        # The head replaces x with the rows that it takes.
        hidden_states = [arrays["x"] for arrays in self._rank_arrays]
        for first in range(0, tokens, rows):
            indices = np.minimum(np.arange(first, first + rows, dtype=np.int32), tokens - 1)
            for arrays, x in zip(self._rank_arrays, hidden_states):
                arrays.update(x=x, logits_indices=self._device.hold(indices[:, None]))
            self._run(head)
            self._device.end_graph()
            head_outputs = self._outputs(logits=True, draws=False)
            for group, outputs in enumerate(group_outputs):
                outputs += head_outputs[group * rows : (group + 1) * rows]
        return [output for outputs in group_outputs for output in outputs[:tokens]]

    def _outputs(self, logits: bool, draws: bool) -> list[StepOutput]:
        """The outputs of the head for every row: logits, candidates and draws, as far as they are asked for."""

        def gathered(name: str) -> list[np.ndarray]:
            """An array of each rank of the last stage."""
            local = [arrays[name] for arrays in self._stages[-1].rank_arrays]
            return self._device.gather(local)[-self._mesh.stage_ranks :]

        names = ("values", "tokens", *(RESULTS if draws else ()))
        rank_results = [gathered(name) for name in names]
        rank_logits = gathered("logits") if logits else []
        outputs = []
        # All tensor-parallel ranks of a group have its candidates and draws; each has the logits of its own tokens.
        for first in range(0, self._mesh.stage_ranks, self._mesh.tensor):
            values, ids, *drawn = (results[first] for results in rank_results)
            group_logits = (
                np.concatenate(rank_logits[first : first + self._mesh.tensor], axis=1) if logits else None
            )
            for row in range(len(values)):
                outputs.append(
                    StepOutput(
                        None if group_logits is None else group_logits[row],
                        values[row],
                        ids[row],
                        _drawn(*(result[row] for result in drawn)) if draws else None,
                    )
                )
        return outputs

    def _run(self, launches: Sequence[BoundLaunch]) -> None:
        for launch in launches:
            launch.run(self._device)

    def _bind_step(self, shape: StepShape) -> list[list[BoundLaunch]]:
        """The launches of a step, section by section: embedding, blocks, head.

        A value that passes to the next pipeline stage is sent by the last section before it.
        """
        stage_lists = [[launches_of(section, shape) for section in stage.sections] for stage in self._stages]
        launches = list(chain.from_iterable(chain.from_iterable(stage_lists)))
        for launch in launches:
            assert launch.repeat == 1 or shape.scores, (
                f"{launch.kernel}: {launch.repeat} launches of other sequences"
            )
        results = {result for launch in launches for result in launch.results}
        window_inputs = {
            name_in_group(name, shape, window) for name in GROUP_ARRAYS for window, _ in shape.window_pages
        }
        changing = {*STEP_INPUTS, *window_inputs, *results, *self._lasting_names}
        bound_sections = [
            [self._binder.bind(launch, changing, stage.rank_arrays) for launch in section]
            for stage, sections in zip(self._stages, stage_lists)
            for section in sections
        ]
        for number, (stage, next_stage) in enumerate(pairwise(self._stages), 1):
            before = [section for earlier in self._stages[:number] for section in earlier.sections]
            after = [section for later in self._stages[number:] for section in later.sections]
            rank_arrays = [*stage.rank_arrays, *next_stage.rank_arrays]
            bound_sections[len(before) - 1] += [
                self._binder.bind_send(send(value), rank_arrays, number)
                for value in sent(before, after, shape)
            ]
        return bound_sections

    def _encoder_launches(self) -> list[Launch]:
        """The launches of the encoder; none of a model without one."""
        encoder = self._decoder.encoder
        if encoder is None:
            return []
        step = encoder.step(self._largest_step)
        return [launch for section in encoder.sections for launch in launches_of(section, step)]

    def _bind_copies(self, copies: int, cache_group: CacheGroup) -> list[BoundLaunch]:
        """The launches that copy so many pages or slots of a cache group."""
        launches = copies_of(self._decoder.layers, self._largest_step, copies, cache_group)
        changing = {value.name for launch in launches for value in launch.values}
        return [self._binder.bind(launch, changing, self._rank_arrays) for launch in launches]


@dataclass(frozen=True)
class _Stage:
    """One stage of the pipeline: its layers, and the arrays of those of its ranks that are in this process.

    `layers` are those of its `sections`, and of an encoder. `constants` compute the arrays that are neither weights
    nor states.
    """

    sections: tuple[BlockLayers, ...]
    layers: list[Layer]
    states: list[Value]
    constants: dict[str, Constant]
    rank_arrays: list[Arrays]

    @classmethod
    def of(cls, sections: tuple[BlockLayers, ...], step: StepShape, encoder: EncoderLayers | None) -> _Stage:
        """The stage of these sections; no rank has arrays of it yet."""
        layer_steps = [(layer, step) for section in sections for layer in section]
        if encoder is not None:
            layer_steps += [(layer, encoder.step(step)) for layer in encoder.layers]
        constants: dict[str, Constant] = {}
        states: dict[str, Value] = {}
        for layer, layer_step in layer_steps:
            for name, constant in layer.constants(layer_step).items():
                assert constants.setdefault(name, constant) == constant, f"two arrays are called {name}"
            states.update({state.name: state for state in states_of(layer, layer_step)})
        return cls(sections, [layer for layer, _ in layer_steps], list(states.values()), constants, [])

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one rank."""
        return sum(state.nbytes for state in self.states)

    def weights_and_constants(self, rank_weights: RankWeights) -> Arrays:
        """The weights and constants of one rank of the stage; `rank_weights` has the weights of all layers."""
        arrays: Arrays = {}
        for layer in self.layers:
            for weight in layer.weights:
                arrays |= rank_weights.of(weight)
        return arrays | {name: constant(rank_weights.shard) for name, constant in self.constants.items()}


def _drawn(token: np.ndarray, logprob: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> Drawn:
    """The draw in one row of the results of the kernel `sample`."""
    return Drawn(int(token[0]), float(logprob[0]), ids, logprobs)


def _indices_in_rows(indices: np.ndarray, rows: slice) -> np.ndarray:
    """Indices of rows of a group as indices among the `rows` of one rank, int32.

    An index of a row that the rank does not hold becomes the number of rows of the rank.
    """
    first, last, _ = rows.indices(rows.stop)
    local = indices - first
    return np.where((local >= 0) & (local < last - first), local, last - first).astype(np.int32)
