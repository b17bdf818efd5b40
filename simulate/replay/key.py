"""Cache key of a launch: kernel, chip, options, and the arguments without the contents of arrays."""

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
    """Exception with the reason why a launch cannot be replayed: a value it depends on cannot be compared later."""


def is_constant(cls: type) -> bool:
    """Return whether a class compares and hashes objects by value; classes of the simulator that do are immutable."""
    return cls.__hash__ is not None and cls.__hash__ is not object.__hash__  # type: ignore[comparison-overlap]


class Signature:
    """Collector of the distinct arrays among one rank's arguments, in order, and of the classes of other objects."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.classes: list[Any] = []
        self._array_indices: dict[int, int] = {}

    def build_key(self, value: Any) -> Any:
        """Return a hashable key of what may decide instructions in an argument; appends to `arrays` and `classes`.

        1, 1.0 and True have different keys. The key of an array has its index in `arrays`, shape, dtype and whether
        it is writable, not its contents.

        Raises:
            NotFixed: The argument contains a value that cannot be compared, or an empty or non-contiguous array.
        """
        cls = type(value)
        if isinstance(value, np.ndarray):
            return self._build_array_key(value)
        if value is None or cls in (bool, int, str, bytes) or isinstance(value, np.dtype):
            return cls, value
        if cls in (float, complex, range):
            return cls, repr(value)
        if isinstance(value, np.generic):
            return cls, value.tobytes()
        if cls is list or isinstance(value, tuple):
            if hasattr(value, "_fields"):
                self.classes.append(cls)
            elif cls not in (list, tuple):
                raise NotFixed(f"an argument is a {cls.__name__}")
            return cls, tuple(map(self.build_key, value))
        if cls is dict:
            return cls, tuple(
                (self.build_key(name), self.build_key(element)) for name, element in value.items()
            )
        if isinstance(value, (Enum, type)):
            self.classes.append(value)
            return cls, value
        if cls.__module__.startswith("simulate.") and is_constant(cls):
            return cls, value
        if isinstance(value, NKIObject) or dataclasses.is_dataclass(value):
            return self._build_object_key(value)
        raise NotFixed(f"an argument is a {cls.__name__}")

    def _build_array_key(self, value: np.ndarray) -> Any:
        """Return the key of an array and append it to `arrays` unless it is there.

        Raises:
            NotFixed: The array is empty, not C-contiguous, or has another byte order than this machine.
        """
        flags, dtype = value.flags, value.dtype
        if not flags.c_contiguous or value.size == 0:
            raise NotFixed("an array is not contiguous")
        if not dtype.isnative:
            raise NotFixed("an array has another byte order")
        index = self._array_indices.setdefault(id(value), len(self.arrays))
        if index == len(self.arrays):
            self.arrays.append(value)
        return "array", index, value.shape, dtype, flags.writeable

    def _build_object_key(self, value: Any) -> Any:
        """Return the key of an object: its class and attributes.

        Raises:
            NotFixed: The object holds arrays, which the kernel might return, or attributes that cannot be compared.
        """
        cls = type(value)
        if not hasattr(value, "__dict__"):
            raise NotFixed(f"an argument is a {cls.__name__}")
        attribute_signature = Signature()
        attribute_keys = tuple(
            (name, attribute_signature.build_key(attribute)) for name, attribute in vars(value).items()
        )
        if attribute_signature.arrays:
            raise NotFixed(f"an argument is a {cls.__name__} that holds arrays")
        self.classes += [cls, *attribute_signature.classes]
        return cls, attribute_keys


@dataclass(frozen=True, eq=False)
class ReplayKey:
    """Cache key of a launch, with what the key leaves out.

    key: hashable; kernel, chip, options and arguments. arrays: the array arguments of each rank, in order. classes:
    the classes of the objects among the arguments, which the guards watch.
    """

    key: tuple[Any, ...]
    arrays: list[list[np.ndarray]]
    classes: list[Any]

    @classmethod
    def from_request(cls, request: LaunchRequest, options: tuple[Any, ...]) -> ReplayKey:
        """Return the key of a launch request.

        Args:
            request: The request.
            options: Further elements of the key.

        Raises:
            NotFixed: The kernel or an argument cannot be compared later.
        """
        signatures = [Signature() for _ in request.arguments]
        if not _has_fixed_behaviour(request.kernel):
            raise NotFixed(f"the kernel is a {type(request.kernel).__name__}, which may change unseen")
        argument_keys = tuple(
            (signature.build_key(args), signature.build_key(kwargs))
            for signature, (args, kwargs) in zip(signatures, request.arguments)
        )
        classes = [argument_class for signature in signatures for argument_class in signature.classes]
        key = (request.kernel, request.chip, options, argument_keys)
        return cls(key, [signature.arrays for signature in signatures], classes)

    def matches(self, request: LaunchRequest, options: tuple[Any, ...]) -> bool:
        """Return whether a request has this key now; False if its arguments cannot be compared."""
        try:
            return ReplayKey.from_request(request, options).key == self.key
        except NotFixed:
            return False


def _has_fixed_behaviour(kernel: Any) -> bool:
    """Return whether equal kernels behave equally: True for functions, partials and kernels of the simulator's classes.

    Equal bound methods and callable objects may differ.
    """
    is_simulator_class = type(kernel).__module__.startswith("simulate.")
    return is_simulator_class or isinstance(kernel, (types.FunctionType, partial))
