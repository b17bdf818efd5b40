"""`neuronxcc.nki.compiler`: manual allocation and hints for the compiler, which a simulation accepts.

A placement names a memory. The simulator places all tensors from the stream and checks that they fit, so addresses
given here are not used and their overlaps are no errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nkw.errors import InvalidArgument
from simulate.memory import MemoryRegion

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Placement:
    """Memory of an allocation; `wanted` are the options with which the kernel asked for a place, without effect."""

    memory: MemoryRegion
    wanted: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Memory:
    """Object `nki.compiler.sbuf` or `nki.compiler.psum`; `base` is the option of `mod_alloc` that must be given."""

    memory: MemoryRegion
    base: str

    def alloc(self, func: Callable[..., Any]) -> Placement:
        """Return a placement by a function of block, partitions and bytes, which is never called.

        Raises InvalidArgument if `func` is not callable.
        """
        if not callable(func):
            raise InvalidArgument("NKW-PLACEMENT", f"alloc({func!r:.60}); it takes a function")
        return Placement(self.memory, {"alloc": func})

    def mod_alloc(self, **wanted: Any) -> Placement:
        """Return a placement by which blocks use several tiles in turn, from a base address or bank on.

        Raises InvalidArgument unless base_addr (SBUF) or base_bank (PSUM) is an integer of 0 or more.
        """
        base = wanted.get(self.base)
        if not isinstance(base, int) or base < 0:
            raise InvalidArgument(
                "NKW-PLACEMENT",
                f"mod_alloc({self.base}={base!r:.60}); give {self.base} as an integer of 0 or more",
            )
        return Placement(self.memory, wanted)

    def auto_alloc(self) -> Placement:
        """Return a placement that leaves the place to the compiler."""
        return Placement(self.memory, {})


sbuf = _Memory(MemoryRegion.sbuf, "base_addr")
psum = _Memory(MemoryRegion.psum, "base_bank")


def skip_middle_end_transformations(func: F) -> F:
    """Return the kernel unchanged; the name is a hint for the compiler."""
    return func


def enable_stack_allocator(func: Any = None, **_: Any) -> Any:
    """Return the kernel unchanged, or without `func` a decorator that does so; the name is a hint for the compiler."""
    return (lambda kernel: kernel) if func is None else func


force_auto_alloc = skip_middle_end_transformations


def no_reorder() -> None:
    """Do nothing; the name is a hint for a loop, which runs in program order anyway."""


def multi_buffer(*_: Any) -> None:
    """Do nothing; the name is a hint for the number of iterations that may overlap."""
