"""tensor_tensor_scan: a recurrence along the free dims of two tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import broadcast, costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import JOINS_COLUMNS, Domain, Plan
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor
from simulate.numerics import alu_operator


@instruction
def tensor_tensor_scan(
    hardware: Hardware,
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: NkiTensor | float,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Plan:
    """Compute state = op1(op0(data0[i], state), data1[i]); dst[i] = state per partition, from `initial`, on Vector.

    dst, data0, data1: [P, ...] @ SBUF or PSUM, any dtype; data0 and data1 not both in PSUM. initial: a number
    or a [P, 1] tile. op0, op1: arithmetic operators of two operands. `reverse0` gives op0(state, data0[i]),
    `reverse1` op1(data1[i], op0's result).

    The state is float32 throughout and rounded to dst's dtype only where it is written; the documented numpy
    program keeps it in data0's dtype, its prose says float32, which is done here. `initial` may have any
    dtype, as in the documented chaining of scans.

    Raises RuleViolation. Cost: 2 cycles per element.
    """
    rules.check_unpacked(hardware, dst=dst, data0=data0, data1=data1)
    rules.same_elements("data0", data0, "data1", data1)
    rules.same_elements("dst", dst, "data0", data0)
    rules.at_most_one_in_psum("data0", data0, "data1", data1)
    first, second = alu_operator(op0), alu_operator(op1)
    for operand, operator in (("op0", first), ("op1", second)):
        rules.binary(operand, operator)
        broadcast.arithmetic_on_vector(hardware, operand, operator)
    reads = (data0, data1, *broadcast.check_operand(hardware, "initial", initial, data0))

    def compute(*operands: np.ndarray) -> tuple[np.ndarray]:
        operand = iter(operands)
        rows0, rows1 = flat(next(operand)), flat(next(operand))
        state = np.broadcast_to(broadcast.take_broadcast_value(initial, operand, 1), (rows0.shape[0],))
        # One contiguous row per step instead of one strided column.
        left, right = np.ascontiguousarray(rows0.T), np.ascontiguousarray(rows1.T)
        states = np.empty(left.shape, np.float32)
        for step in range(left.shape[0]):
            inner = first.function(state, left[step]) if reverse0 else first.function(left[step], state)
            states[step] = (
                second.function(right[step], inner) if reverse1 else second.function(inner, right[step])
            )
            state = states[step]
        return (states.T,)

    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, data0.free_size, "vector_scan_cycles_per_element"),
        name=name,
        propagate=propagation.within_partitions,
        effects=JOINS_COLUMNS,
        undocumented=rules.violations(*rules.flags(reverse0=reverse0, reverse1=reverse1)),
    )
