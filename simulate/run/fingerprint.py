"""Everything besides its arguments that a kernel's instructions may depend on, and whether it is still the same.

A kernel is a Python function: its defaults, closure and globals, and those of every function it calls, decide
what it does. `Watch` keeps them as they were; a launch is replayed only while they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np

from simulate.memory import MemoryRegion, NKIObject

_CONSTANTS = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    Enum,
    type,
    np.generic,
    np.dtype,
    MemoryRegion,
    range,
    slice,
)
_OURS = ("simulate.", "numpy", "math", "builtins", "ml_dtypes")


class NotFixed(Exception):
    """Something a kernel depends on that cannot be compared with what it was; carries the reason."""


class Watch:
    """The surroundings of one kernel function as they were when it was recorded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._places: list[tuple[Any, str, Any]] = []
        self._texts: list[tuple[Any, str]] = []
        self._seen: set[int] = set()
        self._function(function)

    def unchanged(self) -> bool:
        """Whether every name still stands for what it did, and every list, dict and set still holds the same."""
        for names, name, value in self._names:
            if names.get(name) is not value:
                return False
        for holder, part, value in self._places:
            if getattr(holder, part, None) is not value:
                return False
        return all(repr(value) == text for value, text in self._texts)

    def _function(self, function: Callable[..., Any]) -> None:
        function = getattr(function, "func", function)
        if id(function) in self._seen or not isinstance(function, types.FunctionType):
            return
        self._seen.add(id(function))
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            self._places.append((function, part, getattr(function, part)))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value, f"a default of {function.__name__}")
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._places.append((cell, "cell_contents", content))
            self._value(content, f"the closure of {function.__name__}")
        names = set(_names(function.__code__))
        for name in names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            self._names.append((function.__globals__, name, value))
            self._value(value, f"the global {name}")
            if isinstance(value, types.ModuleType) and not value.__name__.startswith(_OURS):
                self._module(value, names)

    def _module(self, module: types.ModuleType, names: set[str]) -> None:
        for name in names & vars(module).keys():
            value = vars(module)[name]
            self._names.append((vars(module), name, value))
            self._value(value, f"{module.__name__}.{name}")

    def _value(self, value: Any, what: str) -> None:
        if isinstance(value, (*_CONSTANTS, types.ModuleType, types.BuiltinFunctionType, np.ufunc)):
            return
        if getattr(value, "__module__", "").startswith(_OURS) and callable(value):
            return
        if isinstance(value, types.FunctionType) or hasattr(value, "func"):
            self._function(value)
        elif isinstance(value, (tuple, list, dict, set, frozenset)):
            self._texts.append((value, repr(value)))
            for part in value.items() if isinstance(value, dict) else value:
                self._value(part, what)
        elif isinstance(value, NKIObject) and type(value).__repr__ is not object.__repr__:
            self._texts.append((value, repr(value)))
        else:
            raise NotFixed(f"{what} is a {type(value).__name__}, which may change unseen")


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def static_key(value: Any, arrays: dict[int, np.ndarray]) -> Any:
    """What of an argument decides a kernel's instructions; arrays are collected once each, in order.

    Raises NotFixed for a value that cannot be compared.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous or value.size == 0:
            raise NotFixed("an array is not contiguous")
        arrays.setdefault(id(value), value)
        return "array", list(arrays).index(id(value)), value.shape, value.dtype, value.flags.writeable
    if isinstance(value, (bool, int, str, bytes, type(None), Enum, type, np.dtype)):
        return type(value), value
    if isinstance(value, (float, np.generic)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(static_key(part, arrays) for part in value)
    if isinstance(value, dict):
        return dict, tuple((key, static_key(part, arrays)) for key, part in value.items())
    if isinstance(value, NKIObject) and type(value).__hash__ not in (None, object.__hash__):
        return type(value), value
    raise NotFixed(f"an argument is a {type(value).__name__}")
