"""Registers: 32-bit integers of an engine's instruction stream, as `nisa.register_alloc` returns them."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.memory.objects import VALUE_READS, NKIObject
from simulate.memory.regions import MemoryRegion
from simulate.memory.storage import Storage
from simulate.memory.tensor import NkiTensor
from simulate.numerics import DType, as_dtype

_INT32 = as_dtype("int32")


class VirtualRegister(NKIObject):
    """Signed integer register of 32 bits, or of 64 bits for a 64-bit scalar.

    It is a (1, 1) int32 or int64 cell in a memory of its own, so instructions read and write it like any operand and
    the stream records what depends on it. `frozen` marks the counter of a device loop, which a body may not write.
    """

    __slots__ = ("cell", "frozen")

    def __init__(self, state: Any = None, frozen: bool = False) -> None:
        storage = state if isinstance(state, Storage) else allocate_cell()
        self.cell = NkiTensor((1, 1), storage.dtype, storage)
        self.frozen = frozen

    @property
    def value(self) -> int:
        """Integer in the register now. Reading it counts as a read by Python (`ValueReads`).

        Raises:
            RuleViolation: The register was allocated without a value and never set.
        """
        VALUE_READS.count += 1
        if not self.cell.storage.validity.written(*self.cell.byte_view()):
            raise RuleViolation(register_was_set, "a register that was allocated without a value")
        return int(self.cell.uncounted_array[0, 0])

    def __bool__(self) -> bool:
        return self.value != 0

    def _refuse(self, *_: Any) -> Any:
        raise RuleViolation(no_python_on_registers, "Python arithmetic or conversion of a register")

    for _name in "add radd sub rsub mul rmul floordiv mod lt le gt ge index int float neg".split():
        locals()[f"__{_name}__"] = _refuse
    del _name

    def __repr__(self) -> str:
        VALUE_READS.count += 1
        storage = self.cell.storage
        is_set = storage.uncounted_array.size and storage.validity.written(*self.cell.byte_view())
        return f"<register {self.cell.uncounted_array[0, 0]}>" if is_set else "<register>"


def allocate_cell(dtype: DType | None = None, has_bytes: bool = True) -> Storage:
    """Return the storage of a fresh register, a (1, 1) cell without a defined value.

    Args:
        dtype: int32 or int64; None for int32.
        has_bytes: Whether the cell has bytes; False in a dry launch, which computes no values.
    """
    array = None if has_bytes else np.empty(0, np.uint8)
    return Storage((1, 1), dtype or _INT32, MemoryRegion.register, "register", array=array, fresh=True)


@rule(
    "NKW-REGISTER-UNSET",
    hint="nisa.register_alloc(0), or nisa.register_move or register_load before the read",
)
def register_was_set() -> None:
    """A register is read only after it was given a value.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule(
    "NKW-REGISTER-PYTHON",
    hint="compute in a tile and register_load it; loop with nl.fori_loop or nl.while_loop",
)
def no_python_on_registers() -> None:
    """A register has a value at run time only: no Python arithmetic, conversion or range() on it.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """
