"""Device of dry launches, for predictions: kernels are checked, placed and timed, but no numbers are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

import numpy as np

import simulate
from model.device.binding import HostArrays, bind_nki, bind_rank_arguments, find_kernel, run_checked
from model.device.chips import can_divide_among, find_sorted_expert_width
from model.device.prediction import Pass, TimedLaunch
from simulate.run.processes import Arrival, Processes


class EqualRanks:
    """Ranks of a dry launch of which only rank 0 is planned; the others are assumed to do the same at the same times.

    Has the methods of `Processes` that a launch calls.
    """

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._arrived: list[tuple[Any, list[np.ndarray], Any]] = []

    def launch(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because no other process takes part in the launch."""
        return nullcontext()

    def post(self, collective: Any, operands: list[np.ndarray], where: Any, dry: bool = False) -> Arrival:
        """Record the arrival of rank 0 at a collective, with its operands, as the arrival of all members."""
        self._arrived = [(collective, operands, where)] * len(collective.members)
        return Arrival("", self.rank, collective, operands, where, dry)

    def wait(self, posted: Sequence[Arrival]) -> tuple[int, list[tuple[Any, list[np.ndarray], Any]]]:
        """Return (0, arrivals): the recorded collective is complete, and every member has the operands of rank 0.

        Args:
            posted: The arrivals that `post` returned; not read.
        """
        return 0, self._arrived


class DryDevice(HostArrays):
    """Ranks of one chip that check, place and time kernels; outputs are zeros.

    Equal launches (kernel, shapes, dtypes, static arguments) are planned and scheduled once. Device loops do not run.
    Only `experts_prefill` has such loops; they compute rows of experts that are chosen more often than expected: more
    often than the mean of random choices plus two standard deviations.

    Args:
        target: Name of the chip.
        ranks: Number of ranks.
        one_for_all: Whether only rank 0 is planned. The other ranks are assumed to make equal launches at equal times,
            as ranks with shards of equal shapes do. The times are the same; the reported work is the work of one rank.
        lnc: Number of physical cores of a rank. A kernel that they do not divide is launched on one of them.

    Raises:
        ModelError: The chip is unknown or has fewer ranks.
    """

    def __init__(self, target: str, ranks: int, one_for_all: bool = False, lnc: int = 1) -> None:
        bind_nki("simulate")
        self.ranks, self.sorted_expert_width = ranks, find_sorted_expert_width(target)
        self.local_ranks = range(1 if one_for_all else ranks)
        self._peers = EqualRanks(ranks) if one_for_all and ranks > 1 else None
        self._lnc = lnc
        self._hardware = run_checked(lambda: simulate.World(target, ranks, lnc)).hardware
        self._launches: dict[tuple[Any, ...], TimedLaunch] = {}
        self._sequence: list[TimedLaunch] = []
        self._layer_ends: list[int] = []

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Plan a launch, and return zeros with the shapes and dtypes of its outputs, for every planned rank.

        The launch is added to the current pass; see `take_pass`.

        Args:
            kernel: Name of a kernel of `nki_kernels`.
            arguments: Arguments by parameter, for every planned rank that takes part.
            written: Unused.

        Raises:
            ModelError: The kernel refuses its arguments, or the simulator reports an error.
        """
        rank_arguments = bind_rank_arguments(kernel, arguments)
        positional = (argument for arguments_of_rank, _ in rank_arguments for argument in arguments_of_rank)
        key = (kernel, *map(_describe_argument, positional))
        if key not in self._launches:
            self._launches[key] = run_checked(lambda: self._plan(kernel, rank_arguments), kernel)
        self._sequence.append(self._launches[key])
        return self._launches[key].launch.outputs

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Return the arrays as NumPy arrays: one for each planned rank of a pipeline stage."""
        return [np.asarray(array) for array in arrays]

    def _plan(self, kernel: str, arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> TimedLaunch:
        function, mode = find_kernel(kernel), simulate.Mode.dry
        plain, peers = getattr(function, "func", function), cast(Processes | None, self._peers)

        def launch(cores: int) -> simulate.Launch:
            return simulate.launch(plain, arguments, self._hardware, cores, mode=mode, trips=0, peers=peers)

        if self._lnc > 1 and can_divide_among(kernel, self._lnc):
            # Two cores do not divide some small shapes, such as a single column.
            with suppress(simulate.NkwError, AssertionError):
                return TimedLaunch.schedule(launch(self._lnc))
        return TimedLaunch.schedule(launch(1))

    def layer_done(self, done: int, layers: int) -> None:
        """Record that layers 0 to `done` - 1 of `layers` have ended; the next launch belongs to layer `done`."""
        self._layer_ends.append(len(self._sequence))

    def take_pass(self) -> Pass:
        """Return the launches since the last call as one pass of the model, and begin a new pass."""
        model_pass = Pass(tuple(self._sequence), tuple(self._layer_ends))
        self._sequence, self._layer_ends = [], []
        return model_pass


def _describe_argument(argument: Any) -> Any:
    """Return the shape and dtype of an array, or the repr of another argument; equal ones give equal instructions."""
    if isinstance(argument, np.ndarray):
        return argument.shape, str(argument.dtype)
    return repr(argument)
