"""tensor_scalar: one or two operators between a tile and numbers or (P, 1) tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, indirection, propagation, rules
from simulate.isa.alu_stage import Stage, stage
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import PERMUTES_BITS, PLAIN, Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator, alu_operator

_GPSIMD_ONLY = ("rsqrt", "power")
_SCALAR_CHAINS = (("multiply", "add"), ("multiply",), ("add",))

# The reference asks for float32; the MoE kernels of the vendor's library scale by bfloat16 affinities.
_COLUMNS = ("float32", "bfloat16", "float16")


@instruction
def tensor_scalar(
    hardware: Hardware,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: NkiTensor | float,
    reverse0: bool = False,
    op1: Any = None,
    operand1: NkiTensor | float | None = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Plan:
    """Compute dst = op1(op0(data, operand0), operand1), on the Vector, Scalar or GpSimd engine.

    dst, data: [P, ...] @ SBUF or PSUM. operand0, operand1: a number, or a [P, 1] tile with one value per partition:
    float32, bfloat16 or float16 for arithmetic operators, of data's dtype for bitvec operators. reverse0 and reverse1
    swap the inputs of their operator. op0 and op1 are of one family; a unary operator takes operand None or 0
    (documented for op0 only; op1 is treated in the same way).

    Arithmetic operators compute in float32, also on integer data, and round once to dst's dtype. Bitvec operators
    work on raw bits of integer tiles of one size. With engine=unknown GpSimd is taken for rsqrt and power, which only
    GpSimd has, and the Vector engine for everything else. The Scalar engine multiplies, adds, or multiplies and
    adds, from gen3 on.

    Raises RuleViolation. Cost: costs.copied on Vector, one element per cycle elsewhere.
    """
    rules.check_unpacked(hardware, indirect=True, dst=dst, data=data)
    rules.same_elements("dst", dst, "data", data)
    first = _operator(hardware, "op0", op0)
    stages: tuple[Stage, ...] = (stage(hardware, 0, first, operand0, reverse0, data, *_COLUMNS),)
    if op1 is None:
        second_operand_has_operator(operand1)
    else:
        second = _operator(hardware, "op1", op1)
        rules.one_operator_family(first, second)
        stages += (stage(hardware, 1, second, operand1, reverse1, data, *_COLUMNS),)
    names = tuple(s.operator.name for s in stages)
    engine = _engine(hardware, engine, names)
    tiles = {f"operand{i}": s.operand for i, s in enumerate(stages)}
    rules.gpsimd_stays_in_sbuf(engine, dst=dst, data=data, **tiles)
    indirection.check(hardware, engine, dst, data)
    bitvec = rules.is_bitvec(first)
    if bitvec:
        rules.bitvec_takes_integers(first, dst=dst, data=data)
    element = dst.dtype.storage

    def compute(values: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray]:
        operands = iter(columns)
        for s in stages:
            values = s.apply(values, operands)
        return (values.view(element) if bitvec else values,)

    return Plan(
        engine=engine,
        reads=(data, *(tile for s in stages for tile in s.reads)),
        writes=(dst,),
        domain=Domain.bits if bitvec else Domain.float32,
        compute=compute,
        cost=costs.copied(hardware, engine, dst, data, bitvec),
        name=name,
        propagate=propagation.elementwise,
        # A number that is shifted by the elements of data depends on several bits of each.
        effects=PERMUTES_BITS if bitvec and not any(s.reads or s.reverse for s in stages) else PLAIN,
        undocumented=rules.violations(
            *rules.flags(reverse0=reverse0, reverse1=reverse1),
            *((column_is_float32, i, s) for i, s in enumerate(stages)),
            (indirect_is_no_address, dst, data),
        ),
    )


def _operator(hardware: Hardware, operand: str, op: Any) -> AluOperator:
    operator = alu_operator(op)
    rules.operator_on_chip(hardware, operand, operator)
    operator_of_tensor_scalar(operand, operator)
    return operator


def _engine(hardware: Hardware, engine: Engine, names: tuple[str, ...]) -> Engine:
    if any(name in _GPSIMD_ONLY for name in names):
        engine = Engine.gpsimd if engine is Engine.unknown else engine
        rules.engine_can(engine, Engine.gpsimd)
        return engine
    if engine is Engine.unknown:
        return Engine.vector
    rules.engine_can(
        engine, Engine.vector, *((Engine.scalar,) if hardware.scalar_engine_tensor_scalar else ())
    )
    if engine is Engine.scalar:
        scalar_engine_multiplies_and_adds(names)
    return engine


@rule(
    "NKW-TENSOR-SCALAR-OPERATOR",
    hint="apply functions with nisa.activation; nl.average belongs to tensor_partition_reduce",
)
def operator_of_tensor_scalar(operand: str, operator: AluOperator) -> None:
    """tensor_scalar takes the operators of the Vector engine, and rsqrt and power of GpSimd.

    Raises RuleViolation otherwise.
    """
    if "vector" not in operator.engines and operator.name not in _GPSIMD_ONLY:
        raise RuleViolation(operator_of_tensor_scalar, f"{operand}={operator.name}")


@rule("NKW-TENSOR-SCALAR-OPERAND1", hint="name op1, or omit operand1")
def second_operand_has_operator(operand1: Any) -> None:
    """operand1 belongs to op1; without op1 it is None.

    Raises RuleViolation if operand1 is not None; the planner applies it if op1 is None.
    """
    if operand1 is not None:
        raise RuleViolation(second_operand_has_operator, "operand1 is given, op1 is None")


@rule("NKW-TENSOR-SCALAR-CHAIN", hint="leave engine=nisa.engine.unknown")
def scalar_engine_multiplies_and_adds(names: tuple[str, ...]) -> None:
    """On the Scalar engine tensor_scalar does multiply then add, multiply alone, or add alone.

    Raises RuleViolation otherwise.
    """
    if names not in _SCALAR_CHAINS:
        raise RuleViolation(
            scalar_engine_multiplies_and_adds,
            " then ".join(names),
            limit="; ".join(" then ".join(chain) for chain in _SCALAR_CHAINS),
        )


@rule("NKW-TENSOR-SCALAR-COLUMN", limit="float32", hint="cast it with nisa.tensor_copy")
def column_is_float32(number: int, stage: Stage) -> None:
    """operand0 and operand1 of arithmetic operators are float32.

    Raises RuleViolation if the operand is a tile of another dtype and its operator is arithmetic.
    """
    tile = stage.operand
    if isinstance(tile, NkiTensor) and not rules.is_bitvec(stage.operator) and tile.dtype != "float32":
        raise RuleViolation(column_is_float32, f"operand{number} is {tile.dtype}")


@rule("NKW-TENSOR-SCALAR-INDIRECT", hint="copy the elements with an indirect nisa.tensor_copy first")
def indirect_is_no_address(dst: NkiTensor, data: NkiTensor) -> None:
    """Tensor indirection is not supported where dst and data are int32 or uint32, as in address arithmetic.

    Raises RuleViolation if dst or data is such a view and both are of these dtypes.
    """
    indirect = any(indirection.is_indirect(tile) for tile in (dst, data))
    if indirect and all(tile.dtype in ("int32", "uint32") for tile in (dst, data)):
        raise RuleViolation(
            indirect_is_no_address, f"an indirect operand with {data.dtype} data, {dst.dtype} dst"
        )
