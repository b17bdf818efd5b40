"""The instruction book: every planner under its NKI name, and how a call is planned.

A planner is the Python function of an instruction: it checks the rules and returns a `Plan`. `simulate.run.issue` plans
calls of kernels with `bind`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from nkw.errors import InvalidArgument, NkwError, RuleViolation
from nkw.suggestions import did_you_mean
from simulate.hardware import Hardware
from simulate.isa.memo import KnownCall, Memo, build_call_key
from simulate.isa.plan import Plan, complete
from simulate.isa.template import Template
from simulate.level import Rules
from simulate.memory import NkiTensor

Planner = Callable[..., Plan]

INSTRUCTIONS: dict[str, Planner] = {}
"""`nki.isa` instructions by name; a planner takes the hardware record, then exactly the documented parameters."""

COLLECTIVES: dict[str, Planner] = {}
"""`nki.collectives` by name."""


class CallError(InvalidArgument, TypeError):
    """Error of a call whose arguments do not fit the documented signature."""


def instruction(planner: Planner) -> Planner:
    """Register a planner in `INSTRUCTIONS` under its name, as a decorator; return it unchanged."""
    INSTRUCTIONS[planner.__name__] = planner
    return planner


def collective(planner: Planner) -> Planner:
    """Register a planner in `COLLECTIVES` under its name, as a decorator; return it unchanged.

    Its first two parameters are the hardware record and the rank that calls.
    """
    COLLECTIVES[planner.__name__] = planner
    return planner


def documented_signature(planner: Planner, hidden: int = 1) -> inspect.Signature:
    """Return a planner's signature as NKI documents it, without the first `hidden` parameters and the return type."""
    signature = inspect.signature(planner)
    return signature.replace(
        parameters=list(signature.parameters.values())[hidden:], return_annotation=inspect.Signature.empty
    )


MEMO = Memo()
"""The calls that this process has planned; they hold no memory of a launch."""


def bind(
    planner: Planner,
    context: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    memo: Memo = MEMO,
) -> tuple[Template, tuple[NkiTensor, ...], tuple[NkiTensor, ...]]:
    """Return the template of one call, and the tensors that the instruction reads and those that it writes.

    A call that equals an earlier one apart from its tensors is not planned again.

    Args:
        planner: The planner.
        context: Its leading parameters that NKI does not document: the hardware record, for collectives also the rank.
        args: Positional arguments as the kernel gives them.
        kwargs: Keyword arguments as the kernel gives them.
        memo: Calls planned so far; the call is added to it.

    Raises:
        RuleViolation: A rule is broken. The error has the instruction's name and its operands.
        CallError: The arguments do not fit the documented signature.
    """
    known = build_call_key(planner, context, args, kwargs)
    if known is not None:
        key, tensors = known
        call = memo.calls.get(key)
        if call is None:
            try:
                call = KnownCall(planner, context, args, kwargs)
            except (NkwError, TypeError):
                pass  # planned for the tensors themselves below, which raises the same with their names
            else:
                memo.add(key, call)
        if call is not None and call.template is not None:
            return call.template, *call.operands(tensors)
    call_plan = _plan_call(planner, context, args, kwargs)
    return Template(planner.__name__, call_plan.template()), call_plan.reads, call_plan.writes


def plan(planner: Planner, context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Return the plan of one call over the call's own tensors; arguments and errors are those of `bind`."""
    template, reads, writes = bind(planner, context, args, kwargs)
    return template.plan.over(reads, writes)


def _plan_call(
    planner: Planner, context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    try:
        return complete(planner(*context, *args, **kwargs))
    except RuleViolation as error:
        name_operands(error, planner, len(context), args, kwargs)
        raise
    except TypeError as error:
        try:
            documented_signature(planner, len(context)).bind(*args, **kwargs)
        except TypeError as mismatch:
            parameters = documented_signature(planner, len(context)).parameters
            unknown = [name for name in kwargs if name not in parameters]
            problem = f"got an unexpected keyword argument {unknown[0]!r}" if unknown else str(mismatch)
            meant = did_you_mean(unknown[0], parameters, suffix="=") if unknown else ""
            raise CallError(
                "NKW-CALL",
                f"{planner.__name__}: {problem}{meant or ';'} its parameters are {', '.join(parameters)}",
            ) from None
        raise error


def undocumented(
    planner: Planner, context: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[RuleViolation, ...]:
    """Return the violations of documented sentences by one call which its planner tolerates (`Plan.undocumented`).

    Each has the instruction's name and the operands of the call. Arguments and errors are those of `bind`.
    """
    violations = _plan_call(planner, context, args, kwargs).undocumented
    for violation in violations:
        name_operands(violation, planner, len(context), args, kwargs)
    return violations


def name_operands(
    error: RuleViolation, planner: Planner, hidden: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Set an error's instruction, and its operands as the user's source names them.

    Does nothing if the error has operands already or belongs to another instruction.

    Args:
        error: The error, which is changed.
        planner: The planner that raised it.
        hidden: Number of the planner's leading parameters that NKI does not document.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    if error.instruction in ("", planner.__name__) and not error.operands:
        error.instruction = planner.__name__
        error.operands = _operands(planner, hidden, args, kwargs)


def _operands(planner: Planner, hidden: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    bound = documented_signature(planner, hidden).bind(*args, **kwargs)
    return {
        name: value.describe() if isinstance(value, NkiTensor) else _shorten(value)
        for name, value in bound.arguments.items()
        if value is not None
    }


def _shorten(value: Any) -> str:
    if isinstance(value, (list, tuple)) and any(isinstance(element, NkiTensor) for element in value):
        return f"[{', '.join(p.describe() if isinstance(p, NkiTensor) else _shorten(p) for p in value)}]"
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plan_for(name: str, hardware: Hardware, *args: Any, **kwargs: Any) -> Plan:
    """Return the plan of an instruction of the book by its name, under the chip's rules and outside a kernel.

    Tests of limits use it.

    Raises:
        RuleViolation: The chip's rules refuse the call.
    """
    full_plan = plan(INSTRUCTIONS[name], (hardware,), args, kwargs)
    for violation in full_plan.undocumented:
        if Rules.chip.refuse(violation.code):
            name_operands(violation, INSTRUCTIONS[name], 1, args, kwargs)
            raise violation
    return full_plan
