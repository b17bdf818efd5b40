"""A program: the instructions of a launch, run on other arrays exactly as recorded, or rewritten to be faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nkw.errors import InvalidArgument, NkwError
from simulate.isa.plan import Domain, Plan, State
from simulate.memory import NkiTensor
from simulate.replay.arena import Arena, Tiles
from simulate.replay.external import External, refused
from simulate.replay.rendezvous import complete_rendezvous
from simulate.run.arguments import list_leaves, map_leaves
from simulate.run.execute import add_to_psum, execute_again, read_operands, write_result, write_results
from simulate.run.launch import Launch, Result
from simulate.run.machine import Mode
from simulate.run.processes import Processes
from simulate.run.rebuild import Rebuilt

if TYPE_CHECKING:
    from simulate.replay.fusion import Fused

Recorded = list[tuple[Plan, Any, bool]]
"""Per instruction, in program order: plan, accumulate mask (see `repeat`), whether a result was written in part."""

Disturbance = Callable[[Plan, list[Any], np.ndarray], np.ndarray]

SEVERAL_CORES = "a logical core of several physical cores"


def why_not_replayed(launch: Launch) -> str | None:
    """The reason why a launch cannot be replayed on other arrays; None if it can."""
    if launch.mode is not Mode.eager:
        return f"a launch in mode {launch.mode.value} has no values"
    if len(launch.streams) != len(launch.interfaces):
        return SEVERAL_CORES
    for stream in launch.streams:
        if any(constant.from_file for constant in stream.constants.values()):
            return "a constant is read from a file"
        if stream.depends_on_data is not None:
            return stream.depends_on_data
    if launch.reads_values:
        return "the kernel's Python reads values"
    if launch.warnings:
        return "the launch has warnings"
    if any(interface.converts for interface in launch.interfaces):
        return "an argument is stored in another dtype"
    for interface, stream in zip(launch.interfaces, launch.streams):
        for value in list_leaves(interface.returned):
            if not (value is None or isinstance(value, (Result, bool, int, float, str))):
                return f"the kernel returns a {type(value).__name__}"
        if any(result.serial in stream.constants for result in interface.results()):
            return "a constant is returned"
    return None


class ProgramMemory:
    """The host memory that programs share: `tiles` for exact replays, `buffers` for rewritten programs."""

    def __init__(self) -> None:
        self.tiles = Arena()
        self.buffers = Arena()


class Program:
    """The instructions of every rank of one eager launch, bound to its arguments and results.

    Every rank has one physical core. Programs that share `memory` run one at a time. Raises InvalidArgument for a
    launch that cannot be replayed; `why_not_replayed` has the reasons.
    """

    def __init__(
        self, launch: Launch, narrow_matmuls: bool = False, memory: ProgramMemory | None = None
    ) -> None:
        reason = why_not_replayed(launch)
        if reason is not None:
            raise InvalidArgument(
                "NKW-REPLAY-LAUNCH",
                f"a launch of {launch.kernel} cannot be replayed: {reason}; launch the kernel eagerly each time",
            )
        made = Rebuilt(launch.streams)
        ranks = [stream.rank for stream in launch.streams]
        self._plans: list[Recorded] = [
            [
                (plan, stream.accumulated.get(event), event in stream.masked)
                for event, plan in enumerate(plans)
            ]
            for stream, plans in zip(launch.streams, made.plans)
        ]

        def tensor(value: Any, rank: int) -> Any:
            return made.tensor(rank, value.serial, value.layout) if isinstance(value, Result) else value

        self._returned = [
            map_leaves(partial(tensor, rank=rank), each.returned)
            for each, rank in zip(launch.interfaces, ranks)
        ]
        inputs = [[(rank, serial) for serial in each.inputs] for each, rank in zip(launch.interfaces, ranks)]
        given = [key for keys in inputs for key in keys]
        returned = [
            (rank, result.serial) for each, rank in zip(launch.interfaces, ranks) for result in each.results()
        ]
        external = {
            key: External(made.storage(*key), made.views[key]) for key in dict.fromkeys(given + returned)
        }
        self._private = [
            External(storage, made.views[key])
            for key, storage in made.storages.items()
            if not storage.buffer.on_chip and key not in external
        ]
        self._inputs = [[external[key] for key in keys] for keys in inputs]
        self._results = [each for key, each in external.items() if key not in given]
        self._external = list(external.values())
        self._tiles = Tiles(made.plans)
        self._written = {id(tile.storage) for plans in made.plans for plan in plans for tile in plan.writes}
        self._narrow_matmuls = narrow_matmuls
        self._memory = memory or ProgramMemory()
        self.fused: Fused | None = None
        self.why_not_fused: str | None = None
        self.was_interrupted = False

    @property
    def was_rewritten(self) -> bool:
        """Whether `rewrite` was called."""
        return self.fused is not None or self.why_not_fused is not None

    def rewrite(self) -> None:
        """Make the rewritten program, `fused`, or set `why_not_fused` to the reason why there is none."""
        from simulate.replay.fusion import Fused, NotFused  # most processes replay nothing

        constants = [own.storage for own in self._private if own.storage.uncounted_host is not None]
        inputs = [[each.storage for each in given] for given in self._inputs]
        external = [
            [
                *given,
                *constants,
                *(leaf.storage for leaf in list_leaves(value) if isinstance(leaf, NkiTensor)),
            ]
            for given, value in zip(inputs, self._returned)
        ]
        try:
            self.fused = Fused(self._plans, external, inputs, self._memory.buffers, self._narrow_matmuls)
        except NotFused as reason:
            self.why_not_fused = str(reason)

    def run(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        exact: bool = False,
        peers: Processes | None = None,
        disturbance: Disturbance | None = None,
    ) -> list[Any]:
        """Run the program on `arrays`, one list per rank in the order of recording; returns each rank's output.

        The plans run one by one as recorded with `exact`, before `rewrite`, with a `disturbance` of the products of
        matmuls, and where the program writes an array that overlaps another. With `peers`, this process has one rank;
        `peers` are the processes of the others. Raises InvalidArgument for arrays of other shapes or dtypes than those
        recorded and for arrays that are not contiguous, NkwError for a run-time index out of bounds; another exception
        than these leaves `was_interrupted` set.
        """
        self.was_interrupted = True
        try:
            outputs = self._run(arrays, exact, peers, disturbance)
        except NkwError:
            self.was_interrupted = False
            raise
        self.was_interrupted = False
        return outputs

    def _run(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        exact: bool,
        peers: Processes | None,
        disturbance: Disturbance | None,
    ) -> list[Any]:
        if len(arrays) != len(self._inputs):
            raise refused(f"{len(arrays)} lists of arrays", f"{len(self._inputs)}, one per rank")
        for inputs, given in zip(self._inputs, arrays):
            if len(given) != len(inputs):
                raise refused(f"{len(given)} arrays for a rank", str(len(inputs)))
            for external, array in zip(inputs, given):
                if external.storage.uncounted_host is not array:
                    external.check(array)
                    external.bind(array)
        for external in self._results:
            external.bind(np.empty(external.storage.nbytes, np.uint8))
            external.storage.uncounted_host = None  # no array of the caller's
        fused = None if exact or disturbance is not None or self._overlaps() else self.fused
        with np.errstate(all="ignore"):
            if fused is not None:
                self._tiles.unbind()
                fused.run(peers)
            else:
                for own in self._private:
                    own.allocate()
                for external in (*self._external, *self._private):
                    external.show()
                self._tiles.bind(self._memory.tiles)
                try:
                    self._execute(peers, disturbance)
                finally:
                    self._tiles.drop_conversions()
        for inputs in self._inputs:
            for external in inputs:
                if id(external.storage) in self._written:
                    external.finish()
        return [map_leaves(_to_output, value) for value in self._returned]

    def release(self) -> None:
        """Drop the arguments and results of the last launch."""
        for external in self._external:
            external.release()
        if self.fused is not None:
            self.fused.release()

    def ranks_alias(self, arrays: Sequence[Sequence[np.ndarray]]) -> bool:
        """Whether a rank writes to memory of another rank's arrays, so that values depend on the order of the ranks.

        The core scheduler runs ranks in an order that a program does not keep.
        """
        return any(
            one != other and any(np.may_share_memory(array, each) for each in arrays[other])
            for one, (held, given) in enumerate(zip(self._inputs, arrays))
            for external, array in zip(held, given)
            if id(external.storage) in self._written
            for other in range(len(arrays))
        )

    def _overlaps(self) -> bool:
        """Whether an array that the program writes shares memory with another argument of its rank."""
        for held in self._inputs:
            for external in held:
                if id(external.storage) not in self._written:
                    continue
                for other in held:
                    if other is not external and np.may_share_memory(
                        external.storage.uncounted_array, other.storage.uncounted_array
                    ):
                        return True
        return False

    def _execute(self, peers: Processes | None, disturbance: Disturbance | None) -> None:
        ranks = [_Run(recorded, disturbance) for recorded in self._plans]
        while True:
            waiting = {
                n: (rank.rendezvous, rank.operands) for n, rank in enumerate(ranks) if rank.to_rendezvous()
            }
            if not waiting:
                return
            for number, results in complete_rendezvous(waiting, peers).items():
                ranks[number].leave(results)


class _Run:
    """One rank's exact replay, from rendezvous to rendezvous."""

    def __init__(self, recorded: Recorded, disturbance: Disturbance | None) -> None:
        self._recorded = recorded
        self._disturbance = disturbance
        self._next = 0
        self._state: dict[State, np.ndarray] = {}
        self.operands: list[Any] = []
        self.rendezvous: Any = None

    def to_rendezvous(self) -> bool:
        """Run up to the next rendezvous, or to the end; returns whether there is one."""
        recorded = self._recorded
        for position in range(self._next, len(recorded)):
            plan, accumulate_mask, _ = recorded[position]
            if plan.rendezvous is not None:
                self._next, self.operands, self.rendezvous = position, read_operands(plan), plan.rendezvous
                return True
            if self._disturbance is not None and accumulate_mask is not None and len(plan.reads) == 2:
                self._disturbed(plan, accumulate_mask, self._disturbance)
            else:
                execute_again(plan, accumulate_mask, self._state, 128)
        self._next = len(recorded)
        return False

    @staticmethod
    def _disturbed(plan: Plan, accumulate_mask: Any, disturbance: Disturbance) -> None:
        """Run a matmul with a disturbed product."""
        operands, tile = read_operands(plan), plan.writes[0]
        product = disturbance(plan, operands, plan.compute(*operands)[0])
        write_result(tile, add_to_psum(tile, product, accumulate_mask), plan.domain is Domain.float32, False)

    def leave(self, results: Sequence[Any]) -> None:
        """Write this rank's results of the rendezvous, and step past it."""
        write_results(self._recorded[self._next][0], results)
        self._next += 1


def _to_output(value: Any) -> Any:
    """The array of a tensor that the kernel returned, any other value unchanged."""
    if not isinstance(value, NkiTensor):
        return value
    host = value.storage.uncounted_host
    if value.covers_storage and host is not None and host.shape == value.shape:
        return host
    value.forget_array()
    array = value.uncounted_array
    return array.astype(bool) if value.dtype == "bool_" else array
