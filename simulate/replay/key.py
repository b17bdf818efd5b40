"""The cache key of a launch: kernel, chip, options, and its arguments without the numbers in their arrays."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from simulate.memory import NKIObject
from simulate.run.launch import LaunchRequest


class NotFixed(Exception):
    """The reason why a launch cannot be replayed: a dependence of the kernel that cannot be compared later."""


def is_constant(kind: type) -> bool:
    """Whether objects of a class of this package are immutable and compare by value."""
    return kind.__hash__ is not None and kind.__hash__ is not object.__hash__  # type: ignore[comparison-overlap]


class Signature:
    """The arrays of one rank's arguments, once each and in order, and the classes of the objects among them."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.classes: list[Any] = []
        self._places: dict[int, int] = {}

    def key(self, value: Any) -> Any:
        """The part of an argument that decides instructions, as a hashable key; 1, 1.0 and True have different keys.

        Raises NotFixed for a value that cannot be compared.
        """
        kind = type(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if value is None or kind in (bool, int, str, bytes) or isinstance(value, np.dtype):
            return kind, value
        if kind in (float, complex, range):
            return kind, repr(value)
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if kind is list or isinstance(value, tuple):
            if hasattr(value, "_fields"):
                self.classes.append(kind)
            elif kind not in (list, tuple):
                raise NotFixed(f"an argument is a {kind.__name__}")
            return kind, tuple(map(self.key, value))
        if kind is dict:
            return kind, tuple((self.key(name), self.key(part)) for name, part in value.items())
        if isinstance(value, (Enum, type)):
            self.classes.append(value)
            return kind, value
        if kind.__module__.startswith("simulate.") and is_constant(kind):
            return kind, value
        if isinstance(value, NKIObject) or dataclasses.is_dataclass(value):
            return self._object(value)
        raise NotFixed(f"an argument is a {kind.__name__}")

    def _array(self, value: np.ndarray) -> Any:
        flags, dtype = value.flags, value.dtype
        if not flags.c_contiguous or value.size == 0:
            raise NotFixed("an array is not contiguous")
        if not dtype.isnative:
            raise NotFixed("an array has another byte order")
        place = self._places.setdefault(id(value), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(value)
        return "array", place, value.shape, dtype, flags.writeable

    def _object(self, value: Any) -> Any:
        """The key of an object: its class and attributes. Raises NotFixed for one with arrays, which it may return."""
        kind = type(value)
        if not hasattr(value, "__dict__"):
            raise NotFixed(f"an argument is a {kind.__name__}")
        inside = Signature()
        parts = tuple((name, inside.key(part)) for name, part in vars(value).items())
        if inside.arrays:
            raise NotFixed(f"an argument is a {kind.__name__} that holds arrays")
        self.classes += [kind, *inside.classes]
        return kind, parts


@dataclass(frozen=True, eq=False)
class ReplayKey:
    """The cache key of a launch, with its arrays in order, one list per rank.

    `classes` are those of the objects among the arguments; the guards watch them.
    """

    key: tuple[Any, ...]
    arrays: list[list[np.ndarray]]
    classes: list[Any]

    @classmethod
    def of(cls, request: LaunchRequest, options: tuple[Any, ...]) -> ReplayKey:
        """The key of a launch; `options` are further parts of the key. Raises NotFixed if there is no key."""
        signatures = [Signature() for _ in request.arguments]
        if not _is_itself(request.kernel):
            raise NotFixed(f"the kernel is a {type(request.kernel).__name__}, which may change unseen")
        parts = tuple(
            (own.key(args), own.key(kwargs)) for own, (args, kwargs) in zip(signatures, request.arguments)
        )
        classes = [each for own in signatures for each in own.classes]
        key = (request.kernel, request.chip, options, parts)
        return cls(key, [own.arrays for own in signatures], classes)

    def matches(self, request: LaunchRequest, options: tuple[Any, ...]) -> bool:
        """Whether a request has this key."""
        try:
            return ReplayKey.of(request, options).key == self.key
        except NotFixed:
            return False


def _is_itself(kernel: Any) -> bool:
    """Whether equal kernels have equal behaviour; equal bound methods and objects may differ."""
    own = type(kernel).__module__.startswith("simulate.")
    return own or isinstance(kernel, (types.FunctionType, partial))
