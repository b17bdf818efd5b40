"""tensor_scalar_reduce: one operator with a broadcast operand, and a reduction of its results."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import accumulator, broadcast, costs, indirection, propagation, rules
from simulate.isa.alu_stage import stage
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.plan import JOINS_COLUMNS, Domain, Plan, Registers, State
from simulate.memory import NkiTensor
from simulate.numerics import alu_operator

_COMMANDS = (ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.load_reduce)
_REDUCTIONS = ("add", "multiply", "maximum", "minimum")


@instruction
def tensor_scalar_reduce(
    hardware: Hardware,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: NkiTensor | float | None,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_init: NkiTensor | float | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> Plan:
    """Compute dst = op0(data, operand0); reduce_res = reduce_op over a partition's results, on Vector.

    dst, data: [P, ...] @ SBUF or PSUM. operand0: a number or a float32 [P, 1] tile; None or 0 where op0 is
    unary. reduce_op: add, multiply, maximum or minimum. reduce_res: [P, 1]. reduce_init: a number or a
    float32 [P, 1] tile, given with reduce_cmd load_reduce and only then.

    The results are reduced in float32 before they are rounded to dst's dtype, and into the Vector
    accumulators: reset_reduce starts from reduce_op's identity (the text says "to 0", the formula reduces dst
    alone, and a maximum of negative numbers would otherwise be 0), reduce from what they hold, load_reduce
    from reduce_init. `reduce_res_negate` changes the sign of what is written, not of the registers.
    reduce_res is written after dst and may alias it. `reverse0` is documented as not supported and refused.

    Raises RuleViolation. Cost: a tensor_scalar at one element per cycle plus the readout of the registers.
    """
    rules.check_unpacked(hardware, indirect=True, dst=dst, data=data)
    rules.same_elements("dst", dst, "data", data)
    indirection.check(hardware, Engine.vector, dst, data)
    operator, reduction = alu_operator(op0), alu_operator(reduce_op)
    broadcast.arithmetic_on_vector(hardware, "op0", operator)
    accumulator.reduction_among(reduction, *_REDUCTIONS)
    accumulator.command_among(reduce_cmd, *_COMMANDS)
    accumulator.initial_with_load_only("reduce_init", reduce_init is not None, reduce_cmd)
    not_reversed(reverse0)
    first = stage(hardware, 0, operator, operand0, False, data)
    reads = (data, *first.reads)
    if reduce_init is not None:
        reads += broadcast.check_operand(hardware, "reduce_init", reduce_init, data, "float32")
    if reduce_res is not None:
        accumulator.check_result(hardware, reduce_res, data)

    def compute(registers: np.ndarray, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        operand = iter(operands)
        result = first.apply(next(operand), operand)
        initial = (
            broadcast.take_broadcast_value(reduce_init, operand, 2)
            if reduce_init is not None
            else np.float32(0)
        )
        updated = accumulator.accumulate(registers, reduce_cmd, reduction, result, initial)
        if reduce_res is None:
            return result, updated
        rows = updated[: result.shape[0]]
        return result, -rows if reduce_res_negate else rows, updated

    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,) if reduce_res is None else (dst, reduce_res),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, data.free_size, accumulates=reduce_res is not None),
        name=name,
        state=State.vector_accumulator,
        registers=Registers(reduce_cmd, reduction.name, data.shape[0], reduce_res is not None),
        propagate=propagation.within_partitions,
        effects=JOINS_COLUMNS,
        undocumented=rules.violations(*rules.flags(reverse0=reverse0, reduce_res_negate=reduce_res_negate)),
    )


@rule("NKW-SCALAR-REDUCE-REVERSE", hint="negate or invert the operand instead")
def not_reversed(reverse0: bool) -> None:
    """reverse0 of tensor_scalar_reduce is documented as not supported.

    Raises RuleViolation if reverse0 is True.
    """
    if reverse0:
        raise RuleViolation(not_reversed, "reverse0=True")
