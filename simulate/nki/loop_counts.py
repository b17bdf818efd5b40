"""How often device loops run: values of registers, trip counts of dry launches, and the limit of endless loops.

A dry launch computes no numbers, so a loop over registers runs as often as the trip count that the launch was given.
`simulate.nki.loops` uses these functions.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache

from nkw.errors import RuleViolation, Unsupported, rule
from simulate.lines import find_body, walk_statements
from simulate.memory.registers import VirtualRegister
from simulate.memory.validity import EMPTY
from simulate.run import current_core
from simulate.run.environment import LOOP_EVENTS_VARIABLE, max_loop_events
from simulate.run.location import kernel_line
from simulate.run.stream import Line


class Register(VirtualRegister):
    """Register that `nisa.register_alloc` returns: 32 bits, signed.

    `while register:` is a device loop (until 0.6), whose iterations `__bool__` counts; `if register:` is refused in a
    dry launch that does not know the value.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        core, line = current_core(), kernel_line()
        if not _is_while(line):
            return read_register(self) != 0
        loop = core.conditions.get(line) or _While(len(core.stream), trip_count())
        goes_on = loop.done < loop.trips if loop.trips is not None else read_register(self) != 0
        core.conditions[line] = _While(loop.first, loop.trips, loop.done + 1) if goes_on else None
        if goes_on and is_too_long(loop.first, loop.done):
            loop_is_bounded(
                "`while`", loop.first, f"{describe_register(self)} is not 0 after {loop.done:,} iterations"
            )
        return goes_on


@dataclass(frozen=True, slots=True)
class _While:
    """State of a running loop `while register:`.

    Attributes:
        first: Number of the event with which the loop began.
        trips: Trip count in a dry launch, None if the register decides.
        done: Iterations so far.
    """

    first: int
    trips: int | None
    done: int = 0


@lru_cache(maxsize=64)
def _is_while(line: Line) -> bool:
    """Return whether a line of a kernel is `while register:`; True also if the source of the line is not known."""
    body = find_body(line[0])
    tests = [node.test for node in walk_statements(body) if isinstance(node, ast.While)]
    plain = (test.lineno for test in tests if isinstance(test, (ast.Name, ast.Attribute, ast.Subscript)))
    return not body or line[1] in plain


def trip_count() -> int | None:
    """Return the trip count that a dry launch was given for the running loop; None if registers decide."""
    core = current_core()
    return core.rank.trip_count(kernel_line()) if core.dry else None


def read_register(register: VirtualRegister) -> int:
    """Return the integer that a register contains.

    Raises:
        Unsupported: The launch is dry and does not know the value (NKW-DRY-CONTROL).
        RuleViolation: The register has no value.
    """
    core = current_core()
    if not core.dry or register.cell.storage.validity.uniform == EMPTY:
        return register.value  # which refuses a register without a value
    known = None if core.rank.trips else core.rank.values.known_tensor(register.cell)
    if known is None:
        raise Unsupported(
            "NKW-DRY-CONTROL",
            "a dry launch computes no numbers, so it does not know how often a loop over registers runs; "
            "give trip counts, --trips N or launch(…, trips=(N,)), or arrays with the numbers that decide",
        )
    return int(known.uncounted_array[0, 0])


def describe_register(register: VirtualRegister) -> str:
    """Return a register as text for messages: "the register that is first used at FILE:LINE"."""
    stream, serial = current_core().stream, register.cell.storage.serial
    return f"the register that is first used at {stream.event(stream.first_use[serial]).where}"


def is_too_long(loop: int, iterations: int = 0) -> bool:
    """Return whether a loop has issued more instructions than the limit (`max_loop_events`).

    Args:
        loop: Number of events in the stream when the loop began.
        iterations: Iterations so far, which count like instructions, for a loop whose body issues none.
    """
    return len(current_core().stream) - loop + iterations > max_loop_events()


@rule("NKW-LOOP-EVENTS")
def loop_is_bounded(name: str, loop: int, seen: str) -> None:
    """The iterations of one device loop issue at most 500,000 instructions, or as many as NKW_LOOP_EVENTS says.

    A simulation cannot tell a loop without an end from a long one.

    Raises RuleViolation at every call: the caller has found that the rule is broken.
    """
    raise RuleViolation(
        loop_is_bounded,
        f"{len(current_core().stream) - loop:,} instructions in {name}; {seen}",
        f"{max_loop_events():,} instructions",
        hint=f"let the body change what ends the loop, or set {LOOP_EVENTS_VARIABLE}",
    )
