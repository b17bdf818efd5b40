"""The compatible face of `nki`: the names of NKI 0.6.0, resting on the instruction book; no arithmetic in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulate.nki import collectives, isa, language, typing
from simulate.run import Kernel, as_kernel

__version__ = "0.6.0"


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a kernel of a function; `@nki.jit` and `@nki.jit(...)` are the same.

    Options of the compiler (`mode`, `platform_target`, …) have no meaning for a simulation and are accepted; the
    target comes from NEURON_PLATFORM_TARGET_OVERRIDE.
    """
    if fn is None:
        return Kernel
    return as_kernel(fn)


def simulate(kernel: Any) -> Kernel:
    """The kernel, or a plain function as a kernel, to be called in the simulator: `nki.simulate(k)(a, b)`."""
    return as_kernel(kernel)


__all__ = ["collectives", "isa", "jit", "language", "simulate", "typing"]
