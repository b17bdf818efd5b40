"""A model's launches on a device: the arrays that its ranks hold, and steps that walk the launch list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from model.config import ModelConfig
from model.decoder import BlockLayers
from model.errors import check_memory
from model.families import compose
from model.layers.joint import joined
from model.layers.launch import Argument, Axis, Launch, Phase, StepShape, Value, View
from model.layers.layer import Constant, Layer
from model.layers.paged import MOST_COPIES, OF_KIND, of_kind
from model.layers.sample import COLUMNS, NUMBERS, RESULTS
from model.layers.shard import vocabulary_span
from model.mesh import Mesh
from model.sampling import Drawn, StepOutput
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


GIVEN = ("ids", "own_positions", "rope_rows", "ends", *OF_KIND, *NUMBERS, *COLUMNS)
"""The arrays that come with a step."""

Progress = Callable[[int, int], None]
"""Called with the layers done, and their number, before the first and after each one."""


class LaunchedModel:
    """What the ranks of this process hold, and the steps of the model.

    `weights` are the shards of these ranks, each once; the groups of `mesh` share them. `shape` is the largest step,
    whose states and constants are held; `purpose` says in an error what the states are for. `kept` steps stay bound.
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
    ) -> None:
        self._mesh = mesh
        self._shape = shape
        self._device = device
        self._progress = progress
        self._decoder = compose(config)
        self._vocabulary = config.vocab_size
        shards = {each.shard: each for each in weights}
        own = [shards[mesh.shard(rank)] for rank in device.own]
        makers: dict[str, Constant] = {}
        for layer in self._decoder.layers:
            for name, make in layer.constants(shape).items():
                assert makers.setdefault(name, make) == make, f"two arrays are called {name}"
        self._states = [state for layer in self._decoder.layers for state in layer.states(shape)]
        check_memory(len(own) * sum(each.nbytes for each in self._states), f"{purpose} on {len(own)} ranks")
        self._held: list[Arrays] = [
            {**rank.arrays, **{name: make(rank.shard) for name, make in makers.items()}} for rank in own
        ]
        self._launches = lru_cache(maxsize=kept)(self._list)
        self._copies = lru_cache(maxsize=None)(self._list_copies)
        self.clear()

    def clear(self) -> None:
        """Set all states to zero."""
        for arrays in self._held:
            arrays.update({each.name: np.zeros(each.shape, each.dtype) for each in self._states})

    def copy_pages(self, pages: Mapping[int, int], window: int | None) -> None:
        """Give pages of one kind, by their number, the contents of others, in order, in every layer that has them.

        The last page, of padding, is copied onto itself where a launch makes more copies.
        """
        copies, spare = list(pages.items()), self._shape.of_window(window).pages - 1
        for size in copy_sizes(len(copies)):
            some, copies = copies[:size], copies[size:]
            padded = np.array(some + [(spare, spare)] * (size - len(some)), np.int32)
            names = [of_kind(name, self._shape, window) for name in ("copy_destinations", "copy_sources")]
            for arrays in self._held:
                arrays.update({name: padded[:, place, None] for place, name in enumerate(names)})
            self._run(self._copies(size, window))

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
        embedding, *blocks, head = self._launches(shape)
        self._run(embedding)
        self._progress(0, len(blocks))
        for done, block in enumerate(blocks, 1):
            self._run(block)
            self._progress(done, len(blocks))
        if not shape.scores:
            self._run(head)
            return self._outputs(logits, shape.draws is not None)
        return self._scored(shape.tokens, head)

    def _scored(self, tokens: int, head: Sequence[_Bound]) -> list[StepOutput]:
        """What follows each token, for as many at a time as the head takes."""
        rows = min(tokens, len(self._held[0]["ends"]))
        outputs: list[StepOutput] = []
        states = [arrays["x"] for arrays in self._held]
        for first in range(0, tokens, rows):
            places = np.minimum(np.arange(first, first + rows, dtype=np.int32), tokens - 1)
            for arrays, x in zip(self._held, states):
                arrays.update(x=x, ends=places[:, None])
            self._run(head)
            outputs += self._outputs(logits=True, draws=False)
        return outputs[:tokens]

    def _outputs(self, logits: bool, draws: bool) -> list[StepOutput]:
        """What the head found for every row."""

        def gathered(name: str) -> list[np.ndarray]:
            return self._device.gather([np.asarray(arrays[name]) for arrays in self._held])

        found = [gathered(name) for name in ("values", "tokens", *(RESULTS if draws else ()))]
        whole = gathered("logits") if logits else []
        outputs = []
        # All ranks of a group have its candidates and draws.
        for first in range(0, self._mesh.ranks, self._mesh.tensor):
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

    def _list(self, shape: StepShape) -> list[list[_Bound]]:
        """The launches of a step, by the parts of the model, with what stays the same from step to step bound."""
        lists = [launches_of(part, shape) for part in self._decoder.sections]
        launches = [launch for part in lists for launch in part]
        for launch in launches:
            assert launch.repeat == 1 or shape.scores, (
                f"{launch.kernel}: {launch.repeat} launches of other sequences"
            )
        results = (name for launch in launches for name in launch.results)
        kinds = (of_kind(name, shape, window) for name in OF_KIND for window, _ in shape.window_pages)
        changing = {*GIVEN, *kinds, *results}
        return [[self._bind(launch, changing) for launch in part] for part in lists]

    def _list_copies(self, copies: int, window: int | None) -> list[_Bound]:
        """The launches that copy so many pages of one kind."""
        launches = copies_of(self._decoder.layers, self._shape, copies, window)
        changing = {each.name for own in launches for each in own.arguments if isinstance(each, Value)}
        return [self._bind(launch, changing) for launch in launches]

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


def _drawn(token: np.ndarray, logprob: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> Drawn:
    return Drawn(int(token[0]), float(logprob[0]), ids, logprobs)


def _within(rows: np.ndarray, own: slice) -> np.ndarray:
    """The numbers of rows among a rank's own ones; how many it has for a row that is not among them."""
    first, last, _ = own.indices(own.stop)
    numbers = rows - first
    return np.where((numbers >= 0) & (numbers < last - first), numbers, last - first).astype(np.int32)


def copies_of(layers: Iterable[Layer], shape: StepShape, copies: int, window: int | None) -> list[Launch]:
    """The launches that copy so many pages of one kind: of the layers that see `window` positions, or all."""
    name = of_kind("copy_sources", shape, window)
    launches = (launch for layer in layers for launch in layer.copy_launches(shape, copies))
    return [each for each in launches if name in (getattr(value, "name", None) for value in each.arguments)]


def copy_sizes(copies: int) -> list[int]:
    """The copies that each launch makes of so many: a power of two."""
    whole, rest = divmod(copies, MOST_COPIES)
    return [MOST_COPIES] * whole + ([1 << (rest - 1).bit_length()] if rest else [])


def bound(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """An argument that is no array, as a device's kernels take it."""
    if isinstance(argument, Axis):
        return device.replica_group(mesh.groups(argument))
    return device.dtype(argument.name) if isinstance(argument, np.dtype) else argument


def launches_of(part: BlockLayers, shape: StepShape) -> list[Launch]:
    """The launches of neighbouring layers, in order; joint launches take the place of their parts."""
    return joined(launch for layer in part for launch in layer.launches(shape))
