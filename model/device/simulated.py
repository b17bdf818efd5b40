"""Ranks that compute: kernels run on simulated NeuronCores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from model.errors import ModelError
from simulate.replay import ReplayCache, ReplayOptions
from simulate.run import environment


class SimulatedDevice:
    """Ranks of one chip that compute: all in this process, or each in a process that torchrun started.

    The first launch of a kind is checked instruction by instruction; with `replay`, later ones run what was recorded
    on new data, rewritten to be faster: float32 sums of matrix products may be taken in another order. `exact` gives
    the bytes of an eager launch, `verify` compares every replay with one. Both are also the environment's to ask for.
    """

    def __init__(
        self,
        target: str,
        ranks: int,
        replay: bool = True,
        processes: bool = False,
        exact: bool = False,
        verify: bool = False,
    ) -> None:
        bind_simulator()
        self.ranks = ranks
        self._mode = simulate.Mode.replay if replay else simulate.Mode.eager
        self._world = checked(
            lambda: simulate.World.of_processes(target) if processes else simulate.World(target, ranks)
        )
        asked = checked(ReplayOptions.from_environment)
        self._world.replay = replace(asked, exact=asked.exact or exact, verify=asked.verify or verify)
        self._target, self._worlds = target, dict[int, simulate.World]()
        self.local_ranks = range(self._world.rank, self._world.rank + self._world.ranks)
        if self._world.size != ranks:
            raise ModelError(
                f"torchrun started {self._world.size} processes for {ranks} ranks; "
                "the product of --pp, --tp and --dp has to be equal"
            )

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument."""
        return nki_dtype(name)

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """The groups of a collective as kernels take them."""
        return replica_group_of(groups)

    @property
    def replays(self) -> ReplayCache:
        """The programs of this device's launches, and their report."""
        return self._world.replays  # type: ignore[no-any-return]

    def hold(self, array: np.ndarray) -> np.ndarray:
        """The array itself: simulated cores read the host's memory."""
        return array

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Launch a kernel on the ranks whose arguments these are; returns each rank's outputs.

        Without arguments it is a launch of other processes' ranks alone.
        """
        if not arguments:
            self._world.skip()
            return []
        function, world = kernel_named(kernel), self._world_of(len(arguments))
        given = by_rank(kernel, arguments)
        done = checked(lambda: world.launch(function, given, self._mode), kernel)
        return done.outputs  # type: ignore[no-any-return]

    def end_graph(self) -> None:
        """Nothing: each launch has been made."""

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The arrays of all ranks that have one, in order; `arrays` are those of the ranks in this process."""
        own = [np.asarray(each) for each in arrays] or [np.zeros(0, np.float32)]
        return checked(lambda: self._world_of(len(own)).gather(own))  # type: ignore[no-any-return]

    def _world_of(self, ranks: int) -> simulate.World:
        """The world of so many ranks of this process; all share their replays."""
        if ranks == self._world.ranks:
            return self._world
        if ranks not in self._worlds:
            replay, replays = self._world.replay, self._world.replays
            self._worlds[ranks] = simulate.World(self._target, ranks, replay=replay, replays=replays)
        return self._worlds[ranks]


def rank_of_this_process() -> int | None:
    """The rank that torchrun gave this process; None if it started none, or only one.

    ModelError for variables that torchrun would not set.
    """
    return checked(environment.rank_of_this_process) if simulate.World.has_processes() else None
