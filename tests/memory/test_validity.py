"""Validity per byte, against a plain array of states."""

from __future__ import annotations

import numpy as np

from simulate.memory.validity import ACCUMULATED, EMPTY, POISON, WRITTEN, Validity


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
            covers_all = shape == (rows, columns)
            strides = (columns * itemsize, itemsize)
            offset = (r0 * columns + c0) * itemsize
            validity.mark(state, covers_all, shape, strides, offset, itemsize)
            states[r0:r1, c0:c1] = state
            everything = (True, (rows, columns), strides, 0, itemsize)
            assert validity.written(*everything) == bool((states != EMPTY).all())
            seen = validity.states(*everything[1:])
            assert np.array_equal(np.broadcast_to(seen, (rows, columns)), states[:, :, 0])


def test_random_boxes_are_remembered_byte_by_byte() -> None:
    """Boxes until a mask must tell, and the mask after that, give the states that a plain array has."""
    rng = np.random.default_rng(4)
    known = unknown = masked = 0
    for _ in range(400):
        sizes = tuple(int(n) for n in rng.integers(1, 7, 3))
        start = int(rng.choice([EMPTY, WRITTEN]))
        validity = Validity(int(np.prod(sizes)), start, sizes)
        states = np.full(sizes, start, np.uint8)
        for _ in range(10):
            box = _box(rng, sizes)
            index = tuple(slice(*interval) for interval in box)
            state = int(rng.choice([WRITTEN, ACCUMULATED]))
            if not validity.mark_box(state, box):
                masked += 1
                view = states[index]
                validity.mark(state, False, view.shape, view.strides, _offset(states, view), 1)
            states[index] = state
            for queried in (_box(rng, sizes), tuple((0, size) for size in sizes)):
                expected = states[tuple(slice(*interval) for interval in queried)]
                state_within = validity.state_within(queried)
                if state_within is None:
                    unknown += 1
                else:
                    known += 1
                    assert (expected == state_within).all()
            if validity.uniform is not None:
                assert (states == validity.uniform).all()
        if validity.mask is not None:
            assert np.array_equal(validity.mask.reshape(sizes), states)
    assert min(known, unknown, masked) > 100


def _box(rng: np.random.Generator, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    box = []
    for size in sizes:
        first = int(rng.integers(size))
        box.append((first, int(rng.integers(first, size)) + 1))
    return tuple(box)


def _offset(array: np.ndarray, view: np.ndarray) -> int:
    return view.__array_interface__["data"][0] - array.__array_interface__["data"][0]


def test_parts_that_cover_everything_become_one_state() -> None:
    for step in (1, 3, 64):
        validity = Validity(128 * 64, EMPTY, (128, 64))
        for row in range(0, 128, 64):
            for first in range(0, 64, step):
                assert validity.uniform is None or (row, first) == (0, 0)
                assert validity.mark_box(WRITTEN, ((row, row + 64), (first, min(64, first + step))))
        assert validity.uniform == WRITTEN and validity.mask is None


def test_one_byte_that_is_missing_keeps_the_parts_apart() -> None:
    validity = Validity(128 * 64, EMPTY, (128, 64))
    assert validity.mark_box(WRITTEN, ((0, 128), (0, 63)))
    assert validity.mark_box(WRITTEN, ((0, 127), (63, 64)))
    assert validity.uniform is None
    assert validity.state_within(((127, 128), (63, 64))) == EMPTY
    assert validity.state_within(((0, 128), (0, 63))) == WRITTEN
    assert not validity.written(True, (128, 64), (64, 1), 0, 1)


def test_many_parts_that_do_not_touch_end_in_a_mask() -> None:
    validity = Validity(128 * 64, EMPTY, (128, 64))
    boxes = [((row, row + 1), (0, 64)) for row in range(0, 128, 2)]
    marked = [validity.mark_box(WRITTEN, box) for box in boxes]
    assert all(marked[:32]) and not any(marked[32:])
    validity.mark(WRITTEN, False, (1, 64), (64, 1), 64 * 64, 1)
    assert validity.mask is not None and validity.mask.sum() == 33 * 64


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
        (POISON, WRITTEN, POISON),
        (WRITTEN, POISON, POISON),
        (WRITTEN, EMPTY, EMPTY),
        (EMPTY, POISON, EMPTY),
    ]
    validity = Validity(2 * len(halves), EMPTY)
    for element, (low, high, _) in enumerate(halves):
        validity.mark(low, False, (1,), (1,), 2 * element, 1)
        validity.mark(high, False, (1,), (1,), 2 * element + 1, 1)
    states = validity.states((len(halves),), (2,), 0, 2)
    assert list(states) == [expected for _, _, expected in halves]
