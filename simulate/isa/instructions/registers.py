"""register_move, register_load, register_store: 32-bit integers of an instruction stream."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.isa.shapes import unchanged
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.registers import VirtualRegister
from simulate.numerics import DType, as_dtype


@instruction
def register_move(hardware: Hardware, dst: VirtualRegister, src: VirtualRegister | int) -> Plan:
    """Copy src, a register or a number of 32 bits, to dst.

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
    """Load the one element of src, a tensor of at most 32 bits per element in SBUF or HBM, into dst.

    Any dtype but the packed ones (0.7 lists them). Integers keep their value; of floats the register takes the bits,
    the upper ones 0. The reference says neither; a sequencer has no float arithmetic.
    """
    is_register("dst", dst)
    writable(dst)
    one_element("src", src, dst)
    undocumented = rules.violations((has_scalar_shape, "src", src))
    return _plan(hardware, (src,), dst.cell, _to_register(src.dtype), undocumented)


@instruction
def register_store(hardware: Hardware, dst: NkiTensor, src: VirtualRegister) -> Plan:
    """Store the low bits of src in the one element of dst, a tensor of at most 32 bits per element in SBUF or HBM.

    Any dtype but the packed ones (0.7 lists them); a float gets its bits from the register.
    """
    is_register("src", src)
    one_element("dst", dst, src)
    undocumented = rules.violations((has_scalar_shape, "dst", dst))
    return _plan(hardware, (src.cell,), dst, _from_register(dst.dtype), undocumented)


def _plan(
    hardware: Hardware,
    reads: tuple[NkiTensor, ...],
    dst: NkiTensor,
    compute: Any,
    undocumented: tuple[RuleViolation, ...] = (),
) -> Plan:
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
        undocumented=undocumented,
    )


def _to_register(dtype: DType) -> Callable[[np.ndarray], tuple[np.ndarray]]:
    """Return a function from an array of one element of `dtype` to a register's word: int32, or int64 for int64.

    32-bit dtypes keep their bits; narrower integers keep their value, and narrower floats their bits, zero-extended.
    """
    if dtype == "int64":
        return unchanged
    bits, word = _bits(dtype)
    if dtype.itemsize == 4:
        return lambda value: (value.view(np.int32),)
    number = bits if dtype.is_integer else word
    return lambda value: (value.astype(bits).view(number).astype(np.int32),)


def _from_register(dtype: DType) -> Callable[[np.ndarray], tuple[np.ndarray]]:
    """Return a function that converts a register's word to one element of `dtype`, from the word's lowest bits."""
    if dtype == "int64":
        return unchanged
    bits, word = _bits(dtype)
    if dtype.itemsize == 4:
        return lambda value: (value.view(bits),)
    return lambda value: (value.astype(word).view(bits).astype(dtype.storage),)


def _bits(dtype: DType) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the storage dtype of an element on the chip, where the host may keep float32, and an equally wide uint."""
    return as_dtype(str(dtype)).storage, np.dtype(f"u{dtype.itemsize}")


def immediate(value: Any, bits: int = 32) -> int:
    """Return a number as a signed integer of `bits` bits with the same bit pattern; unsigned numbers wrap around.

    Raises:
        RuleViolation: The value is no integer, or has more bits.
    """
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


@rule(
    "NKW-REGISTER-IMMEDIATE",
    hint="pass a Python int of that range; load a larger one from an int64 tensor (NkiScalar)",
)
def immediate_fits_register() -> None:
    """A number moved to a register has no more bits than the register, 32 or, for a 64-bit scalar, 64.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-REGISTER", hint="nisa.register_alloc()")
def is_register(operand: str, value: Any) -> None:
    """A register operand comes from nisa.register_alloc or is the counter of a device loop.

    Raises RuleViolation otherwise.
    """
    if not isinstance(value, VirtualRegister):
        raise RuleViolation(is_register, f"{operand} is {type(value).__name__}")


@rule("NKW-REGISTER-FROZEN", hint="keep a register of your own")
def writable(register: VirtualRegister) -> None:
    """The counter of a device loop is read-only.

    Raises RuleViolation if the register is such a counter.
    """
    if register.frozen:
        raise RuleViolation(writable, "a write to a loop counter")


@rule("NKW-REGISTER-TILE", hint="slice one element, as t[0:1, 0:1], of a tensor of such a dtype")
def one_element(operand: str, tile: Any, register: VirtualRegister) -> None:
    """A register exchanges one element with SBUF or HBM: of at most 32 bits, not packed; a 64-bit scalar an int64.

    Raises RuleViolation otherwise.
    """
    rules.is_tensor(operand, tile)
    wide = register.cell.dtype.itemsize == 8
    fits = tile.dtype == "int64" if wide else tile.dtype.itemsize <= 4 and not tile.dtype.is_packed
    if tile.size != 1 or not fits or tile.buffer is MemoryRegion.psum:
        raise RuleViolation(
            one_element,
            f"{operand} is {tile.describe()}",
            limit="one int64 element"
            if wide
            else "one element of at most 32 bits, not packed, in sbuf or hbm",
        )


@rule("NKW-REGISTER-SHAPE", limit="shape (1,) or (1, 1)", hint="reshape the view to (1, 1)")
def has_scalar_shape(operand: str, tile: NkiTensor) -> None:
    """register_load and register_store take a tensor of shape [1] or [1, 1].

    Raises RuleViolation otherwise.
    """
    if tile.shape not in ((1,), (1, 1)):
        raise RuleViolation(has_scalar_shape, f"{operand} has shape {tile.shape}")
