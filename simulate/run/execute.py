"""Executing a plan on simulated memory: operands are read, results are rounded once and written.

`issue` calls this module after its checks, `replay` without them. No other module writes simulated memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.isa.plan import Domain, Masked, Plan, State
from simulate.memory import NkiTensor
from simulate.numerics import from_float32, tfloat32, to_float32
from simulate.run.indirect import resolve


def gather(tile: NkiTensor, as_float: bool, skip_out_of_range: bool) -> np.ndarray | Masked:
    """The elements of a dynamic view; Masked where indices out of range are skipped."""
    where = resolve(tile, skip_out_of_range)
    elements = where.elements if where.inside is None else np.where(where.inside, where.elements, 0)
    values = flat(tile).uncounted_array[elements]
    if as_float:
        values = to_float32(values, tile.dtype)
    return values if where.inside is None else Masked(values, where.inside)


def put(tile: NkiTensor, result: np.ndarray | Masked, as_float: bool, skip_out_of_range: bool) -> Any:
    """Write a result; returns the elements written: None for all, a mask of the view, or positions in the storage."""
    masked = isinstance(result, Masked)
    values = result.values if isinstance(result, Masked) else result
    if values.shape != tile.shape:
        values = values.reshape(tile.shape)
    if as_float:
        values = rounded(tile, values)
    storage = tile.storage
    if storage.float_views:
        storage.float_views.clear()
    if tile.dynamic is not None:
        chosen = result.chosen.reshape(tile.shape) if isinstance(result, Masked) else None
        return _scatter(tile, values, skip_out_of_range, chosen)
    array = tile.uncounted_array
    if storage.uncounted_host is not None and not array.flags.writeable:
        raise RuleViolation(input_is_writable, f"a write to {tile.describe()}")
    if masked:
        chosen = result.chosen.reshape(tile.shape)  # type: ignore[union-attr]
        np.copyto(array, values, where=chosen)
        return chosen
    array[...] = values
    return None


def accumulated(tile: NkiTensor, product: np.ndarray, accumulate_mask: Any) -> np.ndarray:
    """A product added to the PSUM elements that `accumulate_mask` selects: True (all), False (none) or a mask."""
    if product.shape != tile.shape:
        product = product.reshape(tile.shape)
    if accumulate_mask is False:
        return product
    before = tile.uncounted_float32() if tile.dynamic is None else gather(tile, True, False)
    assert isinstance(before, np.ndarray)
    total = before + product
    return total if accumulate_mask is True else np.where(accumulate_mask, total, product)


def add(tile: NkiTensor, product: np.ndarray, accumulate_mask: Any, as_float: bool) -> None:
    """Write a product into a view without a run-time index; add it where `accumulate_mask` selects."""
    if accumulate_mask is True and tile.dtype == "float32":
        array = tile.uncounted_array
        tile.storage.float_views.clear()
        # The sum of a float32 element and a product needs no rounding after it, so it is made in place.
        np.add(array, product if product.shape == array.shape else product.reshape(array.shape), out=array)
    else:
        put(tile, accumulated(tile, product, accumulate_mask), as_float, False)


def repeat(plan: Plan, accumulate_mask: Any, states: dict[State, np.ndarray], partitions: int) -> None:
    """Execute a plan again that `issue` has checked; a plan with a rendezvous is not for this function.

    `accumulate_mask` selects the PSUM elements to which a matmul's product was added; None for other instructions.
    `states` has the state of the core, which the plan may update.
    """
    operands = operands_of(plan)
    if accumulate_mask is not None:
        tile = plan.writes[0]
        as_float = plan.domain is Domain.float32
        product = plan.compute(*operands)[0]
        if tile.dynamic is None:
            add(tile, product, accumulate_mask, as_float)
        else:
            put(tile, accumulated(tile, product, accumulate_mask), as_float, False)
        return
    if plan.state is not None:
        state = states.get(plan.state)
        if state is None:
            state = plan.state.initial(partitions)
        *results, states[plan.state] = plan.compute(state, *operands)
    else:
        results = plan.compute(*operands)
    put_all(plan, results)


def operands_of(plan: Plan) -> list[Any]:
    """The operands of a plan as its `compute` takes them, without checks."""
    as_float = plan.domain is Domain.float32
    return [
        gather(tile, as_float, plan.skip_out_of_range)
        if tile.dynamic is not None
        else tile.uncounted_float32()
        if as_float
        else tile.uncounted_array
        for tile in plan.reads
    ]


def put_all(plan: Plan, results: Sequence[Any]) -> None:
    """Write the results of a plan."""
    for tile, result in zip(plan.writes, results):
        put(tile, result, plan.domain is Domain.float32, plan.skip_out_of_range)


def flat(tile: NkiTensor) -> NkiTensor:
    """The whole storage of a view, as one dim of the view's dtype."""
    storage = tile.storage
    return NkiTensor.over((storage.nbytes // tile.dtype.storage.itemsize,), tile.dtype, storage, (1,), 0)


def _scatter(
    tile: NkiTensor, values: np.ndarray, skip_out_of_range: bool, chosen: np.ndarray | None
) -> np.ndarray:
    where = resolve(tile, skip_out_of_range)
    array = flat(tile).uncounted_array
    if not array.flags.writeable:
        raise RuleViolation(input_is_writable, f"a write to {tile.describe()}")
    selected = where.inside if chosen is None else chosen if where.inside is None else chosen & where.inside
    if selected is None:
        array[where.elements] = values
        return where.elements
    elements = where.elements[selected]
    array[elements] = values[selected]
    return elements


def rounded(tile: NkiTensor, values: np.ndarray) -> np.ndarray:
    """float32 results rounded once to the destination's storage dtype."""
    dtype = tile.dtype
    if values.dtype == dtype.storage and dtype is not tfloat32:
        return values
    return from_float32(values, dtype)


@rule("NKW-READ-ONLY")
def input_is_writable() -> None:
    """An array that a kernel writes to is writable."""
