"""TorchNeuron: tensors on the device `neuron`, and kernels registered as operators of PyTorch.

Written against SDK 2.33 (torch-neuronx 2.13 and 2.14, nki 0.7) for Trn2 and Trn3; it has not run on a chip. Its
documentation, below https://awsdocs-neuron.readthedocs-hosted.com/en/latest/:

- torch/guides/how-to-work-with-nki.html: `nki_op(name, mutates_args=…)` registers a function that calls a kernel; the
  first call compiles the kernel for its shapes, dtypes and values that are no tensors, later ones reuse it;
- frameworks/torch/pytorch-native-overview.html: `.to('neuron')`, `torch.accelerator` chooses among the cores, copies to
  the host wait for what is under way;
- torch/reference/env-vars.html: TORCH_NEURONX_NEFF_CACHE_DIR has the compiled kernels.

PyTorch requires that an operator lists the arguments that it overwrites, and that it returns none of them:
https://docs.pytorch.org/tutorials/advanced/python_custom_ops_mutable.html
Operators here take tensors only. The other arguments of a launch are constants of the operator, so a kernel has one
operator for every combination of them.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, ClassVar

from model.device.neuron.framework import Kernel, Named, Written, unwrap_named

_NAMESPACE = "nki_workbench"


class NativeTorch:
    """Framework TorchNeuron, with PyTorch's own device `neuron`; each launch is an operator."""

    written_against: ClassVar[str] = "SDK 2.33"
    process_group: ClassVar[str] = "neuron"

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._neuron = importlib.import_module("torch_neuronx")
        self._operators: dict[str, Callable[..., Any]] = {}

    def prepare_process_group(self) -> None:
        """Do nothing, because torch_neuronx registers the backend `neuron`."""

    def open(self, local_rank: int) -> None:
        """Select the core with number `local_rank` of this host."""
        self._torch.accelerator.set_device_index(local_rank)

    def copy_to_core(self, tensor: Any) -> Any:
        """Return a copy of a host tensor on the core."""
        return tensor.to("neuron")

    def call(self, name: str, kernel: Kernel, arguments: Sequence[Any], written: Written) -> list[Any]:
        """Launch a kernel through its operator, which the first such launch registers, and return the outputs.

        An output that overwrites an argument is this argument's tensor.
        """
        is_tensor = [isinstance(argument, self._torch.Tensor) for argument in arguments]
        tensors = list(compress(arguments, is_tensor))
        constants = [None if is_tensor[index] else argument for index, argument in enumerate(arguments)]
        operator_name = _make_operator_name(name, is_tensor, constants, written)
        if operator_name not in self._operators:
            self._operators[operator_name] = self._register(
                operator_name, kernel, is_tensor, constants, written
            )
        returned = self._operators[operator_name](*tensors)
        new = iter(
            () if returned is None else returned if isinstance(returned, (tuple, list)) else (returned,)
        )
        return [next(new) if index is None else arguments[index] for index in written]

    def end_graph(self) -> None:
        """Do nothing, because every launch is a graph."""

    def fetch(self, tensor: Any) -> Any:
        """Return a copy of a core tensor in host memory; waits for launches under way."""
        return tensor.cpu()

    @staticmethod
    def cache_variables(folder: str) -> Mapping[str, str]:
        """Return the environment variable that makes `folder` the cache of compiled kernels."""
        return {"TORCH_NEURONX_NEFF_CACHE_DIR": folder}

    def _register(
        self, name: str, kernel: Kernel, is_tensor: Sequence[bool], constants: Sequence[Any], written: Written
    ) -> Callable[..., Any]:
        """Register an operator with PyTorch that calls a kernel, and return it; the operator takes only tensors.

        Args:
            name: Name of the operator.
            kernel: The kernel.
            is_tensor: For each argument of the kernel, whether the operator takes it.
            constants: For each other argument, its value, which the operator keeps; None for tensors.
            written: For every output, the index of the argument that it overwrites; None for a new tensor.
        """
        names = {index: f"argument_{index}" for index, tensor in enumerate(is_tensor) if tensor}
        new = [number for number, index in enumerate(written) if index is None]

        def launch(*tensors: Any) -> Any:
            arguments = list(map(unwrap_named, constants))
            for index, tensor in zip(names, tensors):
                arguments[index] = tensor
            outputs = kernel(*arguments)
            all_outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            new_outputs = tuple(all_outputs[number] for number in new)
            return None if not new else new_outputs[0] if len(new) == 1 else new_outputs

        tensor = self._torch.Tensor
        returned = None if not new else tensor if len(new) == 1 else tuple[(tensor,) * len(new)]  # type: ignore[misc]
        parameters = [
            inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=tensor)
            for argument in names.values()
        ]
        launch.__name__ = launch.__qualname__ = name.partition("::")[2]
        launch.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        launch.__annotations__ = dict.fromkeys(names.values(), tensor) | {"return": returned}
        overwritten = {names[index] for index in written if index is not None}
        return self._neuron.nki_op(name, mutates_args=overwritten)(launch)  # type: ignore[no-any-return]


def _make_operator_name(
    kernel: str, is_tensor: Sequence[bool], constants: Sequence[Any], written: Written
) -> str:
    """Return an operator's name: the kernel with a hash of the constants, equal in every process."""
    texts = [constant.text if isinstance(constant, Named) else repr(constant) for constant in constants]
    key = repr((list(is_tensor), texts, list(written)))
    return f"{_NAMESPACE}::{kernel}_{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"
