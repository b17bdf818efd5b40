"""Values of a view while a launch runs, as float32 and with run-time addresses resolved.

The observers of this package (`observed_…`) call these functions.
"""

from __future__ import annotations

import math

import numpy as np

from simulate.memory import NkiTensor
from simulate.memory.validity import WRITTEN
from simulate.numerics.quiet import quiet
from simulate.run.execute import view_flat
from simulate.run.indirect import resolve

_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Exponent bits of a 16-bit float, which are all set in infinities and NaN only."""


def has_nonfinite_values(tile: NkiTensor) -> bool:
    """Return whether the dtype of a view can represent NaN or infinities.

    False for integers, for packed elements, and for scales of MX formats (float8_e8m0fnu).
    """
    return tile.dtype.is_float and not tile.dtype.is_packed and tile.dtype != "float8_e8m0fnu"


@quiet
def is_finite(tile: NkiTensor) -> bool:
    """Return whether no element of a view is NaN or infinite; skipped run-time indices count as finite."""
    if tile.dynamic is not None:
        return bool(np.isfinite(read_values(tile)).all())
    array = tile.array
    mask = _EXPONENT.get(str(tile.dtype))
    if mask is not None and array.itemsize == 2:
        return not bool((array.view(np.uint16) & mask == mask).any())
    if array.dtype == np.float32:
        # A sum is finite only if all its terms are; where it overflows, the terms themselves decide.
        return math.isfinite(float(np.add.reduce(array, axis=None))) or bool(np.isfinite(array).all())
    return bool(np.isfinite(array.astype(np.float32)).all())


def resolve_elements(tile: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the element ids that a run-time address selects, and a bool array of the ids that are in range.

    Both have the shape of the view. An id counts the elements of the storage.
    """
    where = resolve(tile, True)
    elements = np.broadcast_to(where.elements, tile.shape)
    inside = np.ones(tile.shape, bool) if where.inside is None else np.broadcast_to(where.inside, tile.shape)
    return elements, inside


def read_values(tile: NkiTensor) -> np.ndarray:
    """Return the elements of a view as float32; zeros where a run-time index is out of range."""
    if tile.dynamic is None:
        return tile.array.astype(np.float32)
    elements, inside = resolve_elements(tile)
    selected = view_flat(tile).array[np.where(inside, elements, 0)].astype(np.float32)
    return np.where(inside, selected, np.float32(0))


def find_defined_elements(tile: NkiTensor) -> np.ndarray:
    """Return a bool array, in the shape of a result, of the elements that were computed from written bytes only.

    All are True for a run-time address.
    """
    if tile.dynamic is not None or tile.storage.validity.uniform is not None:
        return np.ones(tile.shape, bool)
    states = tile.storage.validity.states(*tile.byte_view()[1:])
    return np.broadcast_to(np.bitwise_and(states, WRITTEN) != 0, tile.shape)
