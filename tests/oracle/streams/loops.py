"""Run-time scalars and device loops: counters and arithmetic checked, and instructions inside of bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulate.nki import language as nl
from tests.oracle.draw import Draw, Register
from tests.oracle.streams.common import Arguments, draws

if TYPE_CHECKING:
    from collections.abc import Callable

_ARITHMETIC = "add sub mul".split()


def _word(d: Draw) -> int:
    choice = d.random.random()
    return int(d.random.integers(-9, 10)) if choice < 0.5 else int(d.random.integers(-(2**31), 2**31))


def _scalar(d: Draw) -> Register:
    known = [register for register in d.lockstep.registers.values() if register.is_scalar]
    if known and d.chance(0.7):
        return d.pick(known)
    return d.lockstep.scalar(_word(d))


@draws
def scalar_load(d: Draw) -> Arguments:
    return {
        "dst": d.lockstep.new_register(),
        "src": d.tile(1, 1, "int32", "hbm" if d.chance(0.5) else "sbuf", shape=(1, 1)),
    }


@draws
def scalar_store(d: Draw) -> Arguments:
    dst = d.result(1, 1, "int32", "hbm" if d.chance(0.5) else "sbuf", shape=(1, 1))
    return {"dst": dst, "value": _scalar(d)}


@draws
def scalar_arithmetic(d: Draw) -> Arguments:
    sides: list[Any] = [_scalar(d), _scalar(d) if d.chance(0.5) else _word(d)]
    if d.chance(0.3):
        sides.reverse()
    return {
        "dst": d.lockstep.new_register(),
        "operator": d.pick(_ARITHMETIC),
        "left": sides[0],
        "right": sides[1],
    }


def loop(d: Draw, instruction: Callable[[], None]) -> None:
    """Run a device loop of an instruction or two per iteration; now and then one loop inside another."""
    lower = int(d.random.integers(-3, 4))
    upper, step = lower + int(d.random.integers(0, 4)), d.upto(2)
    if d.chance(0.3):
        _counting_down(d, instruction)
        return
    expected = list(range(lower, upper, step))
    seen: list[int] = []

    def body(counter: Any) -> None:
        counter_hold = d.lockstep.hold(counter, expected[len(seen)])
        seen.append(counter.value)
        instruction()
        if d.chance(0.1):
            loop(d, instruction)
        d.lockstep.release(counter_hold)

    bounds = [d.lockstep.register(bound).simulated if d.chance(0.3) else bound for bound in (lower, upper)]
    nl.fori_loop(*bounds, body, step)
    d.lockstep.expect("fori_loop", seen, expected)


def _counting_down(d: Draw, instruction: Callable[[], None]) -> None:
    """Run a while_loop from a few down to 0; of none at all, no iteration."""
    count = int(d.random.integers(0, 4))
    seen: list[int] = []

    def body(condition: Any) -> Any:
        seen.append(condition.value)
        instruction()
        return d.lockstep.scalar(count - len(seen)).simulated

    nl.while_loop(d.lockstep.scalar(count).simulated, body)
    d.lockstep.expect("while_loop", seen, list(range(count, 0, -1)))
