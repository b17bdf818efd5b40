"""torch-neuronx on torch_xla: lazy tensors, whose operations are compiled to one graph from one mark_step to the next.

Written against SDK 2.28 (torch-neuronx 2.7 to 2.9, nki 0.2), the last whose own inference library has NKI kernels for
Trn1 and Inf2; it has not run on a chip. Its documentation, below https://awsdocs-neuron.readthedocs-hosted.com/en/v2.28.0/:

- nki/guides/framework_custom_op.html: a kernel is called with tensors of the XLA device and returns such;
- frameworks/torch/torch-neuronx/programming-guide/training/pytorch-neuron-programming-guide.html: `xm.xla_device()` is
  the core of this process, `xm.mark_step()` compiles and executes what was recorded, torchrun starts a process for each
  core, and `init_process_group('xla')` follows the import of `torch_xla.distributed.xla_backend`;
- about-neuron/arch/neuron-features/neuron-caching.html: a graph is compiled once for each compiler, flags and
  operations and kept below NEURON_COMPILE_CACHE_URL. Weights are inputs of a graph, not part of it.

A kernel returns the arguments that it overwrites. Operations of XLA make new values, so later launches get the returned
tensor. The compiler may place it in the argument's memory, so the argument must not be read again.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from model.device.neuron.framework import Kernel, Written, unwrap_named


class XlaTorch:
    """Framework torch-neuronx on torch_xla: launches are recorded and executed as one graph by `end_graph`."""

    written_against: ClassVar[str] = "SDK 2.28"
    process_group: ClassVar[str] = "xla"

    def __init__(self) -> None:
        self._xm = importlib.import_module("torch_xla.core.xla_model")
        self._device: Any = None

    def prepare_process_group(self) -> None:
        """Register the backend `xla` with torch.distributed."""
        importlib.import_module("torch_xla.distributed.xla_backend")

    def open(self, local_rank: int) -> None:
        """Select the core of this process, which torchrun has set for the runtime; `local_rank` is not read."""
        self._device = self._xm.xla_device()

    def copy_to_core(self, tensor: Any) -> Any:
        """Return a copy of a host tensor on the core."""
        return tensor.to(self._device)

    def call(self, name: str, kernel: Kernel, arguments: Sequence[Any], written: Written) -> list[Any]:
        """Record a call of a kernel in the current graph, and return its outputs; `end_graph` computes them."""
        outputs = kernel(*map(unwrap_named, arguments))
        return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]

    def end_graph(self) -> None:
        """Execute the recorded graph; it is compiled first unless the cache has an equal graph."""
        self._xm.mark_step()

    def fetch(self, tensor: Any) -> Any:
        """Return a copy of a core tensor in host memory."""
        return tensor.cpu()

    @staticmethod
    def cache_variables(folder: str) -> Mapping[str, str]:
        """Return the environment variable that makes `folder` the persistent cache of compiled graphs.

        `--cache_dir` in NEURON_CC_FLAGS takes precedence over it.
        """
        return {"NEURON_COMPILE_CACHE_URL": folder}
