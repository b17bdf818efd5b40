"""register_move, register_load, register_store: 32-bit integers of an instruction stream."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from simulate.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.isa.shapes import unchanged
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.registers import VirtualRegister


@instruction
def register_move(hardware: Hardware, dst: VirtualRegister, src: VirtualRegister | int) -> Plan:
    """dst = src, a register or a number of 32 bits.

    The 0.3 notes allow only a register as src, the 0.6 stub a number too; both are taken. On the Sync stream.
    """
    is_register("dst", dst)
    writable(dst)
    if isinstance(src, VirtualRegister):
        return _plan(hardware, (src.cell,), dst.cell, unchanged)
    word = immediate(src)
    return _plan(hardware, (), dst.cell, lambda: (np.array([[word]], np.int32),))


@instruction
def register_load(hardware: Hardware, dst: VirtualRegister, src: NkiTensor) -> Plan:
    """dst = the one element of src, an int32 or uint32 tensor in SBUF or HBM."""
    is_register("dst", dst)
    writable(dst)
    one_integer("src", src, dst)
    return _plan(hardware, (src,), dst.cell, _as_words if dst.cell.dtype.itemsize == 4 else unchanged)


@instruction
def register_store(hardware: Hardware, dst: NkiTensor, src: VirtualRegister) -> Plan:
    """The one element of dst, an int32 or uint32 tensor in SBUF or HBM, = src."""
    is_register("src", src)
    one_integer("dst", dst, src)
    element = dst.dtype.storage
    return _plan(hardware, (src.cell,), dst, lambda value: (value.view(element),))


def _plan(hardware: Hardware, reads: tuple[NkiTensor, ...], dst: NkiTensor, compute: Any) -> Plan:
    in_hbm = any(not t.buffer.on_chip and t.buffer is not MemoryRegion.register for t in (*reads, dst))
    number = "register_load_hbm_ns" if in_hbm else "semaphore_ns"
    return Plan(
        engine=Engine.sync,
        reads=reads,
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.fixed(hardware, Engine.sync, number),
        name=None,
    )


def _as_words(value: np.ndarray) -> tuple[np.ndarray]:
    return (value.view(np.int32),)


def immediate(value: Any, bits: int = 32) -> int:
    """A number as the word of a register of so many bits, two's complement."""
    half = 2 ** (bits - 1)
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not -half <= number < 2 * half:
        raise RuleViolation(
            immediate_fits_register, f"{value!r:.40}", limit=f"a register or a {bits}-bit integer"
        )
    return (number + half) % (2 * half) - half


@rule("NKW-REGISTER-IMMEDIATE")
def immediate_fits_register() -> None:
    """A number moved to a register has no more bits than the register, 32 or, for a 64-bit scalar, 64."""


@rule("NKW-REGISTER", hint="nisa.register_alloc()")
def is_register(operand: str, value: Any) -> None:
    """A register operand comes from nisa.register_alloc or is the counter of a device loop."""
    if not isinstance(value, VirtualRegister):
        raise RuleViolation(is_register, f"{operand} is {type(value).__name__}")


@rule("NKW-REGISTER-FROZEN", hint="keep a register of your own")
def writable(register: VirtualRegister) -> None:
    """The counter of a device loop is read-only."""
    if register.frozen:
        raise RuleViolation(writable, "a write to a loop counter")


@rule("NKW-REGISTER-TILE")
def one_integer(operand: str, tile: Any, register: VirtualRegister) -> None:
    """A register exchanges one element with memory: int32 or uint32, that of a 64-bit scalar int64."""
    rules.is_tensor(operand, tile)
    dtypes = ("int32", "uint32") if register.cell.dtype.itemsize == 4 else ("int64",)
    if tile.size != 1 or tile.dtype not in dtypes or tile.buffer is MemoryRegion.psum:
        raise RuleViolation(
            one_integer, f"{operand} is {tile.describe()}", limit=f"one {' or '.join(dtypes)} element"
        )
