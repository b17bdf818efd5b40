"""Device loops: bodies with a counter or a condition that only the device knows.

The simulator runs a body once per iteration, eagerly, with the values the registers hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from simulate.errors import RuleViolation, Unsupported, rule
from simulate.isa import costs
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.level import RUN_TIME_SCALARS
from simulate.memory.registers import VirtualRegister
from simulate.nki.scalars import NkiScalar, not_a_comparison, thirty_two_bits
from simulate.run import current_core, running_level
from simulate.run.environment import LOOP_EVENTS_VARIABLE, loop_events
from simulate.run.issue import issue
from simulate.run.location import kernel_line


def fori_loop(
    lower: int | VirtualRegister,
    upper: int | VirtualRegister,
    body_fun: Callable[[VirtualRegister], Any],
    step: int = 1,
) -> None:
    """body_fun(i) for i in lower, lower+step, … below upper, on the device; i is read-only.

    i is a scalar that has arithmetic (0.7), unless a bound is a register: then it is a register too.
    """
    values = _counts(lower, upper, step)
    outside_no_reorder("fori_loop")
    loop = len(current_core().stream)
    plain = not running_level().has(RUN_TIME_SCALARS) or any(
        isinstance(b, VirtualRegister) and not isinstance(b, NkiScalar) for b in (lower, upper)
    )
    for value in values:
        with _inside(loop):
            counter = _counter(value)
            body_returns_nothing(body_fun(counter if plain else NkiScalar(counter)))
        if _is_too_long(loop):
            loop_is_bounded("fori_loop", loop, f"its counter is {value:,}")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """r = init; while r is not 0: r = body_fun(r). The body returns the next register."""
    outside_no_reorder("while_loop")
    loop = len(current_core().stream)
    condition: Any = init
    body_returns_register(condition)
    if current_core().dry:
        for _ in range(_trip_count()):
            condition = _iterated(loop, condition, body_fun)
        return
    same, value = 0, condition.value
    while value != 0:
        condition = _iterated(loop, condition, body_fun)
        before, value = value, condition.value
        same = same + 1 if value == before else 0
        if _is_too_long(loop):
            loop_is_bounded("while_loop", loop, f"{_named(condition)} is {value} since {same:,} iterations")


def _iterated(loop: int, condition: Any, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> Any:
    with _inside(loop):
        _issue_step(lambda: (), ())
        condition = body_fun(condition)
    body_returns_register(condition)
    return condition


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Deprecated since 0.6: a loop over a register range; use fori_loop."""
    running_level().notice("nl.dynamic_range")
    outside_no_reorder("dynamic_range")
    loop = len(current_core().stream)
    lower, upper = (0, start) if stop is None else (start, stop)
    for value in _counts(lower, upper, step):
        with _inside(loop):
            yield _counter(value)
        if _is_too_long(loop):
            loop_is_bounded("dynamic_range", loop, f"its counter is {value:,}")


@contextmanager
def _inside(loop: int) -> Iterator[None]:
    """One iteration of the device loop of that number; ordering requests may not lead out of it."""
    stream = current_core().stream
    stream.open_loops.append(len(stream))
    stream.iterations[len(stream)] = loop
    try:
        yield
    finally:
        stream.open_loops.pop()


def _bound(value: Any) -> int:
    if isinstance(value, VirtualRegister):
        return value.value
    return operator.index(value)


def _named(register: VirtualRegister) -> str:
    stream, serial = current_core().stream, register.cell.storage.serial
    return f"the register that is first used at {stream.event(stream.first_use[serial]).where}"


def _counts(lower: Any, upper: Any, step: int) -> range:
    """The values of a loop's counter; in a dry launch with registers as bounds, as many as its trip count."""
    positive_step(step)
    registers = [bound for bound in (lower, upper) if isinstance(bound, VirtualRegister)]
    for bound in registers:
        not_a_comparison(bound)
        thirty_two_bits(bound.cell.dtype, "a loop bound")
    if registers and current_core().dry:
        first = 0 if isinstance(lower, VirtualRegister) else operator.index(lower)
        return range(first, first + _trip_count() * step, step)
    return range(_bound(lower), _bound(upper), operator.index(step))


def _trip_count() -> int:
    """The trip count that a dry launch was given for the running loop."""
    count = current_core().rank.trip_count(kernel_line())
    if count is None:
        raise Unsupported(
            "NKW-DRY-CONTROL",
            "a dry launch computes no numbers, so it does not know how often a loop over registers runs; "
            "give trip counts, --trips N or launch(…, trips=(N,))",
        )
    return count


def _counter(value: int) -> VirtualRegister:
    core = current_core()
    counter = core.allocate_register(frozen=True)
    _issue_step(lambda: (np.array([[value]], np.int32),), (counter.cell,))
    return counter


def _issue_step(compute: Callable[[], tuple[Any, ...]], writes: tuple[Any, ...]) -> None:
    core = current_core()
    issue(
        core,
        "loop_iteration",
        Plan(
            engine=Engine.sync,
            reads=(),
            writes=writes,
            domain=Domain.bits,
            compute=compute,
            cost=costs.fixed(core.hardware, Engine.sync, "device_loop_iteration_ns"),
            name=None,
        ),
    )


@rule("NKW-LOOP-STEP")
def positive_step(step: Any) -> None:
    """The step of a device loop is a positive compile-time integer."""
    if isinstance(step, VirtualRegister) or operator.index(step) < 1:
        raise RuleViolation(positive_step, f"step={step!r}", hint="keep the step a Python int, 1 or more")


@rule("NKW-ORDER-BLOCK")
def outside_no_reorder(loop: str) -> None:
    """There is no device loop inside nl.no_reorder()."""
    if current_core().stream.open_blocks:
        raise RuleViolation(
            outside_no_reorder, f"nl.{loop} inside nl.no_reorder()", hint="put no_reorder into the body"
        )


def _is_too_long(loop: int) -> bool:
    """Whether the loop that began with event `loop` has issued more than the limit."""
    return len(current_core().stream) - loop > loop_events()


@rule("NKW-LOOP-EVENTS")
def loop_is_bounded(name: str, loop: int, seen: str) -> None:
    """The iterations of one device loop issue at most 500,000 instructions, or as many as NKW_LOOP_EVENTS says.

    A simulation cannot tell a loop without an end from a long one.
    """
    raise RuleViolation(
        loop_is_bounded,
        f"{len(current_core().stream) - loop:,} instructions in nl.{name}; {seen}",
        f"{loop_events():,} instructions",
        hint=f"let the body change what ends the loop, or set {LOOP_EVENTS_VARIABLE}",
    )


@rule("NKW-LOOP-BODY")
def body_returns_nothing(result: Any) -> None:
    """The body of fori_loop returns nothing; it keeps values in SBUF, HBM or registers."""
    if result is not None:
        raise RuleViolation(body_returns_nothing, f"the body returned {type(result).__name__}")


@rule("NKW-LOOP-CONDITION")
def body_returns_register(result: Any) -> None:
    """while_loop starts from a register, and its body returns the next one."""
    if not isinstance(result, VirtualRegister):
        raise RuleViolation(
            body_returns_register, f"{type(result).__name__}", hint="return the register to test next"
        )
