"""Lowering of the recorded plans of one rank to operations between values.

A value is an array that is written once. A tile on chip has no bytes here, only the provenance of its elements: the
values that they are copies of. Loads, copies, transposes and exact casts change provenance alone; an operation reads
an element from the value that computed it. Two kinds of storage keep their bytes and are *memory* values: arguments
and results in HBM, and tensors that an instruction addresses at run time or views as another dtype. Instructions that
operations cannot express stay *unlowered* and run as recorded, on memory. A *dynamic* tile has a run-time index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from simulate.isa.plan import Domain, Masked, Plan, State
from simulate.memory import NkiTensor, Storage
from simulate.numerics import DType
from simulate.numerics.dtypes import float32
from simulate.replay.arena import list_operands
from simulate.replay.fusion.builder import EXACT_IN_FLOAT32, Builder
from simulate.replay.fusion.graph import NotFused, Value, ValueLocation, View
from simulate.replay.fusion.opcodes import (
    ComputeCall,
    Copy,
    DynamicView,
    Gather,
    Narrow,
    NumpyCall,
    Scatter,
    Widen,
)
from simulate.replay.fusion.provenance import Provenance, split_into_boxes
from simulate.replay.fusion.provenance_map import ProvenanceMap, view_elements
from simulate.replay.fusion.tracing import Tracer, Untraceable, as_tracer

Recorded = Sequence[tuple[Plan, Any, bool]]


@dataclass(frozen=True, eq=False, slots=True)
class Unlowered:
    """Opcode of an instruction that runs as recorded; `accumulate_mask` has the PSUM elements that a matmul adds to."""

    plan: Plan
    accumulate_mask: Any

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Raise AssertionError, because the program of a rank runs the plan itself."""
        raise AssertionError("an unlowered instruction has no numpy calls")


@dataclass
class Writes:
    """Writes to one storage, in program order: the position of each plan, and its byte range [start, end)."""

    positions: list[int]
    spans: list[tuple[int, int]]


class Lowering:
    """Lowering of one rank's plans; `memory` has the storages that keep their bytes, by id."""

    def __init__(self, recorded: Recorded, external: Sequence[Storage]) -> None:
        """Find the storages that keep their bytes and the instructions that stay unlowered; `run` lowers the others.

        Args:
            recorded: The plans of the rank, in program order.
            external: The storages of arguments, results and constants.
        """
        self.builder = Builder()
        self.memory = {id(storage): storage for storage in external}
        self.read_memory: set[int] = set()
        self._recorded = recorded
        self._is_unlowered = [
            _needs_memory(plan, accumulate_mask, masked and not _is_masked_choice(plan))
            for plan, accumulate_mask, masked in recorded
        ]
        self._find_memory()
        self._writes = self._find_writes()
        self._provenance = ProvenanceMap((plan for plan, _, _ in recorded), self.builder.values)
        self._versions: dict[tuple[int, str, int], Value] = {}
        self._last_stores: dict[int, int] = {}
        self._states: dict[State, Tracer] = {}
        self._position = 0

    def run(self) -> Builder:
        """Append every plan to the builder, in program order, and return it.

        A plan is lowered to operations, except for those that must run as recorded, such as collectives: these are
        appended as `Unlowered`.

        Raises:
            NotFused: An operand has elements that no instruction wrote or consists of too many views, or an
                instruction with state has to stay unlowered.
        """
        for position, (plan, accumulate_mask, _) in enumerate(self._recorded):
            self._position = position
            if self._is_unlowered[position]:
                self._leave_unlowered(plan, accumulate_mask)
            else:
                self._lower(plan, accumulate_mask)
            self._provenance.drop_dead(position)
        return self.builder

    def find_results_written_once(self, inputs: set[int]) -> dict[int, Storage]:
        """Return the memory storages, by id, whose elements are written at most once and never read.

        Args:
            inputs: The ids of the arguments' storages, which are left out.
        """
        results: dict[int, Storage] = {}
        for key, storage in self.memory.items():
            if key in inputs or key in self.read_memory:
                continue
            counts = np.zeros(storage.size, np.int64)
            for plan, _, _ in self._recorded:
                for tile in plan.writes:
                    if tile.storage is storage:
                        view_elements(counts, tile)[...] += 1
            if counts.max() <= 1:
                results[key] = storage
        return results

    # -- memory -------------------------------------------------------------------------------------------------

    def _find_memory(self) -> None:
        """Add to `memory` the storages of unlowered instructions, dynamic tiles, and tiles viewed as another dtype."""
        for (plan, _, _), unlowered in zip(self._recorded, self._is_unlowered):
            for tile in (*plan.reads, *plan.writes):
                if unlowered or tile.dynamic is not None or tile.dtype is not tile.storage.dtype:
                    self.memory[id(tile.storage)] = tile.storage
                if unlowered and tile.dynamic is not None:
                    index = tile.dynamic.index
                    self.memory[id(index.storage)] = index.storage

    def _find_writes(self) -> dict[int, Writes]:
        """Return the writes to each storage in `memory`, by the storage's id."""
        writes_by_storage: dict[int, Writes] = {}
        for position, (plan, _, _) in enumerate(self._recorded):
            for tile in plan.writes:
                if id(tile.storage) in self.memory:
                    writes = writes_by_storage.setdefault(id(tile.storage), Writes([], []))
                    writes.positions.append(position)
                    writes.spans.append(_compute_span(tile))
        return writes_by_storage

    def _get_memory_value(self, tile: NkiTensor) -> Value:
        """Return the memory value of a tile's storage at the current plan; each write to a storage makes a new one."""
        storage = tile.storage
        writes = self._writes.get(id(storage))
        version = bisect_left(writes.positions, self._position) if writes else 0
        key = id(storage), str(tile.dtype), version
        value = self._versions.get(key)
        if value is None:
            value = self.builder.add_value(ValueLocation.memory, storage.shape, tile.dtype, storage=storage)
            value.ready = self._last_stores.get(id(storage), -1)
            self._versions[key] = value
        return value

    def _can_be_overwritten(self, tile: NkiTensor) -> bool:
        """Return whether the current or a later plan may write bytes of a tile."""
        writes = self._writes.get(id(tile.storage))
        if writes is None:
            return False
        start, end = _compute_span(tile)
        later = bisect_left(writes.positions, self._position)
        return any(first < end and start < last for first, last in writes.spans[later:])

    def _read(self, tile: NkiTensor) -> Provenance:
        """Return the provenance of a tile at the current plan.

        Adds an operation for a dynamic tile, and a copy for memory that may be overwritten later.
        """
        if tile.dynamic is not None:
            self.read_memory.add(id(tile.storage))
            tensor = _flatten(self._get_memory_value(tile))
            gathered = Gather(_build_dynamic_view(tile))
            return Provenance(
                self.builder.add_op(gathered, [tensor, self._read_index(tile)], tile.shape, tile.dtype)
            )
        if id(tile.storage) not in self.memory:
            return self._provenance.read(tile)
        self.read_memory.add(id(tile.storage))
        view = View(self._get_memory_value(tile), tile.offset, tile.shape, tile.strides)
        if self._can_be_overwritten(tile):
            view = self.builder.add_op(Copy(), [view], view.shape, tile.dtype)
        return Provenance(view)

    def _write(self, tile: NkiTensor, result: Tracer) -> None:
        """Record a result as the new provenance of a tile; for memory, append operations that store it.

        Args:
            tile: The destination.
            result: All its elements, in the tile's dtype.
        """
        provenance = result.provenance.reshape(tile.shape)
        if id(tile.storage) not in self.memory:
            self._provenance.write(tile, provenance)
            return
        value = self.builder.add_value(
            ValueLocation.memory, tile.storage.shape, tile.dtype, storage=tile.storage
        )
        if tile.dynamic is not None:
            self.read_memory.add(id(tile.storage))
            values = self.builder.read(provenance, tile.dtype)
            operands = [values, self._read_index(tile)]
            self.builder.append(
                Scatter(_build_dynamic_view(tile)), operands, [_flatten(value)], has_effects=True
            )
            self._last_stores[id(tile.storage)] = self.builder.sequence - 1
            return
        target = View(value, tile.offset, tile.shape, tile.strides)
        for box, piece in split_into_boxes(provenance, self.builder.values):
            converted = self.builder.convert(piece, tile.dtype)
            self.builder.append(Copy(), [converted], [target.cut(box)], has_effects=True)
        self._last_stores[id(tile.storage)] = self.builder.sequence - 1

    def _read_index(self, tile: NkiTensor) -> View:
        """Return a view of the run-time indices of a dynamic tile."""
        assert tile.dynamic is not None
        index = tile.dynamic.index
        return self.builder.read(self._read(index), index.dtype)

    # -- instructions -------------------------------------------------------------------------------------------

    def _leave_unlowered(self, plan: Plan, accumulate_mask: Any) -> None:
        """Append an instruction as unlowered; all its tiles must be memory.

        Raises NotFused for an instruction that uses state of the core, such as a random generator.
        """
        if plan.state is not None:
            raise NotFused("an instruction with state writes a part of its result, or at run-time addresses")
        for tile in list_operands(plan):
            self.read_memory.add(id(tile.storage))
        self.builder.append(Unlowered(plan, accumulate_mask), [], [], has_effects=True)
        for tile in plan.writes:
            self._last_stores[id(tile.storage)] = self.builder.sequence - 1

    def _lower(self, plan: Plan, accumulate_mask: Any) -> None:
        """Append the numpy calls of an instruction's `compute`; one call of `compute` itself if it is untraceable."""
        as_float = plan.domain is Domain.float32
        operands = [self._read_operand(tile, as_float) for tile in plan.reads]
        state = None if plan.state is None else self._get_state(plan.state)
        before = len(self.builder.ops)
        try:
            arguments = (
                operands
                if state is None
                else [Tracer(self.builder, state.provenance.copy(), state.value_dtype), *operands]
            )
            results = [
                self._merge_masked(result, tile, as_float)
                for result, tile in zip_longest(plan.compute(*arguments), plan.writes)
            ]
            if state is not None:
                next_state = results.pop()
            results = [
                self._round_to_tile(tile, tracer, as_float) for tile, tracer in zip(plan.writes, results)
            ]
        except NotFused:
            raise
        except Exception:  # numpy and planners may raise anything for operands without data
            self.builder.roll_back(before)
            self._call_compute(plan, accumulate_mask, operands, state)
            return
        if state is not None and plan.state is not None:
            self._states[plan.state] = next_state
        if accumulate_mask is True:
            results = [self._accumulate(plan.writes[0], results[0])]
        for tile, result in zip(plan.writes, results):
            self._write(tile, result)

    def _read_operand(self, tile: NkiTensor, as_float: bool) -> Tracer:
        """Return a tile as an operand of `compute`: in float32 if `as_float`, else in the tile's dtype."""
        provenance, dtype = self._read(tile), tile.dtype
        if not as_float or (dtype.storage == np.float32 and dtype != "tfloat32"):
            return Tracer(self.builder, provenance, dtype if dtype.storage != np.float32 else float32)
        if dtype in EXACT_IN_FLOAT32:
            return Tracer(self.builder, provenance, float32)
        view = self.builder.read(provenance, dtype)
        widened = self.builder.add_op(Widen(dtype), [view], view.shape, float32)
        return Tracer(self.builder, Provenance(widened), float32)

    def _round_to_tile(self, tile: NkiTensor, result: Tracer, as_float: bool) -> Tracer:
        """Return a result in the dtype of its tile; an operation rounds it unless it consists of copies in that dtype.

        Raises:
            Untraceable: The result has another size or another dtype than a plain write needs.
        """
        dtype = tile.dtype
        if result.size != tile.size or result.dtype != (np.float32 if as_float else dtype.storage):
            raise Untraceable("the write broadcasts or converts")
        if not as_float or (dtype.storage == np.float32 and dtype != "tfloat32"):
            return result
        if all(
            isinstance(source_dtype, DType) and source_dtype == dtype
            for source_dtype in self.builder.list_dtypes(result.provenance)
        ):
            return Tracer(self.builder, result.provenance, dtype)
        view = self.builder.read(result.provenance, float32)
        narrow = self.builder.add_op(Narrow(dtype), [view], view.shape, dtype)
        return Tracer(self.builder, Provenance(narrow), dtype)

    def _merge_masked(self, result: Any, tile: NkiTensor | None, as_float: bool) -> Tracer:
        """Return the elements of a tile after a result is written; a Masked leaves unselected elements unchanged.

        Args:
            result: An array, tracer or Masked.
            tile: The destination, None for the next state of the core.
            as_float: Whether the plan computes in float32.
        """
        if not isinstance(result, Masked):
            return as_tracer(self.builder, result)
        assert tile is not None, "the state is written whole"
        chosen, values = (as_tracer(self.builder, array) for array in (result.chosen, result.values))
        before = self._read_operand(tile, as_float)
        return np.where(chosen.reshape(tile.shape), values.reshape(tile.shape), before)  # type: ignore[no-any-return,call-overload]

    def _accumulate(self, tile: NkiTensor, product: Tracer) -> Tracer:
        """Return a matmul's product added to the present float32 elements of a tile in PSUM."""
        before = Tracer(self.builder, self._read(tile).reshape(product.shape), float32)
        total: Tracer = before + product
        return total

    def _get_state(self, core_state: State) -> Tracer:
        """Return the present state of the core, such as a random generator; at first the initial constant."""
        state = self._states.get(core_state)
        if state is None:
            initial = core_state.initial(128)
            state = self._states[core_state] = as_tracer(self.builder, initial)
        return state

    def _call_compute(
        self, plan: Plan, accumulate_mask: Any, operands: list[Tracer], state: Tracer | None
    ) -> None:
        """Append one call of an instruction's `compute`, and record its results as those of the tiles and the state."""
        arguments = operands if state is None else [state, *operands]
        reads = [self.builder.read(argument.provenance, argument.value_dtype) for argument in arguments]
        results: list[Any] = [(tile.shape, tile.dtype) for tile in plan.writes]
        if state is not None:
            results.append((state.shape, state.value_dtype))
        result_views = self.builder.add_results(ComputeCall(plan), reads, results)
        if state is not None and plan.state is not None:
            self._states[plan.state] = Tracer(self.builder, Provenance(result_views.pop()), state.value_dtype)
        for tile, view in zip(plan.writes, result_views):
            result = Tracer(self.builder, Provenance(view), tile.dtype)
            self._write(tile, self._accumulate(tile, result) if accumulate_mask is True else result)


def _needs_memory(plan: Plan, accumulate_mask: Any, masked: bool) -> bool:
    """Return whether an instruction must stay unlowered.

    Args:
        plan: The plan.
        accumulate_mask: PSUM elements that a matmul adds to: True, False, a mask, or None for other instructions.
        masked: Whether the instruction wrote only some elements, in a way that cannot be traced.
    """
    dynamic = any(
        tile.dynamic is not None
        and (
            plan.skip_out_of_range
            or accumulate_mask is not None
            or bool(tile.dynamic.group)
            or not _build_dynamic_view(tile).is_ascending
        )
        for tile in (*plan.reads, *plan.writes)
    )
    adds = accumulate_mask is True and plan.writes[0].dtype != "float32"
    return dynamic or masked or adds or plan.rendezvous is not None or isinstance(accumulate_mask, np.ndarray)


def _is_masked_choice(plan: Plan) -> bool:
    """Return whether an instruction writes selected elements of one tile with a Masked that can be traced."""
    tiles = (*plan.reads, *plan.writes)
    if len(plan.writes) > 1 or plan.state is not None or any(tile.dynamic is not None for tile in tiles):
        return False
    if plan.writes[0].dtype is not plan.writes[0].storage.dtype:
        return False
    builder = Builder()
    dtypes = [float32 if plan.domain is Domain.float32 else tile.dtype for tile in plan.reads]
    values = [
        builder.add_value(ValueLocation.buffer, tile.shape, dtype) for tile, dtype in zip(plan.reads, dtypes)
    ]
    arguments = [Tracer(builder, Provenance(View.full(value)), dtype) for value, dtype in zip(values, dtypes)]
    try:
        return isinstance(plan.compute(*arguments)[0], Masked)
    except Exception:  # numpy and planners may raise anything for operands without data
        return False


def _build_dynamic_view(tile: NkiTensor) -> DynamicView:
    """Return the layout of a tile with a run-time index."""
    dynamic = tile.dynamic
    assert dynamic is not None
    return DynamicView(tile.shape, tile.strides, tile.offset, dynamic.step, dynamic.extent, tile.describe())


def _flatten(memory: Value) -> View:
    """Return a view of one dim of all elements of a memory value."""
    assert memory.storage is not None
    return View(memory, 0, (memory.storage.nbytes // memory.element.itemsize,), (1,))


def _compute_span(tile: NkiTensor) -> tuple[int, int]:
    """Return the byte range [start, end) of its storage that a tile may touch; all bytes for a dynamic tile."""
    if tile.dynamic is not None:
        return 0, tile.storage.nbytes
    width = tile.dtype.storage.itemsize
    steps = [(extent - 1) * stride for extent, stride in zip(tile.shape, tile.strides)]
    first = tile.offset + sum(step for step in steps if step < 0)
    last = tile.offset + sum(step for step in steps if step > 0)
    return first * width, (last + 1) * width
