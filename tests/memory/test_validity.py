"""Validity per byte, against a plain array of states."""

from __future__ import annotations

import numpy as np

from simulate.memory.validity import ACCUMULATED, CARRIED, EMPTY, WRITTEN, Validity


def test_random_writes_are_remembered_byte_by_byte() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        rows, columns, itemsize = int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.choice([1, 2, 4]))
        validity = Validity(rows * columns * itemsize, EMPTY)
        states = np.zeros((rows, columns, itemsize), np.uint8)
        for _ in range(8):
            r0, c0 = int(rng.integers(rows)), int(rng.integers(columns))
            r1, c1 = int(rng.integers(r0, rows)) + 1, int(rng.integers(c0, columns)) + 1
            state = int(rng.choice([WRITTEN, ACCUMULATED]))
            shape = (r1 - r0, c1 - c0)
            whole = shape == (rows, columns)
            strides = (columns * itemsize, itemsize)
            offset = (r0 * columns + c0) * itemsize
            validity.mark(state, whole, shape, strides, offset, itemsize)
            states[r0:r1, c0:c1] = state
            everything = (True, (rows, columns), strides, 0, itemsize)
            assert validity.written(*everything) == bool((states != EMPTY).all())
            seen = validity.states(*everything[1:])
            assert np.array_equal(np.broadcast_to(seen, (rows, columns)), states[:, :, 0])


def test_a_half_written_word_is_not_written() -> None:
    validity = Validity(8, EMPTY)
    validity.mark(WRITTEN, False, (1,), (2,), 0, 2)
    assert validity.written(False, (1,), (2,), 0, 2)
    assert not validity.written(False, (1,), (4,), 0, 4)


def test_a_covering_write_drops_the_mask() -> None:
    validity = Validity(8, EMPTY)
    validity.mark(WRITTEN, False, (1,), (4,), 0, 4)
    assert validity.mask is not None
    validity.mark(WRITTEN, True, (2,), (4,), 0, 4)
    assert validity.mask is None and validity.uniform == WRITTEN


def test_only_chosen_elements_become_written() -> None:
    validity = Validity(16, EMPTY)
    validity.mark_where(WRITTEN, np.array([True, False, True, False]), (4,), (4,), 0, 4)
    assert np.array_equal(validity.states((4,), (4,), 0, 4), [WRITTEN, EMPTY, WRITTEN, EMPTY])


def test_an_element_is_no_more_defined_than_its_least_defined_byte() -> None:
    halves = [
        (WRITTEN, WRITTEN, WRITTEN),
        (ACCUMULATED, WRITTEN, WRITTEN),
        (WRITTEN, ACCUMULATED, WRITTEN),
        (CARRIED, WRITTEN, CARRIED),
        (WRITTEN, CARRIED, CARRIED),
        (WRITTEN, EMPTY, EMPTY),
        (EMPTY, CARRIED, EMPTY),
    ]
    validity = Validity(2 * len(halves), EMPTY)
    for element, (low, high, _) in enumerate(halves):
        validity.mark(low, False, (1,), (1,), 2 * element, 1)
        validity.mark(high, False, (1,), (1,), 2 * element + 1, 1)
    states = validity.states((len(halves),), (2,), 0, 2)
    assert list(states) == [expected for _, _, expected in halves]
