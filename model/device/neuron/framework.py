"""Interface of the frameworks that reach a NeuronCore; `native.py` and `xla.py` implement it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

Kernel = Callable[..., Any]
Written = Sequence[int | None]
"""For every output of a kernel, the index of the argument that it overwrites; None for a new tensor."""


@dataclass(frozen=True)
class Named:
    """Argument that is an object of the vendor's packages, with a text that is the same in every process."""

    text: str
    value: Any


def plain(argument: Any) -> Any:
    """Return an argument as a kernel takes it."""
    return argument.value if isinstance(argument, Named) else argument


class Torch(Protocol):
    """Framework that brings tensors and kernels to the NeuronCore of this process."""

    written_against: ClassVar[str]
    """Release of AWS Neuron whose documentation the file follows."""
    process_group: ClassVar[str]
    """Backend of torch.distributed for the collectives of the ranks."""

    def prepare_process_group(self) -> None:
        """Register the backend `process_group`."""

    def open(self, local_rank: int) -> None:
        """Select a NeuronCore of this host for this process, after the process group has been joined."""

    def copy_to_core(self, tensor: Any) -> Any:
        """Copy a tensor of the host to the core."""

    def call(self, name: str, kernel: Kernel, arguments: Sequence[Any], written: Written) -> list[Any]:
        """Launch a kernel and return its outputs, which include the arguments that it overwrites.

        Args:
            name: Name of the kernel.
            kernel: The kernel.
            arguments: Arguments in the order of the signature, with tensors on the core.
            written: For every output, the index of the argument that it overwrites; None for a new tensor.
        """

    def end_graph(self) -> None:
        """End a graph of all calls since the last end; does nothing if every call is a graph."""

    def fetch(self, tensor: Any) -> Any:
        """Copy a tensor of the core to the host."""

    @staticmethod
    def cache_variables(folder: str) -> Mapping[str, str]:
        """Return the environment variables that make a folder the cache of compiled graphs."""
