"""Decides once per process what `import nki` means: the real package or the simulator's face.

NKI_BACKEND=auto|simulate|neuron. `auto` takes the real package if a usable one is installed, else the simulator.
The public index carries placeholder packages (`nki` 0.0.1 and others) whose import raises ImportError; they are
recognised by their metadata and never executed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

from simulate.errors import InvalidArgument, Unsupported

BACKEND_VARIABLE = "NKI_BACKEND"
_MODULES = {
    name: f"simulate.nki.{name.rpartition('.')[2]}"
    for name in (
        *("collectives", "dtype", "experimental", "isa", "isa.constants", "language", "meta"),
        *("simulator", "typing"),
    )
}
_BETA1_MODULES = {
    **{name: f"simulate.beta1.{name}" for name in ("compiler", "isa", "language", "typing")},
    "isa.constants": "simulate.nki.constants",
}
_FIRST_REAL_VERSION = (0, 2)
_decided: str | None = None


def install(backend: str | None = None) -> str:
    """Bind the name `nki` and return what it stands for, "simulate" or "neuron".

    The first call decides; a later one that asks for something else raises InvalidArgument.
    """
    global _decided
    wanted = backend or os.environ.get(BACKEND_VARIABLE) or "auto"
    if wanted not in ("auto", "simulate", "neuron"):
        raise InvalidArgument("NKW-BACKEND", f"{BACKEND_VARIABLE}={wanted}; known are auto, simulate, neuron")
    if _decided is not None:
        if wanted not in ("auto", _decided):
            raise InvalidArgument(
                "NKW-BACKEND", f"nki is bound to {_decided} in this process; {wanted} was asked for"
            )
        return _decided
    if wanted == "neuron" and not real_package():
        raise Unsupported(
            "NKW-NO-NEURON",
            "no usable nki package is installed; on a Trn or Inf instance install AWS Neuron's packages "
            "(pip install 'nki-workbench[neuron]' with the Neuron package repository configured)",
        )
    _decided = "neuron" if wanted == "neuron" or (wanted == "auto" and real_package()) else "simulate"
    if _decided == "simulate":
        _bind_face()
    return _decided


def real_package() -> bool:
    """Whether the vendor's `nki` is installed: a version that was ever released as such, not the placeholder."""
    loaded = sys.modules.get("nki")
    if loaded is not None and loaded.__name__ != "simulate.nki":
        return True
    try:
        if importlib.util.find_spec("nki") is None:
            return False
    except ValueError:
        return False
    from importlib import metadata  # takes as long to import as half of the face

    try:
        return _numbers(metadata.version("nki")) >= _FIRST_REAL_VERSION
    except metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:2] if part.isdigit())


def _bind_face() -> None:
    face = importlib.import_module("simulate.nki")
    sys.modules["nki"] = face
    for name, module in _MODULES.items():
        sys.modules[f"nki.{name}"] = importlib.import_module(module)
    _bind_absent("nki", face, importlib.import_module("simulate.nki.missing").NOT_YET)
    if not _beta1_package():
        _bind_beta1()


def _beta1_package() -> bool:
    """Whether a `neuronxcc` is installed or loaded; it is never shadowed, nor executed to find out."""
    if "neuronxcc" in sys.modules:
        return True
    try:
        return importlib.util.find_spec("neuronxcc") is not None
    except ValueError:
        return False


def _bind_beta1() -> None:
    face = importlib.import_module("simulate.beta1")
    package = ModuleType("neuronxcc", "The package of Beta 1; of it, the simulator has `neuronxcc.nki`.")
    package.__path__ = []
    package.nki = face  # type: ignore[attr-defined]
    sys.modules["neuronxcc"] = package
    sys.modules["neuronxcc.nki"] = face
    for name, module in _BETA1_MODULES.items():
        sys.modules[f"neuronxcc.nki.{name}"] = importlib.import_module(module)
    _bind_absent("neuronxcc.nki", face, importlib.import_module("simulate.beta1.missing").NOT_IN_BETA1)


def _bind_absent(root: str, face: ModuleType, listed: dict[str, dict[str, str]]) -> None:
    """Let modules be imported of which nothing can be simulated; calling a name of theirs says why."""
    absent_modules = importlib.import_module("simulate.nki.missing").absent_modules
    for name, module in absent_modules(set(sys.modules), listed).items():
        sys.modules[name] = module
        parent, _, part = name.rpartition(".")
        if parent == root:
            setattr(face, part, module)


def load_everything() -> None:
    """Import the whole face, so that every rule is registered."""
    importlib.import_module("simulate.nki")
