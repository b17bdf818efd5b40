"""The API modules of `nki`: the names of NKI 0.6.0 over the instruction book; they compute nothing themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulate.kernel import Kernel, as_kernel
from simulate.nki import assignment as _assignment  # noqa: F401 (gives tensors their assignment)
from simulate.nki import collectives, dtype, experimental, isa, language, meta, simulator, typing
from simulate.nki.missing import not_yet
from simulate.nki.typing import tensor

__version__ = "0.6.0"


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a kernel of a function; `@nki.jit` and `@nki.jit(...)` are the same.

    Options of the compiler (`mode`, `platform_target`, …) have no meaning for a simulation and are accepted; the
    target comes from NEURON_PLATFORM_TARGET_OVERRIDE.
    """
    return as_kernel if fn is None else as_kernel(fn)


def simulate(kernel: Any) -> Kernel:
    """The kernel, or a plain function as a kernel, to be called in the simulator: `nki.simulate(k)(a, b)`."""
    return as_kernel(kernel)


cpu_simulate = simulate
"""As `simulate`, under the name that public test harnesses use: `nki.cpu_simulate(k)[2](a=a, b=b)`."""


def __getattr__(name: str) -> Any:
    return not_yet("nki", name)


__all__ = [
    "collectives",
    "cpu_simulate",
    "dtype",
    "experimental",
    "isa",
    "jit",
    "language",
    "meta",
    "simulate",
    "simulator",
    "tensor",
    "typing",
]
