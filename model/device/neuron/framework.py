"""What the device asks of the software that is installed. `native.py` and `xla.py` answer, one for each product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

Kernel = Callable[..., Any]
Written = Sequence[int | None]
"""For each output of a kernel the place of the argument that it writes to and returns, None for a new tensor."""


@dataclass(frozen=True)
class Named:
    """An argument that is an object of the vendor's packages, and a text that is the same in every process."""

    text: str
    value: Any


def plain(argument: Any) -> Any:
    """An argument as kernels take it."""
    return argument.value if isinstance(argument, Named) else argument


class Torch(Protocol):
    """One product that brings tensors and kernels to the NeuronCore of this process."""

    written_against: ClassVar[str]
    """The release that the file was written against."""
    process_group: ClassVar[str]
    """The backend of torch.distributed over which the ranks' collectives run."""

    def prepare_process_group(self) -> None:
        """Import what registers that backend."""

    def open(self, local_rank: int) -> None:
        """Take the NeuronCore of this process, one of those on this machine; after the process group is there."""

    def place(self, tensor: Any) -> Any:
        """A tensor of this machine on the core."""

    def call(self, name: str, kernel: Kernel, arguments: Sequence[Any], written: Written) -> list[Any]:
        """Launch a kernel. Returns its outputs; arguments that the kernel wrote to are among them."""

    def end_graph(self) -> None:
        """End a graph of all calls since the last end. A framework that runs each call alone does nothing."""

    def fetch(self, tensor: Any) -> Any:
        """A tensor of the core on this machine."""

    @staticmethod
    def cache_variables(folder: str) -> Mapping[str, str]:
        """The environment variables under which compiled graphs are kept in a folder."""
