"""Which elements of a result are defined, given which elements of the operands are.

Kernels transpose, copy and scale whole tiles of which they filled a part, and use that part only; on the chip the
rest is whatever was there. An instruction whose plan names one of these functions may read such a tile: results of
undefined elements are poison. Every other instruction refuses to read them.

Each function takes the plan and one array of bools per operand, of the operand's shape, and gives one per result, or
None where the read is refused after all.
"""

from __future__ import annotations

import numpy as np

from simulate.isa.plan import Masked, Plan
from simulate.isa.shapes import flat


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
    (result,), (dst,) = plan.compute(*defined), plan.writes
    if isinstance(result, Masked):
        return [result.values.reshape(dst.shape) | ~result.chosen.reshape(dst.shape)]
    return [result.reshape(dst.shape)]


def quantized(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Eight partitions of four elements share a scale: all of them are defined, or the packed elements are not."""
    dst, *scales = plan.writes
    partitions, columns = dst.shape[0], dst.free_size
    groups = defined[0].reshape(partitions // 8, 8, columns, -1).all(axis=(1, 3))
    rows = np.split(groups, np.cumsum([tile.shape[0] for tile in scales])[:-1], axis=0)
    packed = np.repeat(groups, 8, axis=0).reshape(dst.shape)
    return [packed, *(each.reshape(tile.shape) for tile, each in zip(scales, rows))]


def contracted_with_scales(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """As `contracted`; the other operands are the rows of scales of the first, and as many of the second."""
    stationary, moving, *scales = (flat(each).all(axis=0) for each in defined)
    half = len(scales) // 2
    columns = [
        np.logical_and.reduce([*parts]) for parts in ((stationary, *scales[:half]), (moving, *scales[half:]))
    ]
    return [np.logical_and.outer(*columns).reshape(plan.writes[0].shape)]


def by_partition(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """A partition of the result depends on that partition of the first operand; the others must be defined."""
    if not all(each.all() for each in defined[1:]):
        return None
    (dst,) = plan.writes
    rows = flat(defined[0]).all(axis=1)
    return [np.broadcast_to(rows.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape)]


def within_partitions(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """A partition of every result depends on that partition of every operand; none may be left without a result."""
    rows = np.logical_and.reduce([flat(each).all(axis=1) for each in defined])
    if not rows.any():
        return None
    return [np.broadcast_to(rows.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape) for dst in plan.writes]


def reduced(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """An element of the result depends on the trailing elements of its partition that it reduces."""
    (dst,) = plan.writes
    result = defined[0].reshape(dst.shape[0], dst.free_size, -1).all(axis=2)
    return [result.reshape(dst.shape)] if result.any() else None


def by_row(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """The n-th result depends on all elements of the n-th operand."""
    return [np.full(dst.shape, each.all()) for dst, each in zip(plan.writes, defined)]


def transposed(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """The result is the first operand transposed, bit by bit."""
    return [flat(defined[0]).T.reshape(plan.writes[0].shape)]


def contracted(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """A column of the first operand is multiplied by every column of the second (of an identity, if there is none)."""
    stationary, *moving = (flat(each).all(axis=0) for each in defined)
    columns = moving[0] if moving else np.ones(defined[0].shape[0], bool)
    return [np.logical_and.outer(stationary, columns).reshape(plan.writes[0].shape)]


def contracted_in_pairs(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """As `contracted`, with operands (K, 2, columns) whose pairs are summed."""
    return contracted(plan, [each.reshape(each.shape[0] * 2, -1) for each in defined])
