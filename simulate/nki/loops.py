"""Device loops, `nl.fori_loop`, `nl.while_loop` and `nl.dynamic_range`: their counter or condition is in a register.

The simulator runs a body once per iteration, eagerly, with the values the registers hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.isa import costs
from simulate.isa.enums import Engine
from simulate.isa.immediates import parse_integer
from simulate.isa.plan import Domain, Plan
from simulate.level import RUN_TIME_SCALARS
from simulate.memory.registers import VirtualRegister
from simulate.nki.arguments import body_is_function, bound_is_integer_or_register
from simulate.nki.loop_counts import (
    describe_register,
    is_too_long,
    loop_is_bounded,
    read_register,
    trip_count,
)
from simulate.nki.scalars import NkiScalar, not_a_comparison, thirty_two_bits
from simulate.run import current_core, running_level
from simulate.run.issue import issue_plan


def fori_loop(
    lower: int | VirtualRegister,
    upper: int | VirtualRegister,
    body_fun: Callable[[VirtualRegister], Any],
    step: int = 1,
) -> None:
    """Run body_fun(i) on the device for i = lower, lower + step, … below upper; i is a read-only register.

    From level 0.7 on i is a scalar with arithmetic (NkiScalar), unless a bound is a plain register. A dry launch with a
    register as bound runs as often as its trip count.

    Raises:
        RuleViolation: A bound is no integer and no register, the step is no positive int, body_fun returns something,
            the loop is inside nl.no_reorder(), or it issues too many instructions.
    """
    body_is_function(body_fun)
    values = _count_values(lower, upper, step, ("lower", "upper"))
    outside_no_reorder("fori_loop")
    loop = len(current_core().stream)
    plain = not running_level().has(RUN_TIME_SCALARS) or any(
        isinstance(b, VirtualRegister) and not isinstance(b, NkiScalar) for b in (lower, upper)
    )
    for number, value in enumerate(values):
        with _mark_iteration(loop):
            counter = _make_counter(value, number == 0)
            body_returns_nothing(body_fun(counter if plain else NkiScalar(counter)))
        if is_too_long(loop):
            loop_is_bounded("nl.fori_loop", loop, f"its counter is {value:,}")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """Run r = body_fun(r) on the device, from r = init, while r is not 0.

    The body returns the register to test next, which may be the same. A dry launch runs as often as its trip count.

    Raises:
        RuleViolation: init or a body's result is no register, the loop is inside nl.no_reorder(), or it issues too many
            instructions.
    """
    body_is_function(body_fun)
    outside_no_reorder("while_loop")
    loop = len(current_core().stream)
    condition: Any = init
    body_returns_register(condition)
    trips = trip_count()
    if trips is not None:
        for _ in range(trips):
            condition = _iterate(loop, condition, body_fun)
        return
    unchanged, value = 0, read_register(condition)
    while value != 0:
        condition = _iterate(loop, condition, body_fun)
        previous, value = value, read_register(condition)
        unchanged = unchanged + 1 if value == previous else 0
        if is_too_long(loop):
            loop_is_bounded(
                "nl.while_loop",
                loop,
                f"{describe_register(condition)} is {value} since {unchanged:,} iterations",
            )


def _iterate(loop: int, condition: Any, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> Any:
    with _mark_iteration(loop):
        _issue_step(lambda: (), (), len(current_core().stream) == loop)
        condition = body_fun(condition)
    body_returns_register(condition)
    return condition


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Yield a read-only register for each value of a range whose bounds may be registers (deprecated; use fori_loop).

    With one bound the range begins at 0. Raises RuleViolation as `fori_loop`.
    """
    running_level().notice("nl.dynamic_range")
    outside_no_reorder("dynamic_range")
    loop = len(current_core().stream)
    lower, upper = (0, start) if stop is None else (start, stop)
    names = ("start", "start") if stop is None else ("start", "stop")
    for number, value in enumerate(_count_values(lower, upper, step, names)):
        with _mark_iteration(loop):
            yield _make_counter(value, number == 0)
        if is_too_long(loop):
            loop_is_bounded("nl.dynamic_range", loop, f"its counter is {value:,}")


@contextmanager
def _mark_iteration(loop: int) -> Iterator[None]:
    """Mark the events that are issued inside the `with` block as one iteration of a device loop.

    Ordering requests of nl.no_reorder may not lead out of it.

    Args:
        loop: Number of events in the stream when the loop began.
    """
    stream = current_core().stream
    stream.open_loops.append(len(stream))
    stream.iterations[len(stream)] = loop
    try:
        yield
    finally:
        stream.open_loops.pop()


def _count_values(lower: Any, upper: Any, step: int, names: tuple[str, str]) -> range:
    """Return the values of a loop's counter.

    In a dry launch with a register as bound these are as many as its trip count, from 0 on if `lower` is a register.

    Args:
        lower: First value, an int or a register.
        upper: End of the values, an int or a register.
        step: Step, a positive int.
        names: Names of the two bounds, for messages.

    Raises:
        RuleViolation: The step or a bound is of another type, or a register has 64 bits or a comparison's result.
        Unsupported: The launch is dry and knows neither a trip count nor the register's value.
    """
    positive_step(step)
    for name, bound in zip(names, (lower, upper)):
        bound_is_integer_or_register(name, bound)
    registers = [bound for bound in (lower, upper) if isinstance(bound, VirtualRegister)]
    for bound in registers:
        not_a_comparison(bound)
        thirty_two_bits(bound.cell.dtype, "a loop bound")
    trips = trip_count() if registers else None
    if trips is not None:
        first = 0 if isinstance(lower, VirtualRegister) else operator.index(lower)
        return range(first, first + trips * step, step)
    first, end = (
        read_register(bound) if isinstance(bound, VirtualRegister) else operator.index(bound)
        for bound in (lower, upper)
    )
    return range(first, end, operator.index(step))


def _make_counter(value: int, first: bool) -> VirtualRegister:
    core = current_core()
    counter = core.allocate_register(frozen=True)
    _issue_step(lambda: (np.array([[value]], np.int32),), (counter.cell,), first)
    return counter


def _issue_step(compute: Callable[[], tuple[Any, ...]], writes: tuple[Any, ...], first: bool) -> None:
    core = current_core()
    cost_name = "device_loop_first_iteration_ns" if first else "device_loop_iteration_ns"
    issue_plan(
        core,
        "loop_iteration",
        Plan(
            engine=Engine.sync,
            reads=(),
            writes=writes,
            domain=Domain.bits,
            compute=compute,
            cost=costs.fixed(core.hardware, Engine.sync, cost_name),
            name=None,
        ),
    )


@rule("NKW-LOOP-STEP")
def positive_step(step: Any) -> None:
    """The step of a device loop is a positive compile-time integer.

    Raises RuleViolation otherwise.
    """
    if isinstance(step, VirtualRegister) or parse_integer(step, 1, 2**31 - 1) is None:
        raise RuleViolation(positive_step, f"step={step!r}", hint="keep the step a Python int, 1 or more")


@rule("NKW-ORDER-BLOCK")
def outside_no_reorder(loop: str) -> None:
    """There is no device loop inside nl.no_reorder().

    Raises RuleViolation if a loop begins inside the block; `loop` is the loop's name.
    """
    if current_core().stream.open_blocks:
        raise RuleViolation(
            outside_no_reorder, f"nl.{loop} inside nl.no_reorder()", hint="put no_reorder into the body"
        )


@rule("NKW-LOOP-BODY", hint="write results to a tensor or a register inside the body, and return nothing")
def body_returns_nothing(result: Any) -> None:
    """The body of fori_loop returns nothing; it keeps values in SBUF, HBM or registers.

    Raises RuleViolation otherwise.
    """
    if result is not None:
        raise RuleViolation(body_returns_nothing, f"the body returned {type(result).__name__}")


@rule("NKW-LOOP-CONDITION")
def body_returns_register(result: Any) -> None:
    """while_loop starts from a register, and its body returns the next one.

    Raises RuleViolation otherwise.
    """
    if not isinstance(result, VirtualRegister):
        raise RuleViolation(
            body_returns_register, f"{type(result).__name__}", hint="return the register to test next"
        )
