"""A model computed by kernels on a device: walks the launch list of its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from model.config import ModelConfig
from model.decoder import BlockLayers
from model.errors import check_memory
from model.families import compose
from model.layers.joint import joined
from model.layers.launch import Argument, Axis, Launch, Phase, StepShape, Value, View
from model.layers.layer import Constant
from model.mesh import Mesh
from model.sampling import StepOutput
from model.weights import RankWeights

Arrays = dict[str, Any]
"""The arrays of one rank by their names in the launch list."""


class Device(Protocol):
    """Something that launches a kernel on all ranks at once.

    `own` are the ranks that this process holds: all of them, or one if the others are processes of their own.
    """

    ranks: int
    own: range

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument, such as `nl.bfloat16`."""

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """The groups of a collective as kernels take them; None where each rank is alone."""

    def run(self, kernel: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Launch a kernel of `nki_kernels` with each own rank's arguments; returns each own rank's outputs."""

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of all ranks, in the order of ranks; `arrays` are those of the ranks in this process."""


class KernelModel:
    """A backend that computes the model with kernels on a device, for a batch of `sequences` sequences.

    `weights` are the shards of the ranks in this process, each once; the groups of `mesh` share them. `cache_length`
    positions are held per layer and sequence; `candidates` is how many of the best tokens the sampler wants picked out
    (lm_head picks a multiple of eight, and beyond eight no more than a rank's part of the vocabulary holds).
    `progress` is called with the layers done, and their number, before the first and after each one.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[RankWeights],
        device: Device,
        cache_length: int,
        candidates: int = 1,
        progress: Callable[[int, int], None] = lambda done, layers: None,
        sequences: int = 1,
        mesh: Mesh | None = None,
    ) -> None:
        self._mesh = mesh = mesh or Mesh(device.ranks)
        shards = {each.shard: each for each in weights}
        own = [shards[mesh.shard(rank)] for rank in device.own]
        self._decoder = compose(config)
        self._device = device
        self._cache_length = cache_length
        self._progress = progress
        first = weights[0]
        self._shape = partial(
            StepShape,
            sequences=mesh.sequences_of_group(sequences),
            cache_length=cache_length,
            context=min(cache_length, config.context),
            ranks=mesh.tensor,
            activations=first.dtype,
            weights=first.arrays[next(iter(first.arrays))].dtype,
            candidates=candidates,
            cuts_sequence=mesh.sequence,
        )
        self._sequences = sequences
        self._longest_short, self._limit = config.longest_short, config.context
        self._ids: list[list[int]] = []
        shape = self._shape(Phase.prefill, mesh.sequences_of_group(sequences))
        makers: dict[str, Constant] = {}
        for layer in self._decoder.layers:
            for name, make in layer.constants(shape).items():
                assert makers.setdefault(name, make) == make, f"two arrays are called {name}"
        self._states = [state for layer in self._decoder.layers for state in layer.states(shape)]
        needed = len(own) * sum(each.nbytes for each in self._states)
        each = "" if sequences == 1 else f" for each of {sequences} sequences"
        check_memory(needed, f"a cache of {cache_length:,} positions{each} on {len(own)} ranks")
        self._held: list[Arrays] = [
            {**rank.arrays, **{name: make(rank.shard) for name, make in makers.items()}} for rank in own
        ]
        # Decode steps all have one shape; a prompt's is used once.
        self._launches = lru_cache(maxsize=2)(self._list)
        self._reset()

    def _reset(self) -> None:
        for arrays in self._held:
            arrays.update({each.name: np.zeros(each.shape, each.dtype) for each in self._states})

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Start a sequence with each prompt; says what follows each.

        Prompts are padded to the longest of them, or further, so that ranks that cut rows divide them.
        """
        of_group = self._mesh.sequences_of_group(self._sequences)
        length = self._mesh.padded_length(max(map(len, prompts)), of_group)
        assert len(prompts) == self._sequences and min(map(len, prompts)) > 0
        assert length <= self._cache_length, f"{length} tokens, a cache of {self._cache_length}"
        self._reset()
        self._ids = [list(prompt) for prompt in prompts]
        rows = self._padded_sequences
        ids = np.zeros((rows, length), np.int32)
        for row, prompt in zip(ids, prompts):
            row[: len(prompt)] = prompt
        lengths = np.array([*map(len, prompts), *[1] * (rows - len(prompts))])
        # Rows behind the longest prompt take its last position, which is within every table.
        positions = np.tile(np.minimum(np.arange(length), max(lengths) - 1), (rows, 1))
        ends = np.arange(rows) % of_group * length + lengths - 1
        return self._step(Phase.prefill, min(lengths) < length, ids=ids, positions=positions, ends=ends)

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        """Append a token to each sequence at its position; an ended one gets a token that nothing reads."""
        assert len(tokens) == len(positions) == self._sequences
        assert all(0 < each < self._cache_length for each in positions), f"{positions}, {self._cache_length}"
        for own, token in zip(self._ids, tokens):
            own.extend([] if token is None else [token])
        if any(token is not None and at == self._longest_short for token, at in zip(tokens, positions)):
            return self.prefill(self._ids)  # other rotations from here on, also of what was cached
        none = self._padded_sequences - self._sequences
        ids = np.array([*(each or 0 for each in tokens), *[0] * none])
        return self._step(Phase.decode, ids=ids, positions=np.array([*positions, *[1] * none]))

    @property
    def _padded_sequences(self) -> int:
        """The sequences of all groups, those of no prompt included, where the groups do not divide the prompts."""
        return self._mesh.data * self._mesh.sequences_of_group(self._sequences)

    def _step(self, phase: Phase, padded: bool = False, **given: np.ndarray) -> list[StepOutput]:
        """One step; `given` has a row for every sequence, group after group."""
        if self._longest_short is not None:
            given["rope_rows"] = self._rope_rows(given["positions"], self._longest_short)
        by_group = {
            name: each.astype(np.int32).reshape(self._mesh.data, -1, 1) for name, each in given.items()
        }
        tokens = by_group["positions"].shape[1]
        for rank, arrays in zip(self._device.own, self._held):
            arrays.update({name: each[self._mesh.group_of(rank)] for name, each in by_group.items()})
            own = self._mesh.own_rows(rank, tokens) if phase is Phase.prefill else slice(0, tokens)
            arrays.update(ids=arrays["ids"][own], own_positions=arrays["positions"][own])
            if "ends" in given:
                arrays["ends"] = _within(arrays["ends"], own)
        shape = self._shape(phase, tokens, padded=padded)
        embedding, *blocks, head = self._launches(shape)
        self._run(embedding)
        self._progress(0, len(blocks))
        for done, block in enumerate(blocks, 1):
            self._run(block)
            self._progress(done, len(blocks))
        self._run(head)
        logits, values, chosen = (
            self._device.gather([np.asarray(arrays[name]) for arrays in self._held])
            for name in ("logits", "values", "tokens")
        )
        outputs = []
        # All ranks of a group have its candidates.
        for first in range(0, self._mesh.ranks, self._mesh.tensor):
            whole = np.concatenate(logits[first : first + self._mesh.tensor], axis=1)
            outputs += [StepOutput(*rows) for rows in zip(whole, values[first], chosen[first])]
        return outputs[: self._sequences]

    def _rope_rows(self, positions: np.ndarray, longest_short: int) -> np.ndarray:
        """Rows of the tables of rotations: those of long sequences lie behind those of short ones."""
        by_sequence = positions.reshape(self._padded_sequences, -1)
        long = np.zeros((self._padded_sequences, 1), bool)
        long[: len(self._ids), 0] = [len(ids) > longest_short for ids in self._ids]
        return by_sequence + min(self._cache_length, self._limit) * long

    def _list(self, shape: StepShape) -> list[list[_Bound]]:
        """The launches of a step, by the parts of the model, with what stays the same from step to step bound."""
        lists = [launches_of(part, shape) for part in self._decoder.sections]
        launches = [launch for part in lists for launch in part]
        for launch in launches:
            assert launch.repeat == 1, f"{launch.kernel}: {launch.repeat} launches of other sequences"
        results = (name for launch in launches for name in launch.results)
        changing = {"ids", "positions", "own_positions", "rope_rows", "ends", *results}
        return [[self._bind(launch, changing) for launch in part] for part in lists]

    def _bind(self, launch: Launch, changing: Collection[str]) -> _Bound:
        later = [
            (place, each.name, None if each.view is View.whole else each)
            for place, each in enumerate(launch.arguments)
            if isinstance(each, Value) and each.name in changing
        ]
        places = {place for place, _, _ in later}
        fixed = [
            [
                None if place in places else self._bound(argument, arrays)
                for place, argument in enumerate(launch.arguments)
            ]
            for arrays in self._held
        ]
        return _Bound(launch.kernel, launch.results, fixed, later)

    def _run(self, launches: Sequence[_Bound]) -> None:
        for each in launches:
            arguments = []
            for arrays, fixed in zip(self._held, each.fixed):
                own = fixed.copy()
                for place, name, view in each.later:
                    own[place] = arrays[name] if view is None else view.of(arrays[name])
                arguments.append(tuple(own))
            first, *others = each.results
            for arrays, outputs in zip(self._held, self._device.run(each.kernel, arguments)):
                if others:
                    arrays.update(zip(each.results, outputs))
                else:
                    arrays[first] = outputs

    def _bound(self, argument: Argument, arrays: Arrays) -> Any:
        if isinstance(argument, Value):
            return argument.of(arrays[argument.name])
        return bound(argument, self._device, self._mesh)


@dataclass(frozen=True)
class _Bound:
    """A launch with the arguments of every rank that stay the same: weights, constants, numbers.

    `later` are the places and names of arguments that each step brings: activations, states, ids and positions; and
    which view of the array a launch is given, where it is not given the whole.
    """

    kernel: str
    results: tuple[str, ...]
    fixed: list[list[Any]]
    later: list[tuple[int, str, Value | None]]


def _within(rows: np.ndarray, own: slice) -> np.ndarray:
    """The numbers of rows among a rank's own ones; how many it has for a row that is not among them."""
    count, numbers = own.stop - own.start, rows - own.start
    return np.where((numbers >= 0) & (numbers < count), numbers, count).astype(np.int32)


def bound(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """An argument that is no array, as a device's kernels take it."""
    if isinstance(argument, Axis):
        return device.replica_group(mesh.groups(argument))
    return device.dtype(argument.name) if isinstance(argument, np.dtype) else argument


def launches_of(part: BlockLayers, shape: StepShape) -> list[Launch]:
    """The launches of neighbouring layers, in order; joint launches take the place of their parts."""
    return joined(launch for layer in part for launch in layer.launches(shape))
