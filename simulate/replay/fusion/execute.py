"""Execution of the fused program of all ranks: numpy calls whose operands are bound to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage
from simulate.replay.arena import Arena, operands
from simulate.replay.fusion.buffers import place_buffers
from simulate.replay.fusion.builder import array_of
from simulate.replay.fusion.elimination import (
    eliminate_concatenations,
    eliminate_dead_code,
    eliminate_result_copies,
)
from simulate.replay.fusion.graph import Op, ValueKind, View
from simulate.replay.fusion.lower import Lowering, Recorded, Unlowered
from simulate.replay.fusion.matmul_fusion import fuse_matmuls
from simulate.replay.fusion.matmul_selection import select_matmuls
from simulate.replay.fusion.packing import pack
from simulate.replay.rendezvous import complete_rendezvous
from simulate.run.execute import execute_again, read_operands, write_results
from simulate.run.processes import Processes

NumpyCall = tuple[Any, list[Any]]

_Slot = tuple[list[Any], int, tuple[int, ...], "np.dtype[Any]", int, tuple[int, ...]]
"""An argument of a call, and the layout of the array that goes there: shape, element, byte offset, byte strides."""


@dataclass(frozen=True)
class FusionReport:
    """Counts of one rank's program: recorded instructions, numpy calls, matmuls fused away, unlowered instructions."""

    instructions: int
    calls: int
    matmuls_fused: int
    unlowered: int


class _RankProgram:
    """The numpy calls of one rank, in segments between its rendezvous."""

    def __init__(
        self, recorded: Recorded, external: Sequence[Storage], inputs: set[int], narrow: bool
    ) -> None:
        lowering = Lowering(recorded, external)
        builder = lowering.run()
        eliminate_dead_code(builder)
        fused = fuse_matmuls(builder)
        eliminate_concatenations(builder)
        results = lowering.results_written_once(inputs)
        eliminate_result_copies(builder, results)
        eliminate_concatenations(builder)
        select_matmuls(builder, narrow)
        pack(builder, results)
        self.memory = lowering.memory
        self._temporary = [
            s for s in lowering.memory.values() if id(s) not in {id(each) for each in external}
        ]
        self._unlowered_tiles: list[NkiTensor] = []
        self.segments: list[list[NumpyCall]] = [[]]
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
            fused,
            sum(isinstance(op.opcode, Unlowered) for op in builder.ops),
        )

    def _add(self, op: Op) -> None:
        if isinstance(op.opcode, Unlowered):
            plan = op.opcode.plan
            self._unlowered_tiles += operands(plan)
            if plan.rendezvous is not None:
                self.rendezvous.append(plan)
                self.segments.append([])
            else:
                self.segments[-1].append((_repeat_recorded, [plan, op.opcode.accumulate_mask]))
            return
        for function, arguments in op.opcode.calls(op.writes, op.reads):
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
        """Bind the buffers to the bytes of a block from `start` on."""
        for arguments, place, shape, element, offset, strides in self._buffers:
            arguments[place] = np.ndarray(shape, element, block, start + offset, strides)

    def release(self) -> None:
        """Drop every array of memory values until the next `bind_memory`."""
        self._bound.clear()
        for slots in self._slots.values():
            for arguments, place, *_ in slots:
                arguments[place] = None
        for tile in self._unlowered_tiles:
            tile.forget_array()

    def bind_memory(self) -> None:
        """Bind memory values to the arrays that their storages have now."""
        for storage in self._temporary:
            own = self._bound.get(id(storage))
            if own is None:
                own = np.empty(storage.nbytes, np.uint8)
            storage.uncounted_array = own
        changed = False
        for key, storage in self.memory.items():
            if self._bound.get(key) is storage.uncounted_array:
                continue
            changed = True
            block = self._bound[key] = storage.uncounted_array
            for arguments, place, shape, element, offset, strides in self._slots.get(key, ()):
                arguments[place] = np.ndarray(shape, element, block, offset, strides)
        if changed or self._temporary:
            for tile in self._unlowered_tiles:
                tile.forget_array()


def _layout(view: View, start: int) -> tuple[tuple[int, ...], np.dtype[Any], int, tuple[int, ...]]:
    """Shape, element, byte offset and byte strides of a view whose value begins at byte `start`."""
    element = view.value.element
    width = element.itemsize
    return view.shape, element, start + view.offset * width, tuple(stride * width for stride in view.strides)


class Fused:
    """The rewritten program of all ranks."""

    def __init__(
        self,
        recorded: Sequence[Recorded],
        external: Sequence[Sequence[Storage]],
        inputs: Sequence[Sequence[Storage]],
        memory: Arena,
        narrow: bool = False,
    ) -> None:
        """`external` are each rank's arguments and results, `inputs` the arguments; buffers lie in `memory`.

        Raises NotFused.
        """
        self._memory = memory
        input_ids = {id(storage) for rank in inputs for storage in rank}
        self._ranks = [_RankProgram(plans, own, input_ids, narrow) for plans, own in zip(recorded, external)]
        self._block: np.ndarray | None = None
        self.reports = [rank.report for rank in self._ranks]

    def release(self) -> None:
        """Drop the arrays of the last launch."""
        for rank in self._ranks:
            rank.release()

    def run(self, peers: Processes | None = None) -> None:
        """Run the calls on the arrays to which the arguments' and results' storages are bound.

        With `peers`, this process has one rank; `peers` are the processes of the others.
        """
        block = self._memory.at_least(sum(rank.size for rank in self._ranks))
        if block is not self._block:
            self._block = block
            start = 0
            for rank in self._ranks:
                rank.bind_buffers(block, start)
                start += rank.size
        for rank in self._ranks:
            rank.bind_memory()
            _run(rank.segments[0])
        passed = [0] * len(self._ranks)
        while True:
            plans = {
                n: rank.rendezvous[passed[n]]
                for n, rank in enumerate(self._ranks)
                if passed[n] < len(rank.rendezvous)
            }
            if not plans:
                return
            waiting = {
                n: (plan.rendezvous, read_operands(plan)) for n, plan in plans.items() if plan.rendezvous
            }
            for number, results in complete_rendezvous(waiting, peers).items():
                write_results(plans[number], results)
                passed[number] += 1
                _run(self._ranks[number].segments[passed[number]])


def _repeat_recorded(plan: Plan, accumulate_mask: Any) -> None:
    """Run an unlowered instruction; other calls may have written its tiles, so float32 conversions are dropped."""
    for tile in plan.reads:
        tile.storage.float_views.clear()
    execute_again(plan, accumulate_mask, {}, 0)


def _run(steps: list[NumpyCall]) -> None:
    for function, arguments in steps:
        function(*arguments)
