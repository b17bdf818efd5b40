"""Replacements, in a process that runs the library's tests, for packages that are not installed or need a device.

The library's tests come with inputs and references; `running.Manager` replaces the code that compiles a kernel and
sends it to a device. The kernels are unchanged, except for mistakes of the published files, which `REPAIRS`, those of
the fidelity bench and `mend` correct.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.fidelity.sources import repairs
from tests.foreign.library import dtypes, running

ABSENT = ("allpairspy", "aws_embedded_metrics", "boto3", "botocore", "fabric2", "pandas", "plotext")
"""Packages that only the device's side of the library's tests uses."""

_TESTS = "test.integration.nkilib"
REPAIRS: dict[str, repairs.Repair] = {
    # A name that is used and not imported.
    f"{_TESTS}.core.qkv.test_qkv_tkg": (
        "from test.utils.test_orchestrator import Orchestrator\n",
        "from test.utils.common_dataclasses import Platforms\n"
        "from test.utils.test_orchestrator import Orchestrator\n",
    ),
    # The module has moved.
    f"{_TESTS}.experimental.subkernels.test_topk_reduce": (
        "nkilib.experimental.subkernels.topk_reduce",
        "nkilib.experimental.collectives.topk_reduce",
    ),
    # The inputs carry the name with a suffix.
    f"{_TESTS}.core.attention.test_gen_mask_tkg": (
        '{"golden_mask": kernel_input["mask_out_hbm"]}',
        '{"golden_mask": kernel_input["mask_out_hbm.must_alias_input"]}',
    ),
    # Our dtypes are strings, and numpy does not know the packed ones.
    f"{_TESTS}.core.moe.moe_tkg.test_moe_tkg": ("getattr(nl, d, np.dtype(d))", "getattr(nl, d)"),
}
"""By module of the tests: text of the published file, and its replacement; those of the kernels are the bench's."""


class Anything(type):
    """A class with every attribute, for names that are imported and never used."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=Anything):
    """A name imported from an absent package; calling it gives another one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Empty(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds absent packages as empty ones."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(clone: Path) -> None:
    """Make the clone's library and its tests importable, with the packages that they lack."""
    sys.path[:0] = [str(clone), str(clone / "src")]
    sys.meta_path.insert(0, _Finder())
    repairs.install({**repairs.LIBRARY, **REPAIRS})
    sys.modules["neuron_dtypes"] = sys.modules["neuronxcc.starfish.support.dtype"] = dtypes.module()
    for name in ("neuronxcc.starfish", "neuronxcc.starfish.support"):
        sys.modules[name] = _Empty(name)
    if importlib.util.find_spec("scipy") is None:
        sys.modules["scipy"] = ModuleType("scipy")
        for name, functions in (
            ("linalg", {"circulant": circulant}),
            ("special", {"expit": expit, "erf": erf}),
        ):
            module = sys.modules[f"scipy.{name}"] = ModuleType(f"scipy.{name}")
            module.__dict__.update(functions)
    for name in [name for name in sys.modules if name == "test" or name.startswith("test.")]:
        del sys.modules[name]  # Python's own package of that name
    orchestrator = ModuleType("test.utils.test_orchestrator")
    orchestrator.Orchestrator = running.Manager  # type: ignore[attr-defined]
    sys.modules["test.utils.test_orchestrator"] = orchestrator
    mend()
    allocate_packed()


def allocate_packed() -> None:
    """Let numpy's zeros and empty make arrays of the packed dtypes, which the vendor's are numpy dtypes."""
    for name in ("zeros", "empty"):
        setattr(np, name, dtypes.allocating(getattr(np, name)))


def mend() -> None:
    """Replace the reference's table of fp4 values, which has -2 twice and so misses one place for all beyond."""
    import torch
    from nkilib_src.nkilib.core.utils import mx_torch_common

    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    mx_torch_common._FP4_LUT = torch.tensor(half + [-value for value in half])


def circulant(column: Any) -> np.ndarray:
    """Return the matrix whose columns are rotations of `column`, as scipy.linalg has it."""
    column = np.asarray(column)
    rows = np.arange(column.size)
    return column[(rows[:, None] - rows) % column.size]


def expit(x: Any) -> np.ndarray:
    """Return the logistic function, in the dtype that comes in."""
    return 1 / (1 + np.exp(-np.asarray(x)))


def erf(x: Any) -> np.ndarray:
    """Return the error function."""
    import torch

    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()
