"""reciprocal: 1 / data on the Vector engine."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics import ALU_OPERATORS

_FUNCTION = ALU_OPERATORS["reciprocal"].function


@instruction
def reciprocal(hardware: Hardware, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Plan:
    """Compute dst = 1 / data in float32 on the Vector engine.

    dst, data: [P, ...] @ SBUF or PSUM, any dtype; same partitions and elements per partition. 1/0 is infinity with
    the sign of the zero.

    Raises RuleViolation. Cost: the record's cycles per element: one, as kernels measured on trn1 take. The
    published formula prints eight and names no chip.
    """
    rules.check_unpacked(hardware, dst=dst, data=data)
    rules.same_elements("dst", dst, "data", data)
    return Plan(
        engine=Engine.vector,
        reads=(data,),
        writes=(dst,),
        domain=Domain.float32,
        compute=_compute,
        cost=costs.vector(hardware, data.free_size, "vector_reciprocal_cycles_per_element"),
        name=name,
        propagate=propagation.elementwise,
    )


def _compute(values: np.ndarray) -> tuple[np.ndarray]:
    return (_FUNCTION(values),)
