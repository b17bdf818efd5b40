"""A rank on the NeuronCore of this process.

Each rank is a process that torchrun started, or there is one rank. Weights, constants and states are put on the core
once; what a kernel returns stays there until the host asks for it. Kernels meet in collectives over the process group
of the vendor's backend; what the host gathers goes through gloo, from the memory of the hosts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from model.device.binding import (
    bind_neuron,
    in_order,
    kernel_named,
    nki_dtype,
    parameter_indices,
    replica_group_of,
)
from model.device.neuron.framework import Named, Torch
from model.device.neuron.host_group import gather_arrays
from model.device.neuron.installed import Framework, installed_software
from model.device.neuron.native import NativeTorch
from model.device.neuron.tensors import to_numpy, to_torch
from model.device.neuron.xla import XlaTorch
from model.device.simulated import rank_of_this_process
from model.errors import ModelError

FRAMEWORKS: dict[Framework, type[NativeTorch] | type[XlaTorch]] = {
    Framework.native: NativeTorch,
    Framework.xla: XlaTorch,
}


class NeuronDevice:
    """`ranks` ranks of NeuronCores, of which this process has one.

    ModelError where packages are missing, or where torchrun started another number of processes.
    """

    def __init__(self, ranks: int) -> None:
        self.software = installed_software()
        started = 1 if rank_of_this_process() is None else int(os.environ["WORLD_SIZE"])
        if started != ranks:
            raise ModelError(
                f"the neuron backend has a process for each rank: {ranks} rank{'s' if ranks > 1 else ''}, "
                f"{started} process{'es' if started > 1 else ''}; start it with torchrun --nproc-per-node {ranks}"
            )
        bind_neuron()
        self._torch: Torch = FRAMEWORKS[self.software.framework]()
        self._host_group = _joined(self._torch) if ranks > 1 else None
        self._torch.open(int(os.environ.get("LOCAL_RANK", "0")) if ranks > 1 else 0)
        rank = rank_of_this_process() or 0
        self.ranks, self.local_ranks = ranks, range(rank, rank + 1)

    def dtype(self, name: str) -> Named:
        """A dtype of `nki.language` as an argument."""
        return Named(name, nki_dtype(name))

    def replica_group(self, groups: list[list[int]] | None) -> Named | None:
        """The groups of a collective as an argument; None where each rank is alone."""
        return None if groups is None else Named(f"ReplicaGroup({groups})", replica_group_of(groups))

    def hold(self, array: np.ndarray) -> Any:
        """The array on the core."""
        return self._torch.place(to_torch(array))

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = (None,)
    ) -> list[Any]:
        """Launch a kernel with the arguments of this rank; what it returns stays on the core.

        Without arguments it is a launch of other processes' ranks alone.
        """
        if not arguments:
            return []
        (of_rank,) = arguments
        given = [
            self.hold(argument) if isinstance(argument, np.ndarray) else argument
            for argument in in_order(kernel, of_rank)
        ]
        places = parameter_indices(kernel, written)
        outputs = self._torch.call(kernel, kernel_named(kernel), given, places)
        return [outputs[0] if len(outputs) == 1 else tuple(outputs)]

    def end_graph(self) -> None:
        """End a graph, where launches are gathered to graphs."""
        self._torch.end_graph()

    def gather(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The arrays of all ranks, in the memory of this host."""
        local = [to_numpy(self._torch.fetch(array)) for array in arrays]
        if self._host_group is None:
            return local
        return gather_arrays(local, self.ranks, self._host_group)


def cache_variables(framework: Framework, folder: str) -> Mapping[str, str]:
    """The environment variables under which compiled graphs are kept in a folder."""
    return FRAMEWORKS[framework].cache_variables(folder)


def _joined(framework: Torch) -> Any:
    """Join the process group of the ranks; returns a group of the hosts, which gloo connects."""
    import torch.distributed as dist

    framework.prepare_process_group()
    if not dist.is_initialized():
        dist.init_process_group(framework.process_group)
    return dist.new_group(backend="gloo")
