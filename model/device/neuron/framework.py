"""Interface of the frameworks that bring tensors and kernels to a NeuronCore.

`native.py` and `xla.py` implement it, and `device.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

Kernel = Callable[..., Any]
Written = Sequence[int | None]
"""For every output of a kernel, the index of the argument that it overwrites; None for a new tensor."""


@dataclass(frozen=True)
class Named:
    """Kernel argument that is an object of the vendor's packages, with a text that is equal in every process.

    The text becomes part of names of compiled operators.
    """

    text: str
    value: Any


def unwrap_named(argument: Any) -> Any:
    """Return the object inside a `Named`, and any other argument as it is."""
    return argument.value if isinstance(argument, Named) else argument


class Torch(Protocol):
    """Framework that brings tensors and kernels to the NeuronCore of this process."""

    written_against: ClassVar[str]
    """Release of AWS Neuron whose documentation the file follows."""
    process_group: ClassVar[str]
    """Backend of torch.distributed for the collectives of the ranks."""

    def prepare_process_group(self) -> None:
        """Register the backend `process_group` with torch.distributed."""

    def open(self, local_rank: int) -> None:
        """Select the NeuronCore with number `local_rank` of this host for this process.

        Call it after the process group has been joined.
        """

    def copy_to_core(self, tensor: Any) -> Any:
        """Return a copy of a host tensor on the core."""

    def call(self, name: str, kernel: Kernel, arguments: Sequence[Any], written: Written) -> list[Any]:
        """Launch a kernel and return its outputs on the core, which include the arguments that it overwrites.

        Args:
            name: Name of the kernel.
            kernel: The kernel.
            arguments: Arguments in the order of the signature, with tensors on the core.
            written: For every output, the index of the argument that it overwrites; None for a new tensor.
        """

    def end_graph(self) -> None:
        """Compile and execute all calls since the last end as one graph; do nothing if every call is a graph."""

    def fetch(self, tensor: Any) -> Any:
        """Return a copy of a core tensor in host memory."""

    @staticmethod
    def cache_variables(folder: str) -> Mapping[str, str]:
        """Return the environment variables that make `folder` the cache of compiled graphs, by name."""
