"""affine_select: keep the elements of a tile whose affine value compares true with 0, fill the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.affine import affine
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.immediates import parse_float32
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import ALU_OPERATORS, AluOperator, alu_operator, cast, from_float32

_COMPARISONS = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
}


@instruction
def affine_select(
    hardware: Hardware,
    dst: NkiTensor,
    pattern: list[list[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = ALU_OPERATORS["equal"],
    offset: Any = 0,
    name: str | None = None,
) -> Plan:
    """Select on_true_tile where cmp_op(a, 0), else on_false_value, on GpSimd; a is the affine value of iota.

    dst, on_true_tile: [P, ...] @ SBUF; same partitions and elements per partition. pattern, channel_multiplier and
    offset as for iota. cmp_op: one of the six comparisons. on_false_value: a float32 number, rounded to dst's dtype.

    The comparison is on int32, exact. Selected elements keep their bits when the dtypes agree and go through float32
    otherwise.

    Raises RuleViolation. Cost: costs.gpsimd.
    """
    rules.check_unpacked(hardware, MemoryRegion.sbuf, dst=dst, on_true_tile=on_true_tile)
    rules.same_elements("dst", dst, "on_true_tile", on_true_tile)
    operator = alu_operator(cmp_op)
    compares(operator)
    reads, affine_values = affine(dst, pattern, offset, channel_multiplier)
    compare = _COMPARISONS[operator.name]
    source, target = on_true_tile.dtype, dst.dtype
    fill = from_float32(np.array([parse_float32("on_false_value", on_false_value)]), target)

    def compute(values: np.ndarray, *cells: np.ndarray) -> tuple[np.ndarray]:
        chosen = compare(affine_values(cells), 0).reshape(values.shape)
        return (np.where(chosen, cast(values, source, target), fill),)

    return Plan(
        engine=Engine.gpsimd,
        reads=(on_true_tile, *reads),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.gpsimd(hardware, on_true_tile.free_size),
        name=name,
    )


@rule("NKW-AFFINE-COMPARISON", hint="cmp_op=nl.greater_equal, or another of these")
def compares(operator: AluOperator) -> None:
    """cmp_op is a comparison: its result selects.

    Raises RuleViolation for any other operator.
    """
    if operator.name not in _COMPARISONS:
        raise RuleViolation(compares, f"cmp_op={operator.name}", limit=", ".join(_COMPARISONS))
