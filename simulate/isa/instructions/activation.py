"""activation and activation_reduce: a function of data * scale + bias on the Scalar engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import accumulator, costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.immediates import parse_float32
from simulate.isa.plan import JOINS_COLUMNS, PLAIN, Argument, Domain, Plan, Registers, State
from simulate.isa.shapes import column, flat
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import activation_function, alu_operator


@instruction
def activation(
    hardware: Hardware,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: NkiTensor | float | None = None,
    scale: NkiTensor | float = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    name: str | None = None,
) -> Plan:
    """Compute dst = op(data * scale + bias) in float32 on Scalar, with an optional running sum per partition.

    dst, data: [P, ...] @ SBUF or PSUM. scale: a number or a float32 [P, 1] tile. bias: None (0), a [P, 1] tile, or
    from gen3 on a number. reduce_res: [P, 1], gets the Scalar accumulator registers after this instruction.

    reduce_cmd: `idle` leaves the registers alone, `reset` sets them to 0, `reduce` adds the sum of this
    instruction's outputs, `reset_reduce` does both. The published pseudo code adds the old register value twice; the
    prose and the Beta 1 tests mean registers + sum(outputs), which is done here. The sum is taken in float32 before
    the cast to dst's dtype (the data path suggests it; it is not stated). reduce_res is written after dst and may
    alias it. Functions are computed exactly also outside their documented domain, except `sin`.

    Raises RuleViolation. Cost: one element per cycle, plus an extra readout when reduce_res is given.
    """
    function = activation_function(op)
    rules.check_unpacked(hardware, indirect=True, dst=dst, data=data)
    rules.same_elements("dst", dst, "data", data)
    indirection.check(hardware, Engine.scalar, dst, data)
    reads = [data]
    if isinstance(scale, NkiTensor):
        rules.check_tile(hardware, "scale", scale)
        rules.is_column("scale", scale, data)
        rules.dtype_among("scale", scale, "float32")
        reads.append(scale)
    else:
        scale = float(parse_float32("scale", scale))
    if isinstance(bias, NkiTensor):
        rules.check_tile(hardware, "bias", bias)
        rules.is_column("bias", bias, data)
        bias_not_tfloat32(bias)
        reads.append(bias)
    elif bias is not None:
        bias = float(parse_float32("bias", bias))
        if bias != 0.0:
            immediate_bias_on_chip(hardware, bias)
    if bias is not None:
        reciprocal_bias_on_chip(hardware, function.name)
    reduces = reduce_cmd is not ReduceCmd.idle
    if reduces or reduce_res is not None or reduce_op is not None:
        _check_reduction(hardware, data, reduce_op, reduce_res, reduce_cmd)

    apply = function.function

    def argument(values: np.ndarray, *columns: np.ndarray) -> np.ndarray:
        operand = iter(columns)
        if isinstance(scale, NkiTensor):
            values = values * column(next(operand), values.ndim)
        elif scale != 1.0:
            values = values * scale
        if isinstance(bias, NkiTensor):
            values = values + column(next(operand), values.ndim)
        elif bias:
            values = values + bias
        return values

    def compute(*operands: np.ndarray) -> tuple[np.ndarray, ...]:
        if not uses_registers:
            return (apply(argument(*operands)),)
        registers = operands[0]
        result = apply(argument(*operands[1:]))
        rows = result.shape[0]
        updated = registers.copy()
        if reduce_cmd in (ReduceCmd.reset, ReduceCmd.reset_reduce):
            updated[:rows] = 0.0
        if reduce_cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce):
            updated[:rows] += np.add.reduce(flat(result), axis=1, dtype=np.float32, keepdims=True)
        return accumulator.collect_results(result, updated, reduce_res)

    uses_registers = reduces or reduce_res is not None
    return Plan(
        engine=Engine.scalar,
        reads=tuple(reads),
        writes=(dst,) if reduce_res is None else (dst, reduce_res),
        domain=Domain.float32,
        compute=compute,
        cost=costs.scalar(
            hardware,
            data.free_size,
            function.table,
            reduce_res is not None,
            data.buffer is MemoryRegion.psum,
        ),
        name=name,
        propagate=propagation.within_partitions if uses_registers else propagation.elementwise,
        state=State.scalar_accumulator if uses_registers else None,
        registers=Registers(reduce_cmd, "add", data.shape[0], reduce_res is not None)
        if uses_registers
        else None,
        argument=Argument(function, argument),
        effects=JOINS_COLUMNS if reduces else PLAIN,
    )


@instruction
def activation_reduce(
    hardware: Hardware,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: NkiTensor | float | None = None,
    scale: NkiTensor | float = 1.0,
    name: str | None = None,
) -> Plan:
    """Run activation with reduce_cmd=reset_reduce: dst, and the sum of dst per partition in reduce_res."""
    return activation(
        hardware, dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCmd.reset_reduce, name
    )


def _check_reduction(
    hardware: Hardware, data: NkiTensor, reduce_op: Any, reduce_res: NkiTensor | None, reduce_cmd: ReduceCmd
) -> None:
    if reduce_op is not None or reduce_cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce):
        reduction_is_add(reduce_op)
    reduce_cmd_of_scalar(reduce_cmd)
    if reduce_res is not None:
        rules.check_tile(hardware, "reduce_res", reduce_res)
        rules.is_column("reduce_res", reduce_res, data)


@rule("NKW-ACTIVATION-REDUCE", hint="reduce_op=nl.add, or nisa.tensor_reduce for another operator")
def reduction_is_add(reduce_op: Any) -> None:
    """The Scalar engine's accumulator registers add; reduce_op must be nl.add.

    Raises RuleViolation otherwise.
    """
    if reduce_op is None or alu_operator(reduce_op).name != "add":
        raise RuleViolation(reduction_is_add, f"reduce_op={getattr(reduce_op, '__name__', reduce_op)!s}")


@rule("NKW-ACTIVATION-REDUCE-CMD", hint="nisa.reduce_cmd.reset_reduce")
def reduce_cmd_of_scalar(reduce_cmd: ReduceCmd) -> None:
    """activation takes idle, reset, reduce or reset_reduce; load_reduce belongs to the Vector engine.

    Raises RuleViolation otherwise.
    """
    if not isinstance(reduce_cmd, ReduceCmd) or reduce_cmd is ReduceCmd.load_reduce:
        raise RuleViolation(reduce_cmd_of_scalar, f"reduce_cmd={reduce_cmd}")


@rule("NKW-BIAS-IMMEDIATE", hint="memset a (P, 1) float32 tile to the value and pass it as bias")
def immediate_bias_on_chip(hardware: Hardware, bias: object) -> None:
    """On gen2 the bias of activation is a (P, 1) tile; from gen3 on it may be a number.

    Raises RuleViolation on gen2; the planner applies it to a number other than 0.
    """
    if not hardware.activation_immediate_bias:
        raise RuleViolation(immediate_bias_on_chip, f"bias={bias} on {hardware.name}")


@rule("NKW-BIAS-RECIPROCAL", hint="add it in an instruction before")
def reciprocal_bias_on_chip(hardware: Hardware, function: str) -> None:
    """On gen2 activation(op=nl.reciprocal) takes no bias.

    Raises RuleViolation on gen2 for the function reciprocal; the planner applies it if there is a bias.
    """
    if function == "reciprocal" and not hardware.activation_reciprocal_bias:
        raise RuleViolation(reciprocal_bias_on_chip, f"op=reciprocal with a bias on {hardware.name}")


@rule("NKW-BIAS-DTYPE", hint="view it as float32")
def bias_not_tfloat32(bias: NkiTensor) -> None:
    """The bias tile has any dtype except tfloat32.

    Raises RuleViolation for a tfloat32 tile.
    """
    if bias.dtype == "tfloat32":
        raise RuleViolation(bias_not_tfloat32, "bias is tfloat32")
