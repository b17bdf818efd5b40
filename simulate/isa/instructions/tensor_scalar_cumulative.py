"""tensor_scalar_cumulative: a scan along the free dims, carried in the Vector accumulator registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import accumulator, broadcast, costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.plan import JOINS_COLUMNS, Domain, Plan, Registers, State
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor
from simulate.numerics import alu_operator

_DTYPES = (
    *("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32"),
    *("int8", "uint8", "int16", "uint16"),
)
_COMMANDS = (ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.load_reduce)
_SCANS = {
    "add": np.add,
    "subtract": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


@instruction
def tensor_scalar_cumulative(
    hardware: Hardware,
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: NkiTensor | float,
    imm1: NkiTensor | float | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    name: str | None = None,
) -> Plan:
    """Compute reg = op1(op0(src[i], imm0), reg); dst[i] = reg per partition, in streaming order, on Vector.

    dst, src: [P, ...] @ SBUF or PSUM, any float or integer dtype of up to 16 bits, or float32. imm0, imm1: a
    number or a float32 [P, 1] tile. op0: any arithmetic operator of two operands; op1: add, subtract,
    multiply, maximum or minimum. As written in the documents op1 takes the new element first, so subtract
    gives x - reg.

    The registers are the Vector accumulators: reset_reduce starts from op1's identity, reduce from what they
    hold, load_reduce from imm1, which is given with it only. dst rounds each value once; the registers stay
    float32.

    Raises RuleViolation. Cost: none is published; that of tensor_tensor_scan is assumed.
    """
    for operand, tile in (("dst", dst), ("src", src)):
        rules.check_tile(hardware, operand, tile, indirect=True)
        rules.dtype_among(operand, tile, *_DTYPES)
    rules.same_elements("dst", dst, "src", src)
    indirection.check(hardware, Engine.vector, dst, src)
    map_operator, scan_operator = alu_operator(op0), alu_operator(op1)
    rules.binary("op0", map_operator)
    broadcast.arithmetic_on_vector(hardware, "op0", map_operator)
    accumulator.reduction_among(scan_operator, *_SCANS)
    accumulator.command_among(reduce_cmd, *_COMMANDS)
    accumulator.initial_with_load_only("imm1", imm1 is not None, reduce_cmd)
    reads = (src, *broadcast.check_operand(hardware, "imm0", imm0, src, "float32"))
    if imm1 is not None:
        reads += broadcast.check_operand(hardware, "imm1", imm1, src, "float32")
    scan = _SCANS[scan_operator.name]
    alternates = scan_operator.name == "subtract"

    def compute(registers: np.ndarray, *operands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        operand = iter(operands)
        values = next(operand)
        elements = flat(
            map_operator.function(values, broadcast.take_broadcast_value(imm0, operand, values.ndim))
        )
        initial = broadcast.take_broadcast_value(imm1, operand, 2) if imm1 is not None else np.float32(0)
        rows = elements.shape[0]
        start = accumulator.start_registers(registers, rows, reduce_cmd, scan_operator, initial)
        steps = np.concatenate((start, elements), axis=1, dtype=np.float32)
        if alternates:
            # x - reg in turn is a running sum with its odd terms, and then its odd results, negated.
            steps[:, 1::2] *= -1
        scanned = scan.accumulate(steps, axis=1)
        if alternates:
            scanned[:, 1::2] *= -1
        return scanned[:, 1:], accumulator.replace_rows(registers, scanned[:, -1:])

    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, src.free_size, "vector_scan_cycles_per_element"),
        name=name,
        state=State.vector_accumulator,
        registers=Registers(reduce_cmd, scan_operator.name, dst.shape[0], False, in_result=True),
        propagate=propagation.within_partitions,
        effects=JOINS_COLUMNS,
    )
