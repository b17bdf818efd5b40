"""Names that public code uses and the simulator does not simulate; calling one raises Unsupported with the reason.

The list `NOT_YET` is complete for what the documentation of NKI 0.2 to 0.7 and public kernels name. Importing such a
name works, so that a file which needs it only on a device still loads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from nkw.errors import Unsupported
from nkw.suggestions import FUNCTION_HINTS, ISA_HINTS, did_you_mean, format_nki_hint
from simulate.memory import MemoryRegion

_COMPILER = "it hands the kernel to the vendor's compiler; run the kernel with nki.simulate(kernel)(…)"
_BETA1 = "it was removed after Beta 1; write slices, and keep dims before the partition dim in a Python list"
_DEVICE = "it measures on a device; nkw time predicts a kernel's time"

NOT_YET: dict[str, dict[str, str]] = {
    "nki": {
        "baremetal": "it was removed after Beta 1; nki.jit kernels are called with numpy arrays directly",
        "simulate_kernel": "it was removed after Beta 1; nki.simulate(kernel)(…)",
        "trace": "it was removed after Beta 1; nki.jit",
        **dict.fromkeys(("benchmark", "profile"), _DEVICE),
    },
    "nki.isa": {},
    "nki.language": {
        **dict.fromkeys(("arange", "mgrid", "par_dim"), _BETA1),
    },
    "nki.collectives": {},
    "nki.compiler.driver": {"compile_to_bir": _COMPILER},
    "nki.compiler.frontend": dict.fromkeys(("NKIFrontend", "ParserFrontend", "TracerFrontend"), _COMPILER),
    "nki.compiler.kernel_builder": {"compile_kernel": _COMPILER},
    "nki.compiler.ncc_driver": dict.fromkeys(("CompileOptions", "CompiledKernel"), _COMPILER),
    "nki.framework.compiled": {"StandaloneKernel": _COMPILER},
    "nki.framework.torch_xla": {"TorchXlaKernel": "it hands the kernel to torch_xla; call the kernel itself"},
}
"""By module: each name, with the reason why it is not simulated."""


def not_yet(module: str, name: str, listed: dict[str, dict[str, str]] = NOT_YET) -> Callable[..., NoReturn]:
    """Return, for a name in `listed`, a function that raises Unsupported when it is called.

    The modules of `simulate.nki` call it as their `__getattr__`.

    Args:
        module: Name of the module, as "nki.isa".
        name: Attribute that the module does not have.
        listed: By module, the reason for each name that is not simulated.

    Raises:
        AttributeError: The name is not listed; the message names similar names.
    """
    reason = listed[module].get(name)
    if reason is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_suggestion(module, name)}")

    def unsupported(*_: Any, **__: Any) -> NoReturn:
        raise Unsupported("NKW-UNSUPPORTED", f"{module}.{name} cannot be simulated: {reason}")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.nki_operator = name  # type: ignore[attr-defined]
    return unsupported


def _suggestion(module: str, name: str) -> str:
    """Return the end of a message for a name that a module does not have, as "; did you mean nl.add?"; else ""."""
    if name.startswith("__") or module not in _SHORT_NAMES:
        return ""
    if module == "nki.isa" and name in ISA_HINTS:
        return format_nki_hint(ISA_HINTS[name])
    for other, short in _SHORT_NAMES.items():
        if other != module and name in _public_names(other):
            return f"; did you mean {short}.{name}?"
    hint = format_nki_hint(FUNCTION_HINTS.get(name, ""))
    return hint or did_you_mean(name, _public_names(module), f"{_SHORT_NAMES[module]}.")


_SHORT_NAMES = {"nki.isa": "nisa", "nki.language": "nl", "nki.collectives": "ncc"}
"""The names under which kernels import the modules."""


def _public_names(module: str) -> set[str]:
    """Return the public names of a module of `simulate.nki`, without what the module imports for itself."""
    names = vars(sys.modules[f"simulate.{module}"])
    public = {
        name
        for name, value in names.items()
        if isinstance(value, MemoryRegion)
        or (getattr(value, "__module__", None) == f"simulate.{module}" and not hasattr(value, "code"))
    }
    return {*names["__all__"], *(name for name in public if not name.startswith("_"))}


def absent_modules(present: set[str], listed: dict[str, dict[str, str]] = NOT_YET) -> dict[str, ModuleType]:
    """Return new modules by name: each module in `listed` that is not `present`, and its missing parent packages.

    Their attributes are those of `not_yet`.

    Args:
        present: Names of modules that exist.
        listed: By module, the reason for each name that is not simulated.
    """
    modules: dict[str, ModuleType] = {}
    for path in listed:
        packages = path.split(".")
        for depth in range(1, len(packages) + 1):
            name = ".".join(packages[:depth])
            if name in present or name in modules:
                continue
            module = ModuleType(name, "Nothing of this module is simulated.")
            module.__path__ = []
            if name in listed:
                module.__getattr__ = partial(not_yet, name, listed=listed)  # type: ignore[method-assign]
            modules[name] = module
            if "." in name and (parent := modules.get(name.rpartition(".")[0])) is not None:
                setattr(parent, packages[depth - 1], module)
    return modules
