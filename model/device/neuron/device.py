"""A rank on the NeuronCore of this process.

With several ranks, every rank is a process that torchrun started. Weights, constants and states are copied to the core
once, and outputs of kernels stay there until the host fetches them. Collectives of kernels use the process group of the
vendor's backend; `gather` uses gloo and the memory of the hosts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from model.device.binding import (
    bind_arguments,
    bind_nki,
    find_kernel,
    find_nki_dtype,
    find_parameter_indices,
    make_replica_group,
)
from model.device.chips import find_sorted_expert_width
from model.device.neuron.framework import Named, Torch
from model.device.neuron.host_group import gather_arrays
from model.device.neuron.installed import Framework, installed_software
from model.device.neuron.native import NativeTorch
from model.device.neuron.tensors import to_numpy, to_torch
from model.device.neuron.xla import XlaTorch
from model.device.simulated import read_process_rank
from model.errors import ModelError
from nkw.targets import DEFAULT_TARGET

FRAMEWORKS: dict[Framework, type[NativeTorch] | type[XlaTorch]] = {
    Framework.native: NativeTorch,
    Framework.xla: XlaTorch,
}


class NeuronDevice:
    """One of `ranks` ranks, on the NeuronCore of this process; torchrun starts a process for each rank.

    Args:
        ranks: Number of ranks.
        target: Name of the chip.

    Raises:
        ModelError: Packages are missing, or torchrun started another number of processes.
    """

    def __init__(self, ranks: int, target: str = DEFAULT_TARGET) -> None:
        self.software = installed_software()
        started = 1 if read_process_rank() is None else int(os.environ["WORLD_SIZE"])
        if started != ranks:
            raise ModelError(
                f"the neuron backend has a process for each rank: {ranks} rank{'s' if ranks > 1 else ''}, "
                f"{started} process{'es' if started > 1 else ''}; start it with torchrun --nproc-per-node {ranks}"
            )
        bind_nki("neuron")
        self._torch: Torch = FRAMEWORKS[self.software.framework]()
        self._host_group = _join_ranks(self._torch) if ranks > 1 else None
        self._torch.open(int(os.environ.get("LOCAL_RANK", "0")) if ranks > 1 else 0)
        rank = read_process_rank() or 0
        self.ranks, self.local_ranks = ranks, range(rank, rank + 1)
        self.sorted_expert_width = find_sorted_expert_width(target)

    def dtype(self, name: str) -> Named:
        """Return a dtype of `nki.language`, with its name, as a kernel argument."""
        return Named(name, find_nki_dtype(name))

    def replica_group(self, groups: list[list[int]] | None) -> Named | None:
        """Return a `ReplicaGroup` with the ranks of each group, as a kernel argument; None (one rank) for None."""
        return None if groups is None else Named(f"ReplicaGroup({groups})", make_replica_group(groups))

    def hold(self, array: np.ndarray) -> Any:
        """Copy a host array to the core, and return the tensor on the core.

        Raises:
            ModelError: NeuronCores do not take the dtype.
        """
        return self._torch.copy_to_core(to_torch(array))

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = (None,)
    ) -> list[Any]:
        """Launch a kernel and return its outputs, which stay on the core: a list with one tensor or tuple of tensors.

        Returns an empty list without arguments.

        Args:
            kernel: Name of a kernel of `nki_kernels`.
            arguments: The arguments of this rank by parameter. Without any, only ranks of other processes launch the
                kernel.
            written: For every output the parameter that it overwrites; None for a new tensor.

        Raises:
            ModelError: The arguments do not fit the signature, or an array has a dtype that NeuronCores do not take.
        """
        if not arguments:
            return []
        core_arguments = [
            self.hold(argument) if isinstance(argument, np.ndarray) else argument
            for argument in bind_arguments(kernel, arguments[0])
        ]
        outputs = self._torch.call(
            kernel, find_kernel(kernel), core_arguments, find_parameter_indices(kernel, written)
        )
        return [outputs[0] if len(outputs) == 1 else tuple(outputs)]

    def session(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because kernels are compiled once."""
        return nullcontext()

    def end_graph(self) -> None:
        """End the current graph, if the framework compiles several launches into one graph; otherwise do nothing."""
        self._torch.end_graph()

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Return the arrays of all ranks in rank order, in the memory of this host; every rank has to call it.

        Args:
            arrays: Tensors on this rank's core.
        """
        local = [to_numpy(self._torch.fetch(array)) for array in arrays]
        if self._host_group is None:
            return local
        return gather_arrays(local, self.ranks, self._host_group)


def cache_variables(framework: Framework, folder: str) -> Mapping[str, str]:
    """Return the environment variables that make `folder` the cache of compiled graphs, by name."""
    return FRAMEWORKS[framework].cache_variables(folder)


def _join_ranks(framework: Torch) -> Any:
    """Join the process group of the ranks, and return a second group of the same processes that gloo connects."""
    import torch.distributed as dist

    framework.prepare_process_group()
    if not dist.is_initialized():
        dist.init_process_group(framework.process_group)
    return dist.new_group(backend="gloo")
