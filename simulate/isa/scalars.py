"""Planner of arithmetic on run-time scalars: 32-bit or 64-bit integers in registers, as `NkiScalar` (0.7) writes it."""

from __future__ import annotations

from enum import Enum

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Effects, Plan
from simulate.memory import NkiTensor

_EFFECTS = Effects(is_scalar_arithmetic=True)


class ScalarOperator(Enum):
    """Operator of two scalars; sums and products wrap to their width, comparisons give 1 or 0."""

    add = np.add
    subtract = np.subtract
    multiply = np.multiply
    less = np.less
    less_equal = np.less_equal
    greater = np.greater
    greater_equal = np.greater_equal
    equal = np.equal
    not_equal = np.not_equal

    @property
    def compares(self) -> bool:
        """Whether the operator is a comparison, whose result is 1 or 0."""
        return self not in (ScalarOperator.add, ScalarOperator.subtract, ScalarOperator.multiply)


def scalar_arithmetic(
    hardware: Hardware,
    operator: ScalarOperator,
    dst: NkiTensor,
    left: NkiTensor | int,
    right: NkiTensor | int,
) -> Plan:
    """Return the plan of dst = left operator right on the Sync stream.

    Cost: none is published; one of an instruction between registers, as for register_move.

    Args:
        hardware: Record of the chip.
        operator: The operator.
        dst: (1, 1) cell of the register that gets the result.
        left: (1, 1) cell of dst's dtype, or a number of its width.
        right: As `left`.
    """
    sides = (left, right)
    element = dst.dtype.storage

    def compute(*cells: np.ndarray) -> tuple[np.ndarray]:
        operand = iter(cells)
        first, second = (
            next(operand) if isinstance(side, NkiTensor) else np.full((1, 1), side, element) for side in sides
        )
        return (operator.value(first, second).astype(element),)

    return Plan(
        engine=Engine.sync,
        reads=tuple(side for side in sides if isinstance(side, NkiTensor)),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.fixed(hardware, Engine.sync, "semaphore_ns"),
        name=None,
        effects=_EFFECTS,
    )
