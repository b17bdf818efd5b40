"""A program: the instructions of a launch, run again on other arrays exactly as recorded, or rewritten to be faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simulate.errors import NkwError
from simulate.isa.plan import Domain, Plan, State
from simulate.memory import NkiTensor, Storage
from simulate.replay.arena import Arena, Tiles
from simulate.replay.rendezvous import hold
from simulate.run.arguments import like
from simulate.run.execute import accumulated, operands_of, put, put_all, repeat
from simulate.run.launch import Launch, Result
from simulate.run.processes import Processes
from simulate.run.rebuild import NO_BYTES, Rebuilt

if TYPE_CHECKING:
    from simulate.replay.fusion import Fused

Recorded = list[tuple[Plan, Any, bool]]
"""Plans in program order, to which PSUM elements a matmul was added, and whether a result was written in part."""

Disturbance = Callable[[Plan, list[Any], np.ndarray], np.ndarray]


class _External:
    """Storage in HBM with every view that the plans take of it.

    That of an argument or a result has other bytes in every launch; one of the kernel's own keeps its bytes.
    """

    def __init__(self, storage: Storage, views: list[NkiTensor]) -> None:
        self.storage = storage
        self.views = views
        self._seen: np.ndarray | None = None

    def bind(self, data: np.ndarray) -> None:
        """Let the storage's bytes be those of `data`."""
        storage = self.storage
        if storage.host is data:
            return
        storage.host = data
        storage.array = data.reshape(-1).view(np.uint8)
        storage.float_views.clear()

    def allocate(self) -> None:
        """Make bytes for a tensor of the kernel's own, at the first exact replay."""
        if self.storage.array is NO_BYTES:
            self.storage.array = np.empty(self.storage.nbytes, np.uint8)

    def release(self) -> None:
        """Hold no array of a launch until the next one."""
        self.storage.host = self._seen = None
        self.storage.array = NO_BYTES
        self.storage.float_views.clear()
        for view in self.views:
            view.forget_array()

    def finish(self) -> None:
        """Let an array of bool hold 0 and 1, as it does after an eager launch; a tile of bool_ may hold any byte."""
        host = self.storage.host
        if host is not None and host.dtype == bool:
            np.not_equal(host.view(np.uint8), 0, out=host)

    def show(self) -> None:
        """Let the plans' views show the bytes that the storage has now."""
        if self._seen is not self.storage.array:
            self._seen = self.storage.array
            for view in self.views:
                view.forget_array()


class ProgramMemory:
    """The host memory that programs share: `tiles` of exact replays, `buffers` of rewritten programs."""

    def __init__(self) -> None:
        self.tiles = Arena()
        self.buffers = Arena()


class Program:
    """The instructions of every rank of one eager launch, and how its arguments and results hang on them.

    Ranks have one physical core each. Programs that share `memory` run one at a time.
    """

    def __init__(
        self, launch: Launch, narrow_products: bool = False, memory: ProgramMemory | None = None
    ) -> None:
        made = Rebuilt(launch.streams)
        ranks = [stream.rank for stream in launch.streams]
        self._plans: list[Recorded] = [
            [
                (plan, stream.accumulated.get(event), event in stream.masked)
                for event, plan in enumerate(plans)
            ]
            for stream, plans in zip(launch.streams, made.plans)
        ]
        self._returned = [_tensors(each.returned, rank, made) for each, rank in zip(launch.interfaces, ranks)]
        self._given = [
            [made.storage(rank, serial) for serial in each.inputs]
            for each, rank in zip(launch.interfaces, ranks)
        ]
        key_of = {id(storage): key for key, storage in made.storages.items()}
        given = {id(storage) for rank in self._given for storage in rank}
        external: dict[int, _External] = {}
        for storage in (s for rank in (*self._given, *map(storages_of, self._returned)) for s in rank):
            if id(storage) not in external:
                external[id(storage)] = _External(storage, made.views[key_of[id(storage)]])
        self._inside = [
            _External(storage, made.views[key])
            for key, storage in made.storages.items()
            if not storage.buffer.on_chip and id(storage) not in external
        ]
        self._inputs = [[external[id(storage)] for storage in rank] for rank in self._given]
        self._results = [each for key, each in external.items() if key not in given]
        self._external = list(external.values())
        self._tiles = Tiles(made.plans)
        self._written = {id(tile.storage) for plans in made.plans for plan in plans for tile in plan.writes}
        self._narrow_products = narrow_products
        self._memory = memory or ProgramMemory()
        self.fused: Fused | None = None
        self.not_fused: str | None = None
        self.was_interrupted = False

    @property
    def was_rewritten(self) -> bool:
        """Whether `rewrite` was called."""
        return self.fused is not None or self.not_fused is not None

    def rewrite(self) -> None:
        """Make the rewritten program, `fused`; where there is none, `not_fused` says why."""
        from simulate.replay.fusion import Fused, NotFused  # most processes replay nothing

        constants = [own.storage for own in self._inside if own.storage.host is not None]
        outside = [
            [*given, *constants, *(s for s in storages_of(value) if all(s is not each for each in given))]
            for given, value in zip(self._given, self._returned)
        ]
        try:
            self.fused = Fused(self._plans, outside, self._given, self._memory.buffers, self._narrow_products)
        except NotFused as reason:
            self.not_fused = str(reason)

    def run(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        exact: bool = False,
        elsewhere: Processes | None = None,
        disturbance: Disturbance | None = None,
    ) -> list[Any]:
        """Carry out the plans on `arrays`, one list per rank in the order of recording; returns each rank's output.

        With `exact`, before `rewrite`, and where arrays overlap that the program writes, the plans run one by one as
        recorded; a `disturbance` may then change the products of matmuls. With `elsewhere`, the only rank here meets
        those of other processes. Raises NkwError for a run-time index that does not exist; `was_interrupted` tells
        whether anything else has ended the last run before its end.
        """
        self.was_interrupted = True
        try:
            outputs = self._run(arrays, exact, elsewhere, disturbance)
        except NkwError:
            self.was_interrupted = False
            raise
        self.was_interrupted = False
        return outputs

    def _run(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        exact: bool,
        elsewhere: Processes | None,
        disturbance: Disturbance | None,
    ) -> list[Any]:
        for inputs, given in zip(self._inputs, arrays):
            for external, array in zip(inputs, given):
                external.bind(array)
        for external in self._results:
            external.bind(np.empty(external.storage.nbytes, np.uint8))
            external.storage.host = None  # no array of the caller's
        fused = None if exact or disturbance is not None or self._overlaps() else self.fused
        with np.errstate(all="ignore"):
            if fused is not None:
                self._tiles.unbind()
                fused.run(elsewhere)
            else:
                for own in self._inside:
                    own.allocate()
                for external in (*self._external, *self._inside):
                    external.show()
                self._tiles.bind(self._memory.tiles)
                try:
                    self._execute(elsewhere, disturbance)
                finally:
                    self._tiles.drop_conversions()
        for inputs in self._inputs:
            for external in inputs:
                if id(external.storage) in self._written:
                    external.finish()
        return [_given_back(value) for value in self._returned]

    def release(self) -> None:
        """Hold no arguments and results of the last launch any more."""
        for external in self._external:
            external.release()
        if self.fused is not None:
            self.fused.release()

    def ranks_share(self, arrays: Sequence[Sequence[np.ndarray]]) -> bool:
        """Whether a rank writes to memory of another one's arrays, so that the turns of ranks decide what is there.

        Ranks take turns at their rendezvous in the order of arrival, which a program does not keep.
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
                        external.storage.array, other.storage.array
                    ):
                        return True
        return False

    def _execute(self, elsewhere: Processes | None, disturbance: Disturbance | None) -> None:
        ranks = [_Run(recorded, disturbance) for recorded in self._plans]
        while True:
            waiting = {
                n: (rank.rendezvous, rank.operands) for n, rank in enumerate(ranks) if rank.to_rendezvous()
            }
            if not waiting:
                return
            for number, results in hold(waiting, elsewhere).items():
                ranks[number].leave(results)


class _Run:
    """One rank on its way through its plans."""

    def __init__(self, recorded: Recorded, disturbance: Disturbance | None) -> None:
        self._recorded = recorded
        self._disturbance = disturbance
        self._next = 0
        self._state: dict[State, np.ndarray] = {}
        self.operands: list[Any] = []
        self.rendezvous: Any = None

    def to_rendezvous(self) -> bool:
        """Run up to the next rendezvous, or to the end; tells whether there is one."""
        recorded = self._recorded
        for position in range(self._next, len(recorded)):
            plan, keeps, _ = recorded[position]
            if plan.rendezvous is not None:
                self._next, self.operands, self.rendezvous = position, operands_of(plan), plan.rendezvous
                return True
            if self._disturbance is not None and keeps is not None and len(plan.reads) == 2:
                self._disturbed(plan, keeps, self._disturbance)
            else:
                repeat(plan, keeps, self._state, 128)
        self._next = len(recorded)
        return False

    @staticmethod
    def _disturbed(plan: Plan, keeps: Any, disturbance: Disturbance) -> None:
        """Carry out a matmul with its product moved."""
        operands, tile = operands_of(plan), plan.writes[0]
        product = disturbance(plan, operands, plan.compute(*operands)[0])
        put(tile, accumulated(tile, product, keeps), plan.domain is Domain.float32, False)

    def leave(self, results: Sequence[Any]) -> None:
        """Write what the rendezvous gave this rank, and go on after it."""
        put_all(self._recorded[self._next][0], results)
        self._next += 1


def storages_of(value: Any) -> list[Storage]:
    """The storages behind the tensors that a kernel returned."""
    if isinstance(value, NkiTensor):
        return [value.storage]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [storage for part in value for storage in storages_of(part)]
    return []


def _given_back(value: Any) -> Any:
    """What the caller gets for what the kernel returned."""
    if isinstance(value, NkiTensor):
        host = value.storage.host
        if value.whole and host is not None and host.shape == value.shape:
            return host
        value.forget_array()
        array = value.array
        return array.astype(bool) if value.dtype == "bool_" else array
    if isinstance(value, (tuple, list)):
        return like(value, [_given_back(part) for part in value])
    if isinstance(value, dict):
        return {key: _given_back(part) for key, part in value.items()}
    return value


def _tensors(value: Any, rank: int, made: Rebuilt) -> Any:
    """What a kernel returned with a tensor for every Result."""
    if isinstance(value, Result):
        return made.tensor(rank, value.serial, value.layout)
    if isinstance(value, (tuple, list)):
        return like(value, [_tensors(part, rank, made) for part in value])
    if isinstance(value, dict):
        return {key: _tensors(part, rank, made) for key, part in value.items()}
    return value
