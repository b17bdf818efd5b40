"""Functions and rules that max8, nc_find_index8 and nc_match_replace8 share: searches for 8 values per partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.memory import NkiTensor

INDEX_DTYPES = ("uint16", "uint32")


def match_in_slot_order(
    rows: np.ndarray, targets: np.ndarray, slots: Iterable[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (slot, matched, positions) for each slot in turn: where each partition has the slot's target value first.

    `matched` is bool (P,), whether the partition has the value at an element that no slot before took; `positions` is
    the index of that element, and has no meaning where `matched` is False. Comparison is float32 equality: -0 equals 0,
    and NaN equals nothing.

    Args:
        rows: Elements of each partition, (P, elements).
        targets: Values to find, (P, 8); column s belongs to slot s.
        slots: Slots in the order in which they take elements.
    """
    unmatched = rows.copy()
    partitions = np.arange(rows.shape[0])
    for slot in slots:
        matches = unmatched == targets[:, slot : slot + 1]
        first_positions = matches.argmax(axis=1)
        matched = matches[partitions, first_positions]
        unmatched[partitions[matched], first_positions[matched]] = np.nan
        yield slot, matched, first_positions


def get_missing_index(index: NkiTensor) -> np.float32:
    """Return the index that stands for a missing value: the largest integer of the index tile's dtype, as float32.

    For 32 bits it rounds to 2**32, which is 2**32 - 1 after saturation.
    """
    return np.float32(np.iinfo(index.dtype.storage).max)


def check_searched(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """Check the rules of the tile that max8 and nc_find_index8 search; raise RuleViolation if one is broken."""
    rules.check_tile(hardware, operand, tile)
    rules.not_packed(operand, tile)
    searchable(hardware, operand, tile)


@rule("NKW-SEARCH-SIZE", hint="search blocks of the row and combine their results")
def searchable(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """A searched tile has up to three dims and 8 to 16384 elements per partition.

    Raises RuleViolation otherwise.
    """
    low, high = hardware.max8_free_min, hardware.max8_free_max
    if tile.ndim > 3 or not low <= tile.free_size <= high:
        raise RuleViolation(
            searchable,
            f"{operand} of shape {tile.shape}: {tile.ndim} dims, {tile.free_size} elements per partition",
            limit=f"3 dims, {low} to {high} elements",
        )


@rule("NKW-SEARCH-EIGHT", hint="allocate it as (P, 8), P being the partitions of data")
def is_eight_wide(operand: str, tile: NkiTensor, data: NkiTensor) -> None:
    """Values and indices of a search are eight per partition.

    Raises RuleViolation if the tile has not 8 elements per partition, or not as many partitions as data.
    """
    if tile.shape[0] != data.shape[0] or tile.free_size != 8:
        raise RuleViolation(
            is_eight_wide,
            f"{operand} has shape {tile.shape}, data has {data.shape[0]} partitions",
            limit=f"({data.shape[0]}, 8)",
        )


@rule("NKW-SEARCH-MATRIX", hint="allocate it as (P, 8)")
def is_matrix(operand: str, tile: NkiTensor) -> None:
    """The result of a search has two dims, (P, 8).

    Raises RuleViolation otherwise.
    """
    if tile.ndim != 2:
        raise RuleViolation(is_matrix, f"{operand} has shape {tile.shape}")


@rule("NKW-SEARCH-VALUES", hint="reshape it to (P, 8)")
def at_most_three_dims(operand: str, tile: NkiTensor) -> None:
    """The eight values to search for have at most three dims.

    Raises RuleViolation otherwise.
    """
    if tile.ndim > 3:
        raise RuleViolation(at_most_three_dims, f"{operand} has shape {tile.shape}")
