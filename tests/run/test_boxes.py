"""Which boxes of a stream overlap: what comparing each with each says, in any number of pieces."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.run import boxes


def each_with_each(table: np.ndarray) -> list[set[tuple[int, bool]]]:
    """Return overlaps and covers of boxes (tensor, first row, end row, first byte, end byte), by sets of places."""
    element_sets = [
        {(tensor, row, byte) for row in range(top, end) for byte in range(left, right)}
        for tensor, top, end, left, right in table.tolist()
    ]
    return [
        {
            (other, other_elements <= elements)
            for other, other_elements in enumerate(element_sets)
            if other != one and elements & other_elements
        }
        for one, elements in enumerate(element_sets)
    ]


@pytest.mark.parametrize("at_once", [1, 2, 17, 1 << 18])
def test_overlaps_are_those_of_comparing_each_with_each(at_once: int) -> None:
    random = np.random.default_rng(at_once)
    seen = 0
    for _ in range(60):
        count, tensors, reach = (int(random.integers(1, most)) for most in (30, 5, 7))
        first = random.integers(0, 8, (count, 2))
        end = first + random.integers(1, 1 + reach, (count, 2))
        owner = random.integers(0, tensors, count) * 3
        table = np.unique(np.column_stack([owner, first[:, 0], end[:, 0], first[:, 1], end[:, 1]]), axis=0)
        overlaps = boxes.find_overlaps(table, at_once)
        assert [set(neighbours) for neighbours in overlaps] == each_with_each(table)
        assert all(len(set(neighbours)) == len(neighbours) for neighbours in overlaps)
        seen += sum(map(len, overlaps))
    assert seen > 1000


def test_no_boxes_have_no_neighbours() -> None:
    assert boxes.find_overlaps(np.zeros((0, 5), np.int64)) == []
    assert [list(neighbours) for neighbours in boxes.find_overlaps(np.array([[4, 0, 1, 0, 1]]))] == [[]]
