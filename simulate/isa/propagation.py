"""Which elements of an instruction's results are defined, if some elements of its operands are not.

Kernels transpose, copy and scale whole tiles of which they filled a part, and use that part only; on the chip the rest
is whatever was there. An instruction whose plan names one of these functions as `propagate` may read such a tile:
results of undefined elements are then marked as poison. Every other instruction refuses to read them.

A mask is a bool array of a tensor's shape, True where the element is defined. Each function takes the plan and a mask
for each operand in `plan.reads`, and returns a mask for each tensor in `plan.writes`. None refuses the read after all.
"""

from __future__ import annotations

import numpy as np

from simulate.isa.plan import Masked, Plan
from simulate.isa.shapes import flat


def elementwise(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the mask of a result each element of which depends on one element of each operand.

    A (P, 1) operand counts for its whole partition.
    """
    (dst,) = plan.writes
    result = np.ones(dst.shape, bool)
    for mask in defined:
        serves_all = mask.size != dst.size
        result &= mask.reshape(-1, *(1,) * (dst.ndim - 1)) if serves_all else mask.reshape(dst.shape)
    return [result]


def moved(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the mask of a result whose elements are moved from operands: the masks are moved like the values.

    Elements that a masked result does not write count as defined.
    """
    (result,), (dst,) = plan.compute(*defined), plan.writes
    if isinstance(result, Masked):
        return [result.values.reshape(dst.shape) | ~result.chosen.reshape(dst.shape)]
    return [result.reshape(dst.shape)]


def quantized(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the masks of quantize_mx's results: packed elements and scales.

    Eight partitions of four elements share a scale; they and the scale are undefined if one of the elements is.
    """
    dst, *scales = plan.writes
    partitions, columns = dst.shape[0], dst.free_size
    groups = defined[0].reshape(partitions // 8, 8, columns, -1).all(axis=(1, 3))
    rows = np.split(groups, np.cumsum([tile.shape[0] for tile in scales])[:-1], axis=0)
    packed = np.repeat(groups, 8, axis=0).reshape(dst.shape)
    return [packed, *(row_mask.reshape(tile.shape) for tile, row_mask in zip(scales, rows))]


def contracted_with_scales(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the mask of nc_matmul_mx's result: an element depends on a column of each operand and on its scales.

    The masks are those of stationary, moving, the rows of stationary's scales and as many rows of moving's scales.
    """
    stationary, moving, *scales = (flat(mask).all(axis=0) for mask in defined)
    half = len(scales) // 2
    columns = [
        np.logical_and.reduce([*masks]) for masks in ((stationary, *scales[:half]), (moving, *scales[half:]))
    ]
    return [np.logical_and.outer(*columns).reshape(plan.writes[0].shape)]


def by_partition(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """Return the mask of a result whose partitions depend each on all elements of that partition of the first operand.

    None if another operand has an undefined element.
    """
    if not all(mask.all() for mask in defined[1:]):
        return None
    (dst,) = plan.writes
    rows = flat(defined[0]).all(axis=1)
    return [np.broadcast_to(rows.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape)]


def within_partitions(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """Return masks of results whose partitions depend each on all elements of that partition of every operand.

    None if every partition has an undefined element.
    """
    rows = np.logical_and.reduce([flat(mask).all(axis=1) for mask in defined])
    if not rows.any():
        return None
    return [np.broadcast_to(rows.reshape(-1, *(1,) * (dst.ndim - 1)), dst.shape) for dst in plan.writes]


def reduced(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray] | None:
    """Return the mask of a result each element of which reduces trailing elements of a partition of the first operand.

    None if the result would have no defined element.
    """
    (dst,) = plan.writes
    result = defined[0].reshape(dst.shape[0], dst.free_size, -1).all(axis=2)
    return [result.reshape(dst.shape)] if result.any() else None


def by_row(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return masks of results of which the n-th is defined if all elements of the n-th operand are."""
    return [np.full(dst.shape, mask.all()) for dst, mask in zip(plan.writes, defined)]


def transposed(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the first operand's mask, (partitions, elements), transposed."""
    return [flat(defined[0]).T.reshape(plan.writes[0].shape)]


def contracted(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the mask of a matmul: element (i, j) depends on column i of the first operand and column j of the second.

    Without a second operand that one is an identity, which is defined.
    """
    stationary, *moving = (flat(mask).all(axis=0) for mask in defined)
    columns = moving[0] if moving else np.ones(defined[0].shape[0], bool)
    return [np.logical_and.outer(stationary, columns).reshape(plan.writes[0].shape)]


def contracted_in_pairs(plan: Plan, defined: list[np.ndarray]) -> list[np.ndarray]:
    """Return the mask of a matmul of operands (K, 2, columns), whose pairs are summed; otherwise as `contracted`."""
    return contracted(plan, [mask.reshape(mask.shape[0] * 2, -1) for mask in defined])
