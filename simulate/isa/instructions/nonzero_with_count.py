"""nonzero_with_count: positions of the nonzero elements, and how many there are."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor


@instruction
def nonzero_with_count(
    hardware: Hardware,
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> Plan:
    """Find the nonzero elements per GpSimd core: ascending positions + index_offset, padding, a count. gen3.

    src: [P, ...] float32 or int32 @ SBUF with T elements per partition. dst: [P, ...] int32 @ SBUF with T +
    1. Each core works on the first of its 16 partitions: partitions 0, 16, ..., 112 are read and written, the
    others are neither. index_offset, padding_val: int32. NaN counts as nonzero; sums beyond int32 wrap
    (neither is documented).

    Raises RuleViolation. Cost: none is published; one element per cycle.
    """
    on_chip(hardware)
    rules.check_tile(hardware, "dst", dst, MemoryRegion.sbuf)
    rules.check_tile(hardware, "src", src, MemoryRegion.sbuf)
    rules.dtype_among("dst", dst, "int32")
    rules.dtype_among("src", src, "float32", "int32")
    rules.same_partitions("dst", dst, "src", src)
    room_for_count(dst, src)
    is_int32("index_offset", index_offset)
    is_int32("padding_val", padding_val)
    elements = src.free_size

    def compute(*rows: np.ndarray) -> list[np.ndarray]:
        results = []
        for row in rows:
            positions = np.flatnonzero(row)
            result = np.full(elements + 1, padding_val, np.int32)
            result[: positions.size] = positions.astype(np.int32) + np.int32(index_offset)
            result[elements] = positions.size
            results.append(result)
        return results

    served = range(0, src.shape[0], hardware.partitions_per_gpsimd_core)
    return Plan(
        engine=Engine.gpsimd,
        reads=tuple(src[row : row + 1] for row in served),
        writes=tuple(dst[row : row + 1] for row in served),
        domain=Domain.bits,
        compute=compute,
        cost=costs.gpsimd(hardware, elements),
        name=name,
        propagate=propagation.by_row,
    )


@rule("NKW-NONZERO-CHIP", hint="compute the positions on the host")
def on_chip(hardware: Hardware) -> None:
    """nonzero_with_count exists from gen3 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.nonzero_with_count:
        raise RuleViolation(on_chip, f"nonzero_with_count on {hardware.name}")


@rule("NKW-NONZERO-SIZE", hint="allocate dst with one more element per partition than src")
def room_for_count(dst: NkiTensor, src: NkiTensor) -> None:
    """dst has one element per partition more than src, for the count.

    Raises RuleViolation otherwise.
    """
    if dst.free_size != src.free_size + 1:
        raise RuleViolation(
            room_for_count,
            f"dst has {dst.free_size} elements per partition, src has {src.free_size}",
            limit=f"{src.free_size + 1}",
        )


@rule("NKW-NONZERO-INT32", limit="-2**31 to 2**31 - 1", hint="pass a Python int")
def is_int32(operand: str, value: Any) -> None:
    """index_offset and padding_val are int32 numbers.

    Raises RuleViolation otherwise.
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not -(2**31) <= value < 2**31:
        raise RuleViolation(is_int32, f"{operand}={value!r:.40}")
