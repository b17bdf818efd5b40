"""The modules of `nki` as kernels import them: the names of NKI up to 0.7.0 over the instruction book (`simulate.isa`).

They compute nothing themselves. `simulate.bind` installs them as `nki`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nkw.errors import InvalidArgument
from simulate.kernel import Kernel, as_kernel
from simulate.level import Level
from simulate.nki import assignment as _assignment  # noqa: F401 (gives tensors their assignment)
from simulate.nki import collectives, compiler, dtype, experimental, isa, language, meta, simulator, typing
from simulate.nki.missing import not_yet
from simulate.nki.typing import tensor


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    compile_config: compiler.CompileConfig | None = None,
    specialization_config: compiler.SpecializationConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Make a kernel of a function; `@nki.jit` and `@nki.jit(...)` are the same.

    The configurations (0.7) change no value of a simulation. A nested kernel whose configuration differs from that of
    the launched one is refused, or with allow_nested_config_override gives a warning. Older options of the compiler
    (`mode`, `platform_target`, …) are accepted and ignored; the target comes from NEURON_PLATFORM_TARGET_OVERRIDE.

    Returns:
        The Kernel; without `fn`, a decorator that makes it.

    Raises:
        InvalidArgument: A configuration is of another type.
        RuleViolation: The level lacks configurations.
    """
    configs = {"compile_config": compile_config, "specialization_config": specialization_config}
    classes = (compiler.CompileConfig, compiler.SpecializationConfig)
    for (name, config), config_type in zip(configs.items(), classes):
        if config is not None:
            Level.resolve().require(f"nki.jit({name}=…)")
            if not isinstance(config, config_type):
                raise InvalidArgument(
                    "NKW-COMPILE-CONFIG",
                    f"{name}={config!r:.60}; give an nki.compiler.{config_type.__name__}",
                )
    overrides = specialization_config is not None and specialization_config.allow_nested_config_override

    def decorate(function: Callable[..., Any]) -> Kernel:
        kernel = as_kernel(function)
        return kernel.configured(compile_config, overrides) if compile_config or overrides else kernel

    return decorate if fn is None else decorate(fn)


def simulate(kernel: Any) -> Kernel:
    """Return a kernel to call in the simulator, `nki.simulate(k)(a, b)`; a plain function is made a kernel."""
    return as_kernel(kernel)


cpu_simulate = simulate
"""As `simulate`, under the name that public test harnesses use: `nki.cpu_simulate(k)[2](a=a, b=b)`."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return f"{Level.resolve()}.0"
    return not_yet("nki", name)


__all__ = [
    "collectives",
    "compiler",
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
