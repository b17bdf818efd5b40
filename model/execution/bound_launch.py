"""Launches whose weights, constants and numbers are bound once to the arrays of ranks on a device.

A launch in the launch list names its array arguments; binding looks them up in the arrays of each rank. A step then
only looks up the arrays that change: activations, states, token ids and positions. `LaunchedNetwork` binds and runs
launches.
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
    """Interface of the devices that launch a kernel on several ranks at once.

    `ranks` is the number of all ranks. `local_ranks` are the ranks of this process: all ranks, or one if each rank is a
    process. `sorted_expert_width` is the width of a rank's part of an expert, in columns, up to which rows are sorted
    by expert; see `find_sorted_expert_width`.
    """

    ranks: int
    local_ranks: range
    sorted_expert_width: float

    def dtype(self, name: str) -> Any:
        """Return a dtype, named as in NumPy, in the form that kernels take as an argument, such as `nl.bfloat16`."""

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """Return the groups of a collective in the form that kernels take; None if each group has one rank.

        Args:
            groups: The ranks of each group; None if each group has one rank.
        """

    def hold(self, array: np.ndarray) -> Any:
        """Copy a host array into the memory that kernels read, and return the device array.

        The array itself is returned if kernels read host memory.
        """

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
        """Return a context for the launches of a step, during which no kernel's source changes.

        A device that looks for changes of a kernel before every launch does so only once in this context.
        """

    def end_graph(self) -> None:
        """End a graph of all launches since the last call; equal graphs are compiled once."""

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Return host copies of one array from all ranks that have it, in rank order.

        Args:
            arrays: The array on each local rank, as `run` returned it.
        """


@dataclass(frozen=True)
class BoundLaunch:
    """Launch on some ranks, ready to run in every step.

    | field | meaning |
    |---|---|
    | `kernel` | name of the kernel |
    | `results` | names under which the outputs are stored |
    | `rank_arrays` | arrays of each participating rank, read and extended by `run` |
    | `fixed` | for each rank, the arguments by parameter that are equal in all steps |
    | `changing` | the arrays that each step looks up again, by parameter; `fixed` takes precedence |
    | `written` | for each result, the parameter of the state that the kernel overwrites; None for a new array |
    """

    kernel: str
    results: tuple[str, ...]
    rank_arrays: list[Arrays]
    fixed: list[dict[str, Any]]
    changing: dict[str, Value]
    written: tuple[str | None, ...]

    def run(self, device: Device) -> None:
        """Launch the kernel, and store its outputs in the arrays of each rank under the names in `results`."""
        arguments = [
            fixed
            | {
                parameter: value.take_view(arrays[value.name])
                for parameter, value in self.changing.items()
                if parameter not in fixed
            }
            for arrays, fixed in zip(self.rank_arrays, self.fixed)
        ]
        outputs = device.run(self.kernel, arguments, self.written)
        for arrays, rank_outputs in zip(self.rank_arrays, outputs):
            arrays.update(zip(self.results, [rank_outputs] if len(self.results) == 1 else rank_outputs))


class Binder:
    """Binder of launches to the arrays of the ranks of a mesh.

    Args:
        device: The device that will run the launches.
        mesh: The ranks of each axis.
        states: Names of the arrays that kernels overwrite.
    """

    def __init__(self, device: Device, mesh: Mesh, states: Collection[str]) -> None:
        self._device = device
        self._mesh = mesh
        self._states = states

    def bind(self, launch: Launch, changing: Collection[str], rank_arrays: list[Arrays]) -> BoundLaunch:
        """Return a launch on ranks, with all arguments bound except the arrays whose names are in `changing`.

        Args:
            launch: The launch.
            changing: Names of arrays that each step looks up again.
            rank_arrays: Arrays of each rank, in which bound arguments are looked up now.
        """
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
        """Return the launch that sends a value from the ranks of the previous pipeline stage to the ranks of `stage`.

        The argument of a receiving rank only gives the shape and dtype.

        Args:
            launch: The launch, with the value as parameter `x`.
            rank_arrays: Arrays of each local rank of both stages.
            stage: Number of the receiving stage, from 1.
        """
        value, count = launch.arguments["x"], self._mesh.stage_ranks
        assert isinstance(value, Value) and not value.takes_last_rows, f"{launch.results} passes in part"
        shape_only = np.broadcast_to(np.zeros((), value.dtype), value.shape)
        first_rank = (stage - 1) * count
        # Ranks that are processes keep their numbers. In a launch the ranks of one process are numbered from 0.
        origin = 0 if len(self._device.local_ranks) == self._mesh.ranks else first_rank
        fixed: list[dict[str, Any]] = []
        for rank in self._device.local_ranks:
            if self._mesh.find_stage(rank) not in (stage - 1, stage):
                continue
            index = rank - first_rank
            source = origin + index % count
            received = {} if index < count else {"x": shape_only}
            fixed.append({"source_target_pairs": [(source, source + count)], **received})
        return BoundLaunch(launch.kernel, launch.results, rank_arrays, fixed, {"x": value}, (None,))

    def _bind_argument(self, argument: Argument, arrays: Arrays) -> Any:
        if isinstance(argument, Value):
            return argument.take_view(arrays[argument.name])
        return convert_argument(argument, self._device, self._mesh)


def convert_argument(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """Return a launch's argument that is no array in the form that kernels take: an axis, a dtype or a plain value."""
    if isinstance(argument, Axis):
        return device.replica_group(mesh.list_groups(argument))
    return device.dtype(argument.name) if isinstance(argument, np.dtype) else argument
