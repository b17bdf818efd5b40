"""Which elements of a result are defined, given which elements of the operands are.

Kernels transpose, copy and scale whole tiles of which they filled a part, and use that part only; on the chip the
rest is whatever was there. An instruction whose plan names one of these functions may read such a tile: what comes
of its unwritten elements counts as unwritten. Every other instruction refuses to read them.

Each function takes the plan and one array of bools per operand, of the operand's shape, and gives one per result, or
None where the read is refused after all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simulate.isa.shapes import flat

if TYPE_CHECKING:
    from simulate.isa.plan import Plan


def elementwise(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """One element of each operand makes one of the result; a (P, 1) operand serves its whole partition."""
    (dst,) = plan.writes
    result = np.ones(dst.shape, bool)
    for each in defined:
        serves_all = each.size != dst.size
        result &= each.reshape(-1, *(1,) * (dst.ndim - 1)) if serves_all else each.reshape(dst.shape)
    return [result]


def moved(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """The instruction only moves elements, and moves these bools as it does the values."""
    (result,) = plan.compute(*defined)
    if not hasattr(result, "chosen"):
        return [result]
    return [result.values | ~result.chosen.reshape(result.values.shape)]


def by_partition(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """A partition of the result comes of the same one of the first operand; the others say where, and are needed."""
    if not all(each.all() for each in defined[1:]):
        return None
    (dst,) = plan.writes
    rows = flat(defined[0]).all(axis=1)
    return [np.broadcast_to(rows.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape)]


def by_row(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """The n-th result comes of all elements of the n-th operand."""
    return [np.full(dst.shape, each.all()) for dst, each in zip(plan.writes, defined)]


def transposed(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """The result is the first operand transposed, bit by bit."""
    return [flat(defined[0]).T.reshape(plan.writes[0].shape)]


def contracted(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """A column of the first operand meets every column of the second (of an identity, if there is none)."""
    stationary, *moving = (flat(each).all(axis=0) for each in defined)
    columns = moving[0] if moving else np.ones(defined[0].shape[0], bool)
    return [np.logical_and.outer(stationary, columns).reshape(plan.writes[0].shape)]


def contracted_in_pairs(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """As `contracted`, with operands (K, 2, columns) whose pairs are summed."""
    return contracted(plan, [each.reshape(each.shape[0] * 2, -1) for each in defined])
