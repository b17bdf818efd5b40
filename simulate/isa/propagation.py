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
    """Return masks of results that depend on one element of each operand; a (P, 1) operand serves its partition."""
    (dst,) = plan.writes
    result = np.ones(dst.shape, bool)
    for mask in defined:
        serves_all = mask.size != dst.size
        result &= mask.reshape(-1, *(1,) * (dst.ndim - 1)) if serves_all else mask.reshape(dst.shape)
    return [result]


def moved(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Move bools as the instruction moves the values, since it only moves elements."""
    (result,), (dst,) = plan.compute(*defined), plan.writes
    if isinstance(result, Masked):
        return [result.values.reshape(dst.shape) | ~result.chosen.reshape(dst.shape)]
    return [result.reshape(dst.shape)]


def quantized(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return masks where eight partitions of four elements share a scale: all are defined, or no packed element is."""
    dst, *scales = plan.writes
    partitions, columns = dst.shape[0], dst.free_size
    groups = defined[0].reshape(partitions // 8, 8, columns, -1).all(axis=(1, 3))
    rows = np.split(groups, np.cumsum([tile.shape[0] for tile in scales])[:-1], axis=0)
    packed = np.repeat(groups, 8, axis=0).reshape(dst.shape)
    return [packed, *(row_mask.reshape(tile.shape) for tile, row_mask in zip(scales, rows))]


def contracted_with_scales(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return masks as `contracted`, with rows of scales of the first operand, then as many of the second."""
    stationary, moving, *scales = (flat(mask).all(axis=0) for mask in defined)
    half = len(scales) // 2
    columns = [
        np.logical_and.reduce([*masks]) for masks in ((stationary, *scales[:half]), (moving, *scales[half:]))
    ]
    return [np.logical_and.outer(*columns).reshape(plan.writes[0].shape)]


def by_partition(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """Return masks of results whose partition depends on that of the first operand; others must be defined."""
    if not all(mask.all() for mask in defined[1:]):
        return None
    (dst,) = plan.writes
    rows = flat(defined[0]).all(axis=1)
    return [np.broadcast_to(rows.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape)]


def within_partitions(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """Return masks of results whose partition depends on that partition of every operand; every result has one."""
    rows = np.logical_and.reduce([flat(mask).all(axis=1) for mask in defined])
    if not rows.any():
        return None
    return [np.broadcast_to(rows.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape) for dst in plan.writes]


def reduced(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """Return masks of results that depend on the trailing elements of a partition that they reduce."""
    (dst,) = plan.writes
    result = defined[0].reshape(dst.shape[0], dst.free_size, -1).all(axis=2)
    return [result.reshape(dst.shape)] if result.any() else None


def by_row(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return masks of results of which the n-th depends on all elements of the n-th operand."""
    return [np.full(dst.shape, mask.all()) for dst, mask in zip(plan.writes, defined)]


def transposed(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Transpose the first operand's mask, as the instruction does bit by bit."""
    return [flat(defined[0]).T.reshape(plan.writes[0].shape)]


def contracted(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the mask of a product of every column of the first operand with every column of the second.

    Without a second operand, it is an identity.
    """
    stationary, *moving = (flat(mask).all(axis=0) for mask in defined)
    columns = moving[0] if moving else np.ones(defined[0].shape[0], bool)
    return [np.logical_and.outer(stationary, columns).reshape(plan.writes[0].shape)]


def contracted_in_pairs(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return masks as `contracted`, with operands (K, 2, columns) whose pairs are summed."""
    return contracted(plan, [mask.reshape(mask.shape[0] * 2, -1) for mask in defined])
