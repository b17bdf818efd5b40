"""From the recorded plans of one rank to operations between values.

A tile on chip is no storage here but a table of where its elements come from. Loads, copies, transposes and exact
casts only change such tables; an element is read from where it was made. Two kinds of memory stay memory, as *homes*:
tensors in HBM that are arguments or results, and tensors that an instruction reaches in a way known at run time only,
or sees as another dtype. An instruction of which this holds is carried out as it was recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.isa.plan import Domain, Plan, State
from simulate.memory import NkiTensor, Storage
from simulate.numerics import DType
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.builder import EXACT_IN_FLOAT32, Builder
from simulate.replay.fusion.graph import NotFused, Value, ValueKind, View
from simulate.replay.fusion.opcodes import (
    Addressed,
    Computed,
    Copy,
    Gathered,
    Narrowed,
    Scattered,
    Step,
    Widened,
)
from simulate.replay.fusion.provenance import Cells, pieces
from simulate.replay.fusion.provenance_map import Tables, seen
from simulate.replay.fusion.tracing import Traced, Untraceable, traced

Recorded = Sequence[tuple[Plan, Any, bool]]


@dataclass(frozen=True, eq=False, slots=True)
class AsRecorded:
    """An instruction carried out on its own tiles; `keeps` is where a matmul was added."""

    plan: Plan
    keeps: Any

    def steps(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[Step]:
        """None: the program that runs the operations carries it out."""
        raise AssertionError("carried out by the program")


@dataclass
class Writes:
    """When a home is written, and between which bytes."""

    positions: list[int]
    spans: list[tuple[int, int]]


class Lowering:
    """One rank's plans on their way to operations."""

    def __init__(self, recorded: Recorded, outside: Sequence[Storage]) -> None:
        """`outside` are the storages of arguments and results."""
        self.builder = Builder()
        self.homes = {id(storage): storage for storage in outside}
        self.read_homes: set[int] = set()
        self._recorded = recorded
        self._as_recorded = [_needs_memory(plan, keeps, masked) for plan, keeps, masked in recorded]
        self._find_homes()
        self._writes = self._find_writes()
        self._tables = Tables((plan for plan, _, _ in recorded), self.builder.values)
        self._versions: dict[tuple[int, str, int], Value] = {}
        self._stored: dict[int, int] = {}
        self._states: dict[State, Traced] = {}
        self._position = 0

    def run(self) -> Builder:
        """Lower every plan; returns what holds the operations. Raises NotFused."""
        for position, (plan, keeps, _) in enumerate(self._recorded):
            self._position = position
            if self._as_recorded[position]:
                self._keep(plan, keeps)
            else:
                self._take_apart(plan, keeps)
            self._tables.passed(position)
        return self.builder

    def written_once(self, given: set[int]) -> dict[int, Storage]:
        """The homes that are no arguments, that nothing reads and that no two instructions write to."""
        found: dict[int, Storage] = {}
        for key, storage in self.homes.items():
            if key in given or key in self.read_homes:
                continue
            counts = np.zeros(storage.size, np.int64)
            for plan, _, _ in self._recorded:
                for tile in plan.writes:
                    if tile.storage is storage:
                        seen(counts, tile)[...] += 1
            if counts.max() <= 1:
                found[key] = storage
        return found

    # -- memory -------------------------------------------------------------------------------------------------

    def _find_homes(self) -> None:
        for (plan, _, _), as_recorded in zip(self._recorded, self._as_recorded):
            for tile in (*plan.reads, *plan.writes):
                if as_recorded or tile.dynamic is not None or tile.dtype is not tile.storage.dtype:
                    self.homes[id(tile.storage)] = tile.storage
                if as_recorded and tile.dynamic is not None:
                    index = tile.dynamic.index
                    self.homes[id(index.storage)] = index.storage

    def _find_writes(self) -> dict[int, Writes]:
        found: dict[int, Writes] = {}
        for position, (plan, _, _) in enumerate(self._recorded):
            for tile in plan.writes:
                if id(tile.storage) in self.homes:
                    writes = found.setdefault(id(tile.storage), Writes([], []))
                    writes.positions.append(position)
                    writes.spans.append(_span(tile))
        return found

    def _home(self, tile: NkiTensor) -> Value:
        """The home under a tile as it is at this position: what was read before a write is another value."""
        storage = tile.storage
        writes = self._writes.get(id(storage))
        version = bisect_left(writes.positions, self._position) if writes else 0
        key = id(storage), str(tile.dtype), version
        value = self._versions.get(key)
        if value is None:
            value = self.builder.value(ValueKind.home, storage.shape, tile.dtype, storage=storage)
            value.ready = self._stored.get(id(storage), -1)
            self._versions[key] = value
        return value

    def _is_overwritten(self, tile: NkiTensor) -> bool:
        """Whether the bytes under a tile may be written at this position or after it."""
        writes = self._writes.get(id(tile.storage))
        if writes is None:
            return False
        start, end = _span(tile)
        later = bisect_left(writes.positions, self._position)
        return any(first < end and start < last for first, last in writes.spans[later:])

    def _read(self, tile: NkiTensor) -> Cells:
        """Where the elements of a tile come from."""
        if tile.dynamic is not None:
            self.read_homes.add(id(tile.storage))
            tensor = _flat(self._home(tile))
            gathered = Gathered(_addressed(tile))
            return Cells(self.builder.op(gathered, [tensor, self._index(tile)], tile.shape, tile.dtype))
        if id(tile.storage) not in self.homes:
            return self._tables.read(tile)
        self.read_homes.add(id(tile.storage))
        view = View(self._home(tile), tile.offset, tile.shape, tile.strides)
        if self._is_overwritten(tile):
            view = self.builder.op(Copy(), [view], view.shape, tile.dtype)
        return Cells(view)

    def _write(self, tile: NkiTensor, result: Traced) -> None:
        cells = result.cells.reshape(tile.shape)
        if id(tile.storage) not in self.homes:
            self._tables.write(tile, cells)
            return
        value = self.builder.value(ValueKind.home, tile.storage.shape, tile.dtype, storage=tile.storage)
        if tile.dynamic is not None:
            self.read_homes.add(id(tile.storage))
            values = self.builder.read(cells, tile.dtype)
            operands = [values, self._index(tile)]
            self.builder.append(Scattered(_addressed(tile)), operands, [_flat(value)], keep=True)
            self._stored[id(tile.storage)] = self.builder.sequence - 1
            return
        target = View(value, tile.offset, tile.shape, tile.strides)
        for box, piece in pieces(cells, self.builder.values):
            shown = self.builder.presented(piece, tile.dtype)
            self.builder.append(Copy(), [shown], [target.at(box)], keep=True)
        self._stored[id(tile.storage)] = self.builder.sequence - 1

    def _index(self, tile: NkiTensor) -> View:
        """The indices by which a tile is addressed at run time."""
        assert tile.dynamic is not None
        index = tile.dynamic.index
        return self.builder.read(self._read(index), index.dtype)

    # -- instructions -------------------------------------------------------------------------------------------

    def _keep(self, plan: Plan, keeps: Any) -> None:
        """Carry an instruction out as it was recorded, on homes."""
        if plan.state is not None:
            raise NotFused("an instruction with a register file writes in part or at run-time addresses")
        tiles = [*plan.reads, *plan.writes]
        tiles += [tile.dynamic.index for tile in tiles if tile.dynamic is not None]
        for tile in tiles:
            self.read_homes.add(id(tile.storage))
        self.builder.append(AsRecorded(plan, keeps), [], [], keep=True)
        for tile in plan.writes:
            self._stored[id(tile.storage)] = self.builder.sequence - 1

    def _take_apart(self, plan: Plan, keeps: Any) -> None:
        """Turn an instruction into operations: its numpy calls, or one call of its `compute`."""
        as_float = plan.domain is Domain.float32
        operands = [self._operand(tile, as_float) for tile in plan.reads]
        state = None if plan.state is None else self._state(plan.state)
        before = len(self.builder.ops)
        try:
            given = (
                operands
                if state is None
                else [Traced(self.builder, state.cells.copy(), state.kept), *operands]
            )
            results = [traced(self.builder, result) for result in plan.compute(*given)]
            if state is not None:
                after = results.pop()
            results = [self._as_written(tile, r, as_float) for tile, r in zip(plan.writes, results)]
        except NotFused:
            raise
        except Exception:  # whatever numpy or the planner says to operands that hold no data
            self.builder.forget(before)
            self._computed(plan, keeps, operands, state)
            return
        if state is not None and plan.state is not None:
            self._states[plan.state] = after
        if keeps is True:
            results = [self._accumulated(plan.writes[0], results[0])]
        for tile, result in zip(plan.writes, results):
            self._write(tile, result)

    def _operand(self, tile: NkiTensor, as_float: bool) -> Traced:
        cells, dtype = self._read(tile), tile.dtype
        if not as_float or (dtype.storage == np.float32 and dtype != "tfloat32"):
            return Traced(self.builder, cells, dtype if dtype.storage != np.float32 else float32)
        if dtype in EXACT_IN_FLOAT32:
            return Traced(self.builder, cells, float32)
        view = self.builder.read(cells, dtype)
        widened = self.builder.op(Widened(dtype), [view], view.shape, float32)
        return Traced(self.builder, Cells(widened), float32)

    def _as_written(self, tile: NkiTensor, result: Traced, as_float: bool) -> Traced:
        """A result in the dtype of its tile: rounded, unless its elements are of that dtype already."""
        dtype = tile.dtype
        if result.size != tile.size or result.dtype != (np.float32 if as_float else dtype.storage):
            raise Untraceable("the write broadcasts or converts")
        if not as_float or (dtype.storage == np.float32 and dtype != "tfloat32"):
            return result
        if all(isinstance(kept, DType) and kept == dtype for kept in self.builder.dtypes(result.cells)):
            return Traced(self.builder, result.cells, dtype)
        view = self.builder.read(result.cells, float32)
        narrow = self.builder.op(Narrowed(dtype), [view], view.shape, dtype)
        return Traced(self.builder, Cells(narrow), dtype)

    def _accumulated(self, tile: NkiTensor, product: Traced) -> Traced:
        before = Traced(self.builder, self._read(tile).reshape(product.shape), float32)
        total: Traced = before + product
        return total

    def _state(self, which: State) -> Traced:
        state = self._states.get(which)
        if state is None:
            initial = which.initial(128)
            state = self._states[which] = traced(self.builder, initial)
        return state

    def _computed(self, plan: Plan, keeps: Any, operands: list[Traced], state: Traced | None) -> None:
        given = operands if state is None else [state, *operands]
        reads = [self.builder.read(each.cells, each.kept) for each in given]
        results: list[Any] = [(tile.shape, tile.dtype) for tile in plan.writes]
        if state is not None:
            results.append((state.shape, state.kept))
        made = self.builder.ops_results(Computed(plan), reads, results)
        if state is not None and plan.state is not None:
            self._states[plan.state] = Traced(self.builder, Cells(made.pop()), state.kept)
        for tile, view in zip(plan.writes, made):
            result = Traced(self.builder, Cells(view), tile.dtype)
            self._write(tile, self._accumulated(tile, result) if keeps is True else result)


def _needs_memory(plan: Plan, keeps: Any, masked: bool) -> bool:
    dynamic = any(
        tile.dynamic is not None
        and (
            plan.skip_out_of_range
            or keeps is not None
            or bool(tile.dynamic.group)
            or not _addressed(tile).goes_up
        )
        for tile in (*plan.reads, *plan.writes)
    )
    adds = keeps is True and plan.writes[0].dtype != "float32"
    return dynamic or masked or adds or plan.rendezvous is not None or isinstance(keeps, np.ndarray)


def _addressed(tile: NkiTensor) -> Addressed:
    dynamic = tile.dynamic
    assert dynamic is not None
    return Addressed(tile.shape, tile.strides, tile.offset, dynamic.step, dynamic.extent, tile.describe())


def _flat(home: Value) -> View:
    """All elements of a home, by their numbers."""
    assert home.storage is not None
    return View(home, 0, (home.storage.nbytes // home.element.itemsize,), (1,))


def _span(tile: NkiTensor) -> tuple[int, int]:
    """First and end byte that a tile may touch."""
    if tile.dynamic is not None:
        return 0, tile.storage.nbytes
    width = tile.dtype.storage.itemsize
    steps = [(extent - 1) * stride for extent, stride in zip(tile.shape, tile.strides)]
    first = tile.offset + sum(step for step in steps if step < 0)
    last = tile.offset + sum(step for step in steps if step > 0)
    return first * width, (last + 1) * width
