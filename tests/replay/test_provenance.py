"""Provenance: views of one value change as numpy changes arrays of their element ids."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.numerics.dtypes import float32
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import NotFused, ValueLocation, View
from simulate.replay.fusion.provenance import Provenance, as_view, compute_element_ids, split_into_boxes
from simulate.replay.fusion.tracing import Tracer, Untraceable


@pytest.fixture
def builder() -> Builder:
    made = Builder()
    for shape in ((5,), (4, 6, 10), (3, 1)):
        made.add_value(ValueLocation.buffer, shape, float32)
    return made


@pytest.fixture
def provenance(builder) -> Provenance:
    return Provenance(View.full(builder.values[1]))


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
    ([0, 2], 1),  # numpy's own, on a ids
    (True, 0),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing_follows_numpy(provenance, key) -> None:
    assert np.array_equal(provenance[key].get_element_ids(), provenance.get_element_ids()[key])


@pytest.mark.parametrize("key", [4, -5, (0, 0, 0, 0), (..., ...)], ids=str)
def test_keys_that_numpy_refuses_are_refused(provenance, key) -> None:
    with pytest.raises(IndexError):
        provenance[key]


@pytest.mark.parametrize("shape", [(240,), (2, 2, 60), (4, -1), (24, 10, 1), (-1,), (8, 30), (40, 6)])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_reshapes_after_transposes(provenance, shape, order) -> None:
    moved, ids = provenance.transpose(order), provenance.get_element_ids().transpose(order)
    assert np.array_equal(moved.reshape(shape).get_element_ids(), ids.reshape(shape))
    assert np.array_equal(moved.reshape(*shape).get_element_ids(), ids.reshape(*shape))


@pytest.mark.parametrize("shape", [(241,), (-1, -1), (0, -1)])
def test_a_reshape_to_another_size_is_refused(provenance, shape) -> None:
    with pytest.raises(ValueError, match=r"reshape|unknown dimension"):
        provenance.reshape(shape)


def test_transposes_as_numpy_writes_them(provenance) -> None:
    ids = provenance.get_element_ids()
    for axes in ((), (None,), ((2, 0, 1),), (2, 0, 1), (-1, 0, 1)):
        assert np.array_equal(provenance.transpose(*axes).get_element_ids(), ids.transpose(*axes))


@pytest.mark.parametrize("shape", [(4, 6, 10), (2, 4, 6, 10), (4, 6, 7)])
def test_broadcasts_as_numpy_does(provenance, shape) -> None:
    column = provenance[:, :, 2:3]
    assert np.array_equal(
        column.broadcast_to(shape).get_element_ids(), np.broadcast_to(column.get_element_ids(), shape)
    )


@pytest.mark.parametrize("shape", [(5, 6, 10), (6, 10)])
def test_a_broadcast_that_does_not_fit_is_refused(provenance, shape) -> None:
    with pytest.raises(ValueError, match=r"broadcast|dimensions"):
        provenance.broadcast_to(shape)


@pytest.mark.parametrize("seed", range(30))
def test_any_chain_of_views(builder, provenance, seed) -> None:
    """Apply each step to the ids with NumPy as well; at the end the view is found in the ids again."""
    generator = np.random.default_rng(seed)
    ids = provenance.get_element_ids()
    for _ in range(6):
        dim = int(generator.integers(provenance.ndim))
        move = generator.integers(3)
        if move == 0:
            order = tuple(int(d) for d in generator.permutation(provenance.ndim))
            provenance, ids = provenance.transpose(order), ids.transpose(order)
        elif move == 1 and ids.shape[dim] % 2 == 0:
            sizes = (*ids.shape[:dim], 2, -1, *ids.shape[dim + 1 :])
            provenance, ids = provenance.reshape(sizes), ids.reshape(sizes)
        else:
            first = int(generator.integers(ids.shape[dim]))
            key = (*[slice(None)] * dim, slice(first, None, int(generator.integers(1, 3))))
            provenance, ids = provenance[key], ids[key]
        assert provenance.view is not None
        assert np.array_equal(provenance.get_element_ids(), ids)
    assert as_view(Provenance(ids), builder.values) == as_view(provenance, builder.values)


def test_an_assignment_makes_element_ids(builder, provenance) -> None:
    ids, other = provenance.get_element_ids(), Provenance(View.full(builder.values[0]))
    provenance[1, 2, 5:] = other
    ids[1, 2, 5:] = compute_element_ids(View.full(builder.values[0]))
    assert provenance.view is None
    assert np.array_equal(provenance.get_element_ids(), ids)
    assert {view.value.number for _, view in split_into_boxes(provenance, builder.values)} == {0, 1}


@pytest.mark.parametrize("target", ["the whole", "the part"])
def test_an_assignment_to_aliased_elements_is_not_traced(builder, provenance, target) -> None:
    tile = Tracer(builder, provenance, float32)
    view = tile[0]
    with pytest.raises(Untraceable, match="another view aliases"):
        (tile if target == "the whole" else view)[...] = 1.0
    copied = tile.copy()
    copied[0][...] = 1.0  # numpy shows it in `copied`, and so does its ids
    assert len(split_into_boxes(copied.provenance, builder.values)) == 2
    assert as_view(tile.provenance, builder.values) == View.full(builder.values[1])


def test_an_operand_with_unwritten_elements_is_refused(builder, provenance) -> None:
    ids = provenance.get_element_ids()
    assert as_view(Provenance(ids.copy()), builder.values) == provenance.view
    ids[0, 0, 0] = -1
    with pytest.raises(NotFused, match="that no instruction wrote"):
        as_view(Provenance(ids), builder.values)
