"""The elements of tiles: views of one value move as tables of their numbers do under numpy."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.numerics.dtypes import float32
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import NotFused, ValueKind, View
from simulate.replay.fusion.provenance import Cells, as_view, pieces, table_of
from simulate.replay.fusion.tracing import Traced, Untraceable


@pytest.fixture
def builder() -> Builder:
    made = Builder()
    for shape in ((5,), (4, 6, 10), (3, 1)):
        made.value(ValueKind.buffer, shape, float32)
    return made


@pytest.fixture
def cells(builder) -> Cells:
    return Cells(View.whole(builder.values[1]))


KEYS = [
    0,
    -1,
    ...,
    None,
    slice(1, 3),
    slice(None, None, -1),
    slice(-2, None, 2),
    (1, 2),
    (1, 2, 3),
    (..., 4),
    (slice(None), None, 1),
    (None, ..., slice(2, 9, 3)),
    (3, ..., -1),
    (slice(3, 1),),  # no elements
    ([0, 2], 1),  # numpy's own, on a table
    (True, 0),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_parts_are_those_that_numpy_takes(cells, key) -> None:
    assert np.array_equal(cells[key].table(), cells.table()[key])


@pytest.mark.parametrize("key", [4, -5, (0, 0, 0, 0), (..., ...)], ids=str)
def test_keys_that_numpy_refuses_are_refused(cells, key) -> None:
    with pytest.raises(IndexError):
        cells[key]


@pytest.mark.parametrize("shape", [(240,), (2, 2, 60), (4, -1), (24, 10, 1), (-1,), (8, 30), (40, 6)])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_reshapes_after_transposes(cells, shape, order) -> None:
    moved, table = cells.transpose(order), cells.table().transpose(order)
    assert np.array_equal(moved.reshape(shape).table(), table.reshape(shape))
    assert np.array_equal(moved.reshape(*shape).table(), table.reshape(*shape))


@pytest.mark.parametrize("shape", [(241,), (-1, -1), (0, -1)])
def test_a_reshape_to_another_size_is_refused(cells, shape) -> None:
    with pytest.raises(ValueError, match=r"reshape|unknown dimension"):
        cells.reshape(shape)


def test_transposes_as_numpy_writes_them(cells) -> None:
    table = cells.table()
    for axes in ((), (None,), ((2, 0, 1),), (2, 0, 1), (-1, 0, 1)):
        assert np.array_equal(cells.transpose(*axes).table(), table.transpose(*axes))


@pytest.mark.parametrize("shape", [(4, 6, 10), (2, 4, 6, 10), (4, 6, 7)])
def test_broadcasts_as_numpy_does(cells, shape) -> None:
    column = cells[:, :, 2:3]
    assert np.array_equal(column.broadcast_to(shape).table(), np.broadcast_to(column.table(), shape))


@pytest.mark.parametrize("shape", [(5, 6, 10), (6, 10)])
def test_a_broadcast_that_does_not_fit_is_refused(cells, shape) -> None:
    with pytest.raises(ValueError, match=r"broadcast|dimensions"):
        cells.broadcast_to(shape)


@pytest.mark.parametrize("seed", range(30))
def test_any_chain_of_moves(builder, cells, seed) -> None:
    """Each move of the view is made by numpy on the table as well; at the end the view is found in the table again."""
    generator = np.random.default_rng(seed)
    table = cells.table()
    for _ in range(6):
        dim = int(generator.integers(cells.ndim))
        move = generator.integers(3)
        if move == 0:
            order = tuple(int(d) for d in generator.permutation(cells.ndim))
            cells, table = cells.transpose(order), table.transpose(order)
        elif move == 1 and table.shape[dim] % 2 == 0:
            sizes = (*table.shape[:dim], 2, -1, *table.shape[dim + 1 :])
            cells, table = cells.reshape(sizes), table.reshape(sizes)
        else:
            first = int(generator.integers(table.shape[dim]))
            key = (*[slice(None)] * dim, slice(first, None, int(generator.integers(1, 3))))
            cells, table = cells[key], table[key]
        assert cells.view is not None
        assert np.array_equal(cells.table(), table)
    assert as_view(Cells(table), builder.values) == as_view(cells, builder.values)


def test_an_assignment_makes_a_table(builder, cells) -> None:
    table, other = cells.table(), Cells(View.whole(builder.values[0]))
    cells[1, 2, 5:] = other
    table[1, 2, 5:] = table_of(View.whole(builder.values[0]))
    assert cells.view is None
    assert np.array_equal(cells.table(), table)
    assert {view.value.number for _, view in pieces(cells, builder.values)} == {0, 1}


@pytest.mark.parametrize("of", ["the whole", "the part"])
def test_an_assignment_that_another_view_would_show_is_not_followed(builder, cells, of) -> None:
    tile = Traced(builder, cells, float32)
    part = tile[0]
    with pytest.raises(Untraceable, match="other views"):
        (tile if of == "the whole" else part)[...] = 1.0
    own = tile.copy()
    own[0][...] = 1.0  # numpy shows it in `own`, and so does its table
    assert len(pieces(own.cells, builder.values)) == 2
    assert as_view(tile.cells, builder.values) == View.whole(builder.values[1])


def test_elements_that_nothing_wrote_are_no_operand(builder, cells) -> None:
    table = cells.table()
    assert as_view(Cells(table.copy()), builder.values) == cells.view
    table[0, 0, 0] = -1
    with pytest.raises(NotFused, match="in part"):
        as_view(Cells(table), builder.values)
