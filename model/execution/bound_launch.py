"""A launch whose weights, constants and numbers are bound once, to the arrays that ranks hold on a device.

A step then only fills in what changes: activations, states, token ids and positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from model.layers.launch import Argument, Axis, Launch, Value
from model.mesh import Mesh

Arrays = dict[str, Any]
"""The arrays of one rank on its device, by their names in the launch list."""


class Device(Protocol):
    """Something that launches a kernel on several ranks at once.

    `local_ranks` are the ranks of this process: all of them, or one where each rank is a process of its own.
    """

    ranks: int
    local_ranks: range

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument, such as `nl.bfloat16`."""

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """The groups of a collective as kernels take them; None where each rank is alone."""

    def hold(self, array: np.ndarray) -> Any:
        """Put an array where kernels read it: weights and constants once, states, and the inputs of a step."""

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Launch a kernel of `nki_kernels` on some ranks of this process; returns the outputs of each.

        `arguments` has one mapping per rank, from the kernel's parameter names to arguments. The device binds them by
        the kernel's signature; ModelError where they do not fit. The ranks are the local ones of one stage of the
        pipeline, or of two where a value passes. The list is empty where other processes have these ranks. In a launch
        the ranks of one process are numbered from 0.

        `written` names, for each output, the parameter whose array the kernel writes to and returns. It is None for an
        output that is a new array.
        """

    def end_graph(self) -> None:
        """End a graph of all launches since the last call. Equal graphs are compiled once."""

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The arrays of all ranks that have one, in rank order, in the memory of the host.

        `arrays` are those of the local ranks, as `run` returned them.
        """


@dataclass(frozen=True)
class BoundLaunch:
    """A launch on some ranks, ready to run in every step.

    `rank_arrays` are the arrays of the ranks that take part. `fixed` has the arguments of each rank that stay the same
    from step to step. `changing` are the values that each step reads anew, by parameter; a fixed argument of a rank
    takes precedence. `written` has, for each result that is a state, the parameter of that state.
    """

    kernel: str
    results: tuple[str, ...]
    rank_arrays: list[Arrays]
    fixed: list[dict[str, Any]]
    changing: dict[str, Value]
    written: tuple[str | None, ...]

    def run(self, device: Device) -> None:
        """Launch the kernel, and keep its results in the arrays of the ranks."""
        arguments = []
        for arrays, fixed in zip(self.rank_arrays, self.fixed):
            changing = {
                parameter: value.view_of(arrays[value.name])
                for parameter, value in self.changing.items()
                if parameter not in fixed
            }
            arguments.append({**fixed, **changing})
        outputs = device.run(self.kernel, arguments, self.written)
        for arrays, rank_outputs in zip(self.rank_arrays, outputs):
            if len(self.results) == 1:
                arrays[self.results[0]] = rank_outputs
            else:
                arrays.update(zip(self.results, rank_outputs))


class Binder:
    """Binds launches to the arrays of the ranks of a mesh; `states` are the names of the states that they keep."""

    def __init__(self, device: Device, mesh: Mesh, states: Collection[str]) -> None:
        self._device = device
        self._mesh = mesh
        self._states = states

    def bind(self, launch: Launch, changing: Collection[str], rank_arrays: list[Arrays]) -> BoundLaunch:
        """Bind all arguments of a launch but the arrays whose names are `changing`."""
        values = {
            parameter: argument
            for parameter, argument in launch.arguments.items()
            if isinstance(argument, Value) and argument.name in changing
        }
        fixed = [
            {
                parameter: self._bound(argument, arrays)
                for parameter, argument in launch.arguments.items()
                if parameter not in values
            }
            for arrays in rank_arrays
        ]
        state_parameters = {
            argument.name: parameter
            for parameter, argument in launch.arguments.items()
            if isinstance(argument, Value) and argument.name in self._states
        }
        written = tuple(state_parameters.get(result) for result in launch.results)
        return BoundLaunch(launch.kernel, launch.results, rank_arrays, fixed, values, written)

    def bind_send(self, launch: Launch, rank_arrays: list[Arrays], stage: int) -> BoundLaunch:
        """Bind the launch that passes a value to the ranks of a pipeline stage from those of the stage before it.

        The argument of a receiving rank only gives the shape and dtype.
        """
        value, count = launch.arguments["x"], self._mesh.stage_ranks
        assert isinstance(value, Value) and not value.takes_last_rows, f"{launch.results} passes in part"
        shape_only = np.broadcast_to(np.zeros((), value.dtype), value.shape)
        first_rank = (stage - 1) * count
        # Ranks in processes of their own keep their numbers. Those of one process count from 0 in a launch.
        origin = 0 if len(self._device.local_ranks) == self._mesh.ranks else first_rank
        fixed: list[dict[str, Any]] = []
        for rank in self._device.local_ranks:
            if self._mesh.stage_of(rank) not in (stage - 1, stage):
                continue
            place = rank - first_rank
            source = origin + place % count
            arguments: dict[str, Any] = {"source_target_pairs": [(source, source + count)]}
            if place >= count:
                arguments["x"] = shape_only
            fixed.append(arguments)
        return BoundLaunch(launch.kernel, launch.results, rank_arrays, fixed, {"x": value}, (None,))

    def _bound(self, argument: Argument, arrays: Arrays) -> Any:
        if isinstance(argument, Value):
            return argument.view_of(arrays[argument.name])
        return bound(argument, self._device, self._mesh)


def bound(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """An argument that is not an array, as the kernels of a device take it."""
    if isinstance(argument, Axis):
        return device.replica_group(mesh.groups(argument))
    return device.dtype(argument.name) if isinstance(argument, np.dtype) else argument
