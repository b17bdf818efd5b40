"""The instruction book: one file per instruction, pure planners.

Importing this package enters every planner into `INSTRUCTIONS` and `COLLECTIVES`.
"""

from simulate.isa import (  # noqa: F401  (imported for the entries they make in the book)
    activation,
    affine_select,
    collectives,
    core_barrier,
    dma_copy,
    iota,
    max8,
    memset,
    nc_find_index8,
    nc_match_replace8,
    nc_matmul,
    nc_transpose,
    reciprocal,
    registers,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)
from simulate.isa.book import COLLECTIVES, INSTRUCTIONS, plan_for
from simulate.isa.enums import Engine
from simulate.isa.plan import Accumulate, Cost, DmaCost, Domain, Meeting, Plan

__all__ = [
    "COLLECTIVES",
    "INSTRUCTIONS",
    "Accumulate",
    "Cost",
    "DmaCost",
    "Domain",
    "Engine",
    "Meeting",
    "Plan",
    "plan_for",
]
