"""A NeuronCore that computes by the simulator, and refuses what the vendor's documentation does not allow.

Each rule names its page, below https://awsdocs-neuron.readthedocs-hosted.com/en/.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from model.device import SimulatedDevice
from model.device.binding import bind_nki, find_kernel
from model.device.neuron.tensors import to_numpy, to_torch

DTYPES = {
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int32,
    torch.uint32,
}
"""latest/about-neuron/arch/neuron-features/data-types.html"""
_GETTERS = {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "ndim")}


class NotDocumented(Exception):
    """What was done is not in the vendor's documentation."""


class DocumentedModule(ModuleType):
    """A module with the names of its page and no others."""

    def __init__(self, name: str, page: str, **names: Any) -> None:
        super().__init__(name, page)
        self.__dict__.update(names)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name} is not on {self.__doc__}")


class CoreTensor(torch.Tensor):
    """A tensor in a core's memory: `array` has its elements, None once the memory was given to another one."""

    array: np.ndarray | None
    core: Core
    ready: bool

    @staticmethod
    def wrap(array: np.ndarray, core: Core, ready: bool = True) -> CoreTensor:
        """Create a tensor of these elements; `ready` unless its operation is only recorded."""
        alike = to_torch(array)
        made = torch.Tensor._make_wrapper_subclass(CoreTensor, alike.shape, dtype=alike.dtype)
        made.array, made.core, made.ready = array, core, ready
        return made

    @property
    def elements(self) -> np.ndarray:
        """The elements; NotDocumented after the memory was given away."""
        if self.array is None:
            raise NotDocumented("a tensor is read whose memory a kernel's output has taken")
        return self.array

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply an operation that the host may use on a tensor of the core."""
        tensor = args[0]
        if function in _GETTERS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function is torch.Tensor.cpu:
            tensor.core.fetched(tensor)
            return to_torch(tensor.elements.copy())
        if function is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            return tensor.core.sliced(tensor, args[1])
        raise NotDocumented(f"{getattr(function, '__name__', function)} of a tensor of the core")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute outside of kernels."""
        raise NotDocumented(f"{function} of a tensor of the core")


class Core:
    """The core of one process of `ranks`; `device` is what `tensor.to` is given for it."""

    def __init__(self, device: object, target: str, ranks: int) -> None:
        self.device, self.ranks = device, ranks
        self.placed_bytes = 0
        self.is_open = False
        self.joined = ranks == 1
        self._target = target
        self._computes: SimulatedDevice | None = None

    def copy_to_core(self, tensor: torch.Tensor, device: object) -> CoreTensor:
        """Copy a tensor of the host to the core, as `tensor.to(device)` does."""
        if not self.is_open:
            raise NotDocumented("a tensor is moved to a core that this process has not taken")
        if device is not self.device and device != self.device:
            raise RuntimeError(f"no device {device!r} here, but {self.device!r}")
        if tensor.dtype not in DTYPES:
            raise NotDocumented(f"a tensor of {tensor.dtype} on a core; see data-types.html")
        self.placed_bytes += tensor.nbytes
        return CoreTensor.wrap(to_numpy(tensor).copy(), self)

    def fetched(self, tensor: CoreTensor) -> None:
        """Record that a tensor is copied to the host."""

    def sliced(self, tensor: CoreTensor, rows: slice) -> CoreTensor:
        """Return some rows of a tensor."""
        return CoreTensor.wrap(tensor.elements[rows], self, tensor.ready)

    def computed(self, kernel: str, arguments: Sequence[Any]) -> list[Any]:
        """Run a kernel on arrays and other values; the kernel writes to some of the arrays."""
        if not self.joined and any(type(argument).__name__ == "ReplicaGroup" for argument in arguments):
            raise NotDocumented("a kernel with a replica group is launched before init_process_group")
        if self._computes is None:
            self._computes = SimulatedDevice(self._target, self.ranks, processes=self.ranks > 1)
        parameters = inspect.signature(find_kernel(kernel).func).parameters
        (outputs,) = self._computes.run(kernel, [dict(zip(parameters, arguments))])
        return list(outputs) if isinstance(outputs, tuple) else [outputs]


def mutable_places(kernel: str) -> set[int]:
    """Return the indices of a kernel's parameters that are annotated as `nt.mutable_tensor`."""
    parameters = inspect.signature(find_kernel(kernel).func).parameters.values()
    return {
        index
        for index, parameter in enumerate(parameters)
        if str(parameter.annotation).endswith("mutable_tensor")
    }


def arrays_of(kernel: str, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call, with arrays for tensors of the core; refuse tensors of the host."""
    for argument in arguments:
        if isinstance(argument, np.ndarray) or type(argument) is torch.Tensor:
            raise NotDocumented(f"{kernel} is called with a {type(argument).__name__} of the host")
        if not isinstance(argument, (CoreTensor, int, float, str, type(None))) and not _is_of_nki(argument):
            raise NotDocumented(f"{kernel} is called with {argument!r}")
    return [argument.elements if isinstance(argument, CoreTensor) else argument for argument in arguments]


def _is_of_nki(value: Any) -> bool:
    """Return whether a value is a dtype or replica group of the bound `nki`."""
    return type(value).__module__.partition(".")[0] == "simulate"


def install(core: Core, modules: Sequence[ModuleType], kernels: Any, patch: pytest.MonkeyPatch) -> None:
    """Let this process find the modules, call `kernels(name)` and move tensors to the core."""
    moved = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        to_host = kwargs or len(args) != 1 or isinstance(args[0], torch.dtype) or str(args[0]) == "cpu"
        return moved(tensor, *args, **kwargs) if to_host else core.copy_to_core(tensor, args[0])

    for module in modules:
        patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(torch.Tensor, "to", to)
    patch.setattr("model.device.neuron.device.bind_nki", lambda _: bind_nki("simulate"))
    patch.setattr("model.device.neuron.device.find_kernel", kernels)
    patch.setattr(torch.distributed, "init_process_group", _init(core, torch.distributed.init_process_group))


def _init(core: Core, real: Any) -> Any:
    """Return an `init_process_group` that takes the vendor's backends; gloo carries the data between ranks."""

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend == "gloo":
            real(backend, *args, **kwargs)
            return
        if args or kwargs or backend not in core.process_groups:
            raise ValueError(f"no backend {backend!r} of torch.distributed is registered")
        real("gloo")
        core.joined = True

    return init_process_group
