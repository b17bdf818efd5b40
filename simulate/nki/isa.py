"""`nki.isa`: every instruction of the book under its name, with the documented signature."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from nkw.errors import NkiValidationError, RuleViolation, rule
from simulate.isa.book import INSTRUCTIONS, Planner, documented_signature
from simulate.isa.rules import violations
from simulate.memory import NkiTensor
from simulate.memory.registers import VirtualRegister
from simulate.nki import constants
from simulate.nki.constants import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from simulate.nki.loop_counts import Register
from simulate.nki.missing import not_yet
from simulate.nki.older import find_member, modernise
from simulate.nki.scalars import NkiScalar, scalar_load, scalar_store
from simulate.run import NkiInstruction, current_core
from simulate.run.issue import issue_call

tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown


def get_nc_version() -> nc_version:
    """Return the generation of the NeuronCore for which the kernel runs, a member of `nisa.nc_version`."""
    return nc_version(current_core().hardware.generation)


def get_nc_sub_version() -> int:
    """Return the stepping of the core's generation: 0 is the first; on gen4, 1 is the one that has `exponential`.

    The reference prints no meaning; public kernels use the number in this way.
    """
    return current_core().hardware.sub_version


def register_alloc(x: int | NkiTensor | None = None) -> VirtualRegister:
    """Return a new 32-bit register with the value x; if x is None it has no value, and reading it is refused.

    The reference knows Python integers only. The vendor's own kernels also pass a one-element tensor, whose element is
    loaded; the launch's rules refuse or tolerate it.

    Raises:
        RuleViolation: x is no 32-bit integer and no tensor of one element.
    """
    core = current_core()
    for violation in violations((starts_with_a_number, x)):
        core.rank.report_violation(violation, "register_alloc")
    register = Register(core.allocate_register().cell.storage)
    if x is not None:
        instruction = "register_load" if isinstance(x, NkiTensor) else "register_move"
        issue_call(INSTRUCTIONS[instruction], (register, x), {})
    return register


@rule("NKW-REGISTER-INITIAL", hint="nisa.register_alloc(), then nisa.register_load")
def starts_with_a_number(x: Any) -> None:
    """register_alloc takes a Python integer or None.

    Raises RuleViolation if x is a tensor; other objects are judged when the register is written.
    """
    if isinstance(x, NkiTensor):
        raise RuleViolation(starts_with_a_number, f"x is {x.describe()}")


def _instruction(planner: Planner) -> Callable[..., NkiInstruction]:
    signature = documented_signature(planner)
    known = frozenset(signature.parameters)
    enums = {
        name: type(parameter.default)
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.default, Enum)
    }

    def instruction(*args: Any, **kwargs: Any) -> NkiInstruction:
        if not kwargs.keys() <= known:
            kwargs = modernise(planner.__name__, kwargs, known)
        for name, members in enums.items():
            if name in kwargs and type(kwargs[name]) is not members:
                kwargs[name] = find_member(members, kwargs[name])
        return issue_call(planner, args, kwargs)

    instruction.__name__ = instruction.__qualname__ = planner.__name__
    instruction.__doc__ = planner.__doc__
    instruction.__signature__ = signature  # type: ignore[attr-defined]
    return instruction


globals().update({name: _instruction(planner) for name, planner in INSTRUCTIONS.items()})


def __getattr__(name: str) -> Any:
    return not_yet("nki.isa", name)


__all__ = [
    "NkiInstruction",
    "NkiScalar",
    "NkiValidationError",
    "VirtualRegister",
    "constants",
    "dge_mode",
    "dma_engine",
    "engine",
    "get_nc_sub_version",
    "get_nc_version",
    "matmul_perf_mode",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "register_alloc",
    "scalar_load",
    "scalar_store",
    *INSTRUCTIONS,
]
