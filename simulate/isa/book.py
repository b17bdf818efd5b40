"""The instruction book: every planner under its NKI name, and the one way to call one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from simulate.errors import InvalidArgument, RuleViolation
from simulate.hardware import Hardware
from simulate.isa import memo
from simulate.isa.plan import Plan
from simulate.memory import NkiTensor

Planner = Callable[..., Plan]

INSTRUCTIONS: dict[str, Planner] = {}
"""`nki.isa` instructions by name; a planner takes the hardware record, then exactly the documented parameters."""

COLLECTIVES: dict[str, Planner] = {}
"""`nki.collectives` by name."""


class CallError(InvalidArgument, TypeError):
    """A call whose arguments do not fit the documented signature."""


def instruction(planner: Planner) -> Planner:
    """Enter a planner into the book of `nki.isa`."""
    INSTRUCTIONS[planner.__name__] = planner
    return planner


def collective(planner: Planner) -> Planner:
    """Enter a planner into the book of `nki.collectives`; its second parameter is the rank that asks."""
    COLLECTIVES[planner.__name__] = planner
    return planner


def documented_signature(planner: Planner, hidden: int = 1) -> inspect.Signature:
    """A planner's signature as NKI documents it: without the `hidden` leading parameters."""
    signature = inspect.signature(planner)
    return signature.replace(
        parameters=list(signature.parameters.values())[hidden:], return_annotation=inspect.Signature.empty
    )


def plan(planner: Planner, context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Plan one call; a broken rule leaves here with the instruction's name and its operands.

    Raises RuleViolation for a broken rule, CallError for arguments that do not fit the signature.
    """
    found = memo.key_of(planner, context, args, kwargs)
    if found is None:
        return _planned(planner, context, args, kwargs)
    key, tiles = found
    call = memo.CALLS.get(key)
    if call is not None:
        if not call.tried:
            call.learn(planner, context, args, kwargs)
        if call.kept:
            return call.plan(tiles)
    made = _planned(planner, context, args, kwargs)
    if call is None:
        memo.met(key, context, args, kwargs)
    return made


def _planned(
    planner: Planner, context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    try:
        return planner(*context, *args, **kwargs)
    except RuleViolation as error:
        if not error.instruction:
            error.instruction = planner.__name__
            error.operands = _operands(planner, len(context), args, kwargs)
        raise
    except TypeError as error:
        try:
            documented_signature(planner, len(context)).bind(*args, **kwargs)
        except TypeError as mismatch:
            parameters = ", ".join(documented_signature(planner, len(context)).parameters)
            raise CallError(
                "NKW-CALL", f"{planner.__name__}: {mismatch}; its parameters are {parameters}"
            ) from None
        raise error


def _operands(planner: Planner, hidden: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    bound = documented_signature(planner, hidden).bind(*args, **kwargs)
    return {
        name: value.describe() if isinstance(value, NkiTensor) else _plain(value)
        for name, value in bound.arguments.items()
        if value is not None
    }


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)) and any(isinstance(part, NkiTensor) for part in value):
        return f"[{', '.join(p.describe() if isinstance(p, NkiTensor) else _plain(p) for p in value)}]"
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plan_for(name: str, hardware: Hardware, *args: Any, **kwargs: Any) -> Plan:
    """Plan an instruction of the book without any machine; what the limit tests use."""
    return plan(INSTRUCTIONS[name], (hardware,), args, kwargs)
