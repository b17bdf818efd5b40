"""select_reduce: one of two values per element, chosen by a predicate, and the maximum of the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import accumulator, broadcast, costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.instructions.tensor_copy_predicated import predicated_pace
from simulate.isa.plan import Domain, Plan, Registers, State
from simulate.memory import NkiTensor
from simulate.numerics import ALU_OPERATORS, alu_operator

_PREDICATES = ("int8", "uint8", "int16", "uint16")
_COMMANDS = (ReduceCmd.idle, ReduceCmd.reset_reduce, ReduceCmd.reduce)
_NOT_SELECTED = ("tfloat32", "int32", "uint32")


@instruction
def select_reduce(
    hardware: Hardware,
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: NkiTensor | float,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_op: Any = ALU_OPERATORS["maximum"],
    reverse_pred: bool = False,
    name: str | None = None,
) -> Plan:
    """Select on_true where the predicate is not zero, else on_false; and its maximum per partition, on Vector.

    dst, predicate, on_true: [P, ...] @ SBUF or PSUM, same elements per partition (ranks may differ); on_true
    and predicate not both in PSUM. predicate: int8, uint8, int16 or uint16. on_true: any dtype but tfloat32,
    int32 and uint32. on_false: a number or a [P, 1] tile. reduce_res: [P, 1] of a float dtype.

    `reverse_pred` negates the predicate logically, as in tensor_copy_predicated. With reduce_cmd reset_reduce
    or reduce the maximum is taken in float32 before rounding to dst's dtype and goes through the Vector
    accumulators. With idle, the default, these are undefined afterwards and reduce_res, if given, gets NaN.

    Raises RuleViolation. Cost: none is published; that of tensor_copy_predicated is assumed, plus the readout
    of the registers.
    """
    rules.check_unpacked(hardware, dst=dst)
    rules.check_tile(hardware, "predicate", predicate)
    rules.dtype_among("predicate", predicate, *_PREDICATES)
    rules.check_unpacked(hardware, on_true=on_true)
    selectable(on_true)
    rules.same_elements("on_true", on_true, "predicate", predicate)
    rules.same_elements("dst", dst, "on_true", on_true)
    rules.at_most_one_in_psum("on_true", on_true, "predicate", predicate)
    reads = (predicate, on_true, *broadcast.check_operand(hardware, "on_false", on_false, on_true))
    maximum = alu_operator(reduce_op)
    accumulator.reduction_among(maximum, "maximum")
    accumulator.command_among(reduce_cmd, *_COMMANDS)
    if reduce_res is not None:
        accumulator.check_result(hardware, reduce_res, on_true, *accumulator.FLOATS)

    def compute(registers: np.ndarray, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        operand = iter(operands)
        chosen = next(operand) != 0
        values = next(operand)
        chosen = chosen.reshape(values.shape)
        other = broadcast.take_broadcast_value(on_false, operand, values.ndim)
        result = np.where(~chosen if reverse_pred else chosen, values, other)
        updated = accumulator.accumulate(registers, reduce_cmd, maximum, result)
        return accumulator.collect_results(result, updated, reduce_res)

    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,) if reduce_res is None else (dst, reduce_res),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(
            hardware, on_true.free_size, predicated_pace(on_true, predicate), reduce_res is not None
        ),
        name=name,
        state=State.vector_accumulator,
        registers=Registers(reduce_cmd, maximum.name, on_true.shape[0], reduce_res is not None),
        propagate=propagation.within_partitions,
        undocumented=rules.violations(*rules.flags(reverse_pred=reverse_pred)),
    )


@rule("NKW-SELECT-REDUCE-DTYPE", hint="view it as float32, or use tensor_copy_predicated")
def selectable(on_true: NkiTensor) -> None:
    """on_true of select_reduce has any dtype but tfloat32, int32 and uint32.

    Raises RuleViolation if it has one of these.
    """
    if on_true.dtype in _NOT_SELECTED:
        raise RuleViolation(selectable, f"on_true is {on_true.dtype}")
