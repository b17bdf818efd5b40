"""Execution of rewritten programs: numpy calls whose operands are bound to arrays.

To bind an operand is to put a NumPy view into the argument list of its call. Buffers are bound when the host memory
changes, memory values when a launch has other arrays. The calls of a rank are cut into segments between its
rendezvous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage
from simulate.replay.arena import Arena, list_operands
from simulate.replay.fusion.buffers import place_buffers
from simulate.replay.fusion.builder import read_constant
from simulate.replay.fusion.elimination import (
    eliminate_concatenations,
    eliminate_dead_code,
    eliminate_result_copies,
)
from simulate.replay.fusion.graph import Op, ValueLocation, View
from simulate.replay.fusion.lower import Lowering, Recorded, Unlowered
from simulate.replay.fusion.matmul_fusion import fuse_matmuls
from simulate.replay.fusion.matmul_selection import select_matmuls
from simulate.replay.fusion.packing import pack
from simulate.replay.rendezvous import complete_rendezvous
from simulate.run.execute import execute_again, read_operands, write_results
from simulate.run.processes import Processes

NumpyCall = tuple[Any, list[Any]]

_Slot = tuple[list[Any], int, tuple[int, ...], "np.dtype[Any]", int, tuple[int, ...]]
"""Argument list and position of an operand, and its layout: shape, numpy dtype, byte offset, byte strides."""


@dataclass(frozen=True)
class FusionReport:
    """Counts of one rank's program.

    instructions: recorded instructions. calls: numpy calls and rendezvous. matmuls_fused: matmuls that fusion
    removed. unlowered: instructions that run as recorded.
    """

    instructions: int
    calls: int
    matmuls_fused: int
    unlowered: int


class _RankProgram:
    """Numpy calls of one rank, in segments between its rendezvous; `size` is the bytes of its buffers."""

    def __init__(
        self, recorded: Recorded, external: Sequence[Storage], inputs: set[int], narrow: bool
    ) -> None:
        """Rewrite the recorded plans of a rank by all passes.

        Args:
            recorded: The plans.
            external: The storages of arguments, constants and results.
            inputs: The ids of the storages of all ranks' arguments.
            narrow: Whether a library multiplies bfloat16 matrices without widening them.

        Raises:
            NotFused: The program cannot be rewritten.
        """
        lowering = Lowering(recorded, external)
        builder = lowering.run()
        eliminate_dead_code(builder)
        fused = fuse_matmuls(builder)
        eliminate_concatenations(builder)
        results = lowering.find_results_written_once(inputs)
        eliminate_result_copies(builder, results)
        eliminate_concatenations(builder)
        select_matmuls(builder, narrow)
        pack(builder, results)
        self.memory = lowering.memory
        self._temporary = [
            storage
            for storage in lowering.memory.values()
            if id(storage) not in {id(external_storage) for external_storage in external}
        ]
        self._unlowered_tiles: list[NkiTensor] = []
        self.segments: list[list[NumpyCall]] = [[]]
        self.rendezvous: list[Plan] = []
        self._slots: dict[int, list[_Slot]] = {}
        self._bound: dict[int, np.ndarray] = {}
        self._offsets, self.size = place_buffers(builder.ops)
        self._buffers: list[_Slot] = []
        for op in builder.ops:
            self._add_op(op)
        self.report = FusionReport(
            len(recorded),
            sum(map(len, self.segments)) + len(self.rendezvous),
            fused,
            sum(isinstance(op.opcode, Unlowered) for op in builder.ops),
        )

    def _add_op(self, op: Op) -> None:
        """Append the calls of an operation to the last segment; a rendezvous begins a new segment."""
        if isinstance(op.opcode, Unlowered):
            plan = op.opcode.plan
            self._unlowered_tiles += list_operands(plan)
            if plan.rendezvous is not None:
                self.rendezvous.append(plan)
                self.segments.append([])
            else:
                self.segments[-1].append((_execute_recorded, [plan, op.opcode.accumulate_mask]))
            return
        for function, arguments in op.opcode.list_calls(op.writes, op.reads):
            for position, argument in enumerate(arguments):
                if isinstance(argument, View):
                    self._add_operand(arguments, position, argument)
            self.segments[-1].append((function, arguments))

    def _add_operand(self, arguments: list[Any], position: int, view: View) -> None:
        """Note where an operand has to be bound: a constant now, buffers and memory values later."""
        if view.value.location is ValueLocation.constant:
            arguments[position] = read_constant(view)
        elif view.value.location is ValueLocation.buffer:
            start = self._offsets[view.value.number]
            self._buffers.append((arguments, position, *_compute_layout(view, start)))
        else:
            assert view.value.storage is not None
            self._slots.setdefault(id(view.value.storage), []).append(
                (arguments, position, *_compute_layout(view, 0))
            )

    def bind_buffers(self, block: np.ndarray, start: int) -> None:
        """Bind all operands in buffers to bytes of `block` from byte `start` on."""
        for arguments, position, shape, element, offset, strides in self._buffers:
            arguments[position] = np.ndarray(shape, element, block, start + offset, strides)

    def release(self) -> None:
        """Drop the arrays of all operands in memory until the next `bind_memory`."""
        self._bound.clear()
        for slots in self._slots.values():
            for arguments, position, *_ in slots:
                arguments[position] = None
        for tile in self._unlowered_tiles:
            tile.forget_array()

    def bind_memory(self) -> None:
        """Bind all operands in memory to the arrays that their storages have now.

        Storages that only the program uses get bytes first, if they have none.
        """
        for storage in self._temporary:
            array = self._bound.get(id(storage))
            if array is None:
                array = np.empty(storage.nbytes, np.uint8)
            storage.uncounted_array = array
        changed = False
        for key, storage in self.memory.items():
            if self._bound.get(key) is storage.uncounted_array:
                continue
            changed = True
            block = self._bound[key] = storage.uncounted_array
            for arguments, position, shape, element, offset, strides in self._slots.get(key, ()):
                arguments[position] = np.ndarray(shape, element, block, offset, strides)
        if changed or self._temporary:
            for tile in self._unlowered_tiles:
                tile.forget_array()


def _compute_layout(view: View, start: int) -> tuple[tuple[int, ...], np.dtype[Any], int, tuple[int, ...]]:
    """Return shape, numpy dtype, byte offset and byte strides of a view whose value begins at byte `start`."""
    element = view.value.element
    width = element.itemsize
    return view.shape, element, start + view.offset * width, tuple(stride * width for stride in view.strides)


class Fused:
    """Rewritten program of all ranks; `reports` has the counts of each rank."""

    def __init__(
        self,
        recorded: Sequence[Recorded],
        external: Sequence[Sequence[Storage]],
        inputs: Sequence[Sequence[Storage]],
        memory: Arena,
        narrow: bool = False,
    ) -> None:
        """Rewrite the recorded plans of every rank.

        Args:
            recorded: The plans of each rank.
            external: The storages of each rank's arguments, constants and results.
            inputs: The storages of each rank's arguments.
            memory: The host memory for buffers, which programs share.
            narrow: Whether a library multiplies bfloat16 matrices without widening them.

        Raises:
            NotFused: An instruction with state cannot be lowered, or an operand has undefined elements or many views.
        """
        self._memory = memory
        input_ids = {id(storage) for rank in inputs for storage in rank}
        self._ranks = [
            _RankProgram(plans, rank_external, input_ids, narrow)
            for plans, rank_external in zip(recorded, external)
        ]
        self._block: np.ndarray | None = None
        self.reports = [rank.report for rank in self._ranks]

    def release(self) -> None:
        """Drop the arrays of arguments and results of the last run, on every rank."""
        for rank in self._ranks:
            rank.release()

    def run(self, peers: Processes | None = None) -> None:
        """Run the calls of all ranks on the arrays to which the storages of arguments and results are bound.

        Args:
            peers: The processes of the other ranks, or None if this process has all ranks.
        """
        block = self._memory.reserve(sum(rank.size for rank in self._ranks))
        if block is not self._block:
            self._block = block
            start = 0
            for rank in self._ranks:
                rank.bind_buffers(block, start)
                start += rank.size
        for rank in self._ranks:
            rank.bind_memory()
            _run_calls(rank.segments[0])
        completed = [0] * len(self._ranks)
        while True:
            plans = {
                rank_index: rank.rendezvous[completed[rank_index]]
                for rank_index, rank in enumerate(self._ranks)
                if completed[rank_index] < len(rank.rendezvous)
            }
            if not plans:
                return
            waiting = {
                rank_index: (plan.rendezvous, read_operands(plan))
                for rank_index, plan in plans.items()
                if plan.rendezvous
            }
            for rank_index, results in complete_rendezvous(waiting, peers).items():
                write_results(plans[rank_index], results)
                completed[rank_index] += 1
                _run_calls(self._ranks[rank_index].segments[completed[rank_index]])


def _execute_recorded(plan: Plan, accumulate_mask: Any) -> None:
    """Execute an unlowered instruction on its tiles' bytes, without cached float32 copies of them.

    Other calls may have written these bytes since they were cached.
    """
    for tile in plan.reads:
        tile.storage.float_views.clear()
    execute_again(plan, accumulate_mask, {}, 0)


def _run_calls(steps: list[NumpyCall]) -> None:
    """Call each function with its arguments, in order."""
    for function, arguments in steps:
        function(*arguments)
