"""Ranks that only plan: kernels are checked, placed and timed, and nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np

import simulate
from model.device.binding import (
    bind_simulator,
    by_rank,
    checked,
    kernel_named,
    nki_dtype,
    replica_group_of,
)
from model.device.prediction import Pass, TimedLaunch
from simulate.run.processes import Arrival, Processes


class EqualRanks:
    """The other ranks of a dry launch, each taken to do what the planned rank 0 does.

    It stands where ranks in processes of their own stand, with the part of `Processes` that a launch uses.
    """

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._arrived: list[tuple[Any, list[np.ndarray], Any]] = []

    def launch(self) -> AbstractContextManager[None]:
        """Begin a launch; there is no other process to announce it to."""
        return nullcontext()

    def post(self, collective: Any, operands: list[np.ndarray], where: Any, dry: bool = False) -> Arrival:
        """Rank 0 arrives at a collective, and with it all its other members."""
        self._arrived = [(collective, operands, where)] * len(collective.members)
        return Arrival("", self.rank, collective, operands, where, dry)

    def wait(self, posted: Sequence[Arrival]) -> tuple[int, list[tuple[Any, list[np.ndarray], Any]]]:
        """The operands of every member of the collective, which equal those of rank 0."""
        return 0, self._arrived


class DryDevice:
    """Ranks of one chip that only plan: kernels are checked, placed and timed, and return zeros.

    Launches that are equal (kernel, shapes, dtypes, static arguments) are planned and scheduled once. With
    `one_for_all` only rank 0 is planned: the others are taken to make equal launches at equal times, as ranks do whose
    shards have one shape. The times are equal, and the work is that of one rank.

    Device loops do not run: the only ones are those of `experts_prefill`, over rows of experts that tokens choose more
    often than twice the standard deviation of choices at random above the mean.
    """

    def __init__(self, target: str, ranks: int, one_for_all: bool = False) -> None:
        bind_simulator()
        self.ranks = ranks
        self.local_ranks = range(1 if one_for_all else ranks)
        self._others = EqualRanks(ranks) if one_for_all and ranks > 1 else None
        self._target, self._hardware = target, checked(lambda: simulate.World(target, ranks)).hardware
        self._launches: dict[tuple[Any, ...], TimedLaunch] = {}
        self._sequence: list[TimedLaunch] = []
        self._layer_ends: list[int] = []

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument."""
        return nki_dtype(name)

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """The groups of a collective as kernels take them."""
        return replica_group_of(groups)

    def hold(self, array: np.ndarray) -> np.ndarray:
        """The array itself, of which nothing but shape and dtype is read."""
        return array

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Plan a kernel on the ranks whose arguments these are; returns zeros with the shapes and dtypes of results."""
        given = by_rank(kernel, arguments)
        key = (kernel, *(_signature(argument) for of_rank, _ in given for argument in of_rank))
        if key not in self._launches:
            self._launches[key] = checked(lambda: self._planned(kernel, given), kernel)
        self._sequence.append(self._launches[key])
        return self._launches[key].launch.outputs

    def end_graph(self) -> None:
        """Nothing: a pass ends where it is taken."""

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The arrays of the ranks of a stage that are planned."""
        return [np.asarray(each) for each in arrays]

    def _planned(self, kernel: str, given: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> TimedLaunch:
        function = kernel_named(kernel)
        if self._others is None:
            world = simulate.World(self._target, len(given))
            return TimedLaunch.of(world.launch(function, given, simulate.Mode.dry, trips=0))
        plain = getattr(function, "func", function)
        return TimedLaunch.of(
            simulate.launch(
                plain,
                given,
                self._hardware,
                mode=simulate.Mode.dry,
                trips=0,
                peers=cast(Processes, self._others),
            )
        )

    def layer_done(self, done: int, layers: int) -> None:
        """Mark the end of a layer: the launches until now belong to the layers before it."""
        self._layer_ends.append(len(self._sequence))

    def take_pass(self) -> Pass:
        """The launches since the last call, as one pass of the model."""
        done = Pass(tuple(self._sequence), tuple(self._layer_ends))
        self._sequence, self._layer_ends = [], []
        return done


def _signature(argument: Any) -> Any:
    """The properties of an argument that decide which instructions a kernel issues."""
    if isinstance(argument, np.ndarray):
        return argument.shape, str(argument.dtype)
    return repr(argument)
