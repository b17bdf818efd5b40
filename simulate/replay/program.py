"""Programs: the instructions of a launch, run on other arrays.

A program runs its plans one by one as recorded, which is an exact replay, or rewritten into fewer numpy calls
(`simulate.replay.fusion`). To bind a tensor is to set the byte array of its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nkw.errors import InvalidArgument, NkwError
from simulate.isa.plan import Domain, Plan, State
from simulate.memory import NkiTensor
from simulate.replay.arena import Arena, Tiles
from simulate.replay.external import External, build_arrays_error
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
"""Plan, accumulate mask (see `execute_again`) and whether a result was masked, by instruction in program order."""

Perturbation = Callable[[Plan, list[Any], np.ndarray], np.ndarray]

SEVERAL_CORES = "a logical core of several physical cores"


def why_not_replayed(launch: Launch) -> str | None:
    """Return the reason, a text, why a launch cannot be replayed on other arrays, or None if it can."""
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
    """Host memory that programs share: `tiles` for on-chip tiles in exact replays, `buffers` for rewritten programs."""

    def __init__(self) -> None:
        self.tiles = Arena()
        self.buffers = Arena()


class Program:
    """Instructions of every rank of one eager launch, to be run on other arguments.

    Every rank has one physical core. Programs that share `memory` must run one at a time. `fused` is the rewritten
    program, or None. `was_interrupted` tells that a run ended by an exception that left memory half bound.
    """

    def __init__(
        self, launch: Launch, narrow_matmuls: bool = False, memory: ProgramMemory | None = None
    ) -> None:
        """Rebuild the plans of a launch over new tensors.

        Args:
            launch: An eager launch.
            narrow_matmuls: Whether the rewritten program multiplies bfloat16 matrices without widening them.
            memory: Host memory to share with other programs; None allocates memory for this program alone.

        Raises:
            InvalidArgument: The launch cannot be replayed; `why_not_replayed` returns the reason.
        """
        reason = why_not_replayed(launch)
        if reason is not None:
            raise InvalidArgument(
                "NKW-REPLAY-LAUNCH",
                f"a launch of {launch.kernel} cannot be replayed: {reason}; launch the kernel eagerly each time",
            )
        rebuilt = Rebuilt(launch.streams)
        ranks = [stream.rank for stream in launch.streams]
        self._plans: list[Recorded] = [
            [
                (plan, stream.accumulated.get(event), event in stream.masked)
                for event, plan in enumerate(plans)
            ]
            for stream, plans in zip(launch.streams, rebuilt.plans)
        ]

        def rebuild_tensor(value: Any, rank: int) -> Any:
            return rebuilt.tensor(rank, value.serial, value.layout) if isinstance(value, Result) else value

        self._returned = [
            map_leaves(partial(rebuild_tensor, rank=rank), interface.returned)
            for interface, rank in zip(launch.interfaces, ranks)
        ]
        inputs = [
            [(rank, serial) for serial in interface.inputs]
            for interface, rank in zip(launch.interfaces, ranks)
        ]
        input_keys = [key for keys in inputs for key in keys]
        returned = [
            (rank, result.serial)
            for interface, rank in zip(launch.interfaces, ranks)
            for result in interface.results()
        ]
        external = {
            key: External(rebuilt.storage(*key), rebuilt.views[key])
            for key in dict.fromkeys(input_keys + returned)
        }
        self._private = [
            External(storage, rebuilt.views[key])
            for key, storage in rebuilt.storages.items()
            if not storage.buffer.on_chip and key not in external
        ]
        self._inputs = [[external[key] for key in keys] for keys in inputs]
        self._results = [
            external_tensor for key, external_tensor in external.items() if key not in input_keys
        ]
        self._external = list(external.values())
        self._tiles = Tiles(rebuilt.plans)
        self._written = {
            id(tile.storage) for plans in rebuilt.plans for plan in plans for tile in plan.writes
        }
        self._narrow_matmuls = narrow_matmuls
        self._memory = memory or ProgramMemory()
        self.fused: Fused | None = None
        self.why_not_fused: str | None = None
        self.was_interrupted = False

    @property
    def was_rewritten(self) -> bool:
        """Whether `rewrite` was called, also without success."""
        return self.fused is not None or self.why_not_fused is not None

    def rewrite(self) -> None:
        """Set `fused` to the rewritten program; if there is none, set `why_not_fused` to the reason."""
        from simulate.replay.fusion import Fused, NotFused  # most processes replay nothing

        constants = [
            private.storage for private in self._private if private.storage.uncounted_host is not None
        ]
        inputs = [[tensor.storage for tensor in rank_inputs] for rank_inputs in self._inputs]
        external = [
            [
                *rank_inputs,
                *constants,
                *(leaf.storage for leaf in list_leaves(value) if isinstance(leaf, NkiTensor)),
            ]
            for rank_inputs, value in zip(inputs, self._returned)
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
        perturbation: Perturbation | None = None,
    ) -> list[Any]:
        """Run the program on new arrays and return each rank's output; arrays that the kernel writes are updated.

        The rewritten program runs if `rewrite` made one. The plans run one by one as recorded with `exact`, with a
        `perturbation`, or if the program writes an array that overlaps another argument. An exception that is no
        NkwError leaves `was_interrupted` set.

        Args:
            arrays: The array arguments of each rank, in the order of recording.
            exact: Whether to run the plans as recorded.
            peers: The processes of the other ranks, or None if this process has all ranks.
            perturbation: A function of a matmul's plan, operands and product that returns another product.

        Raises:
            InvalidArgument: An array does not have the recorded shape and dtype, or is not contiguous.
            NkwError: A run-time index is out of bounds.
        """
        self.was_interrupted = True
        try:
            outputs = self._run(arrays, exact, peers, perturbation)
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
        perturbation: Perturbation | None,
    ) -> list[Any]:
        """Bind storages to the arrays, run the program as rewritten or as recorded, and return each rank's output.

        Raises InvalidArgument for arrays of other shapes, dtypes or numbers, and NkwError for a run-time index out of
        bounds.
        """
        if len(arrays) != len(self._inputs):
            raise build_arrays_error(f"{len(arrays)} lists of arrays", f"{len(self._inputs)}, one per rank")
        for inputs, rank_arrays in zip(self._inputs, arrays):
            if len(rank_arrays) != len(inputs):
                raise build_arrays_error(f"{len(rank_arrays)} arrays for a rank", str(len(inputs)))
            for external, array in zip(inputs, rank_arrays):
                if external.storage.uncounted_host is not array:
                    external.check(array)
                    external.bind(array)
        for external in self._results:
            external.bind(np.empty(external.storage.nbytes, np.uint8))
            external.storage.uncounted_host = None  # no array of the caller's
        fused = None if exact or perturbation is not None or self._has_overlaps() else self.fused
        with np.errstate(all="ignore"):
            if fused is not None:
                self._tiles.unbind()
                fused.run(peers)
            else:
                for private in self._private:
                    private.allocate()
                for external in (*self._external, *self._private):
                    external.show()
                self._tiles.bind(self._memory.tiles)
                try:
                    self._execute(peers, perturbation)
                finally:
                    self._tiles.drop_conversions()
        for inputs in self._inputs:
            for external in inputs:
                if id(external.storage) in self._written:
                    external.finish()
        return [map_leaves(_read_output, value) for value in self._returned]

    def release(self) -> None:
        """Drop the arrays of arguments and results that the last run bound."""
        for external in self._external:
            external.release()
        if self.fused is not None:
            self.fused.release()

    def has_aliased_ranks(self, arrays: Sequence[Sequence[np.ndarray]]) -> bool:
        """Return whether a rank writes to an array that shares memory with another rank's arguments.

        Values then depend on the order of ranks. The core scheduler runs ranks in an order that a program does not
        keep.

        Args:
            arrays: The array arguments of each rank.
        """
        return any(
            rank != other_rank
            and any(np.may_share_memory(array, other_array) for other_array in arrays[other_rank])
            for rank, (inputs, rank_arrays) in enumerate(zip(self._inputs, arrays))
            for external, array in zip(inputs, rank_arrays)
            if id(external.storage) in self._written
            for other_rank in range(len(arrays))
        )

    def _has_overlaps(self) -> bool:
        """Return whether an argument that the program writes now shares memory with another argument of its rank."""
        for inputs in self._inputs:
            for external in inputs:
                if id(external.storage) not in self._written:
                    continue
                for other_input in inputs:
                    if other_input is not external and np.may_share_memory(
                        external.storage.uncounted_array, other_input.storage.uncounted_array
                    ):
                        return True
        return False

    def _execute(self, peers: Processes | None, perturbation: Perturbation | None) -> None:
        """Run the plans of all ranks as recorded, each rank up to its next rendezvous in turn, until all have ended."""
        ranks = [_Run(recorded, perturbation) for recorded in self._plans]
        while True:
            waiting = {
                n: (rank.rendezvous, rank.operands)
                for n, rank in enumerate(ranks)
                if rank.run_to_rendezvous()
            }
            if not waiting:
                return
            for rank, results in complete_rendezvous(waiting, peers).items():
                ranks[rank].finish_rendezvous(results)


class _Run:
    """Run of one rank's plans as recorded, which stops at every rendezvous.

    At a stop, `rendezvous` and `operands` are what the rank exchanges.
    """

    def __init__(self, recorded: Recorded, perturbation: Perturbation | None) -> None:
        self._recorded = recorded
        self._perturbation = perturbation
        self._next = 0
        self._state: dict[State, np.ndarray] = {}
        self.operands: list[Any] = []
        self.rendezvous: Any = None

    def run_to_rendezvous(self) -> bool:
        """Execute plans up to the next rendezvous or to the end; returns whether a rendezvous was reached."""
        recorded = self._recorded
        for position in range(self._next, len(recorded)):
            plan, accumulate_mask, _ = recorded[position]
            if plan.rendezvous is not None:
                self._next, self.operands, self.rendezvous = position, read_operands(plan), plan.rendezvous
                return True
            if self._perturbation is not None and accumulate_mask is not None and len(plan.reads) == 2:
                self._execute_perturbed(plan, accumulate_mask, self._perturbation)
            else:
                execute_again(plan, accumulate_mask, self._state, 128)
        self._next = len(recorded)
        return False

    @staticmethod
    def _execute_perturbed(plan: Plan, accumulate_mask: Any, perturbation: Perturbation) -> None:
        """Compute a matmul, and write its product after `perturbation` has changed it."""
        operands, tile = read_operands(plan), plan.writes[0]
        product = perturbation(plan, operands, plan.compute(*operands)[0])
        write_result(tile, add_to_psum(tile, product, accumulate_mask), plan.domain is Domain.float32, False)

    def finish_rendezvous(self, results: Sequence[Any]) -> None:
        """Write this rank's results of the rendezvous, so that the next run continues after it."""
        write_results(self._recorded[self._next][0], results)
        self._next += 1


def _read_output(value: Any) -> Any:
    """Return the array of a tensor that the kernel returned, and any other value unchanged.

    It is the caller's array if the tensor is an entire argument.
    """
    if not isinstance(value, NkiTensor):
        return value
    host = value.storage.uncounted_host
    if value.covers_storage and host is not None and host.shape == value.shape:
        return host
    value.forget_array()
    array = value.uncounted_array
    return array.astype(bool) if value.dtype == "bool_" else array
