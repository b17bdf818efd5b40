"""Binding of the name `nki`, of kernels and of their arguments, for all devices.

The name `nki` is bound either to the simulator or to the vendor's package. Errors of the simulator become `ModelError`
here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

import simulate
from model.errors import ModelError


def bind_nki(backend: str) -> None:
    """Bind the name `nki` for this process, before the first kernel is imported.

    Args:
        backend: "simulate" for the simulator, or "neuron" for the vendor's package.

    Raises:
        ModelError: `nki` is bound to the other package, or the vendor's package is not installed.
    """
    run_checked(lambda: simulate.install(backend))


def find_nki_dtype(name: str) -> Any:
    """Return the dtype of `nki.language` with this name; call it after a device has bound `nki`."""
    import nki.language

    return getattr(nki.language, name)


def make_replica_group(groups: list[list[int]] | None) -> Any:
    """Return a `ReplicaGroup` for the kernel of a collective; None for None, which means one rank.

    Args:
        groups: The ranks of each group that communicates.
    """
    if groups is None:
        return None
    from nki.collectives import ReplicaGroup

    return ReplicaGroup(groups)


def run_checked(action: Callable[[], Any], kernel: str = "") -> Any:
    """Call `action`, which uses the simulator, and return its result.

    Raises:
        ModelError: The simulator or an assertion of a kernel refuses the call; the message begins with `kernel`, if
            given.
    """
    try:
        return action()
    except (simulate.NkwError, AssertionError) as error:
        code = getattr(error, "code", "NKW-MODEL-KERNEL")
        raise ModelError(f"{kernel}: {error}" if kernel else str(error), code) from error


def find_kernel(name: str) -> Any:
    """Return the kernel of `nki_kernels` with this name; AttributeError if there is none."""
    import nki_kernels

    return getattr(nki_kernels, name)


@cache
def list_parameters(kernel: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a kernel of `nki_kernels` by name, in the order of its signature."""
    function = find_kernel(kernel)
    return inspect.signature(getattr(function, "func", function)).parameters


@cache
def _list_defaults(kernel: str, names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Return (name, default) of each parameter of a kernel in order, after checking the names of a launch's arguments.

    Raises:
        ModelError: The kernel has no parameter of one of the names, or a parameter without a default is missing.
    """
    parameters = list_parameters(kernel)
    required = (
        name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty
    )
    wrong = [f"no parameter {name}" for name in names if name not in parameters]
    wrong += [f"no argument for {name}" for name in required if name not in names]
    if wrong:
        raise ModelError(f"{kernel}: {', '.join(wrong)}", "NKW-MODEL-KERNEL")
    return tuple((name, parameter.default) for name, parameter in parameters.items())


def bind_arguments(kernel: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a kernel as a tuple in the order of its signature, with defaults for missing ones.

    Launches with and without an explicit default are equal, so they share one replay, one plan and one operator.

    Raises:
        ModelError: The arguments do not fit the signature; the message names the kernel and the parameters.
    """
    return tuple([arguments.get(name, default) for name, default in _list_defaults(kernel, tuple(arguments))])


def find_parameter_indices(kernel: str, names: Sequence[str | None]) -> tuple[int | None, ...]:
    """Return the index of each named parameter in the signature of a kernel; None for a name that is None.

    Raises:
        ValueError: The kernel has no parameter of a name.
    """
    parameters = list(list_parameters(kernel))
    return tuple(None if name is None else parameters.index(name) for name in names)


def bind_rank_arguments(
    kernel: str, arguments: Sequence[Mapping[str, Any]]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return, for each rank, (positional arguments, {}) as a simulated launch takes them.

    Args:
        kernel: Name of a kernel of `nki_kernels`.
        arguments: The arguments of each rank by parameter name.

    Raises:
        ModelError: The arguments do not fit the signature.
    """
    return [(bind_arguments(kernel, rank_arguments), {}) for rank_arguments in arguments]


class HostArrays:
    """Base class of devices whose arrays stay in the memory of the host."""

    def dtype(self, name: str) -> Any:
        """Return the dtype of `nki.language` with this name, as a kernel argument."""
        return find_nki_dtype(name)

    def replica_group(self, groups: list[list[int]] | None) -> Any:
        """Return a `ReplicaGroup` with the ranks of each group, as a kernel argument; None (one rank) for None."""
        return make_replica_group(groups)

    def hold(self, array: np.ndarray) -> np.ndarray:
        """Return the array itself, because the device reads the memory of the host."""
        return array

    def session(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because the device keeps no recorded kernels."""
        return nullcontext()

    def end_graph(self) -> None:
        """Do nothing, because every launch takes effect at once."""
