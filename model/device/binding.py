"""Which package the name `nki` means, and calls into the simulator whose refusals are errors of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def by_rank(arguments: Sequence[tuple[Any, ...]]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of every rank, as the simulator takes them."""
    return [(tuple(each), {}) for each in arguments]
