"""TorchNeuron as SDK 2.33 documents it: the device `neuron`, and kernels as operators of PyTorch.

latest/torch/guides/how-to-work-with-nki.html and latest/frameworks/torch/pytorch-native-overview.html, below
https://awsdocs-neuron.readthedocs-hosted.com/en/. Signatures and mutation are checked by PyTorch's own rules:
https://docs.pytorch.org/tutorials/advanced/python_custom_ops_mutable.html
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.device.core import Core, CoreTensor, DocumentedModule, NotDocumented, arrays_of, install

GUIDE = "latest/torch/guides/how-to-work-with-nki.html"


class NativeCore(Core):
    """A core that launches each operator when it is called."""

    def __init__(self, target: str, ranks: int) -> None:
        super().__init__("neuron", target, ranks)
        self.process_groups = {"neuron"}
        self.operators: dict[str, str] = {}
        self._inside: list[str] = []

    def forget(self) -> None:
        """Begin a new process, which has no operators."""
        self.operators.clear()

    def set_device_index(self, index: int) -> None:
        """Set the core of this process, as `torch.accelerator.set_device_index` does."""
        if not isinstance(index, int) or not 0 <= index < 64:
            raise RuntimeError(f"device index {index!r}")
        self.is_open = True

    def kernel(self, name: str) -> Callable[..., Any]:
        """Call a kernel of `nki.jit`; the kernel writes to its arguments in place."""

        def call(*arguments: Any) -> Any:
            if not self._inside:
                raise NotDocumented(f"{name} is called outside of an operator")
            arrays = arrays_of(name, arguments)
            known = {
                id(array): argument
                for argument, array in zip(arguments, arrays)
                if isinstance(argument, CoreTensor)
            }
            outputs = self.computed(name, arrays)
            made = [
                known[id(output)] if id(output) in known else CoreTensor.wrap(output, self)
                for output in outputs
            ]
            return tuple(made) if len(made) > 1 else made[0]

        return call

    def nki_op(self, name: str, mutates_args: Iterable[str] = ()) -> Callable[..., Any]:
        """Return the decorator `torch_neuronx.nki_op(name, mutates_args=…)`."""
        if not re.fullmatch(r"\w+::\w+", name):
            raise ValueError(f"the operator {name!r} has no namespace")
        if name in self.operators:
            raise RuntimeError(f"the operator {name} is registered already")

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.operators[name] = torch.library.infer_schema(function, mutates_args=set(mutates_args))
            return self._checked(name, function, set(mutates_args))

        return register

    def _checked(self, name: str, function: Callable[..., Any], mutates: set[str]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)

        def call(*tensors: CoreTensor) -> Any:
            if len(tensors) != len(names) or not all(type(tensor) is CoreTensor for tensor in tensors):
                raise NotDocumented(f"{name} takes {len(names)} tensors of the core")
            before = [tensor.elements.copy() for tensor in tensors]
            self._inside.append(name)
            try:
                made = function(*tensors)
            finally:
                self._inside.pop()
            for tensor, old, parameter in zip(tensors, before, names):
                if parameter not in mutates and tensor.elements.tobytes() != old.tobytes():
                    raise NotDocumented(f"{name} writes to {parameter}, which mutates_args does not have")
            every = () if made is None else made if isinstance(made, tuple) else (made,)
            if any(returned is tensor for returned in every for tensor in tensors):
                raise NotDocumented(f"{name} returns one of its arguments")
            returns = self.operators[name].partition("->")[2].count("Tensor")
            if len(every) != returns:
                raise NotDocumented(f"{name} returns {len(every)} tensors, {returns} by its schema")
            return made

        return call


def installed(target: str, ranks: int, patch: pytest.MonkeyPatch) -> NativeCore:
    """Make this process one of `ranks` on a core of TorchNeuron, and return the core."""
    core = NativeCore(target, ranks)
    install(core, [DocumentedModule("torch_neuronx", GUIDE, nki_op=core.nki_op)], core.kernel, patch)
    patch.setattr(torch.accelerator, "set_device_index", core.set_device_index)
    return core
