"""Plans made again for operands that have equal layouts.

A planner is pure: what it refuses, chooses and costs follows from the chip, from how its tiles lie and from its
constants. So the plan of a call holds for every later call with equal constants and with tiles of the same layouts,
once its operands are put in the place of the first ones. A kernel's loops make few different calls.

What is kept is planned for stand-ins, tiles of the same layouts without bytes, so that no launch's memory is held.

Calls with a run-time index, a list or another value that may change are planned anew every time, and so are rendezvous,
which differ from core to core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.plan import Plan
from simulate.memory import NkiTensor, Storage
from simulate.numerics import DType

MOST_CALLS = 1 << 14
"""How many calls are known, of some 1 KB each, before all are forgotten."""
_BY_VALUE = frozenset((int, bool, str, type(None)))
_BY_IDENTITY = {Hardware, DType, FunctionType, BuiltinFunctionType, np.ufunc}
"""Types whose values never change; kernels pass the same few objects, so the object stands for its value."""
_REST = tuple(field.name for field in fields(Plan))[len(("engine", "reads", "writes")) :]
_NO_BYTES = np.empty(0, np.uint8)


class PlannedCall:
    """What is known of a call: nothing but that it was made, at first; then its plan apart from the tiles."""

    __slots__ = ("_engine", "_reads", "_rest", "_writes", "constants", "kept", "tried")

    def __init__(self, constants: list[Any]) -> None:
        self.constants = constants  # kept alive, because the key knows some by their identity
        self.tried = False
        self.kept = False

    def learn(
        self,
        planner: Callable[..., Plan],
        context: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """The call is made for the second time: plan it for stand-ins, and keep that for this one and those to come."""
        self.tried = True
        tiles = [value for value in (*args, *kwargs.values()) if type(value) is NkiTensor]
        stand_ins: dict[int, NkiTensor] = {}
        for tile in tiles:
            if id(tile) not in stand_ins:
                stand_ins[id(tile)] = _stand_in(tile)
        plan = planner(
            *context,
            *[stand_ins.get(id(value), value) for value in args],
            **{name: stand_ins.get(id(value), value) for name, value in kwargs.items()},
        )
        places = [stand_ins[id(tile)] for tile in tiles]
        self._engine = plan.engine
        self._reads = [_place(tile, places) for tile in plan.reads]
        self._writes = [_place(tile, places) for tile in plan.writes]
        self._rest = tuple([getattr(plan, name) for name in _REST])
        self.kept = plan.rendezvous is None and min((*self._reads, *self._writes), default=0) >= 0

    def plan(self, tiles: list[NkiTensor]) -> Plan:
        """The plan for other tiles that have equal layouts."""
        reads, writes = tuple([tiles[i] for i in self._reads]), tuple([tiles[i] for i in self._writes])
        return Plan(self._engine, reads, writes, *self._rest)


CALLS: dict[tuple[Any, ...], PlannedCall] = {}
"""Calls by their key."""


def key_of(
    planner: Callable[..., Plan], context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[NkiTensor]] | None:
    """What a call is known by, and its tiles; None for one that is planned anew every time."""
    parts: list[Any] = [planner, len(args), *kwargs]
    tiles: list[NkiTensor] = []
    for value in (*context, *args, *kwargs.values()):
        kind = type(value)
        if kind is NkiTensor:
            if value.dynamic is not None:
                return None
            parts.append(value.layout)
            if value in tiles:  # one tile twice is another call than two tiles that have equal layouts
                parts.append(tiles.index(value))
            tiles.append(value)
        elif kind in _BY_VALUE:
            parts += kind, value  # 1 is no True
        elif kind in _BY_IDENTITY:
            parts.append(id(value))
        elif kind is float:
            parts += kind, value or repr(value)  # 0.0 is no -0.0
        elif kind is tuple and all(type(part) is int for part in value):
            parts += kind, value
        elif issubclass(kind, Enum):
            _BY_IDENTITY.add(kind)
            parts.append(id(value))
        else:
            return None
    return tuple(parts), tiles


def met(
    key: tuple[Any, ...], context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A call was planned for the first time."""
    if len(CALLS) >= MOST_CALLS:
        CALLS.clear()
    values = (*context, *args, *kwargs.values())
    CALLS[key] = PlannedCall([value for value in values if type(value) is not NkiTensor])


def _stand_in(tile: NkiTensor) -> NkiTensor:
    form = tile.layout.form
    storage = Storage(form.shape, form.dtype, form.buffer, "", array=_NO_BYTES, fresh=True)
    return NkiTensor.over(tile.shape, tile.dtype, storage, tile.strides, tile.offset)


def _place(tile: NkiTensor, tiles: list[NkiTensor]) -> int:
    return next((place for place, each in enumerate(tiles) if each is tile), -1)
