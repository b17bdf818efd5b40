"""nc_match_replace8: replace one occurrence of each of eight values in every partition."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.immediates import parse_float32
from simulate.isa.plan import Domain, Plan
from simulate.isa.search8 import INDEX_DTYPES, get_missing_index, is_eight_wide, match_in_slot_order
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor


@instruction
def nc_match_replace8(
    hardware: Hardware,
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> Plan:
    """Replace one occurrence of each of vals in data by imm; their positions go to dst_idx; on the Vector engine.

    dst, data: [P, ...] @ SBUF or PSUM. vals: [P, 8]. imm: a float32 number. dst_idx: None or [P, 8] uint16 or uint32.

    Slots are served from 7 down to 0 and each takes the first occurrence that is left, so of equal values the lowest
    position lands in the highest slot. The notes are silent on three points. A slot without a match gives all ones
    in dst_idx, as in nc_find_index8. An element once replaced is not matched again, even if imm equals a value. NaN
    equals nothing. Elements go through float32, replaced or not.

    Raises RuleViolation. Cost: one element per cycle (the published formula prints min where max must be meant).
    """
    rules.check_unpacked(hardware, dst=dst, data=data, vals=vals)
    rules.same_elements("dst", dst, "data", data)
    is_eight_wide("vals", vals, data)
    replacement = parse_float32("imm", imm)
    missing = np.float32(0)
    if dst_idx is not None:
        rules.check_tile(hardware, "dst_idx", dst_idx)
        is_eight_wide("dst_idx", dst_idx, data)
        rules.dtype_among("dst_idx", dst_idx, *INDEX_DTYPES)
        missing = get_missing_index(dst_idx)

    def compute(values: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = flat(values)
        replaced = rows.copy()
        positions = np.full((rows.shape[0], 8), missing, np.float32)
        for slot, matched, first_positions in match_in_slot_order(rows, flat(targets), range(7, -1, -1)):
            replaced[matched, first_positions[matched]] = replacement
            positions[matched, slot] = first_positions[matched]
        return (replaced,) if dst_idx is None else (replaced, positions)

    return Plan(
        engine=Engine.vector,
        reads=(data, vals),
        writes=(dst,) if dst_idx is None else (dst, dst_idx),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, data.free_size),
        name=name,
        propagate=propagation.within_partitions,
    )
