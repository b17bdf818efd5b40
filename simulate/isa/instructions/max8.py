"""max8: the eight largest values of every partition."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import JOINS_COLUMNS, Domain, Plan
from simulate.isa.search8 import check_searched, is_eight_wide, is_matrix
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor


@instruction
def max8(hardware: Hardware, dst: NkiTensor, src: NkiTensor, name: str | None = None) -> Plan:
    """Find the eight largest elements of each partition of src, in descending order, duplicates kept, on Vector.

    src: [P, ...] @ SBUF or PSUM, up to three dims, 8 to 16384 elements per partition. dst: [P, 8], float32 values
    rounded to its dtype. NaN is not documented; it counts as larger than every number, as the ALU's maximum lets it
    pass.

    Raises RuleViolation. Cost: one element per cycle.
    """
    rules.check_tile(hardware, "dst", dst)
    check_searched(hardware, "src", src)
    rules.not_packed("dst", dst)
    is_eight_wide("dst", dst, src)
    return Plan(
        engine=Engine.vector,
        reads=(src,),
        writes=(dst,),
        domain=Domain.float32,
        compute=_largest,
        cost=costs.vector(hardware, src.free_size),
        name=name,
        propagate=propagation.within_partitions,
        effects=JOINS_COLUMNS,
        undocumented=rules.violations((is_matrix, "dst", dst)),
    )


def _largest(values: np.ndarray) -> tuple[np.ndarray]:
    rows = flat(values)
    top = np.partition(rows, rows.shape[1] - 8, axis=1)[:, -8:]
    return (np.sort(top, axis=1)[:, ::-1],)  # numpy sorts NaN last, which is first here
