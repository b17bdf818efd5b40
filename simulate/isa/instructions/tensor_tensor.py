"""tensor_tensor: one binary operator over two tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import AluOperator, alu_operator

_EXACT_INTEGERS = ("int32", "uint32")
_INTEGER_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
}


@instruction
def tensor_tensor(
    hardware: Hardware,
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Plan:
    """Compute dst = op(data1, data2), element by element, on the Vector or GpSimd engine.

    dst, data1, data2: [P, ...] @ SBUF or PSUM; data1 and data2 not both in PSUM.

    Arithmetic operators compute in float32 and round once to dst's dtype; bitvec operators work on the raw bits of
    integer tiles of one size, which the Vector engine alone does. If all three tiles are int32 or uint32 and none lies
    in PSUM, engine=unknown means GpSimd, which adds, subtracts and multiplies integers exactly; overflow is not
    documented and wraps here (two's complement). `power` exists on GpSimd only.

    Raises RuleViolation. Cost: costs.tensor_tensor; on GpSimd costs.gpsimd.
    """
    rules.check_tile(hardware, "dst", dst, indirect=True)
    rules.check_tile(hardware, "data1", data1, indirect=True)
    rules.check_tile(hardware, "data2", data2)
    rules.same_elements("data1", data1, "data2", data2)
    rules.same_elements("dst", dst, "data1", data1)
    rules.at_most_one_in_psum("data1", data1, "data2", data2)
    operator = alu_operator(op)
    rules.binary("op", operator)
    rules.operator_on_chip(hardware, "op", operator)
    tiles = (dst, data1, data2)
    integers = all(t.dtype in _EXACT_INTEGERS for t in tiles)
    in_sbuf = all(t.buffer is MemoryRegion.sbuf for t in tiles)
    bitvec = rules.is_bitvec(operator)
    if engine is Engine.unknown:
        exact = integers and in_sbuf and operator.name in _INTEGER_FUNCTIONS
        engine = Engine.gpsimd if exact or operator.name == "power" else Engine.vector
    element_wise(operator)
    if operator.name == "power":
        rules.engine_can(engine, Engine.gpsimd)
    elif bitvec:
        rules.engine_can(engine, Engine.vector)
    else:
        rules.engine_can(engine, Engine.vector, Engine.gpsimd)
    rules.gpsimd_stays_in_sbuf(engine, dst=dst, data1=data1, data2=data2)
    indirection.check(hardware, engine, dst, data1, Engine.vector, Engine.gpsimd)
    if bitvec:
        rules.bitvec_takes_integers(operator, dst=dst, data1=data1, data2=data2)
    for operand, tile in zip(("dst", "data1", "data2"), tiles):
        rules.not_packed(operand, tile)

    compute: Callable[..., tuple[np.ndarray]]
    if bitvec or (engine is Engine.gpsimd and integers and operator.name in _INTEGER_FUNCTIONS):
        function = operator.function if bitvec else _INTEGER_FUNCTIONS[operator.name]
        domain, element = Domain.bits, dst.dtype.storage

        def compute(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray]:
            other = second.view(first.dtype)
            return (function(first, _like(other, first)).astype(element, copy=False),)

    else:
        function, domain = operator.function, Domain.float32

        def compute(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray]:
            return (function(first, _like(second, first)),)

    if engine is Engine.vector:
        cost = costs.tensor_tensor(hardware, dst, data1, data2)
    else:
        cost = costs.gpsimd(hardware, data1.free_size)
    return Plan(
        engine=engine,
        reads=(data1, data2),
        writes=(dst,),
        domain=domain,
        compute=compute,
        cost=cost,
        name=name,
        propagate=propagation.elementwise,
    )


def _like(values: np.ndarray, other: np.ndarray) -> np.ndarray:
    return values if values.shape == other.shape else values.reshape(other.shape)


@rule("NKW-ELEMENT-OPERATOR", hint="nl.average belongs to tensor_partition_reduce")
def element_wise(operator: AluOperator) -> None:
    """An element-wise operator is one that the Vector engine has, or power on GpSimd.

    Raises RuleViolation for any other operator.
    """
    if "vector" not in operator.engines and operator.name != "power":
        raise RuleViolation(element_wise, f"op={operator.name}")
