"""Records the calls of instructions that a kernel makes, and decides if two runs are equal whatever the inputs are.

The instruction stream leaves out constants. A call here has all arguments; a tile is described by the line and count
of its allocation, its shape, strides and offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from simulate.isa import book
from simulate.isa.plan import Accumulate
from simulate.memory import NkiTensor, Storage
from simulate.run import current_core
from tools.mutants.calls import Call, Tile, View
from tools.mutants.dataflow import same_values


@contextmanager
def record_calls() -> Iterator[dict[int, list[Call]]]:
    """Yield a dict of calls by rank, which is filled with each instruction that is issued inside the block.

    Replaces `book.bind` during the block.
    """
    calls: dict[int, list[Call]] = {}
    names: dict[int, Tile] = {}
    counts: dict[Tile, int] = {}
    kept: list[Storage] = []
    bind = book.bind

    def named(storage: Storage) -> Tile:
        known = names.get(id(storage))
        if known is None:
            kept.append(storage)  # so that its id stays its own
            where = (storage.line[0].co_name, storage.line[1]) if storage.line else ("argument", storage.name)
            origin = (current_core().rank.number, *where)
            counts[origin] = counts.get(origin, 0) + 1
            known = names[id(storage)] = (*where, counts[origin])
        return known

    def spelled(value: Any) -> Any:
        if isinstance(value, NkiTensor):
            dynamic = value.dynamic
            index = None if dynamic is None else (spelled(dynamic.index), dynamic.step, dynamic.extent)
            view = (value.shape, value.strides, value.offset, str(value.dtype), index)
            return ("tile", named(value.storage), view, value.buffer.value)
        if isinstance(value, (list, tuple)):
            return tuple(spelled(element) for element in value)
        return getattr(value, "__name__", None) or repr(value)

    def logging(planner: Any, context: Any, args: Any, kwargs: Any) -> Any:
        template, reads, writes = bind(planner, context, args, kwargs)
        arguments = (spelled(args), tuple((key, spelled(kwargs[key])) for key in sorted(kwargs)))
        indices = [tile.dynamic.index for tile in (*reads, *writes) if tile.dynamic is not None]
        plan = template.plan
        calls.setdefault(current_core().rank.number, []).append(
            Call(
                planner.__name__,
                arguments,
                tuple(named(tile.storage) for tile in (*reads, *indices)),
                tuple(named(tile.storage) for tile in writes),
                plan.accumulate not in (None, Accumulate.overwrite) or plan.state is not None,
                tuple(View.from_tile(tile, named(tile.storage)) for tile in (*reads, *indices)),
                tuple(View.from_tile(tile, named(tile.storage)) for tile in writes),
                any(effect is not None for effect in (plan.state, plan.registers, plan.rendezvous)),
            )
        )
        return template, reads, writes

    book.bind = logging
    try:
        yield calls
    finally:
        book.bind = bind


def same_calls(ours: Mapping[int, list[Call]], theirs: Mapping[int, list[Call]]) -> str | None:
    """Return how two runs are shown to compute the same on any data, or None if they are not.

    identical: equal call by call. memory: equal except for the memory (SBUF, PSUM, HBM) of tiles. repeated: equal
    except for instructions executed twice in a row that read nothing they write. reordered: equal except for the
    order of instructions that share no tile, or only read it. values: each value stored in HBM is computed by the
    same instructions.
    """
    if ours.keys() != theirs.keys():
        return None
    for word, seen in _VIEWS.items():
        if all(seen(ours[rank]) == seen(theirs[rank]) for rank in ours):
            return word
    return "values" if same_values(ours.values(), (theirs[rank] for rank in ours)) else None


def _identical(calls: list[Call]) -> Any:
    """Return names and arguments of calls."""
    return [(call.name, call.arguments) for call in calls]


def _in_any_memory(calls: list[Call]) -> Any:
    """Return names and arguments of calls without the memory of tiles."""
    return [(call.name, _without_memory(call.arguments)) for call in calls]


def _without_memory(value: Any) -> Any:
    """Return arguments without the memory of tiles."""
    if isinstance(value, tuple):
        if len(value) == 4 and value[0] == "tile":
            return value[:3]
        return tuple(_without_memory(element) for element in value)
    return value


def _once(calls: list[Call]) -> Any:
    """Return names and arguments of calls, without immediate repetitions that change nothing."""
    kept: list[Call] = []
    for call in calls:
        if not (kept and call == kept[-1] and call.again):
            kept.append(call)
    return _identical(kept)


def _in_any_order(calls: list[Call]) -> Any:
    """Return, for each allocation, its calls in order.

    Reads between two writes are sorted, because their order is free.
    """
    histories: dict[Tile, list[Any]] = {}
    for call in calls:
        spelling = repr((call.name, call.arguments))
        for tile in {*call.reads, *call.writes}:
            history = histories.setdefault(tile, [])
            if tile in call.writes:
                history.append(spelling)
            elif history and isinstance(history[-1], list):
                history[-1].append(spelling)
            else:
                history.append([spelling])
    for history in histories.values():
        for entry in history:
            if isinstance(entry, list):
                entry.sort()
    return histories


_VIEWS = {"identical": _identical, "repeated": _once, "memory": _in_any_memory, "reordered": _in_any_order}
