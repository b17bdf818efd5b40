"""Ranks that only plan: kernels are checked, placed and timed, and nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from simulate.errors import Location
from simulate.isa.plan import Meeting
from simulate.run.processes import Processes


@dataclass(frozen=True)
class _Arrival:
    """The planned rank at a collective, where every other one arrives at once."""

    meeting: Meeting
    operands: list[np.ndarray]
    where: Location
    dry: bool


@dataclass(frozen=True)
class EqualRanks:
    """The other ranks of a dry launch, each taken to do what the planned one does.

    It stands where ranks in processes of their own stand, with the part of their interface that a launch uses.
    """

    ranks: int
    rank: int = 0

    def launch(self) -> AbstractContextManager[None]:
        """One launch; nobody has to be told of it."""
        return nullcontext()

    def post(
        self, meeting: Meeting, operands: list[np.ndarray], where: Location, dry: bool = False
    ) -> _Arrival:
        """The planned rank arrives at a collective."""
        return _Arrival(meeting, operands, where, dry)

    def wait(
        self, posted: Sequence[_Arrival]
    ) -> tuple[int, list[tuple[Meeting, list[np.ndarray], Location]]]:
        """The others bring what the planned rank brought."""
        first = posted[0]
        return 0, [(first.meeting, first.operands, first.where)] * len(first.meeting.members)


class DryDevice:
    """Ranks of one chip that only plan: kernels are checked, placed and timed, and return zeros.

    Launches that are equal (kernel, shapes, dtypes, static arguments) are planned and scheduled once. With
    `one_for_all`, only the first rank is: the others are taken to make the same launches at the same times, as ranks
    do whose shards have one shape. That gives the same times, without the work of planning every rank.
    """

    def __init__(self, target: str, ranks: int, one_for_all: bool = False) -> None:
        bind_simulator()
        self.ranks = ranks
        self.own = range(1 if one_for_all else ranks)
        self._others = EqualRanks(ranks) if one_for_all and ranks > 1 else None
        self.replica_group = replica_group_of(ranks)
        self._world = checked(lambda: simulate.World(target=target, ranks=ranks))
        self._launches: dict[tuple[Any, ...], TimedLaunch] = {}
        self._sequence: list[TimedLaunch] = []
        self._layer_ends: list[int] = []

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument."""
        return nki_dtype(name)

    def run(self, kernel: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Plan a kernel on all ranks; returns zeros of the shapes and dtypes that each rank would return."""
        key = (kernel, *(_signature(each) for rank in arguments for each in rank))
        if key not in self._launches:
            self._launches[key] = checked(lambda: self._planned(kernel, arguments), kernel)
        self._sequence.append(self._launches[key])
        return self._launches[key].launch.outputs

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of the ranks that are planned."""
        return list(arrays)

    def _planned(self, kernel: str, arguments: Sequence[tuple[Any, ...]]) -> TimedLaunch:
        function, given = kernel_named(kernel), by_rank(arguments)
        if self._others is None:
            return TimedLaunch.of(self._world.launch(function, given, simulate.Mode.dry))
        plain = getattr(function, "func", function)
        return TimedLaunch.of(
            simulate.launch(
                plain,
                given,
                self._world.hardware,
                mode=simulate.Mode.dry,
                elsewhere=cast(Processes, self._others),
            )
        )

    def layer_done(self, done: int, layers: int) -> None:
        """So many of a model's layers are behind the launches until now."""
        self._layer_ends.append(len(self._sequence))

    def take_pass(self) -> Pass:
        """The launches since the last call, as one pass of the model."""
        done = Pass(tuple(self._sequence), tuple(self._layer_ends))
        self._sequence, self._layer_ends = [], []
        return done


def _signature(argument: Any) -> Any:
    """What decides which instructions an argument gives rise to."""
    if isinstance(argument, np.ndarray):
        return argument.shape, str(argument.dtype)
    return repr(argument)
