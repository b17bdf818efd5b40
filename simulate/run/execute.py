"""Execution of a plan on simulated memory: operands are read, results are rounded once and written.

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


def gather_elements(tile: NkiTensor, as_float: bool, skip_out_of_range: bool) -> np.ndarray | Masked:
    """Return the elements that a view with a run-time index selects, in the shape of the view.

    If indices out of range are skipped and one is, the result is a Masked that selects the elements in range.

    Args:
        tile: The view.
        as_float: Whether to convert the elements to float32; else they have the storage dtype.
        skip_out_of_range: Whether indices out of range are skipped; else they raise OutOfBounds.
    """
    selection = resolve(tile, skip_out_of_range)
    elements = (
        selection.elements if selection.inside is None else np.where(selection.inside, selection.elements, 0)
    )
    values = view_flat(tile).uncounted_array[elements]
    if as_float:
        values = to_float32(values, tile.dtype)
    return values if selection.inside is None else Masked(values, selection.inside)


def write_result(
    tile: NkiTensor, result: np.ndarray | Masked, as_float: bool, skip_out_of_range: bool
) -> Any:
    """Write a result to a view's bytes, rounded once to the dtype of the view; validity is not marked.

    Args:
        tile: The destination.
        result: The values, in any shape of the same size; a Masked writes its chosen elements only.
        as_float: Whether the values are float32 and have to be rounded.
        skip_out_of_range: Whether run-time indices out of range are skipped.

    Returns:
        The elements written: None for all, a bool mask of the view, or element ids in the storage for a run-time
            index.

    Raises:
        RuleViolation: The destination is a read-only array of the caller.
        OutOfBounds: A run-time index is out of range and is not skipped.
    """
    masked = isinstance(result, Masked)
    values = result.values if isinstance(result, Masked) else result
    if values.shape != tile.shape:
        values = values.reshape(tile.shape)
    if as_float:
        values = round_to_dtype(tile, values)
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


def add_to_psum(tile: NkiTensor, product: np.ndarray, accumulate_mask: Any) -> np.ndarray:
    """Return a matmul's product plus the present values of the selected PSUM elements, as float32.

    Args:
        tile: The destination in PSUM.
        product: The product, in any shape of the same size.
        accumulate_mask: The elements to add to: True for all, False for none, or a bool mask of the view.
    """
    if product.shape != tile.shape:
        product = product.reshape(tile.shape)
    if accumulate_mask is False:
        return product
    before = tile.uncounted_float32() if tile.dynamic is None else gather_elements(tile, True, False)
    assert isinstance(before, np.ndarray)
    total = before + product
    return total if accumulate_mask is True else np.where(accumulate_mask, total, product)


def accumulate_product(tile: NkiTensor, product: np.ndarray, accumulate_mask: Any, as_float: bool) -> None:
    """Write a matmul's product to a static view in PSUM; the selected elements are added to instead of overwritten.

    Args:
        tile: The destination.
        product: The product, in any shape of the same size.
        accumulate_mask: The elements to add to: True for all, False for none, or a bool mask of the view.
        as_float: Whether values are float32 and have to be rounded to the destination's dtype.
    """
    if accumulate_mask is True and tile.dtype == "float32":
        array = tile.uncounted_array
        tile.storage.float_views.clear()
        # The sum of a float32 element and a product needs no further rounding, so it is computed in place.
        np.add(array, product if product.shape == array.shape else product.reshape(array.shape), out=array)
    else:
        write_result(tile, add_to_psum(tile, product, accumulate_mask), as_float, False)


def execute_again(plan: Plan, accumulate_mask: Any, states: dict[State, np.ndarray], partitions: int) -> None:
    """Compute the results of a plan that `issue` has checked before, and write them to its tensors, without checks.

    Args:
        plan: The plan, over tensors with bytes; it must have no rendezvous.
        accumulate_mask: PSUM elements to which a matmul's product is added: True for all, False for none, or a mask.
            None for other instructions.
        states: The states of the core, such as random generators, by key; the plan may update them.
        partitions: The number of partitions of the chip.
    """
    operands = read_operands(plan)
    if accumulate_mask is not None:
        tile = plan.writes[0]
        as_float = plan.domain is Domain.float32
        product = plan.compute(*operands)[0]
        if tile.dynamic is None:
            accumulate_product(tile, product, accumulate_mask, as_float)
        else:
            write_result(tile, add_to_psum(tile, product, accumulate_mask), as_float, False)
        return
    if plan.state is not None:
        state = states.get(plan.state)
        if state is None:
            state = plan.state.initial(partitions)
        *results, states[plan.state] = plan.compute(state, *operands)
    else:
        results = plan.compute(*operands)
    write_results(plan, results)


def read_operands(plan: Plan) -> list[Any]:
    """Return the values of a plan's operands in the form that its `compute` takes, without checks.

    They are float32 if the plan computes in float32, else in their storage dtype; gathers may give a Masked.
    """
    as_float = plan.domain is Domain.float32
    return [
        gather_elements(tile, as_float, plan.skip_out_of_range)
        if tile.dynamic is not None
        else tile.uncounted_float32()
        if as_float
        else tile.uncounted_array
        for tile in plan.reads
    ]


def write_results(plan: Plan, results: Sequence[Any]) -> None:
    """Write results into a plan's destinations, in the order of `plan.writes`, rounded once to their dtypes."""
    for tile, result in zip(plan.writes, results):
        write_result(tile, result, plan.domain is Domain.float32, plan.skip_out_of_range)


def view_flat(tile: NkiTensor) -> NkiTensor:
    """Return all bytes of a view's storage as a view of one dim, in the dtype of `tile`."""
    storage = tile.storage
    return NkiTensor.from_storage(
        (storage.nbytes // tile.dtype.storage.itemsize,), tile.dtype, storage, (1,), 0
    )


def _scatter(
    tile: NkiTensor, values: np.ndarray, skip_out_of_range: bool, chosen: np.ndarray | None
) -> np.ndarray:
    """Write values to the elements that a view's run-time index selects, and return their ids in the storage.

    Args:
        tile: The view.
        values: The values, in the view's shape and storage dtype.
        skip_out_of_range: Whether indices out of range are skipped; else they raise OutOfBounds.
        chosen: Mask of the elements to write; None for all.

    Raises:
        RuleViolation: The destination is a read-only array of the caller.
    """
    selection = resolve(tile, skip_out_of_range)
    array = view_flat(tile).uncounted_array
    if not array.flags.writeable:
        raise RuleViolation(input_is_writable, f"a write to {tile.describe()}")
    selected = (
        selection.inside
        if chosen is None
        else chosen
        if selection.inside is None
        else chosen & selection.inside
    )
    if selected is None:
        array[selection.elements] = values
        return selection.elements
    elements = selection.elements[selected]
    array[elements] = values[selected]
    return elements


def round_to_dtype(tile: NkiTensor, values: np.ndarray) -> np.ndarray:
    """Return float32 results rounded once to a view's dtype, as an array of its storage dtype."""
    dtype = tile.dtype
    if values.dtype == dtype.storage and dtype is not tfloat32:
        return values
    return from_float32(values, dtype)


@rule("NKW-READ-ONLY")
def input_is_writable() -> None:
    """An array that a kernel writes to is writable.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """
