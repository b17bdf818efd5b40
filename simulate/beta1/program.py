"""One program of an SPMD grid while it runs, and the instruction that waits for its target.

A program is one run of the kernel's function, at one position of the grid. In Beta 1 an instruction returns a tile,
and `t[...] = nisa.f(x)` writes into `t`. The program therefore issues an instruction when the next statement shows
its target: the target of an assignment, else a fresh tile. No other instruction is issued in between, so program
order is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, NkwError, RuleViolation, rule
from simulate.beta1.masks import Box, Condition, Mask, find_bounding_box
from simulate.beta1.region import Region
from simulate.isa.book import INSTRUCTIONS
from simulate.lines import location
from simulate.memory import MemoryRegion, NkiTensor, views
from simulate.memory.validity import EMPTY, WRITTEN
from simulate.numerics import ALU_OPERATORS, DType, as_dtype
from simulate.run import NkiInstruction
from simulate.run.issue import issue_call
from simulate.run.location import kernel_line
from simulate.run.machine import NeuronCore


@dataclass(slots=True)
class Pending:
    """Instruction that waits for its target.

    shape, dtype, memory: those of the result in a fresh tile. emit: issues the instruction into a region of that
    shape. line: the kernel line of the call. memories: where a target may lie that the instruction writes directly.
    dtype_given: whether the call had `dtype=`, so that a direct target must have that dtype. masked: whether the
    instruction may leave elements out. accumulate: issues a matmul so that it adds to its target. target_needed:
    whether the result must be assigned. region: where the result was written, None before.
    """

    shape: tuple[int, ...]
    dtype: DType
    memory: MemoryRegion
    emit: Callable[[Region], None]
    line: tuple[CodeType, int]
    memories: tuple[MemoryRegion, ...]
    dtype_given: bool
    masked: bool
    accumulate: Callable[[Region], None] | None = None
    target_needed: bool = False
    region: Region | None = None

    def complete(self, region: Region, accumulate: bool = False) -> None:
        """Issue the instruction into `region`, or with `accumulate` so that it adds to the region's elements."""
        program = current()
        assert program.waiting is self
        program.waiting = None
        if self.masked:
            program.leave_undefined(region.tensor)
        self.region = region
        emit = self.accumulate if accumulate else self.emit
        assert emit is not None
        with at_line(self.line):
            emit(region)


class Program:
    """Running program: `ids` is its position in a grid of `sizes`, and `waiting` the instruction that waits, or None.

    `shared` holds the shared HBM tensors of all programs of the grid. `tile` is the class of the tiles that the
    kernel sees.
    """

    def __init__(
        self,
        core: NeuronCore,
        ids: tuple[int, ...],
        sizes: tuple[int, ...],
        shared: list[NkiTensor],
        tile: type[Any],
    ) -> None:
        self.core = core
        self.ids = ids
        self.sizes = sizes
        self.tile = tile
        self.waiting: Pending | None = None
        self._shared = shared
        self._shared_taken = 0
        self._zeroed: dict[int, NkiTensor] = {}
        self._masked: dict[int, NkiTensor] = {}

    def allocate(self, shape: Any, dtype: Any, buffer: MemoryRegion, name: str = "") -> NkiTensor:
        """Return a fresh tensor; in shared HBM it is the same tensor for every program of the grid.

        Raises RuleViolation if the programs' allocations in shared HBM differ, or the memory cannot hold the shape.
        """
        if buffer is not MemoryRegion.shared_hbm:
            return self.core.allocate(shape, dtype, buffer, name)
        taken, self._shared_taken = self._shared_taken, self._shared_taken + 1
        if taken == len(self._shared):
            self._shared.append(self.core.allocate(shape, dtype, buffer, name))
        tensor = self._shared[taken]
        if tensor.shape != tuple(shape) or tensor.dtype != self.core.stored_dtype(as_dtype(dtype)):
            raise RuleViolation(
                programs_agree, f"{tuple(shape)} {dtype}; an earlier program allocated {tensor.describe()}"
            )
        return tensor

    def start_at_zero(self, tensor: NkiTensor) -> None:
        """Mark a PSUM tensor of `nl.zeros`: the first matmul overwrites, and a memset precedes any other read."""
        self._zeroed[id(tensor.storage)] = tensor

    def leave_undefined(self, tensor: NkiTensor) -> None:
        """Mark a tensor that a masked instruction writes in part; `readable` defines elements that stay unwritten."""
        self._masked[id(tensor.storage)] = tensor

    def readable(self, region: Region) -> NkiTensor:
        """Return a region as an operand of an instruction, after defining marked elements that nothing has written.

        A region of `nl.zeros` in PSUM gets a memset if nothing was written. Elements that a mask left out are set to
        all bits set, which is NaN in float dtypes.
        """
        view = region.view()
        if view.dynamic is None and id(view.storage) in (self._zeroed.keys() | self._masked.keys()):
            empty = np.equal(view.storage.validity.states(*view.byte_view()[1:]), EMPTY)
            if id(view.storage) in self._zeroed and np.all(empty):
                issue("memset", dst=view, value=0)
            elif id(view.storage) in self._masked and np.any(empty):
                _define_unwritten(view, np.broadcast_to(empty, view.shape), self.core.dry)
        return view

    def settle(self) -> None:
        """Issue the instruction that waits, into a fresh tile; does nothing if none waits.

        Raises InvalidArgument for nl.loop_reduce, whose result must be assigned.
        """
        pending = self.waiting
        if pending is None:
            return
        try:
            with at_line(pending.line):
                if pending.target_needed:
                    raise InvalidArgument(
                        "NKW-LOOP-REDUCE", "nl.loop_reduce is assigned to a tile: t[...] = nl.loop_reduce(…)"
                    )
                region = self.fresh(pending.shape, pending.dtype, pending.memory)
            pending.complete(region)
        finally:
            self.waiting = None

    def fresh(self, shape: tuple[int, ...], dtype: Any, buffer: MemoryRegion, name: str = "") -> Region:
        """Return the region of a fresh tensor of any number of dims.

        On chip, with more dims than the hardware's five, the tensor has one free dim and the region the shape.
        """
        joined = (
            isinstance(buffer, MemoryRegion) and buffer.on_chip and len(shape) > self.core.hardware.dims_max
        )
        stored = (shape[0], views.count(shape[1:])) if joined else shape
        return Region.from_tensor(self.allocate(stored, dtype, buffer, name), shape if joined else None)

    def divide(self, mask: Mask | None, dst: Region, run: Callable[[Region, Box], None]) -> None:
        """Run an on-chip operation for the elements of a result that a mask selects.

        A mask that selects a rectangle is one run. Otherwise the operation runs on the bounding box into a scratch
        tile; affine_select makes a predicate, once per condition, and tensor_copy_predicated copies the selected
        elements to `dst`. Nothing runs if the mask selects nothing.

        Args:
            mask: The mask, None for all elements.
            dst: The result.
            run: Issues the operation: it gets a part of `dst` or of the scratch tile, and the box of that part in
                `dst`.
        """
        if mask is None:
            run(dst, tuple((0, size) for size in dst.shape))
            return
        boxes = mask.boxes(dst.shape)
        if not boxes:
            return
        box = find_bounding_box(boxes)
        region = dst.cut(box)
        if len(boxes) == 1:
            run(region, box)
            return
        scratch = self.fresh(region.shape, dst.tensor.dtype, MemoryRegion.sbuf)
        run(scratch, box)
        predicate = self.fresh(region.shape, "uint8", MemoryRegion.sbuf).view()
        issue("memset", dst=predicate, value=1)
        for condition in mask.conditions:
            select(condition, box, predicate, predicate, 0.0)
        issue("tensor_copy_predicated", dst=region.view(), src=scratch.view(), predicate=predicate)


def select(
    condition: Condition,
    box: Box,
    dst: NkiTensor,
    on_true: NkiTensor,
    on_false: float,
    name: str | None = None,
) -> None:
    """Issue affine_select with a condition of a mask: `dst` gets on_true where the condition holds, else on_false.

    Args:
        condition: The condition.
        box: The box of the mask's axes that `dst` stands for.
        dst: The destination, of the box's shape.
        on_true: The tensor of values where the condition holds.
        on_false: The number elsewhere.
        name: The name of the instruction.
    """
    steps = (0,) * (len(box) - len(condition.steps)) + condition.steps
    issue(
        "affine_select",
        dst=dst,
        on_true_tile=on_true,
        on_false_value=on_false,
        cmp_op=ALU_OPERATORS[condition.comparison],
        name=name,
        **encode_affine(steps, condition.offset, box),
    )


def encode_affine(steps: tuple[int, ...], offset: int, box: Box) -> dict[str, Any]:
    """Return an affine value over a box as arguments of an instruction: pattern, channel_multiplier and offset.

    Args:
        steps: The step on each axis; that of the partition axis becomes channel_multiplier.
        offset: The value at position 0 of all axes.
        box: (start, end) on each axis.
    """
    starts = sum(start * step for (start, _), step in zip(box, steps))
    pattern = [[step, end - start] for step, (start, end) in zip(steps[1:], box[1:])]
    return {"pattern": pattern, "channel_multiplier": steps[0], "offset": offset + starts}


class _Here(threading.local):
    """State of a thread: the program that it runs, and the kernel line that replaces the running one."""

    program: Program | None = None
    line: tuple[CodeType, int] | None = None


_thread = _Here()


def current() -> Program:
    """Return the program that the calling thread runs. Raises NkwError outside of a kernel."""
    if _thread.program is None:
        raise NkwError(
            "NKW-NO-KERNEL",
            "a neuronxcc.nki call outside of a kernel; call a function decorated with @nki.jit, or "
            "nki.simulate_kernel(function, …)",
        )
    return _thread.program


def running() -> Program | None:
    """Return the program that the calling thread runs, or None outside of a kernel."""
    return _thread.program


@contextmanager
def enter_program(program: Program) -> Iterator[None]:
    """Make `program` the calling thread's program inside a `with` block."""
    before, _thread.program = _thread.program, program
    try:
        yield
    finally:
        _thread.program = before


@contextmanager
def at_line(line: tuple[CodeType, int]) -> Iterator[None]:
    """Let instructions and errors inside a `with` block have `line`, a kernel line that ran earlier."""
    before, _thread.line = _thread.line, line
    try:
        yield
    except NkwError as error:
        if error.where is None:
            error.where = location(line)
        raise
    finally:
        _thread.line = before


def issue(instruction: str, /, **arguments: Any) -> NkiInstruction:
    """Issue one instruction of the instruction book by its name and return its handle.

    Its line is that of `at_line`, else the running one.
    """
    return issue_call(INSTRUCTIONS[instruction], (), arguments, _thread.line)


def remark(code: str, seen: str) -> None:
    """Record a remark in the core's stream, once per code and kernel line; detectors read the remarks.

    Args:
        code: The code of the detector.
        seen: What the statement does that no instruction shows.
    """
    line = kernel_line()
    remarks = current().core.stream.remarks
    if all((code, line) != known[:2] for known in remarks):
        remarks.append((code, line, seen))


def _define_unwritten(view: NkiTensor, empty: np.ndarray, dry: bool) -> None:
    """Set unwritten elements of a view to all bits set and mark them as written; a dry launch only marks them.

    Memory has old bytes there, which are no result of the kernel.

    Args:
        view: The view.
        empty: Mask of its unwritten elements.
        dry: Whether the launch is dry.
    """
    if not dry:
        bits = view.uncounted_array.view(f"u{view.dtype.storage.itemsize}")
        np.copyto(bits, np.iinfo(bits.dtype).max, where=empty)
        view.storage.float_views.clear()
    view.storage.validity.mark_where(WRITTEN, empty, *view.byte_view()[1:])


@rule("NKW-SPMD-SHARED")
def programs_agree() -> None:
    """All programs of a grid allocate the same shared HBM tensors in the same order.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """
