"""The command `doctor`: what is installed and what works."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from pathlib import Path

import numpy as np

from simulate.bind import install
from simulate.errors import InvalidArgument, NkwError
from simulate.files import Outputs, imported_files, json_document
from simulate.hardware import hardware
from simulate.isa import INSTRUCTIONS
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import as_dtype
from simulate.parts import Hanging, table
from simulate.run import current_core, target_hardware
from simulate.run.issue import call
from simulate.targets import DEFAULT_TARGET
from simulate.terminal import error, show
from simulate.world import launch

_DEVICES = "neuron*"
_PACKAGES = {"nki": (0, 2), "neuronx-cc": (2, 20), "torch-neuronx": (2, 7), "libneuronxla": (2, 2)}
"""The vendor's packages, each with a version that lies above every placeholder of the public index."""
_PLACEHOLDER_FILES = 3  # a placeholder is a module or two that raise ImportError


def doctor(options: argparse.Namespace) -> int:
    """Say what is installed, what `import nki` and the target would be here, and whether a small kernel runs."""
    works = True
    devices = sorted(path.name for path in Path("/dev").glob(_DEVICES))
    found = {
        "Python": platform.python_version(),
        **{name: _version(name) or "not installed" for name in ("numpy", "ml_dtypes", "torch")},
        **{name: _vendor_package(name) for name in _PACKAGES},
        "chip": ", ".join(devices) or "no Neuron device files",
    }
    for label, asked in (("import nki", install), ("target", lambda: target_hardware().name)):
        try:
            found[label] = asked()
        except NkwError as refused:
            found[label] = str(refused)
            works = False
    try:
        right = _trial()
        found["simulator"] = f"a small kernel ran and returned {'the right' if right else 'a wrong'} answer"
        works = works and right
    except Exception as failed:
        found["simulator"] = f"a small kernel failed: {type(failed).__name__}: {failed}"
        works = False
    try:
        with json_document(options.json, Outputs(imported_files), "doctor") as contents:
            rows = [(label, Hanging(value, 0)) for label, value in found.items()]
            show([table("", rows, left=(0, 1), firm=(0,))])
            contents["found"] = found
            contents["works"] = works
    except InvalidArgument as refused:
        error(refused)
        return 2
    return 0 if works else 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _vendor_package(name: str) -> str:
    """Whether a package is the vendor's or a placeholder of the public index; nothing of it is executed."""
    version = _version(name)
    if version is None:
        return "not installed"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    code = [file for file in metadata.files(name) or [] if file.suffix in (".py", ".so")]
    if numbers < _PACKAGES[name] and len(code) <= _PLACEHOLDER_FILES:
        return f"{version}, a placeholder that cannot be imported; uninstall it"
    return version


def _trial() -> bool:
    """Run one matmul and compare it with numpy; small integers, so that both are exact."""

    def kernel(stationary: NkiTensor, moving: NkiTensor) -> NkiTensor:
        core = current_core()
        float32 = as_dtype("float32")
        tiles = [core.allocate(each.shape, float32) for each in (stationary, moving)]
        sums = core.allocate((4, 3), float32, MemoryRegion.psum)
        copied = core.allocate((4, 3), float32)
        out = core.allocate((4, 3), float32, MemoryRegion.shared_hbm)
        for tile, source in zip(tiles, (stationary, moving)):
            call(INSTRUCTIONS["dma_copy"], (), {"dst": tile, "src": source})
        call(INSTRUCTIONS["nc_matmul"], (), {"dst": sums, "stationary": tiles[0], "moving": tiles[1]})
        call(INSTRUCTIONS["tensor_copy"], (), {"dst": copied, "src": sums})
        call(INSTRUCTIONS["dma_copy"], (), {"dst": out, "src": copied})
        return out

    a = np.arange(20, dtype=np.float32).reshape(5, 4)
    b = np.arange(15, dtype=np.float32).reshape(5, 3)
    result = launch(kernel, [((a, b), {})], hardware(DEFAULT_TARGET)).outputs[0]
    return bool(np.array_equal(result, a.T @ b))
