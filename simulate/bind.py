"""Decides once per process what `import nki` means: the real package or the API modules of the simulator.

NKI_BACKEND=auto|simulate|neuron. `auto` takes the real package if a usable one is installed, else the simulator.
The public index carries placeholder packages (`nki` 0.0.1 and others) whose import raises ImportError; they are
recognised by their metadata and never executed. The Beta 1 dialect, `neuronxcc.nki`, is loaded when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from nkw.errors import InvalidArgument, Unsupported
from simulate.level import choose
from simulate.tracebacks import show_user_frames
from simulate.vendor_packages import FIRST_NKI, parse_version

BACKEND_VARIABLE = "NKI_BACKEND"
_MODULES = {
    name: f"simulate.nki.{name.rpartition('.')[2]}"
    for name in "collectives compiler dtype experimental isa isa.constants language meta simulator typing".split()
}
_BETA1_MODULES = {
    **{name: f"simulate.beta1.{name}" for name in ("compiler", "isa", "language", "typing")},
    "isa.constants": "simulate.nki.constants",
}
_decided: str | None = None


def install(backend: str | None = None, level: str | None = None, rules: str | None = None) -> str:
    """Bind the name `nki` and return the backend that it means, "simulate" or "neuron".

    The first call decides for the process; later calls may ask for the same backend or "auto", and return the one in
    use. With "simulate", `nki` and its modules are put into `sys.modules`, `neuronxcc.nki` becomes importable, and
    tracebacks of user errors lose the simulator's frames.

    Args:
        backend: "simulate", "neuron", or "auto" for the installed vendor package if it is usable, else the simulator.
            None is the value of NKI_BACKEND, else "auto".
        level: A release of NKI such as "0.6", written to NKI_LEVEL of this process; None leaves the variable.
        rules: "chip" or "simulator", written to NKI_RULES of this process; None leaves the variable.

    Raises:
        InvalidArgument: Backend, NKI_BACKEND, level or rules are unknown, or `nki` is already bound to another
            backend.
        Unsupported: "neuron" is requested and no usable vendor package is installed.
    """
    global _decided
    choose(level, rules)
    named = os.environ.get(BACKEND_VARIABLE) or "auto"
    wanted = backend or named
    for name in (wanted, named):  # what the environment names is asked for again by the kernels
        if name not in ("auto", "simulate", "neuron"):
            raise InvalidArgument(
                "NKW-BACKEND", f"{BACKEND_VARIABLE}={name}; known are auto, simulate, neuron"
            )
    if _decided is not None:
        if wanted not in ("auto", _decided):
            raise InvalidArgument(
                "NKW-BACKEND",
                f"nki is bound to {_decided} in this process, so {wanted} cannot be installed; "
                "start a new process for it",
            )
        return _decided
    if wanted == "neuron" and not has_real_package():
        raise Unsupported(
            "NKW-NO-NEURON",
            "no usable nki package is installed; on a Trn or Inf instance install AWS Neuron's packages "
            "(pip install 'nki-workbench[neuron]' with the Neuron package repository configured)",
        )
    _decided = "neuron" if wanted == "neuron" or (wanted == "auto" and has_real_package()) else "simulate"
    if _decided == "simulate":
        _bind_nki()
        show_user_frames()
    return _decided


def has_real_package() -> bool:
    """Return whether `import nki` gives the vendor's package: already imported, or installed with version 0.2 or later.

    The placeholder on the public package index has a lower version. Nothing is imported to find out.
    """
    loaded = sys.modules.get("nki")
    if loaded is not None and loaded.__name__ != "simulate.nki":
        return True
    try:
        if importlib.util.find_spec("nki") is None:
            return False
    except ValueError:
        return False
    from importlib import metadata  # takes as long to import as half of the simulator

    try:
        return parse_version(metadata.version("nki")) >= FIRST_NKI
    except metadata.PackageNotFoundError:
        return False


def _bind_nki() -> None:
    """Put the simulator's `nki` and its modules into `sys.modules`, and make `neuronxcc.nki` importable."""
    _bind("nki", importlib.import_module("simulate.nki"), _MODULES, "simulate.nki.missing", "NOT_YET")
    sys.meta_path.append(_Beta1Finder)  # the last one, so that an installed `neuronxcc` is found first


def _bind(root: str, package: ModuleType, modules: dict[str, str], missing: str, table: str) -> None:
    """Enter a package and its modules into `sys.modules` under the names that kernels import.

    Modules that the simulator does not have are entered too, as modules whose names raise an error that says why.

    Args:
        root: The name of the package, "nki" or "neuronxcc.nki".
        package: The simulator's package with that API.
        modules: The simulator's module of each API module, by its name without `root`.
        missing: The module whose attribute `table` lists the API names that are not simulated.
        table: The name of that attribute.
    """
    sys.modules[root] = package
    for name, module in modules.items():
        sys.modules[f"{root}.{name}"] = importlib.import_module(module)
    absent_modules = importlib.import_module("simulate.nki.missing").absent_modules
    listed = getattr(importlib.import_module(missing), table)
    for name, module in absent_modules(set(sys.modules), listed).items():
        sys.modules[name] = module
        parent, _, attribute = name.rpartition(".")
        if parent == root:
            setattr(package, attribute, module)


class _Beta1Finder:
    """Import hook that finds `neuronxcc` and loads it as a package with `neuronxcc.nki` as its only member."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, cls, is_package=True) if name == "neuronxcc" else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Return None, so that Python creates the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Import `simulate.beta1` as `neuronxcc.nki` and enter its modules into `sys.modules`.

        Also adds the level `OFF` to `logging`, as the vendor's package does.
        """
        module.__doc__ = "The package of Beta 1; of it, the simulator has `neuronxcc.nki`."
        package = importlib.import_module("simulate.beta1")
        module.nki = package  # type: ignore[attr-defined]
        if not hasattr(logging, "OFF"):  # the vendor's package adds this level, and course harnesses use it
            logging.OFF = logging.CRITICAL + 10  # type: ignore[attr-defined]
        _bind("neuronxcc.nki", package, _BETA1_MODULES, "simulate.beta1.missing", "NOT_IN_BETA1")


def load_everything() -> None:
    """Import `simulate.nki` and `simulate.beta1`, which registers every rule with its code."""
    importlib.import_module("simulate.nki")
    importlib.import_module("simulate.beta1")
