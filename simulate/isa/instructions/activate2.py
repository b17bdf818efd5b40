"""activate2: up to two broadcast operators, an activation function and a reduction, on the Scalar engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import accumulator, broadcast, costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.plan import Argument, Domain, Plan, Registers, State
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import ALU_OPERATORS, AluOperator, activation_function, alu_operator

_PAIRS = (
    ("multiply", "add"),
    ("multiply", "subtract"),
    ("multiply", "bypass"),
    ("add", "bypass"),
    ("subtract", "bypass"),
    ("bypass", "bypass"),
)
_REDUCTIONS = ("add", "maximum", "minimum", "abs_max", "abs_min")


@instruction
def activate2(
    hardware: Hardware,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: NkiTensor | float,
    imm1: NkiTensor | float,
    op0: Any,
    op1: Any,
    relu_param: NkiTensor | float = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    name: str | None = None,
) -> Plan:
    """Compute dst = op(op1(op0(data, imm0), imm1)) in float32 on the Scalar engine, with an optional reduction. gen4.

    dst, data: [P, ...] @ SBUF or PSUM. imm0, imm1, relu_param: a number or a [P, 1] tile, both immediates of
    one dtype if both are tiles. (op0, op1): (multiply, add), (multiply, subtract), (multiply, bypass), (add,
    bypass), (subtract, bypass) or (bypass, bypass); a bypassed stage ignores its immediate, which may then be
    None. `reverse0` and `reverse1` swap the inputs of an operator that is not bypassed. relu_param is the
    negative slope of prelu and ignored by other functions.

    reduce_op: add, maximum, minimum, abs_max or abs_min, into the Scalar accumulators, which activation
    shares. The published loop accumulates what it wrote to dst; as in activation, the float32 values before
    the cast are taken. reset and reset_reduce start from reduce_op's identity; idle leaves the registers
    alone.

    Raises RuleViolation. Cost: as activation.
    """
    on_chip(hardware)
    function = activation_function(op)
    rules.check_unpacked(hardware, indirect=True, dst=dst, data=data)
    rules.same_elements("dst", dst, "data", data)
    indirection.check(hardware, Engine.scalar, dst, data)
    first, second = alu_operator(op0), alu_operator(op1)
    documented_pair(first, second)
    for operand, operator, reverse in (("reverse0", first, reverse0), ("reverse1", second, reverse1)):
        reverses_an_operator(operand, operator, reverse)
    reads: tuple[NkiTensor, ...] = (data,)
    if first.name != "bypass":
        reads += broadcast.check_operand(hardware, "imm0", imm0, data)
    if second.name != "bypass":
        reads += broadcast.check_operand(hardware, "imm1", imm1, data)
        immediates_agree(imm0, imm1)
    if function.relu_param:
        reads += broadcast.check_operand(hardware, "relu_param", relu_param, data)
    reduction = _reduction(reduce_op, reduce_cmd)
    if reduce_res is not None:
        accumulator.check_result(hardware, reduce_res, data)

    def argument(values: np.ndarray, *immediates: np.ndarray) -> np.ndarray:
        operand = iter(immediates)
        for operator, immediate, reverse in ((first, imm0, reverse0), (second, imm1, reverse1)):
            if operator.name != "bypass":
                other = broadcast.take_broadcast_value(immediate, operand, values.ndim)
                values = operator.function(other, values) if reverse else operator.function(values, other)
        return values

    def applied(*operands: np.ndarray) -> np.ndarray:
        values = argument(*operands)
        if not function.relu_param:
            return function.function(values)
        slope = broadcast.take_broadcast_value(relu_param, iter(operands[-1:]), values.ndim)
        return function.function(values, slope)

    def compute(*operands: np.ndarray) -> tuple[np.ndarray, ...]:
        if not uses_registers:
            return (applied(*operands),)
        registers = operands[0]
        result = applied(*operands[1:])
        rows = result.shape[0]
        updated = registers
        if reduce_cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce):
            updated = accumulator.accumulate(registers, reduce_cmd, reduction, result)
        elif reduce_cmd is ReduceCmd.reset:
            updated = accumulator.replace_rows(registers, np.full((rows, 1), reduction.identity, np.float32))
        return accumulator.collect_results(result, updated, reduce_res)

    uses_registers = reduce_cmd is not ReduceCmd.idle or reduce_res is not None
    return Plan(
        engine=Engine.scalar,
        reads=reads,
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
        state=State.scalar_accumulator if uses_registers else None,
        registers=Registers(reduce_cmd, reduction.name, data.shape[0], reduce_res is not None)
        if uses_registers
        else None,
        argument=Argument(function, argument),
        propagate=propagation.within_partitions,
        undocumented=rules.violations(*rules.flags(reverse0=reverse0, reverse1=reverse1)),
    )


def _reduction(reduce_op: Any, command: ReduceCmd) -> AluOperator:
    accumulator.command_among(
        command, ReduceCmd.idle, ReduceCmd.reset, ReduceCmd.reduce, ReduceCmd.reset_reduce
    )
    if reduce_op is None:
        reduces_with_an_operator(command)
        return ALU_OPERATORS["add"]
    operator = alu_operator(reduce_op)
    accumulator.reduction_among(operator, *_REDUCTIONS)
    return operator


@rule("NKW-ACTIVATE2-CHIP", hint="nisa.tensor_scalar, then nisa.activation")
def on_chip(hardware: Hardware) -> None:
    """activate2 exists from gen4 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.activate2:
        raise RuleViolation(on_chip, f"activate2 on {hardware.name}")


@rule("NKW-ACTIVATE2-PAIR", hint="use one of these pairs, with nl.bypass for a stage that does nothing")
def documented_pair(first: AluOperator, second: AluOperator) -> None:
    """activate2 combines op0 and op1 in six documented ways.

    Raises RuleViolation otherwise.
    """
    if (first.name, second.name) not in _PAIRS:
        raise RuleViolation(
            documented_pair,
            f"op0={first.name}, op1={second.name}",
            limit="; ".join(f"{a}, {b}" for a, b in _PAIRS),
        )


@rule("NKW-ACTIVATE2-REVERSE", hint="leave it False, or name an operator")
def reverses_an_operator(operand: str, operator: AluOperator, reverse: bool) -> None:
    """reverse0 and reverse1 need an operator that is not bypassed.

    Raises RuleViolation if `reverse` is True for an operator bypass.
    """
    if reverse and operator.name == "bypass":
        raise RuleViolation(
            reverses_an_operator, f"{operand}=True with {operand.replace('reverse', 'op')}=bypass"
        )


@rule("NKW-ACTIVATE2-IMMEDIATES", hint="cast one of them")
def immediates_agree(imm0: NkiTensor | float, imm1: NkiTensor | float) -> None:
    """Two immediates that are tiles have one dtype.

    Raises RuleViolation otherwise.
    """
    if isinstance(imm0, NkiTensor) and isinstance(imm1, NkiTensor) and imm0.dtype != imm1.dtype:
        raise RuleViolation(immediates_agree, f"imm0 is {imm0.dtype}, imm1 is {imm1.dtype}")


@rule("NKW-ACTIVATE2-REDUCE-OP", hint="reduce_op=nl.add")
def reduces_with_an_operator(command: ReduceCmd) -> None:
    """reduce_cmd reset, reduce and reset_reduce need a reduce_op.

    Raises RuleViolation for every command but idle; the planner applies it if reduce_op is None.
    """
    if command is not ReduceCmd.idle:
        raise RuleViolation(reduces_with_an_operator, f"reduce_cmd={command.name}, reduce_op=None")
