"""Templates: plans made once for all calls with equal constants and operands of equal layouts.

A planner is pure: what it refuses, chooses and costs follows from the chip, from the layouts of its tensors and from
its constants. So a call is planned for stand-ins, tensors of the same layouts without bytes. That plan is the template
of every later call that differs in its tensors only. A kernel's loops make few different calls. `book.bind` uses this
module.

Barriers and sends between cores, whose terms name tensors, and calls with a value that may change are planned anew
every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.plan import Plan, complete, stand_in
from simulate.isa.replica_group import ReplicaGroup
from simulate.isa.template import Template
from simulate.memory import Dynamic, NkiTensor, Storage
from simulate.memory.layout import Layout
from simulate.memory.registers import VirtualRegister
from simulate.numerics import DType

Planner = Callable[..., Plan]
Tensors = tuple[NkiTensor, ...]

_CAPACITY = 1 << 14  # known calls, of some 1 KB each
_BY_VALUE = frozenset((int, bool, str, type(None)))
_BY_IDENTITY = {Hardware, DType, FunctionType, BuiltinFunctionType, np.ufunc}
"""Types whose values never change; kernels pass the same few objects, so the key holds the object's identity."""


@dataclass(frozen=True, slots=True)
class _View:
    """Operand that the planner made: a view of the allocation of one of the call's tensors.

    Attributes:
        argument: Index of that tensor in the list of `build_call_key`.
        layout: Layout of the view.
        dynamic: Run-time component of the view's address, or None.
        index: Index, in the same list, of the tensor that is the index of `dynamic`; -1 without one.
    """

    argument: int
    layout: Layout
    dynamic: Dynamic | None
    index: int  # the argument that is the index of `dynamic`

    def select(self, tensors: list[NkiTensor]) -> NkiTensor:
        dynamic = self.dynamic
        if dynamic is not None:
            dynamic = replace(dynamic, index=tensors[self.index])
        return NkiTensor.from_layout(self.layout, tensors[self.argument].storage, dynamic)


class KnownCall:
    """Template of a call, and which of the call's tensors each operand of the plan is."""

    __slots__ = ("_are_arguments", "_constants", "_reads", "_writes", "template")

    template: Template | None
    """None for a call that has to be planned anew every time."""

    def __init__(
        self, planner: Planner, context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Plan the call for stand-ins; raises what the planner raises, with stand-ins that have no names."""
        values = (*args, *kwargs.values())
        # Kept alive, because the key knows some by their identity.
        self._constants = [*context, *[value for value in values if not _tensors_of(value)]]
        stand_ins: dict[int, Any] = {}
        storages: dict[int, Storage] = {}

        def replace_tensors(value: Any) -> Any:
            if type(value) is list:
                return [replace_tensors(element) for element in value] if _tensors_of(value) else value
            if type(value) is NkiTensor or isinstance(value, VirtualRegister):
                replacement = stand_ins.get(id(value))
                if replacement is None:
                    replacement = stand_ins[id(value)] = _make_stand_in(value, storages)
                return replacement
            return value

        positional = [replace_tensors(value) for value in args]
        keywords = {name: replace_tensors(value) for name, value in kwargs.items()}
        plan = complete(planner(*context, *positional, **keywords))
        arguments = _with_indices(
            [element for value in (*positional, *keywords.values()) for element in _tensors_of(value)]
        )
        self._reads = [_operand(tensor, arguments) for tensor in plan.reads]
        self._writes = [_operand(tensor, arguments) for tensor in plan.writes]
        operands = (*self._reads, *self._writes)
        self._are_arguments = all(type(operand) is int for operand in operands)
        # What cores of one rank agree on names their tensors; what ranks agree on does not.
        shared = plan.rendezvous is None or plan.rendezvous.by_rank
        self.template = Template(planner.__name__, plan) if shared and None not in operands else None

    def operands(self, tensors: list[NkiTensor]) -> tuple[Tensors, Tensors]:
        """Return the tensors that the instruction reads and those that it writes, for a call with these tensors.

        Args:
            tensors: The call's tensors as `build_call_key` lists them.
        """
        if self._are_arguments:
            get_tensor = tensors.__getitem__
            return tuple(map(get_tensor, self._reads)), tuple(map(get_tensor, self._writes))  # type: ignore[arg-type]
        reads, writes = (
            tuple([tensors[operand] if type(operand) is int else operand.select(tensors) for operand in side])  # type: ignore[union-attr]
            for side in (self._reads, self._writes)
        )
        return reads, writes


class Memo:
    """Calls planned so far, `KnownCall` by the key of `build_call_key`; emptied before it exceeds `capacity`."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.capacity = capacity
        self.calls: dict[tuple[Any, ...], KnownCall] = {}

    def add(self, key: tuple[Any, ...], call: KnownCall) -> None:
        """Record a call under its key; empties a full memo before."""
        if len(self.calls) >= self.capacity:
            self.calls.clear()
        self.calls[key] = call


def build_call_key(
    planner: Planner, context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[NkiTensor]] | None:
    """Return the key of a call, and the tensors among its arguments, each followed by its run-time index tile.

    Two calls with equal keys have equal plans apart from their tensors. None for a call with an argument that may
    change or is of an unknown type, which is planned anew every time.
    """
    items: list[Any] = [planner, len(args), *kwargs]
    tensors: list[NkiTensor] = []
    storages: list[int] = []

    def add(tensor: NkiTensor) -> bool:
        storage = id(tensor.storage)
        items.append(tensor.layout)
        if storage in storages:  # views of one allocation are another call than views of two
            items.append(storages.index(storage))
        storages.append(storage)
        tensors.append(tensor)
        dynamic = tensor.dynamic
        if dynamic is None:
            return True
        items.extend((dynamic.step, dynamic.extent, dynamic.per_partition, dynamic.group))
        return type(dynamic.index) is NkiTensor and add(dynamic.index)

    for value in (*context, *args, *kwargs.values()):
        value_type = type(value)
        if value_type is NkiTensor:
            if not add(value):
                return None
        elif value_type in _BY_VALUE:
            items += value_type, value  # 1 is no True
        elif value_type in _BY_IDENTITY:
            items.append(id(value))
        elif value_type is float:
            items += value_type, value or repr(value)  # 0.0 is no -0.0
        elif value_type is tuple and all(type(entry) is int for entry in value):
            items += value_type, value
        elif issubclass(value_type, Enum):
            _BY_IDENTITY.add(value_type)
            items.append(id(value))
        elif issubclass(value_type, VirtualRegister):
            items += value_type, value.frozen
            add(value.cell)
        elif value_type is ReplicaGroup:
            items.append(value)
        elif value_type is list and _tensors_of(value):
            items += value_type, len(value)
            if not all(add(element) for element in value):
                return None
        else:
            return None
    return tuple(items), tensors


def _tensors_of(value: Any) -> list[NkiTensor]:
    """Return the tensors of an argument: itself, the cell of a register, or the elements of a list of tensors."""
    if type(value) is NkiTensor:
        return [value]
    if isinstance(value, VirtualRegister):
        return [value.cell]
    if type(value) is list and all(type(element) is NkiTensor for element in value):
        return value
    return []


def _make_stand_in(
    value: NkiTensor | VirtualRegister, storages: dict[int, Storage]
) -> NkiTensor | VirtualRegister:
    if isinstance(value, NkiTensor):
        return stand_in(value, storages)
    return VirtualRegister(stand_in(value.cell, storages).storage, value.frozen)


def _with_indices(tensors: list[NkiTensor]) -> list[NkiTensor]:
    """Return a new list of tensors, each followed by the index tile of its run-time address, as in `build_call_key`."""
    indexed: list[NkiTensor] = []
    for tensor in tensors:
        indexed.append(tensor)
        while (dynamic := indexed[-1].dynamic) is not None:
            indexed.append(dynamic.index)
    return indexed


def _operand(tensor: NkiTensor, arguments: list[NkiTensor]) -> int | _View | None:
    """Return an operand of a plan as its index in `arguments`, or as the view of an argument's allocation that it is.

    None if it is neither.
    """
    for number, argument in enumerate(arguments):
        if argument is tensor:
            return number
    index = -1
    if tensor.dynamic is not None:
        index = next((n for n, candidate in enumerate(arguments) if candidate is tensor.dynamic.index), -1)
        if index < 0:
            return None
    for number, argument in enumerate(arguments):
        if argument.storage is tensor.storage:
            return _View(number, tensor.layout, tensor.dynamic, index)
    return None
