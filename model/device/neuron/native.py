"""TorchNeuron: tensors of the device `neuron`, and kernels registered as operators of PyTorch.

Written against SDK 2.33 (torch-neuronx 2.13 and 2.14, nki 0.7) for Trn2 and Trn3; it has not run on a chip. Its
documentation, below https://awsdocs-neuron.readthedocs-hosted.com/en/latest/:

- torch/guides/how-to-work-with-nki.html: `nki_op(name, mutates_args=…)` registers a function that calls a kernel; the
  first call compiles the kernel for its shapes, dtypes and values that are no tensors, later ones reuse it;
- frameworks/torch/pytorch-native-overview.html: `.to('neuron')`, `torch.accelerator` chooses among the cores, copies to
  the host wait for what is under way;
- torch/reference/env-vars.html: TORCH_NEURONX_NEFF_CACHE_DIR has the compiled kernels.

PyTorch's rules for operators that write to arguments hold: each is listed, and none is returned:
https://docs.pytorch.org/tutorials/advanced/python_custom_ops_mutable.html
Operators take tensors alone here: other values of a launch are part of the operator, so a kernel has one operator for
each choice of them.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from model.device.neuron.framework import Kernel, Named, Written, plain

_NAMESPACE = "nki_workbench"


class NativeTorch:
    """PyTorch's own device `neuron`."""

    written_against: ClassVar[str] = "SDK 2.33"
    process_group: ClassVar[str] = "neuron"

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._neuron = importlib.import_module("torch_neuronx")
        self._operators: dict[str, Callable[..., Any]] = {}

    def prepare_process_group(self) -> None:
        """Nothing: torch_neuronx registers the backend `neuron`."""

    def open(self, local_rank: int) -> None:
        """Take one of the cores of this machine."""
        self._torch.accelerator.set_device_index(local_rank)

    def place(self, tensor: Any) -> Any:
        """A tensor of this machine on the core."""
        return tensor.to("neuron")

    def call(self, name: str, kernel: Kernel, arguments: Sequence[Any], written: Written) -> list[Any]:
        """Launch a kernel through its operator."""
        is_tensor = [isinstance(each, self._torch.Tensor) for each in arguments]
        others = [None if tensor else each for tensor, each in zip(is_tensor, arguments)]
        operator_name = _operator_name(name, is_tensor, others, written)
        if operator_name not in self._operators:
            self._operators[operator_name] = self._operator(operator_name, kernel, is_tensor, others, written)
        tensors = [each for tensor, each in zip(is_tensor, arguments) if tensor]
        made = self._operators[operator_name](*tensors)
        new = iter(() if made is None else made if isinstance(made, (tuple, list)) else (made,))
        return [next(new) if place is None else arguments[place] for place in written]

    def end_graph(self) -> None:
        """Nothing: each kernel is a graph of its own."""

    def fetch(self, tensor: Any) -> Any:
        """A tensor of the core on this machine."""
        return tensor.cpu()

    @staticmethod
    def cache_variables(folder: str) -> Mapping[str, str]:
        """Where compiled kernels are."""
        return {"TORCH_NEURONX_NEFF_CACHE_DIR": folder}

    def _operator(
        self, name: str, kernel: Kernel, is_tensor: Sequence[bool], others: Sequence[Any], written: Written
    ) -> Callable[..., Any]:
        """Register a kernel with the values of a launch that are no tensors."""
        places = [place for place, tensor in enumerate(is_tensor) if tensor]
        new = [number for number, place in enumerate(written) if place is None]

        def launch(*tensors: Any) -> Any:
            given = list(map(plain, others))
            for place, tensor in zip(places, tensors):
                given[place] = tensor
            outputs = kernel(*given)
            every = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            made = tuple(every[number] for number in new)
            return None if not made else made[0] if len(made) == 1 else made

        tensor = self._torch.Tensor
        returned = None if not new else tensor if len(new) == 1 else tuple[(tensor,) * len(new)]  # type: ignore[misc]
        parameters = [
            inspect.Parameter(_argument(place), inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=tensor)
            for place in places
        ]
        launch.__name__ = launch.__qualname__ = name.partition("::")[2]
        launch.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        launch.__annotations__ = {each.name: tensor for each in parameters} | {"return": returned}
        changed = {_argument(place) for place in written if place is not None}
        return self._neuron.nki_op(name, mutates_args=changed)(launch)  # type: ignore[no-any-return]


def _argument(place: int) -> str:
    return f"argument_{place}"


def _operator_name(kernel: str, is_tensor: Sequence[bool], others: Sequence[Any], written: Written) -> str:
    """A name for a kernel with these values, equal in every process."""
    told = repr((list(is_tensor), [_told(each) for each in others], list(written)))
    return f"{_NAMESPACE}::{kernel}_{hashlib.blake2b(told.encode(), digest_size=6).hexdigest()}"


def _told(value: Any) -> str:
    return value.text if isinstance(value, Named) else repr(value)
