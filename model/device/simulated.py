"""Device whose kernels run on simulated NeuronCores and compute real numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

import simulate
from model.device.binding import HostArrays, bind_nki, bind_rank_arguments, find_kernel, run_checked
from model.device.chips import find_sorted_expert_width
from model.errors import ModelError
from simulate.replay import ReplayCache, ReplayOptions
from simulate.run import environment


class SimulatedDevice(HostArrays):
    """Simulated ranks of one chip, all in this process or each in a process that torchrun started.

    Args:
        target: Name of the chip.
        ranks: Number of ranks.
        replay: Whether a launch that equals a checked one runs its recorded program. Recorded programs are rewritten
            into fewer operations, so float32 sums of matrix products may be taken in another order.
        processes: Whether every rank is a process of torchrun.
        exact: Whether replays give the bytes of an eager launch. Environment variables can enable this, too.
        verify: Whether every replay is compared with an eager launch. Environment variables can enable this, too.

    Raises:
        ModelError: The chip is unknown, or torchrun started another number of processes.
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
        bind_nki("simulate")
        self.ranks, self.sorted_expert_width = ranks, find_sorted_expert_width(target)
        self._mode = simulate.Mode.replay if replay else simulate.Mode.eager
        self._world = run_checked(
            lambda: simulate.World.from_torchrun(target) if processes else simulate.World(target, ranks)
        )
        options = run_checked(ReplayOptions.from_environment)
        self._world.replay = replace(options, exact=options.exact or exact, verify=options.verify or verify)
        self._target, self._worlds = target, {self._world.ranks: self._world}
        self.local_ranks = range(self._world.rank, self._world.rank + self._world.ranks)
        if self._world.size != ranks:
            raise ModelError(
                f"torchrun started {self._world.size} processes for {ranks} ranks; "
                "the product of --pp, --tp and --dp has to be equal"
            )

    @property
    def replays(self) -> ReplayCache:
        """Recorded programs of this device's launches, and the report on them."""
        return self._world.replays  # type: ignore[no-any-return]

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Launch a kernel and return the outputs of every rank of this process; an empty list without arguments.

        Args:
            kernel: Name of a kernel of `nki_kernels`.
            arguments: Arguments by parameter, for every rank of this process that takes part. Without any, only ranks
                of other processes launch the kernel.
            written: Unused; kernels write to the arrays themselves.

        Raises:
            ModelError: The kernel refuses its arguments, or the simulator reports an error.
        """
        if not arguments:
            self._world.skip()
            return []
        function, world = find_kernel(kernel), self._find_world(len(arguments))
        rank_arguments = bind_rank_arguments(kernel, arguments)
        return run_checked(  # type: ignore[no-any-return]
            lambda: world.launch(function, rank_arguments, self._mode).outputs, kernel
        )

    def session(self) -> AbstractContextManager[None]:
        """Return a context for the launches of a step, in which recorded kernels are checked only once for changes."""
        return self.replays.session()

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Return the arrays of all ranks that have one, in rank order; every process has to call it.

        Args:
            arrays: The arrays of this process's ranks; empty if it has none.

        Raises:
            ModelError: The processes cannot exchange the arrays.
        """
        local = [np.asarray(array) for array in arrays] or [np.zeros(0, np.float32)]
        return run_checked(lambda: self._find_world(len(local)).gather(local))  # type: ignore[no-any-return]

    def _find_world(self, ranks: int) -> simulate.World:
        """Return the simulated world for launches on `ranks` ranks of this process, made at first use.

        All worlds share recorded programs.
        """
        if ranks not in self._worlds:
            self._worlds[ranks] = simulate.World(
                self._target, ranks, replay=self._world.replay, replays=self.replays
            )
        return self._worlds[ranks]


def read_process_rank() -> int | None:
    """Return the rank that torchrun gave this process; None without torchrun or for a single process.

    Raises:
        ModelError: The environment has variables that torchrun would not set.
    """
    return run_checked(environment.read_rank) if simulate.World.has_processes() else None
