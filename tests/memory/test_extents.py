"""Boxes of views, against the set of bytes that each view touches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from simulate.memory.extents import Box, contains, find_boxes, find_rows, join_boxes, meets


def _touched(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, width: int) -> list[int]:
    addresses = [
        offset + sum(i * stride for i, stride in zip(index, strides)) + byte
        for index in itertools.product(*map(range, shape))
        for byte in range(width)
    ]
    return sorted(set(addresses))


def _inside(sizes: tuple[int, ...], box: Box) -> list[int]:
    numbers = np.arange(int(np.prod(sizes))).reshape(sizes)
    return sorted(numbers[tuple(slice(*interval) for interval in box)].ravel().tolist())


def test_slices_permutations_and_reshapes_are_the_boxes_they_touch() -> None:
    rng = np.random.default_rng(5)
    for _ in range(400):
        width = int(rng.choice([1, 2, 4]))
        sizes = tuple(int(n) for n in rng.integers(1, 6, rng.integers(1, 5)))
        array = np.zeros(sizes, f"u{width}")
        slices = []
        for size in sizes:
            first = int(rng.integers(size))
            slices.append(slice(first, int(rng.integers(first, size)) + 1))
        view = array[tuple(slices)]
        order = rng.permutation(view.ndim)
        moved = view.transpose(order)
        offset = view.__array_interface__["data"][0] - array.__array_interface__["data"][0]
        in_bytes = (*sizes[:-1], sizes[-1] * width)
        exact, enclosing = find_boxes(in_bytes, moved.shape, moved.strides, offset, width)
        assert exact is not None and exact == enclosing
        assert _inside(in_bytes, exact) == _touched(moved.shape, moved.strides, offset, width)


def test_a_box_is_exact_only_if_the_view_touches_all_of_it() -> None:
    rng = np.random.default_rng(6)
    exacts = inexact = 0
    for _ in range(3000):
        width = int(rng.choice([1, 2]))
        sizes = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
        in_bytes = (*sizes[:-1], sizes[-1] * width)
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
        strides = tuple(int(n) * width for n in rng.integers(-2, 13, len(shape)))
        offset = int(rng.integers(np.prod(sizes))) * width
        touched = _touched(shape, strides, offset, width)
        exact, enclosing = find_boxes(in_bytes, shape, strides, offset, width)
        if touched[0] < 0 or touched[-1] >= np.prod(in_bytes):
            assert exact is None and enclosing is None
            continue
        assert enclosing is not None and set(touched) <= set(_inside(in_bytes, enclosing))
        if exact is None:
            inexact += 1
        else:
            exacts += 1
            assert _inside(in_bytes, exact) == touched
    assert exacts > 100 and inexact > 100


@pytest.mark.parametrize(
    ("sizes", "shape", "strides", "offset", "width", "box"),
    [
        ((128, 2048), (128, 127), (2048, 4), 0, 4, ((0, 128), (0, 508))),
        ((128, 2048), (128, 128), (2048, 4), 512, 4, ((0, 128), (512, 1024))),
        ((256, 512), (128, 2, 128), (512, 65536, 4), 0, 4, ((0, 256), (0, 512))),  # reshaped and permuted
        ((256, 512), (128, 2, 127), (512, 65536, 4), 4, 4, ((0, 256), (4, 512))),
        ((256, 512), (129, 128), (512, 4), 512 * 127, 4, ((127, 256), (0, 512))),
        ((8, 16), (128,), (1,), 0, 1, ((0, 8), (0, 16))),  # flattened
        ((8, 16), (32,), (1,), 16, 1, ((1, 3), (0, 16))),
        ((8, 16), (32,), (1,), 15, 1, None),  # wraps over the end of a row
        ((8, 16), (4, 16), (32, 1), 0, 1, None),  # every other row
        ((8, 16), (8, 3, 16), (16, 0, 1), 0, 1, ((0, 8), (0, 16))),  # repeated
        ((8, 16), (8, 16), (-16, 1), 112, 1, None),  # upside down: no box is grown backwards
    ],
)
def test_boxes_of_usual_views(sizes, shape, strides, offset, width, box) -> None:
    exact, enclosing = find_boxes(sizes, shape, strides, offset, width)
    assert exact == box
    assert enclosing is not None


def test_rows_by_bytes_enclose_what_a_view_in_hbm_touches() -> None:
    rng = np.random.default_rng(7)
    tight = narrow = 0
    for _ in range(3000):
        width = int(rng.choice([1, 2, 4]))
        rows, row_bytes = int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 8, 12, 16]))
        if row_bytes > width and row_bytes % width:
            continue
        shape = tuple(int(n) for n in rng.integers(1, 4, rng.integers(1, 4)))
        strides = tuple(int(n) for n in rng.integers(0, 9, len(shape)))
        offset = int(rng.integers(rows * row_bytes))
        touched = _touched(shape, tuple(width * stride for stride in strides), offset * width, width)
        if touched[-1] >= rows * row_bytes:
            continue
        first, end, low, high = find_rows(False, row_bytes, width, shape, strides, offset)
        assert 0 <= first < end <= rows and 0 <= low < high <= row_bytes
        assert set(touched) <= set(_inside((rows, row_bytes), ((first, end), (low, high))))
        narrow += row_bytes < width
        tight += len(touched) == (end - first) * (high - low)
    assert tight > 50 and narrow > 20


@pytest.mark.parametrize("on_chip", [True, False])
def test_rows_of_a_view_that_goes_backwards_enclose_it(on_chip: bool) -> None:
    """Four rows of eight elements of four bytes: the last four columns, from the last one back."""
    assert find_rows(on_chip, 32, 4, (4, 4), (8, -1), 7) == (0, 4, 16, 32)
    assert find_rows(on_chip, 32, 4, (4, 4), (8, 1), 4) == (0, 4, 16, 32)


def test_rows_of_views_that_go_back_over_rows_enclose_them() -> None:
    assert find_rows(False, 32, 4, (3, 2), (-8, 1), 17) == (0, 3, 4, 12)
    assert find_rows(False, 32, 4, (12,), (-1,), 19) == (1, 3, 0, 32)
    assert find_rows(False, 4, 8, (3,), (-1,), 2) == (0, 6, 0, 4)


def test_an_empty_view_has_no_box() -> None:
    assert find_boxes((8, 16), (0, 4), (16, 1), 0, 1) == (None, None)


def test_boxes_that_lie_beside_each_other_join() -> None:
    box = ((0, 4), (4, 8))
    assert join_boxes(box, ((0, 4), (8, 9))) == ((0, 4), (4, 9))
    assert join_boxes(((0, 4), (8, 9)), box) == ((0, 4), (4, 9))
    assert join_boxes(box, ((0, 4), (9, 10))) is None
    assert join_boxes(box, ((0, 3), (8, 9))) is None
    assert join_boxes(box, ((4, 5), (4, 8))) == ((0, 5), (4, 8))


def test_boxes_meet_and_contain() -> None:
    box = ((0, 4), (4, 8))
    assert (
        meets(box, ((3, 5), (7, 9))) and not meets(box, ((4, 5), (7, 9))) and not meets(box, ((3, 5), (8, 9)))
    )
    assert contains(box, ((0, 4), (4, 8))) and contains(box, ((1, 2), (5, 6)))
    assert not contains(box, ((0, 4), (3, 8))) and not contains(box, ((0, 5), (4, 8)))
