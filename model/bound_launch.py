"""A launch whose lasting arguments, weights and constants, are bound to the arrays that ranks hold on a device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from model.layers.launch import Argument, Axis, Launch, Value, View
from model.mesh import Mesh

Arrays = dict[str, Any]
"""The arrays of one rank by their names in the launch list."""


class Device(Protocol):
    """Something that launches a kernel on some ranks at once.

    `own` are the ranks that this process holds: all of them, or one if the others are processes of their own.
    """

    ranks: int
    own: range

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument, such as `nl.bfloat16`."""

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """The groups of a collective as kernels take them; None where each rank is alone."""

    def hold(self, array: np.ndarray) -> Any:
        """An array where kernels read it: weights and constants once, states, and what comes with a step."""

    def run(
        self, kernel: str, arguments: Sequence[tuple[Any, ...]], written: Sequence[int | None] = ()
    ) -> list[Any]:
        """Launch a kernel of `nki_kernels` with the arguments of each rank that takes part; returns their outputs.

        These are the own ranks of one stage, or of two where values pass; none where other processes have these. A
        launch in one process numbers its ranks from 0. `written` has for each output the place of the argument that
        the kernel writes to and returns, None for a new array.
        """

    def end_graph(self) -> None:
        """What was launched since the last call is a graph: equal launches, in the same order, are compiled once."""

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The arrays of all ranks that have one, in order, in the host's memory.

        `arrays` are those of the ranks in this process, as `run` returned them.
        """


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with the arguments of every rank that stay the same: weights, constants, numbers.

    `held` are the arrays of the ranks that take part. `later` are the places and names of arguments that each step
    brings: activations, states, ids and positions; and which view of the array a launch is given, where it is not
    given the whole. They are None in `fixed`. `written` has for each result the place of the state that it is, if any.
    """

    kernel: str
    results: tuple[str, ...]
    held: list[Arrays]
    fixed: list[list[Any]]
    later: list[tuple[int, str, Value | None]]
    written: tuple[int | None, ...]

    def run(self, device: Device) -> None:
        """Launch the kernel, and keep its results in the arrays of the ranks."""
        arguments = []
        for arrays, fixed in zip(self.held, self.fixed):
            own = fixed.copy()
            for place, name, view in self.later:
                if own[place] is None:
                    own[place] = arrays[name] if view is None else view.of(arrays[name])
            arguments.append(tuple(own))
        first, *others = self.results
        for arrays, outputs in zip(self.held, device.run(self.kernel, arguments, self.written)):
            if others:
                arrays.update(zip(self.results, outputs))
            else:
                arrays[first] = outputs


class Binder:
    """Binds launches to the arrays of ranks of a mesh on a device; `states` are the names of states."""

    def __init__(self, device: Device, mesh: Mesh, states: Collection[str]) -> None:
        self._device = device
        self._mesh = mesh
        self._states = states

    def bind(self, launch: Launch, changing: Collection[str], held: list[Arrays]) -> BoundLaunch:
        """A launch, in which the arrays with the names `changing` are left to each step."""
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
            for arrays in held
        ]
        places_of_states = {
            each.name: place
            for place, each in enumerate(launch.arguments)
            if isinstance(each, Value) and each.name in self._states
        }
        written = tuple(places_of_states.get(name) for name in launch.results)
        return BoundLaunch(launch.kernel, launch.results, held, fixed, later, written)

    def bind_send(self, launch: Launch, held: list[Arrays], target: int) -> BoundLaunch:
        """A value that passes to the ranks of a stage from those of the one before.

        A target's own argument only has the shape.
        """
        value, count = launch.arguments[0], self._mesh.stage_ranks
        assert isinstance(value, Value) and value.view is View.whole, f"{launch.results} passes in part"
        shape = np.broadcast_to(np.zeros((), value.dtype), value.shape)
        first = (target - 1) * count
        # Ranks in processes of their own keep their numbers; those of one process count from 0 in a launch.
        origin = 0 if len(self._device.own) == self._mesh.ranks else first
        fixed: list[list[Any]] = []
        for rank in self._device.own:
            if self._mesh.stage_of(rank) in (target - 1, target):
                place = rank - first
                source = origin + place % count
                fixed.append([None if place < count else shape, [(source, source + count)]])
        return BoundLaunch(launch.kernel, launch.results, held, fixed, [(0, value.name, None)], (None,))

    def _bound(self, argument: Argument, arrays: Arrays) -> Any:
        if isinstance(argument, Value):
            return argument.of(arrays[argument.name])
        return bound(argument, self._device, self._mesh)


def bound(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """An argument that is no array, as a device's kernels take it."""
    if isinstance(argument, Axis):
        return device.replica_group(mesh.groups(argument))
    return device.dtype(argument.name) if isinstance(argument, np.dtype) else argument
