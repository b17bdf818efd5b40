"""memset: fill a tile with one value."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.immediates import parse_float32, parse_integer
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import DType, from_float32


@instruction
def memset(
    hardware: Hardware,
    dst: NkiTensor,
    value: Any,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Plan:
    """Set every element of dst to value, on the Vector or GpSimd engine.

    dst: [P, ...] @ SBUF or PSUM (GpSimd: SBUF). value: for an integer tile an integer in the dtype's range, for a
    float tile a number, for an x4 tile 0.

    A float tile gets the value as float32, rounded once: a value beyond the range of a narrow dtype becomes infinity
    as in any cast, so the float32 minimum fills a bfloat16 tile with -inf. With engine=unknown the Vector engine is
    taken, which reaches both memories.

    Raises RuleViolation. Cost: one element per cycle; zeros into 16-bit floats at the record's memset rate; none where
    matmuls accumulate onto zeros (`simulate.timing.cleared`).
    """
    rules.check_tile(hardware, "dst", dst)
    if engine is Engine.unknown:
        engine = Engine.vector
    rules.engine_can(engine, Engine.vector, Engine.gpsimd)
    rules.gpsimd_stays_in_sbuf(engine, dst=dst)
    fill, shape = _element(dst.dtype, value), dst.shape

    def compute() -> tuple[np.ndarray]:
        return (np.broadcast_to(fill, shape),)

    zero = dst.dtype.is_float and value == 0
    pace = "vector_memset_zero_16bit" if zero and dst.dtype.itemsize == 2 else None
    cost = costs.cleared if zero and dst.buffer is MemoryRegion.psum else costs.on_engine
    return Plan(
        engine=engine,
        reads=(),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=cost(hardware, engine, dst.free_size, pace),
        name=name,
    )


def _element(dtype: DType, value: Any) -> np.ndarray:
    """Return the value as an array of one element in the dtype's storage type; RuleViolation if it does not fit."""
    if dtype.is_packed:
        packed_is_zero(dtype, value)
        return np.zeros(1, dtype.storage)
    if dtype.is_integer:
        return np.array([_integer(dtype, value)], dtype.storage)
    return from_float32(np.array([parse_float32("value", value)]), dtype)


def _integer(dtype: DType, value: Any) -> int:
    low, high = (0, 1) if dtype == "bool_" else (np.iinfo(dtype.storage).min, np.iinfo(dtype.storage).max)
    number = parse_integer(value, low, high)
    if number is None:
        raise RuleViolation(
            integer_in_range, f"value={value!r:.60} for {dtype}", limit=f"an integer from {low} to {high}"
        )
    return number


@rule("NKW-MEMSET-INTEGER", hint="write 0 instead of 0.0 for an integer tile")
def integer_in_range() -> None:
    """An integer tile is filled with an integer of its dtype's range.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-MEMSET-PACKED", hint="view the tile as an integer dtype")
def packed_is_zero(dtype: DType, value: Any) -> None:
    """An x4 tile can be filled with 0 only.

    Raises RuleViolation otherwise.
    """
    if not isinstance(value, (int, float)) or value != 0:
        raise RuleViolation(packed_is_zero, f"value={value!r:.60} for {dtype}")
