"""Parameters of `nki.isa` in 0.2 to 0.5 that public kernels still write: the table `OLDER`.

An accepted parameter gives a DeprecationWarning from level 0.6 on. It is rewritten to today's parameter, or has no
effect. A parameter that changed its meaning or its position is refused like any other that does not fit. A parameter of
an enum also takes the documented number of a member.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.isa.enums import DmaEngine
from simulate.level import OLDER_PARAMETERS
from simulate.numerics import as_dtype
from simulate.run import running_level


@dataclass(frozen=True, slots=True)
class Older:
    """Parameter of an earlier release.

    Attributes:
        instructions: Names of the instructions that had it; None for all.
        now: What to write now, for the warning.
        replace: Function from the value to the keyword arguments of 0.6 with the same meaning, None if there are none.
            It raises RuleViolation for a value that has no equal in 0.6.
    """

    instructions: frozenset[str] | None  # None: every instruction
    now: str
    replace: Callable[[Any], Any]


def _known_dtype(dtype: Any) -> None:
    if dtype is not None:
        as_dtype(dtype)


@rule("NKW-OLDER-MASK")
def masks_are_gone(mask: Any) -> None:
    """nki.isa has no masks; mask=None of an earlier release is accepted.

    Raises RuleViolation if the mask is not None.
    """
    if mask is not None:
        raise RuleViolation(masks_are_gone, "mask= with a value", hint="slice the operands")


@rule("NKW-OLDER-RMW")
def copies_only(dst_rmw_op: Any) -> None:
    """dma_copy copies; it does not read, modify and write.

    Raises RuleViolation if dst_rmw_op is not None.
    """
    if dst_rmw_op is not None:
        raise RuleViolation(
            copies_only, f"dst_rmw_op={getattr(dst_rmw_op, '__name__', dst_rmw_op)}", hint="nisa.dma_compute"
        )


OLDER: dict[str, Older] = {
    # Public kernels of 0.2 name a dtype that is not always dst's; what is written has dst's dtype.
    "dtype": Older(None, "leave it out; dst's dtype decides, whatever it says", _known_dtype),
    "mask": Older(None, "leave it out; slice the operands", masks_are_gone),
    # The name that the first 0.2 had by mistake.
    "is_moving_zero": Older(
        frozenset({"nc_matmul"}), "is_moving_onezero=", lambda value: {"is_moving_onezero": value}
    ),
    "imm": Older(frozenset({"register_move"}), "src=", lambda value: {"src": value}),
    "use_gpsimd_dma": Older(
        frozenset({"sendrecv"}),
        "dma_engine=nisa.dma_engine.gpsimd_dma or .dma",
        lambda value: {"dma_engine": DmaEngine.gpsimd_dma if value else DmaEngine.dma},
    ),
    "dst_rmw_op": Older(frozenset({"dma_copy"}), "nisa.dma_compute", copies_only),
    "unique_indices": Older(
        frozenset({"dma_copy"}), "leave it out; it belonged to dst_rmw_op", lambda value: None
    ),
}
"""Every parameter of an earlier release that is accepted."""


def modernise(instruction: str, kwargs: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return a copy of keyword arguments in which parameters of earlier releases are rewritten as 0.6 has them.

    A name that no release had stays in. Gives a DeprecationWarning for each rewritten one at levels that deprecate
    them.

    Args:
        instruction: Name of the instruction.
        kwargs: The keyword arguments as the kernel gives them.
        known: The documented parameters of the instruction.

    Raises:
        RuleViolation: 0.6 cannot express an argument.
    """
    result = dict(kwargs)
    for name in kwargs.keys() - known:
        older = OLDER.get(name)
        if older is None or (older.instructions is not None and instruction not in older.instructions):
            continue
        if running_level().deprecates(OLDER_PARAMETERS):
            warnings.warn(
                f"nisa.{instruction}({name}=…) is of an earlier release of NKI; now: {older.now}",
                DeprecationWarning,
                stacklevel=3,
            )
        result.update(older.replace(result.pop(name)) or {})
    return result


def find_member(members: type[Enum], value: Any) -> Any:
    """Return the member of the enum `members` whose documented number is the int `value`; any other value unchanged."""
    if type(value) is int:
        for member in members:
            if member.value == value:
                return member
    return value
