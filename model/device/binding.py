"""Which package the name `nki` means, and calls into the simulator whose refusals are errors of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import simulate
from model.errors import ModelError
from simulate.bind import real_package


def neuron_package_installed() -> bool:
    """Whether the vendor's `nki` is installed, and not a placeholder of that name."""
    return real_package()


def bind_neuron() -> None:
    """Bind `nki` to the vendor's package for this process."""
    checked(lambda: simulate.install("neuron"))


def bind_simulator() -> None:
    """Bind `nki` to the simulator, before the kernels are imported and decide for themselves."""
    checked(lambda: simulate.install("simulate"))


def nki_dtype(name: str) -> Any:
    """A dtype of `nki.language`, which a device has bound before."""
    import nki.language

    return getattr(nki.language, name)


def replica_group_of(groups: list[list[int]] | None) -> Any:
    """The groups of a collective as kernels take them; None where each rank is alone."""
    if groups is None:
        return None
    from nki.collectives import ReplicaGroup

    return ReplicaGroup(groups)


def checked(action: Callable[[], Any], kernel: str = "") -> Any:
    """Carry out a call into the simulator; what it refuses becomes a ModelError that names the kernel."""
    try:
        return action()
    except (simulate.NkwError, AssertionError) as error:
        code = getattr(error, "code", "NKW-MODEL-KERNEL")
        raise ModelError(f"{kernel}: {error}" if kernel else str(error), code) from error


def kernel_named(name: str) -> Any:
    """A kernel of `nki_kernels`."""
    import nki_kernels

    return getattr(nki_kernels, name)


@cache
def parameters_of(kernel: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a kernel of `nki_kernels` by name, in the order of its signature."""
    function = kernel_named(kernel)
    return inspect.signature(getattr(function, "func", function)).parameters


@cache
def _defaults(kernel: str, names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Return all parameters of a kernel with their defaults, for a launch with arguments of these names.

    Raises:
        ModelError: the kernel has no parameter of one of the names, or a parameter without a default is missing.
    """
    parameters = parameters_of(kernel)
    required = (
        name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty
    )
    wrong = [f"no parameter {name}" for name in names if name not in parameters]
    wrong += [f"no argument for {name}" for name in required if name not in names]
    if wrong:
        raise ModelError(f"{kernel}: {', '.join(wrong)}", "NKW-MODEL-KERNEL")
    return tuple((name, parameter.default) for name, parameter in parameters.items())


def in_order(kernel: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a kernel in the order of its signature, with the defaults of those left out.

    A launch that leaves out a default equals one that gives it: both have one replay, one plan and one operator.

    Raises:
        ModelError: the arguments do not fit the signature; the message names the kernel and the parameters.
    """
    return tuple([arguments.get(name, default) for name, default in _defaults(kernel, tuple(arguments))])


def parameter_indices(kernel: str, names: Sequence[str | None]) -> tuple[int | None, ...]:
    """Return the indices of parameters in the signature of a kernel; None for a name that is None."""
    indices = {name: index for index, name in enumerate(parameters_of(kernel))}
    return tuple(None if name is None else indices[name] for name in names)


def by_rank(
    kernel: str, arguments: Sequence[Mapping[str, Any]]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of every rank as the simulator takes them: all positional."""
    return [(in_order(kernel, rank_arguments), {}) for rank_arguments in arguments]
