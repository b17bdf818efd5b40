"""Launches whose weights, constants and numbers are bound once to the arrays of ranks on a device.

A step then only binds the arrays that change: activations, states, token ids and positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from model.layers.launch import Argument, Axis, Launch, Value
from model.mesh import Mesh

Arrays = dict[str, Any]
"""Arrays of one rank on its device, by their names in the launch list."""


class Device(Protocol):
    """A device that launches a kernel on several ranks at once.

    `local_ranks` are the ranks of this process: all ranks, or one if each rank is a process.
    `sorted_expert_width` is that of `StepShape`.
    """

    ranks: int
    local_ranks: range
    sorted_expert_width: float

    def dtype(self, name: str) -> Any:
        """Return a dtype in the form that kernels take as an argument, such as `nl.bfloat16`."""

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """Return the groups of a collective in the form that kernels take; None if each group has one rank."""

    def hold(self, array: np.ndarray) -> Any:
        """Copy a host array into the memory that kernels read, and return the device array."""

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Launch a kernel of `nki_kernels` on some ranks of this process.

        Args:
            kernel: The name of the kernel.
            arguments: The arguments of each rank by parameter name. The ranks are the local ranks of one pipeline
                stage, or of two stages for a launch between them, numbered from 0. Empty if other processes have them.
            written: For each output, the parameter whose array the kernel writes and returns; None for a new array.

        Returns:
            The outputs of each rank.

        Raises:
            ModelError: The arguments do not fit the kernel's signature.
        """

    def session(self) -> AbstractContextManager[None]:
        """Return a context for the launches of a step, between which no kernel changes.

        A device that looks for changes of a kernel before every launch does so once in it.
        """

    def end_graph(self) -> None:
        """End a graph of all launches since the last call. Equal graphs are compiled once."""

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Return the host copies of an array of all ranks that have one, in rank order.

        `arrays` are the arrays of the local ranks, as `run` returned them.
        """


@dataclass(frozen=True)
class BoundLaunch:
    """A launch on some ranks, ready to run in every step.

    `rank_arrays` has the arrays of each participating rank, and `fixed` the arguments of each rank that are equal in
    all steps. `changing` has the values that each step reads again, by parameter; fixed arguments take precedence.
    `written` has, for each result, the parameter of the state that it is, or None.
    """

    kernel: str
    results: tuple[str, ...]
    rank_arrays: list[Arrays]
    fixed: list[dict[str, Any]]
    changing: dict[str, Value]
    written: tuple[str | None, ...]

    def run(self, device: Device) -> None:
        """Launch the kernel and store its results in the arrays of the ranks."""
        arguments = [
            fixed
            | {
                parameter: value.view_of(arrays[value.name])
                for parameter, value in self.changing.items()
                if parameter not in fixed
            }
            for arrays, fixed in zip(self.rank_arrays, self.fixed)
        ]
        outputs = device.run(self.kernel, arguments, self.written)
        for arrays, rank_outputs in zip(self.rank_arrays, outputs):
            arrays.update(zip(self.results, [rank_outputs] if len(self.results) == 1 else rank_outputs))


class Binder:
    """A binder of launches to the arrays of the ranks of a mesh; `states` are the names of their states."""

    def __init__(self, device: Device, mesh: Mesh, states: Collection[str]) -> None:
        self._device = device
        self._mesh = mesh
        self._states = states

    def bind(self, launch: Launch, changing: Collection[str], rank_arrays: list[Arrays]) -> BoundLaunch:
        """Bind all arguments of a launch except the arrays whose names are in `changing`."""
        values = {
            parameter: argument
            for parameter, argument in launch.arguments.items()
            if isinstance(argument, Value) and argument.name in changing
        }
        fixed = [
            {
                parameter: self._bind_argument(argument, arrays)
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
        """Bind the launch that sends a value from the ranks of the previous pipeline stage to those of `stage`.

        The argument of a receiving rank only states the shape and dtype.
        """
        value, count = launch.arguments["x"], self._mesh.stage_ranks
        assert isinstance(value, Value) and not value.takes_last_rows, f"{launch.results} passes in part"
        shape_only = np.broadcast_to(np.zeros((), value.dtype), value.shape)
        first_rank = (stage - 1) * count
        # Ranks that are processes keep their numbers. In a launch the ranks of one process are numbered from 0.
        origin = 0 if len(self._device.local_ranks) == self._mesh.ranks else first_rank
        fixed: list[dict[str, Any]] = []
        for rank in self._device.local_ranks:
            if self._mesh.stage_of(rank) not in (stage - 1, stage):
                continue
            index = rank - first_rank
            source = origin + index % count
            received = {} if index < count else {"x": shape_only}
            fixed.append({"source_target_pairs": [(source, source + count)], **received})
        return BoundLaunch(launch.kernel, launch.results, rank_arrays, fixed, {"x": value}, (None,))

    def _bind_argument(self, argument: Argument, arrays: Arrays) -> Any:
        if isinstance(argument, Value):
            return argument.view_of(arrays[argument.name])
        return convert_argument(argument, self._device, self._mesh)


def convert_argument(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """Return an argument that is not an array in the form that the kernels of a device take."""
    if isinstance(argument, Axis):
        return device.replica_group(mesh.groups(argument))
    return device.dtype(argument.name) if isinstance(argument, np.dtype) else argument
