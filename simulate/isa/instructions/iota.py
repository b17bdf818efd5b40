"""iota: write the values of an affine function of partition and free indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.affine import affine
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import cast, int32


@instruction
def iota(
    hardware: Hardware,
    dst: NkiTensor,
    pattern: list[list[int]],
    offset: Any = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> Plan:
    """Write offset + p*channel_multiplier + w*step_w + z*step_z + y*step_y + x*step_x to dst[p, w, z, y, x], on GpSimd.

    dst: [P, ...] @ SBUF, any dtype but x4. pattern: up to four [step, num] pairs, the outermost first, shorter ones
    padded with dims of size 1; the nums multiply to dst's elements per partition. offset: an integer or a register.

    The values are int32 and reach another dtype through float32, like every cast. See simulate.isa.affine for p and
    for overflow.

    Raises RuleViolation. Cost: costs.gpsimd.
    """
    rules.check_unpacked(hardware, MemoryRegion.sbuf, dst=dst)
    reads, values = affine(dst, pattern, offset, channel_multiplier)
    dtype = dst.dtype

    def compute(*cells: np.ndarray) -> tuple[np.ndarray]:
        return (cast(values(cells), int32, dtype),)

    return Plan(
        engine=Engine.gpsimd,
        reads=reads,
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.gpsimd(hardware, dst.free_size),
        name=name,
    )
