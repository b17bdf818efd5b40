"""The API modules of Beta 1, `neuronxcc.nki`: instructions return tiles, indices are affine, masks skip elements.

Every effect on data is an instruction of the instruction book, which `nki` uses too; it is issued, checked, recorded
and timed as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulate.beta1 import compiler, isa, language, typing
from simulate.beta1.kernel import Benchmarked, Kernel
from simulate.beta1.typing import mutable_tensor, tensor

__version__ = "2.26 (Beta 1)"


def jit(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a kernel that runs `func`: `@nki.jit`, or `@nki.jit(mode=…)`, which returns a decorator.

    `options` are the compiler's and change nothing. The target comes from NEURON_PLATFORM_TARGET_OVERRIDE, as for
    `nki`. Raises InvalidArgument if `func` is not callable.
    """
    return as_kernel if func is None else as_kernel(func)


baremetal = trace = nki_jit = profile = jit
"""As `jit`: on the simulated core, under its oldest name, under that of torch_neuronx, and without writing files."""


def benchmark(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a kernel that also predicts its latency, in `benchmark_result`; without `func`, a decorator.

    `options`, such as warm-up and iteration counts, change nothing.
    """
    if func is None:
        return benchmark
    kernel = as_kernel(func)
    return Benchmarked(kernel.function, kernel.grid)


def simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch a kernel, or a plain function as one, and return its outputs: `simulate_kernel(kernel[4, 2], a, b)`."""
    return as_kernel(kernel)(*args, **kwargs)


def as_kernel(func: Any) -> Kernel:
    """Return a `Kernel` unchanged, and a plain function wrapped as a kernel without a grid."""
    return func if isinstance(func, Kernel) else Kernel(func)


__all__ = [
    "baremetal",
    "benchmark",
    "compiler",
    "isa",
    "jit",
    "language",
    "mutable_tensor",
    "nki_jit",
    "profile",
    "simulate_kernel",
    "tensor",
    "trace",
    "typing",
]
