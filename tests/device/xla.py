"""torch_xla as SDK 2.28 documents it: lazy tensors, a graph from one mark_step to the next.

v2.28.0/frameworks/torch/torch-neuronx/programming-guide/training/pytorch-neuron-programming-guide.html and
v2.28.0/nki/guides/framework_custom_op.html, below https://awsdocs-neuron.readthedocs-hosted.com/en/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.device.core import (
    Core,
    CoreTensor,
    DocumentedModule,
    NotDocumented,
    arrays_of,
    install,
    mutable_places,
)

GUIDE = (
    "v2.28.0/frameworks/torch/torch-neuronx/programming-guide/training/pytorch-neuron-programming-guide.html"
)

Graph = tuple[Any, ...]
"""The operations of a graph: what decides whether it was compiled before."""


class XlaCore(Core):
    """A core whose operations are recorded until a step is marked."""

    def __init__(self, target: str, ranks: int) -> None:
        super().__init__(object(), target, ranks)
        self.process_groups: set[str] = set()
        self.executed: list[Graph] = []
        self._recorded: list[Any] = []
        self._waiting: list[CoreTensor] = []

    def xla_device(self) -> object:
        """Return the core of this process, as `xm.xla_device()` does."""
        if self.ranks > 1 and not self.joined:
            raise NotDocumented("the XLA device is taken before init_process_group")
        self.is_open = True
        return self.device

    def mark_step(self) -> None:
        """Execute the recorded operations, as `xm.mark_step()` does."""
        if self._recorded:
            self.executed.append(tuple(self._recorded))
        for tensor in self._waiting:
            tensor.ready = True
        self._recorded, self._waiting = [], []

    def forget(self) -> None:
        """Begin a new process, as far as graphs go."""
        self.executed, self._recorded, self._waiting = [], [], []

    def fetched(self, tensor: CoreTensor) -> None:
        """Compute a recorded tensor that the host reads: the graph ends there."""
        if not tensor.ready:
            self.mark_step()

    def sliced(self, tensor: CoreTensor, rows: slice) -> CoreTensor:
        """Return some rows of a tensor, another operation of the graph."""
        self._recorded.append(("slice", tensor.elements.shape, rows.start, rows.stop))
        made = super().sliced(tensor, rows)
        self._waiting.append(made)
        return made

    def kernel(self, name: str) -> Callable[..., Any]:
        """Return a kernel of `nki.jit`, to be called with tensors of the device."""

        def call(*arguments: Any) -> Any:
            arrays = arrays_of(name, arguments)
            may_write = mutable_places(name)
            before = [array.copy() if isinstance(array, np.ndarray) else array for array in arrays]
            outputs = self.computed(name, arrays)
            returned = {id(output) for output in outputs}
            for index, (array, old) in enumerate(zip(arrays, before)):
                allowed = index in may_write and id(array) in returned
                if isinstance(array, np.ndarray) and not allowed and array.tobytes() != old.tobytes():
                    raise NotDocumented(f"{name} writes to argument {index}, which it does not return")
            for argument, array in zip(arguments, arrays):
                if isinstance(argument, CoreTensor) and id(array) in returned:
                    argument.array = None  # the output has its memory
            self._recorded.append((name, *map(_described, arguments, arrays)))
            made = [CoreTensor.wrap(output, self, ready=False) for output in outputs]
            self._waiting += made
            return tuple(made) if len(made) > 1 else made[0]

        return call


def installed(target: str, ranks: int, patch: pytest.MonkeyPatch) -> XlaCore:
    """Make this process one of `ranks` on a core of torch_xla, and return the core."""
    core = XlaCore(target, ranks)
    model = DocumentedModule(
        "torch_xla.core.xla_model", GUIDE, xla_device=core.xla_device, mark_step=core.mark_step
    )
    modules: Sequence[ModuleType] = [
        DocumentedModule("torch_xla", GUIDE),
        DocumentedModule("torch_xla.core", GUIDE, xla_model=model),
        model,
        DocumentedModule("torch_xla.distributed", GUIDE),
    ]
    install(core, modules, core.kernel, patch)
    patch.setattr(sys, "meta_path", [_Backend(core), *sys.meta_path])
    return core


class _Backend:
    """Finds torch_xla.distributed.xla_backend, whose import registers the backend `xla`."""

    def __init__(self, core: XlaCore) -> None:
        self._core = core

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module of that name alone."""
        if name != "torch_xla.distributed.xla_backend":
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        """Return the module."""
        return DocumentedModule(spec.name, GUIDE)

    def exec_module(self, module: ModuleType) -> None:
        """Register the backend."""
        self._core.process_groups.add("xla")


def _described(argument: Any, array: Any) -> Any:
    """Return the properties of an argument that decide the operation."""
    return (array.shape, str(array.dtype)) if isinstance(argument, CoreTensor) else repr(argument)
