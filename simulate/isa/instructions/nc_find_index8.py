"""nc_find_index8: where eight given values stand in every partition."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.isa.search8 import (
    INDEX_DTYPES,
    at_most_three_dims,
    check_searched,
    get_missing_index,
    is_eight_wide,
    is_matrix,
    match_in_slot_order,
)
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor


@instruction
def nc_find_index8(
    hardware: Hardware, dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None
) -> Plan:
    """Find the position of vals[p, i] in partition p of data, free dims flattened, on the Vector engine.

    data: [P, ...] @ SBUF or PSUM, up to three dims, 8 to 16384 elements per partition. vals: [P, 8]. dst: [P, 8]
    uint16 or uint32.

    Slots are served in ascending order and each takes the first occurrence that no earlier slot has taken, so equal
    values advance through their occurrences. A missing value, and one whose occurrences are all taken, gives all ones.
    Values are compared as float32; NaN equals nothing and is therefore missing [NaN is not documented].

    Raises RuleViolation. Cost: one element per cycle.
    """
    rules.check_tile(hardware, "dst", dst)
    check_searched(hardware, "data", data)
    rules.check_unpacked(hardware, vals=vals)
    is_eight_wide("vals", vals, data)
    is_eight_wide("dst", dst, data)
    rules.dtype_among("dst", dst, *INDEX_DTYPES)
    missing = get_missing_index(dst)

    def compute(values: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray]:
        positions = np.full((values.shape[0], 8), missing, np.float32)
        for slot, matched, first_positions in match_in_slot_order(flat(values), flat(targets), range(8)):
            positions[matched, slot] = first_positions[matched]
        return (positions,)

    return Plan(
        engine=Engine.vector,
        reads=(data, vals),
        writes=(dst,),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, data.free_size),
        name=name,
        propagate=propagation.within_partitions,
        undocumented=rules.violations((is_matrix, "dst", dst), (at_most_three_dims, "vals", vals)),
    )
