"""The rewritten program of all ranks: numpy calls with their operands at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage
from simulate.replay.arena import Arena
from simulate.replay.fusion.buffers import place_buffers
from simulate.replay.fusion.builder import array_of
from simulate.replay.fusion.elimination import drop_unused, make_in_place, prepare_products, show_neighbours
from simulate.replay.fusion.graph import Op, ValueKind, View
from simulate.replay.fusion.lower import AsRecorded, Lowering, Recorded
from simulate.replay.fusion.matmul_fusion import join_products
from simulate.replay.rendezvous import hold
from simulate.run.execute import operands_of, put_all, repeat
from simulate.run.processes import Processes

Step = tuple[Any, list[Any]]

_Slot = tuple[list[Any], int, tuple[int, ...], "np.dtype[Any]", int, tuple[int, ...]]
"""An argument of a call, and the layout of the array that goes there: shape, element, byte offset, byte strides."""


@dataclass(frozen=True)
class FusionReport:
    """What became of the instructions of one rank: numpy calls, joined matmuls, and those carried out as recorded."""

    instructions: int
    calls: int
    products_joined: int
    as_recorded: int


class _Rank:
    """One rank's calls, cut where it meets others."""

    def __init__(self, recorded: Recorded, outside: Sequence[Storage], given: set[int], narrow: bool) -> None:
        lowering = Lowering(recorded, outside)
        builder = lowering.run()
        drop_unused(builder)
        joined = join_products(builder)
        show_neighbours(builder)
        results = lowering.written_once(given)
        make_in_place(builder, results)
        prepare_products(builder, narrow)
        self.homes = lowering.homes
        self._own = [s for s in lowering.homes.values() if id(s) not in {id(each) for each in outside}]
        self._tiles: list[NkiTensor] = []
        self.segments: list[list[Step]] = [[]]
        self.rendezvous: list[Plan] = []
        self._slots: dict[int, list[_Slot]] = {}
        self._bound: dict[int, np.ndarray] = {}
        self._offsets, self.size = place_buffers(builder.ops)
        self._buffers: list[_Slot] = []
        for op in builder.ops:
            self._add(op)
        self.report = FusionReport(
            len(recorded),
            sum(map(len, self.segments)) + len(self.rendezvous),
            joined,
            sum(isinstance(op.work, AsRecorded) for op in builder.ops),
        )

    def _add(self, op: Op) -> None:
        if isinstance(op.work, AsRecorded):
            plan = op.work.plan
            tiles = [*plan.reads, *plan.writes]
            self._tiles += tiles + [tile.dynamic.index for tile in tiles if tile.dynamic is not None]
            if plan.rendezvous is not None:
                self.rendezvous.append(plan)
                self.segments.append([])
            else:
                self.segments[-1].append((_again, [plan, op.work.keeps]))
            return
        for function, arguments in op.work.steps(op.writes, op.reads):
            for place, each in enumerate(arguments):
                if isinstance(each, View):
                    self._operand(arguments, place, each)
            self.segments[-1].append((function, arguments))

    def _operand(self, arguments: list[Any], place: int, view: View) -> None:
        if view.value.kind is ValueKind.constant:
            arguments[place] = array_of(view)
        elif view.value.kind is ValueKind.buffer:
            start = self._offsets[view.value.number]
            self._buffers.append((arguments, place, *_layout(view, start)))
        else:
            assert view.value.storage is not None
            self._slots.setdefault(id(view.value.storage), []).append((arguments, place, *_layout(view, 0)))

    def bind_buffers(self, block: np.ndarray, start: int) -> None:
        """Put the buffers into a block from a byte on."""
        for arguments, place, shape, element, offset, strides in self._buffers:
            arguments[place] = np.ndarray(shape, element, block, start + offset, strides)

    def release(self) -> None:
        """Leave every home without its bytes until the next `bind_homes`."""
        self._bound.clear()
        for slots in self._slots.values():
            for arguments, place, *_ in slots:
                arguments[place] = None
        for tile in self._tiles:
            tile.forget_array()

    def bind_homes(self) -> None:
        """Let the calls work on the bytes that the homes have now."""
        for storage in self._own:
            own = self._bound.get(id(storage))
            if own is None:
                own = np.empty(storage.nbytes, np.uint8)
            storage.array = own
        changed = False
        for key, storage in self.homes.items():
            if self._bound.get(key) is storage.array:
                continue
            changed = True
            block = self._bound[key] = storage.array
            for arguments, place, shape, element, offset, strides in self._slots.get(key, ()):
                arguments[place] = np.ndarray(shape, element, block, offset, strides)
        if changed or self._own:
            for tile in self._tiles:
                tile.forget_array()


def _layout(view: View, start: int) -> tuple[tuple[int, ...], np.dtype[Any], int, tuple[int, ...]]:
    """Shape, element, byte offset and byte strides of a view of a value that begins at a byte."""
    element = view.value.element
    width = element.itemsize
    return view.shape, element, start + view.offset * width, tuple(stride * width for stride in view.strides)


class Fused:
    """The rewritten program of all ranks."""

    def __init__(
        self,
        recorded: Sequence[Recorded],
        outside: Sequence[Sequence[Storage]],
        given: Sequence[Sequence[Storage]],
        memory: Arena,
        narrow: bool = False,
    ) -> None:
        """`outside` are each rank's arguments and results, `given` the arguments; buffers lie in `memory`.

        Raises NotFused.
        """
        self._memory = memory
        inputs = {id(storage) for rank in given for storage in rank}
        self._ranks = [_Rank(plans, own, inputs, narrow) for plans, own in zip(recorded, outside)]
        self._block: np.ndarray | None = None
        self.reports = [rank.report for rank in self._ranks]

    def release(self) -> None:
        """Hold no array of the last launch any more."""
        for rank in self._ranks:
            rank.release()

    def run(self, elsewhere: Processes | None = None) -> None:
        """Carry the calls out on the arrays to which the arguments' and results' storages are bound.

        With `elsewhere`, the only rank here meets those of other processes.
        """
        block = self._memory.at_least(sum(rank.size for rank in self._ranks))
        if block is not self._block:
            self._block = block
            start = 0
            for rank in self._ranks:
                rank.bind_buffers(block, start)
                start += rank.size
        for rank in self._ranks:
            rank.bind_homes()
            _run(rank.segments[0])
        met = [0] * len(self._ranks)
        while True:
            plans = {
                n: rank.rendezvous[met[n]]
                for n, rank in enumerate(self._ranks)
                if met[n] < len(rank.rendezvous)
            }
            if not plans:
                return
            waiting = {
                n: (plan.rendezvous, operands_of(plan)) for n, plan in plans.items() if plan.rendezvous
            }
            for number, results in hold(waiting, elsewhere).items():
                put_all(plans[number], results)
                met[number] += 1
                _run(self._ranks[number].segments[met[number]])


def _again(plan: Plan, keeps: Any) -> None:
    """Carry out an instruction as recorded; its tiles may have been written by other calls since."""
    for tile in plan.reads:
        tile.storage.float_views.clear()
    repeat(plan, keeps, {}, 0)


def _run(steps: list[Step]) -> None:
    for function, arguments in steps:
        function(*arguments)
