"""tensor_copy_predicated: copy the elements that a predicate selects and leave the others unchanged."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, indirection, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.immediates import parse_float32
from simulate.isa.plan import Domain, Masked, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import from_float32

PREDICATES = ("uint8", "uint16", "uint32")


@instruction
def tensor_copy_predicated(
    hardware: Hardware,
    dst: NkiTensor,
    src: NkiTensor | float,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> Plan:
    """Copy src to dst where the predicate is not zero, on Vector; elsewhere dst is unchanged.

    dst, src, predicate: [P, ...] @ SBUF or PSUM, same elements per partition; src and predicate not both in
    PSUM. src: dst's dtype, or a number, which is rounded to it through float32. predicate: uint8, uint16 or
    uint32.

    `reverse_pred` selects where the predicate is zero: the documents write `~`, but the bits of a uint8 1
    inverted would still be true, so the negation is logical.

    Raises RuleViolation. Cost: 2 cycles per element when src and predicate both stream from SBUF, else 1; a
    number as src streams nothing and counts as the cheaper case (not documented).
    """
    rules.check_unpacked(hardware, indirect=True, dst=dst)
    rules.check_tile(hardware, "predicate", predicate, indirect=True)
    rules.dtype_among("predicate", predicate, *PREDICATES)
    rules.same_elements("dst", dst, "predicate", predicate)
    indirection.check(hardware, Engine.vector, dst, predicate)
    if isinstance(src, NkiTensor):
        rules.check_tile(hardware, "src", src)
        rules.same_elements("dst", dst, "src", src)
        rules.same_dtype("dst", dst, "src", src)
        rules.at_most_one_in_psum("src", src, "predicate", predicate)
        reads: tuple[NkiTensor, ...] = (predicate, src)
        number = predicated_pace(src, predicate)
    else:
        constant = from_float32(np.full(1, parse_float32("src", src)), dst.dtype)
        reads, number = (predicate,), None

    def compute(chosen: np.ndarray, *source: np.ndarray) -> tuple[Masked]:
        selected = (chosen == 0) if reverse_pred else (chosen != 0)
        values = source[0] if source else np.broadcast_to(constant, dst.shape)
        return (Masked(values, selected),)

    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.vector(hardware, dst.free_size, number),
        name=name,
        undocumented=rules.violations(*rules.flags(reverse_pred=reverse_pred)),
    )


def predicated_pace(data: NkiTensor, predicate: NkiTensor) -> str | None:
    """Return the field of the hardware record that paces an instruction with a predicate, for `costs.vector`.

    None, one element per cycle, if data or predicate is in PSUM; in SBUF both share a port.
    """
    if data.buffer is MemoryRegion.psum or predicate.buffer is MemoryRegion.psum:
        return None
    return "vector_copy_predicated_sbuf_cycles_per_element"
