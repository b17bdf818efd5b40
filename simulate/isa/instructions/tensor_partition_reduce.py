"""tensor_partition_reduce: reduce over the partitions of a tile."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Contraction, Domain, Effects, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import AluOperator, alu_operator

_OPERATORS = ("add", "average", "maximum", "bitwise_or", "bitwise_and")

_EFFECTS = Effects(contraction=Contraction.rows)


@instruction
def tensor_partition_reduce(
    hardware: Hardware, dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> Plan:
    """Reduce dst[0, f] = op over all partitions p of data[p, f], on the GpSimd engine.

    data: [P, ...] @ SBUF. dst: [1, ...] @ SBUF, as many elements as a partition of data. op: add, average,
    maximum (nl.max), bitwise_or or bitwise_and.

    add, average and maximum compute in float32, also for integers (native integer arithmetic of GpSimd is
    documented for tensor_tensor only); the bitwise operators work on the raw bits of integers of one size.

    Raises RuleViolation. Cost: none is published; a tree of ceil(log2 P) steps of one element per cycle is
    assumed.
    """
    rules.check_unpacked(hardware, MemoryRegion.sbuf, dst=dst, data=data)
    one_output_partition(dst)
    rules.same_free_size("dst", dst, "data", data)
    operator = alu_operator(op)
    reduces_partitions(operator)
    bitvec = rules.is_bitvec(operator)
    if bitvec:
        rules.bitvec_takes_integers(operator, dst=dst, data=data)
    reduce = operator.reduce
    assert reduce is not None

    def compute(values: np.ndarray) -> tuple[np.ndarray]:
        reduced = reduce(values, 0)
        return (reduced.view(dst.dtype.storage) if bitvec else reduced,)

    steps = max(ceil(log2(data.shape[0])), 1)
    return Plan(
        engine=Engine.gpsimd,
        reads=(data,),
        writes=(dst,),
        domain=Domain.bits if bitvec else Domain.float32,
        compute=compute,
        cost=costs.gpsimd(hardware, data.free_size * steps),
        name=name,
        effects=_EFFECTS,
    )


@rule("NKW-PARTITION-REDUCE-OUTPUT", hint="pass dst[0:1]")
def one_output_partition(dst: NkiTensor) -> None:
    """A reduction over partitions leaves one partition.

    Raises RuleViolation if dst has more partitions than one.
    """
    if dst.shape[0] != 1:
        raise RuleViolation(one_output_partition, f"dst has {dst.shape[0]} partitions")


@rule("NKW-PARTITION-REDUCE-OPERATOR", hint="transpose the tile and use nisa.tensor_reduce")
def reduces_partitions(operator: AluOperator) -> None:
    """tensor_partition_reduce takes add, average, maximum, bitwise_or or bitwise_and.

    Raises RuleViolation otherwise.
    """
    if operator.name not in _OPERATORS:
        raise RuleViolation(reduces_partitions, f"op={operator.name}", limit=", ".join(_OPERATORS))
