"""`issue`: the only place where a Plan takes effect and the only writer of simulated memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

import numpy as np

from simulate.errors import NkwError, RuleViolation, rule
from simulate.isa import book
from simulate.isa.plan import Accumulate, Domain, Masked, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.validity import ACCUMULATED, EMPTY, WRITTEN
from simulate.numerics import from_float32
from simulate.run.indirect import Resolved, resolve
from simulate.run.location import kernel_line, location
from simulate.run.machine import NeuronCore, current_core
from simulate.run.stream import NkiInstruction


def call(
    planner: book.Planner,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: tuple[CodeType, int] | None = None,
) -> NkiInstruction:
    """Plan one instruction of `nki.isa` for the running core and carry it out.

    `line` is the kernel's line where that is not the one that is running now.
    """
    core = current_core()
    try:
        return issue(core, planner.__name__, book.plan(planner, (core.hardware,), args, kwargs), line)
    except NkwError as error:
        raise _located(error, planner, line) from None


def call_collective(planner: book.Planner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NkiInstruction:
    """Plan one instruction of `nki.collectives` for the running core and carry it out."""
    core = current_core()
    try:
        plan = book.plan(planner, (core.hardware, core.rank.number), args, kwargs)
        return issue(core, planner.__name__, plan)
    except NkwError as error:
        raise _located(error, planner) from None


def _located(
    error: NkwError, planner: book.Planner, line: tuple[CodeType, int] | None = None
) -> NkwError:
    if error.where is None:
        error.where = location(line or kernel_line())
    if isinstance(error, RuleViolation) and not error.instruction:
        error.instruction = planner.__name__
    return error


def issue(
    core: NeuronCore, op: str, plan: Plan, line: tuple[CodeType, int] | None = None
) -> NkiInstruction:
    """Check every read, compute, round once into the destination, update validity, record the event.

    Raises RuleViolation for a read of bytes that were never written.
    """
    line = line or kernel_line()
    as_float = plan.domain is Domain.float32
    dry = core.dry
    operands: list[np.ndarray] = []
    for tile in plan.reads:
        if tile.dynamic is not None:
            if not dry:
                operands.append(_gather(tile, as_float, plan.skip_out_of_range))
            continue
        validity = tile.storage.validity
        if (validity.uniform is None or validity.uniform == EMPTY) and not validity.written(
            *tile.byte_view()
        ):
            _refuse_unwritten(tile)
        if not dry:
            operands.append(tile.float32() if as_float else tile.array)
    meeting_serial: int | None = None
    if plan.meeting is not None:
        member = _member(core, plan)
        results: Sequence[Any]
        results, meeting_serial = core.turns.meet(
            core.index, member, plan.meeting, operands, location(line), dry
        )
    elif dry:
        results = ()
    elif plan.state is not None:
        *results, state = plan.compute(core.state(plan.state), *operands)
        core.set_state(plan.state, state)
    else:
        results = plan.compute(*operands)
    if dry:
        for tile in plan.writes:
            _mark(tile, ACCUMULATED if plan.accumulate else WRITTEN)
    else:
        for tile, result in zip(plan.writes, results):
            if plan.accumulate is not None:
                _accumulate(core, tile, result, plan.accumulate)
            elif tile.dynamic is not None:
                _scatter(tile, result, as_float, plan.skip_out_of_range)
            else:
                _write(tile, result, as_float, WRITTEN)
    return core.stream.append(op, plan, line, meeting_serial)


def _member(core: NeuronCore, plan: Plan) -> int:
    assert plan.meeting is not None
    return core.rank.number if plan.meeting.by_rank else core.number


def _rounded(tile: NkiTensor, values: np.ndarray) -> np.ndarray:
    """float32 results in the destination's storage type; one rounding."""
    dtype = tile.dtype
    if values.dtype == dtype.storage and dtype != "tfloat32":
        return values
    return from_float32(values, dtype) if dtype.storage != np.float32 or dtype == "tfloat32" else values


def _write(tile: NkiTensor, result: np.ndarray | Masked, as_float: bool, state: int) -> None:
    masked = isinstance(result, Masked)
    values = result.values if isinstance(result, Masked) else result
    if values.shape != tile.shape:
        values = values.reshape(tile.shape)
    if as_float:
        values = _rounded(tile, values)
    storage = tile.storage
    if storage.host is not None and not tile.array.flags.writeable:
        raise RuleViolation(input_is_writable, f"a write to {tile.describe()}")
    if storage.float_views:
        storage.float_views.clear()
    if masked:
        chosen = result.chosen.reshape(tile.shape)  # type: ignore[union-attr]
        np.copyto(tile.array, values, where=chosen)
        storage.validity.mark_where(chosen, *tile.byte_view()[1:])
        return
    tile.array[...] = values
    _mark(tile, state)


def _mark(tile: NkiTensor, state: int) -> None:
    validity = tile.storage.validity
    if validity.uniform != state and tile.dynamic is None:
        validity.mark(state, *tile.byte_view())


def _accumulate(core: NeuronCore, tile: NkiTensor, product: np.ndarray, how: Accumulate) -> None:
    if product.shape != tile.shape:
        product = product.reshape(tile.shape)
    if how is Accumulate.overwrite:
        _write(tile, product, product.dtype == np.float32, ACCUMULATED)
        return
    states = tile.storage.validity.states(*tile.byte_view()[1:])
    started = states if isinstance(states, int) else None
    if how is Accumulate.add and np.any(np.equal(states, EMPTY)):
        raise RuleViolation(
            accumulation_was_started,
            f"accumulate=True on {tile.describe()}, which no matmul has written",
            hint="accumulate=(k > 0), or accumulate=None",
        )
    if not core.hardware.psum_accumulate_after_other_write and np.any(np.equal(states, WRITTEN)):
        core.warn(
            f"[NKW-PSUM-INIT] matmul accumulates onto {tile.describe()}, which another instruction initialised: "
            f"undefined on {core.hardware.name}"
        )
    if started == EMPTY:
        _write(tile, product, True, ACCUMULATED)
        return
    total = tile.float32() + product
    if started is None:
        total = np.where(states == EMPTY, product, total)
    _write(tile, total, True, ACCUMULATED)


def _gather(tile: NkiTensor, as_float: bool, skip: bool) -> Any:
    index = tile.dynamic.index  # type: ignore[union-attr]
    if not index.storage.validity.written(*index.byte_view()):
        _refuse_unwritten(index)
    where = resolve(tile, skip)
    storage = tile.storage
    flat = NkiTensor((storage.nbytes // tile.dtype.storage.itemsize,), tile.dtype, storage, (1,), 0)
    elements = where.elements if where.inside is None else np.where(where.inside, where.elements, 0)
    if storage.validity.uniform is None or storage.validity.uniform == EMPTY:
        _check_gathered(flat, tile, elements, where)
    source = flat.float32() if as_float else flat.array
    values = source[elements]
    return values if where.inside is None else Masked(values, where.inside)


def _check_gathered(flat: NkiTensor, tile: NkiTensor, elements: np.ndarray, where: Resolved) -> None:
    states = flat.storage.validity.states(*flat.byte_view()[1:])
    if isinstance(states, int):
        missing = states == EMPTY
    else:
        empty = states[elements] == EMPTY
        missing = bool((empty if where.inside is None else empty & where.inside).any())
    if missing:
        _refuse_unwritten(tile)


def _scatter(tile: NkiTensor, result: np.ndarray | Masked, as_float: bool, skip: bool) -> None:
    index = tile.dynamic.index  # type: ignore[union-attr]
    if not index.storage.validity.written(*index.byte_view()):
        _refuse_unwritten(index)
    where = resolve(tile, skip)
    values = (result.values if isinstance(result, Masked) else result).reshape(tile.shape)
    if as_float:
        values = _rounded(tile, values)
    storage = tile.storage
    storage.float_views.clear()
    flat = NkiTensor((storage.nbytes // tile.dtype.storage.itemsize,), tile.dtype, storage, (1,), 0)
    inside = slice(None) if where.inside is None else where.inside
    elements = where.elements[inside]
    if not flat.array.flags.writeable:
        raise RuleViolation(input_is_writable, f"a write to {tile.describe()}")
    flat.array[elements] = values[inside]
    chosen = np.zeros(flat.shape, bool)
    if storage.validity.uniform != WRITTEN:
        chosen[elements] = True
        storage.validity.mark_where(chosen, *flat.byte_view()[1:])


def _refuse_unwritten(tile: NkiTensor) -> None:
    memory = "" if tile.buffer is not MemoryRegion.psum else "; a matmul or tensor_copy must write it first"
    raise RuleViolation(
        reads_what_was_written,
        f"a read of {tile.describe()}, of which some bytes were never written{memory}",
        hint="write or memset every element that is read, or slice the read to what was written",
    )


@rule("NKW-UNWRITTEN")
def reads_what_was_written() -> None:
    """An instruction reads only bytes that were written before."""


@rule("NKW-PSUM-UNSTARTED")
def accumulation_was_started() -> None:
    """accumulate=True adds to what an earlier matmul wrote; on a location never written it is undefined."""


@rule("NKW-READ-ONLY")
def input_is_writable() -> None:
    """A kernel that writes to its input needs an array that can be written."""
