"""Decides from their calls alone whether two runs store the same values in HBM, whatever the inputs are.

A value is identified by the instruction that computes it, all of its arguments, and the values that it reads. So names
of tiles do not matter, a value computed twice is the same value, and values that no store needs do not matter.
Instructions that synchronise, draw random numbers or use accumulator registers keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tools.mutants.calls import Call, View

NO_VALUE = ("engine", "name", "dge_mode")
"""Arguments that change when and by whom something is done, and never a value."""


Stores = list[tuple[View, int]]


class _Values:
    """The values in allocations during a run: by allocation, what was stored there and not overwritten since.

    numbers: a number for each value, shared by the two runs that are compared.
    """

    def __init__(self, numbers: dict[Any, int]) -> None:
        self.stored: dict[tuple[Any, ...], Stores] = {}
        self._numbers = numbers
        self._ordered = 0

    def _number(self, value: Any) -> int:
        """Return the number of a value; an unknown value gets the next number."""
        return self._numbers.setdefault(value, len(self._numbers))

    def read(self, view: View) -> int:
        """Return the number of a view's value, which depends on all stores that overlap the view."""
        loaded = [
            (store.starts, store.steps, store.dtype, value)
            for store, value in self.stored.get(view.allocation, [])
            if store.overlaps(view)
        ]
        origin = view.allocation if view.in_hbm else None
        return self._number(("read", origin, view.starts, view.steps, view.dtype, tuple(loaded)))

    def carry_out(self, call: Call) -> None:
        """Record the values that an instruction stores."""
        before = call.stores if call.accumulates else ()
        operands = tuple(self.read(view) for view in (*call.loads, *before))
        order = self._ordered if call.is_ordered else None
        self._ordered += call.is_ordered
        made = (call.name, _without_tiles(call.arguments), operands, order)
        for index, view in enumerate(call.stores):
            value = self._number((made, index))
            is_update = call.accumulates or any(store.allocation == view.allocation for store in call.loads)
            self._store(view, value, covers=not is_update and not view.is_dynamic)

    def _store(self, view: View, value: int, covers: bool) -> None:
        """Record a store of a value to a view; if it `covers`, it replaces earlier stores to the same view.

        Stores that do not overlap are sorted by their values, so that their order in time does not matter.
        """
        stores = self.stored.setdefault(view.allocation, [])
        for store in reversed(stores):
            if covers and store == (view, value):
                return
            if store[0].overlaps(view):
                break
        if covers:
            stores[:] = [store for store in stores if store[0] != view]
        index = len(stores)
        while index and stores[index - 1][1] > value and not stores[index - 1][0].overlaps(view):
            index -= 1
        stores.insert(index, (view, value))


def _without_tiles(value: Any) -> Any:
    """Return the arguments that change a value, with each tile reduced to shape, dtype and run-time index."""
    if not isinstance(value, tuple):
        return value
    if len(value) == 4 and value[0] == "tile":
        shape, _, _, dtype, *index = value[2]
        return ("tile", shape, dtype, *map(_without_tiles, index))
    if len(value) == 2 and value[0] in NO_VALUE:
        return ()
    return tuple(_without_tiles(element) for element in value)


def same_values(ours: Iterable[list[Call]], theirs: Iterable[list[Call]]) -> bool:
    """Return whether, on every rank, two runs leave the same values in HBM; each is a list of calls per rank."""
    numbers: dict[Any, int] = {}
    return all(_in_hbm(one, numbers) == _in_hbm(other, numbers) for one, other in zip(ours, theirs))


def _in_hbm(calls: list[Call], numbers: dict[Any, int]) -> list[Any]:
    """Return (allocation, stores) for each allocation of HBM that the calls of one rank store to, sorted."""
    values = _Values(numbers)
    for call in calls:
        values.carry_out(call)
    return sorted(
        (str(allocation), stores)
        for allocation, stores in values.stored.items()
        if stores and stores[0][0].in_hbm
    )
