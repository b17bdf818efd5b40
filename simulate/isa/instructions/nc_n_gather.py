"""nc_n_gather: gather within each partition."""

from __future__ import annotations

import numpy as np

from nkw.errors import OutOfBounds, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.isa.shapes import flat
from simulate.memory import MemoryRegion, NkiTensor

_GROUP = 512


@instruction
def nc_n_gather(
    hardware: Hardware, dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None
) -> Plan:
    """Gather dst[p, j] = data[p, indices[p, j]] over flattened free dims, on the GpSimd engine; bits are kept.

    data: [P, ...] @ SBUF. indices: [P, ...] uint32 @ SBUF. dst: [P, ...] @ SBUF, data's dtype, as many
    elements as indices. An index beyond data's elements is documented as invalid and refused when the
    instruction runs.

    Raises RuleViolation, OutOfBounds. Cost: documented as one group of instructions per 512 elements; each is
    taken with GpSimd's fixed start, and one element per cycle.
    """
    for operand, tile in (("dst", dst), ("data", data), ("indices", indices)):
        rules.check_tile(hardware, operand, tile, MemoryRegion.sbuf)
    rules.same_dtype("dst", dst, "data", data)
    rules.dtype_among("indices", indices, "uint32")
    rules.same_partitions("data", data, "indices", indices)
    rules.same_elements("dst", dst, "indices", indices)
    limit = data.free_size

    def compute(values: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray]:
        indices_inside(int(positions.max()), limit)
        return (np.take_along_axis(flat(values), flat(positions).astype(np.int64), axis=1),)

    starts = -(-dst.free_size // _GROUP) - 1
    return Plan(
        engine=Engine.gpsimd,
        reads=(data, indices),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.gathered(hardware, dst.free_size, starts),
        name=name,
    )


@rule("NKW-N-GATHER-INDEX", hint="correct the indices, or clip them with nl.minimum before")
def indices_inside(highest: int, elements: int) -> None:
    """Every index names an element of data's partition.

    Raises OutOfBounds otherwise.
    """
    if highest >= elements:
        raise OutOfBounds(indices_inside, f"index {highest}", limit=f"0 to {elements - 1}")
