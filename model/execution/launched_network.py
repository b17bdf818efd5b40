"""A network on a device: the arrays of its ranks, and the steps that run launch lists on them.

Model runners use it. A section is one decoder layer, or all layers before or after the decoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from model.errors import check_memory
from model.execution.bound_launch import Arrays, Binder, BoundLaunch, Device
from model.execution.launch_list import list_copies, list_copy_sizes, list_launches, list_packs
from model.execution.stages import divide_stages, find_sent_values, launch_send
from model.layers.launch import Launch, Phase, StepShape, Value
from model.layers.layer import Constant, Layer, list_states
from model.layers.paged import FULL_PAGES, NEWEST, CacheGroup, find_padding_page, name_in_group
from model.layers.shard import slice_vocabulary
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.network import Network, Section, Sharding

Progress = Callable[[int, int], None]
"""Called with the number of finished inner sections and of all, before the first section and after each.

A kernel that the call changes is recorded again from the next step on.
"""

RankArrays = list[np.ndarray]
"""Arrays of the ranks of the last pipeline stage, in rank order."""


class LaunchedNetwork:
    """Network on the ranks of this process, with weights, constants and states on the device.

    `traced_arrays` has, for every launch of the last step with a traced result, the result of each rank.
    """

    def __init__(
        self,
        network: Network,
        weights: Sequence[RankWeights],
        device: Device,
        largest_step: StepShape,
        mesh: Mesh,
        purpose: str,
        progress: Progress = lambda done, sections: None,
        max_bound_steps: int = 2,
        traced: Collection[str] = (),
    ) -> None:
        """Put the weights, constants and states on the device; states are zero.

        Args:
            network: The layers.
            weights: One entry for each distinct weight shard of the local ranks; data-parallel groups share them.
            device: The device that launches kernels.
            largest_step: The step that determines the sizes of states and constants.
            mesh: The ranks of each axis.
            purpose: A phrase for the states, which the message about too little memory quotes.
            progress: Called when sections are finished.
            max_bound_steps: The number of step shapes whose bound launches are cached.
            traced: Names of the results that `traced_arrays` has.

        Raises:
            ModelError: The states do not fit into memory.
        """
        self._mesh = mesh
        self._largest_step = largest_step
        self._device = device
        self._progress = progress
        self._network = network
        self._traced = traced
        self.traced_arrays: list[list[Any]] = []
        stages = divide_stages(network, mesh.pipeline, largest_step)
        assert not network.before or len(stages) == 1, "networks before a network of several stages"
        self._stages = [
            _Stage.from_sections(sections, largest_step, network.before.values()) for sections in stages
        ]
        rank_stages = [self._stages[mesh.find_stage(rank)] for rank in device.local_ranks]
        state_bytes = sum(state.nbytes for stage in rank_stages for state in stage.states)
        check_memory(state_bytes, f"{purpose} on {len(rank_stages)} ranks")
        shard_weights = {rank_weights.shard: rank_weights for rank_weights in weights}
        self._rank_arrays: list[Arrays] = []
        for rank, stage in zip(device.local_ranks, rank_stages):
            host_arrays = stage.build_weights_and_constants(shard_weights[mesh.shard(rank)])
            arrays = {name: device.hold(array) for name, array in host_arrays.items()}
            stage.rank_arrays.append(arrays)
            self._rank_arrays.append(arrays)
        # States and the results of earlier networks persist from step to step.
        self._lasting_names = {state.name for stage in self._stages for state in stage.states}
        self._binder = Binder(device, mesh, frozenset(self._lasting_names))
        self._bound_step = lru_cache(maxsize=max_bound_steps)(self._bind_step)
        self._bound_copies = lru_cache(maxsize=None)(self._bind_copies)
        self._bound_packs = lru_cache(maxsize=None)(self._bind_packs)
        self.clear()
        self._before = {name: self._bind_before(earlier) for name, earlier in network.before.items()}

    def clear(self) -> None:
        """Set all states (KV caches and recurrent states) of all ranks to zero."""
        for stage in self._stages:
            for arrays in stage.rank_arrays:
                zeros = {state.name: np.zeros(state.shape, state.dtype) for state in stage.states}
                arrays.update({name: self._device.hold(array) for name, array in zeros.items()})

    def copy_pages(self, group_copies: Sequence[Mapping[int, int]], cache_group: CacheGroup) -> None:
        """Copy pages or slots of one cache group on the device, in every layer of the group.

        Args:
            group_copies: For each data-parallel group, the number of the source by the number of the destination.
                Copies are made in order. A launch with room for more copies also copies the padding page onto itself.
            cache_group: The pages of a window, pages without a window, or slots.
        """
        padding_page = find_padding_page(self._largest_step, cache_group)
        names = [
            name_in_group(name, self._largest_step, cache_group)
            for name in ("copy_destinations", "copy_sources")
        ]
        pending = [list(copies.items()) for copies in group_copies]
        for size in self._hold_pairs(pending, names, (padding_page, padding_page)):
            self._run_graph(self._bound_copies(size, cache_group))

    @property
    def padding_pages(self) -> tuple[int, int]:
        """Padding page of the newest pages, and that of the full pages of four bits."""
        step = self._largest_step
        return find_padding_page(step, NEWEST), find_padding_page(step, None)

    def pack_pages(self, group_pages: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Round pages that a step has filled to four bits, in every layer.

        Args:
            group_pages: For each data-parallel group, pairs of the number among the newest pages and of the page of
                four bits. A launch with room for more pages also packs the padding page.
        """
        for size in self._hold_pairs([[*pages] for pages in group_pages], FULL_PAGES, self.padding_pages):
            self._run_graph(self._bound_packs(size))

    def _hold_pairs(
        self, pending: list[list[tuple[int, int]]], names: Sequence[str], padding: tuple[int, int]
    ) -> Iterator[int]:
        """Put pairs of page numbers on the device, as many as a launch takes, and yield their number for each launch.

        Args:
            pending: For each data-parallel group, its pairs.
            names: Names of the arrays of first and of second numbers, [pairs, 1] int32 each.
            padding: The pair that fills launches with room for more.
        """
        for size in list_copy_sizes(max(map(len, pending))):
            padded = [pairs[:size] + [padding] * (size - len(pairs)) for pairs in pending]
            pending = [pairs[size:] for pairs in pending]
            numbers = np.array(padded, np.int32)  # [groups, size, 2]
            for rank, arrays in zip(self._device.local_ranks, self._rank_arrays):
                columns = np.split(numbers[self._mesh.find_group(rank)], 2, axis=1)
                arrays.update({name: self._device.hold(column) for name, column in zip(names, columns)})
            yield size

    def run_before(self, name: str, inputs: Mapping[str, np.ndarray]) -> None:
        """Run a network that precedes this one, such as an encoder; its results stay on the device for later steps.

        Args:
            name: Name of the preceding network.
            inputs: Its host arrays by name, [groups, ...] each.
        """
        earlier = self._network.before[name]
        self._hold_inputs(earlier, earlier.step(self._largest_step), inputs)
        self._run_graph(self._before[name])

    def run(
        self, shape: StepShape, inputs: Mapping[str, np.ndarray], outputs: Collection[str] | None = None
    ) -> dict[str, RankArrays]:
        """Run one step and update the states.

        Args:
            shape: The sizes of the step.
            inputs: The host arrays of the step by name, [groups, ...] each.
            outputs: Names of the returned outputs, by default all outputs of the network.

        Returns:
            For each output, its host array on each rank of the last pipeline stage.
        """
        (rank_outputs,) = self.run_in_pieces(shape, inputs, [{}], outputs)
        return rank_outputs

    def run_in_pieces(
        self,
        shape: StepShape,
        inputs: Mapping[str, np.ndarray],
        piece_inputs: Sequence[Mapping[str, np.ndarray]],
        outputs: Collection[str] | None = None,
    ) -> Iterator[dict[str, RankArrays]]:
        """Run one step whose last section runs once for each piece, and yield the outputs of each piece.

        All sections before the last one run once; every piece starts from their results.

        Args:
            shape: The sizes of the step.
            inputs: The host arrays of the step by name, [groups, ...] each.
            piece_inputs: Additional or replaced inputs of each piece.
            outputs: Names of the yielded outputs, by default all outputs of the network.

        Yields:
            For each output, its host array on each rank of the last pipeline stage.
        """
        self._hold_inputs(self._network, shape, inputs)
        *sections, last_section = self._bound_step(shape)
        self.traced_arrays = []
        for done, section in enumerate(sections):
            for launch in section:
                launch.run(self._device)
            self.traced_arrays += [
                [arrays[result] for arrays in launch.rank_arrays]
                for launch in section
                for result in launch.results
                if result in self._traced
            ]
            self._progress(done, len(sections) - 1)
        overwritten = {result for launch in last_section for result in launch.results} - self._lasting_names
        before_last = [
            {name: arrays[name] for name in overwritten if name in arrays} for arrays in self._rank_arrays
        ]
        for piece in piece_inputs:
            for arrays, results in zip(self._rank_arrays, before_last):
                arrays.update(results)
            self._hold_inputs(self._network, shape, piece)
            self._run_graph(last_section)
            yield {
                name: self._device.gather([arrays[name] for arrays in self._stages[-1].rank_arrays])[
                    -self._mesh.stage_ranks :
                ]
                for name in (self._network.outputs if outputs is None else outputs)
            }

    def _hold_inputs(self, network: Network, shape: StepShape, inputs: Mapping[str, np.ndarray]) -> None:
        """Put each local rank's shard of a step's inputs on the device, cast to the dtype that the network declares."""
        for rank, arrays in zip(self._device.local_ranks, self._rank_arrays):
            group = self._mesh.find_group(rank)
            for name, array in inputs.items():
                declared = network.inputs[name]
                rank_array = self._shard_input(array[group], declared.sharding, shape, rank)
                dtype = shape.activations if declared.dtype is None else declared.dtype
                arrays[name] = self._device.hold(rank_array.astype(dtype, copy=False))

    def _shard_input(self, array: np.ndarray, sharding: Sharding, shape: StepShape, rank: int) -> np.ndarray:
        """Return a rank's part of an input of its data-parallel group, as the input's `sharding` says.

        The part is the whole array, the rank's columns of the vocabulary, the rank's rows, or row indices converted to
        indices among the rank's rows.
        """
        if sharding is Sharding.replicated:
            return array
        if sharding is Sharding.vocabulary:
            columns = slice_vocabulary(array.shape[-1], self._mesh.shard(rank))
            return np.ascontiguousarray(array[:, columns])
        rows = slice(shape.tokens)
        if shape.phase is Phase.prefill:
            rows = self._mesh.slice_local_rows(rank, shape.tokens)
        return array[rows] if sharding is Sharding.rows else _convert_to_local_indices(array, rows)

    def _run_graph(self, launches: Sequence[BoundLaunch]) -> None:
        """Run launches one after another, and end the graph after them."""
        for launch in launches:
            launch.run(self._device)
        self._device.end_graph()

    def _bind_step(self, shape: StepShape) -> list[list[BoundLaunch]]:
        """Return the bound launches of a step, section by section.

        The last section of a pipeline stage also sends the values that the next stage reads.
        """
        stage_lists = [
            [list_launches(section, shape) for section in stage.sections] for stage in self._stages
        ]
        launches = [launch for sections in stage_lists for section in sections for launch in section]
        for launch in launches:
            assert launch.repeat == 1 or shape.scores, (
                f"{launch.kernel}: {launch.repeat} launches of other sequences"
            )
        results = {result for launch in launches for result in launch.results}
        changing = {*self._network.inputs, *results, *self._lasting_names}
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
                self._binder.bind_send(launch_send(value), rank_arrays, number)
                for value in find_sent_values(before, after, shape)
            ]
        return bound_sections

    def _bind_before(self, network: Network) -> list[BoundLaunch]:
        """Return the bound launches of a network that precedes this one.

        Its results are from now on kept from step to step, like states.
        """
        step = network.step(self._largest_step)
        launches = [launch for section in network.sections for launch in list_launches(section, step)]
        self._lasting_names.update(result for launch in launches for result in launch.results)
        changing = {*network.inputs, *self._lasting_names}
        return [self._binder.bind(launch, changing, self._rank_arrays) for launch in launches]

    def _bind_copies(self, copies: int, cache_group: CacheGroup) -> list[BoundLaunch]:
        """Return the bound launches that make `copies` copies of pages or slots of a cache group in every layer."""
        return self._bind_on_caches(
            list_copies(self._network.layers, self._largest_step, copies, cache_group)
        )

    def _bind_packs(self, count: int) -> list[BoundLaunch]:
        """Return the bound launches that pack `count` full pages in every layer."""
        return self._bind_on_caches(list_packs(self._network.layers, self._largest_step, count))

    def _bind_on_caches(self, launches: Sequence[Launch]) -> list[BoundLaunch]:
        """Return bound launches that read only caches and numbers of pages or slots."""
        changing = {value.name for launch in launches for value in launch.values}
        return [self._binder.bind(launch, changing, self._rank_arrays) for launch in launches]


@dataclass(frozen=True)
class _Stage:
    """One pipeline stage: its layers, and the arrays of its ranks in this process.

    `layers` has the layers of its `sections` and of preceding networks. `constants` compute the arrays that are neither
    weights nor states.
    """

    sections: tuple[Section, ...]
    layers: list[Layer]
    states: list[Value]
    constants: dict[str, Constant]
    rank_arrays: list[Arrays]

    @classmethod
    def from_sections(
        cls, sections: tuple[Section, ...], step: StepShape, before: Iterable[Network]
    ) -> _Stage:
        """Return the stage of sections and of networks before them; `rank_arrays` is still empty.

        Args:
            sections: Neighbouring sections of the network.
            step: The step that determines the sizes of states and constants.
            before: Networks that run before this one.
        """
        layer_steps = [(layer, step) for section in sections for layer in section]
        layer_steps += [(layer, network.step(step)) for network in before for layer in network.layers]
        constants: dict[str, Constant] = {}
        states: dict[str, Value] = {}
        for layer, layer_step in layer_steps:
            for name, constant in layer.constants(layer_step).items():
                assert constants.setdefault(name, constant) == constant, f"two arrays are called {name}"
            states.update({state.name: state for state in list_states(layer, layer_step)})
        return cls(sections, [layer for layer, _ in layer_steps], list(states.values()), constants, [])

    def build_weights_and_constants(self, rank_weights: RankWeights) -> Arrays:
        """Return the host arrays of one rank by name: weights and constants of the stage's layers.

        Args:
            rank_weights: Weights of the rank's shard, of all layers.
        """
        arrays: Arrays = {}
        for layer in self.layers:
            for weight in layer.weights:
                arrays |= rank_weights.select(weight)
        return arrays | {name: constant(rank_weights.shard) for name, constant in self.constants.items()}


def _convert_to_local_indices(indices: np.ndarray, rows: slice) -> np.ndarray:
    """Return row indices of a group as indices among the rows of one rank, int32.

    An index outside of `rows` becomes the number of these rows.
    """
    first, last, _ = rows.indices(rows.stop)
    local = indices - first
    return np.where((local >= 0) & (local < last - first), local, last - first).astype(np.int32)
