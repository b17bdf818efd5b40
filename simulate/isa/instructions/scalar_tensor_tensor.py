"""scalar_tensor_tensor: a tile with a number or (P, 1) tile, and the result with a second tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.alu_stage import stage
from simulate.isa.book import instruction
from simulate.isa.broadcast import arithmetic_on_vector
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator, alu_operator


@instruction
def scalar_tensor_tensor(
    hardware: Hardware,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: NkiTensor | float,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Plan:
    """Compute dst = op1(op0(data, operand0), operand1) in float32 on Vector; arithmetic operators only.

    dst, data, operand1: [P, ...] @ SBUF or PSUM; data and operand1 not both in PSUM. operand0: a number or a
    [P, 1] tile of float32, bfloat16 or float16 [the reference names no dtype]; None or 0 for a unary op0. reverse0 and
    reverse1 swap the inputs of their operator.

    Raises RuleViolation. Cost: the record's cycles per element; one for the documented fast case, bfloat16 data and
    operand1 of an even number of elements with subtract and then multiply.
    """
    rules.check_unpacked(hardware, dst=dst, data=data, operand1=operand1)
    rules.same_elements("data", data, "operand1", operand1)
    rules.same_elements("dst", dst, "data", data)
    rules.at_most_one_in_psum("data", data, "operand1", operand1)
    first, second = alu_operator(op0), alu_operator(op1)
    arithmetic_on_vector(hardware, "op0", first)
    arithmetic_on_vector(hardware, "op1", second)
    rules.binary("op1", second)
    inner = stage(hardware, 0, first, operand0, reverse0, data, "float32", "bfloat16", "float16")

    def compute(values: np.ndarray, other: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray]:
        inner_result = inner.apply(values, iter(columns))
        outer = other.reshape(values.shape)
        if reverse1:
            return (second.function(outer, inner_result),)
        return (second.function(inner_result, outer),)

    return Plan(
        engine=Engine.vector,
        reads=(data, operand1, *inner.reads),
        writes=(dst,),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, data.free_size, _pace(data, operand1, first, second)),
        name=name,
        propagate=propagation.elementwise,
        undocumented=rules.violations(*rules.flags(reverse0=reverse0, reverse1=reverse1)),
    )


def _pace(data: NkiTensor, operand1: NkiTensor, first: AluOperator, second: AluOperator) -> str | None:
    bfloat16 = data.dtype == "bfloat16" and operand1.dtype == "bfloat16"
    if bfloat16 and (first.name, second.name) == ("subtract", "multiply") and data.free_size % 2 == 0:
        return None
    return "vector_scalar_tensor_tensor_cycles_per_element"
