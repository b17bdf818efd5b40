"""What the strategies draw fits the chip, reaches its borders, and is a view that numpy agrees with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import simulate
import simulate.numerics
from simulate.memory import MemoryRegion
from simulate.run import current_core
from simulate.run.machine import capacity_bytes
from simulate.testing.strategies import dtypes, partitions, tile_shapes, tiles, views

EXAMPLES = settings(max_examples=50, deadline=None, derandomize=True, database=None)
TARGETS = ("trn1", "inf2", "trn2", "trn3")


@pytest.mark.parametrize("buffer", [MemoryRegion.sbuf, MemoryRegion.psum])
@pytest.mark.parametrize("target", TARGETS)
def test_tiles_of_drawn_shapes_can_be_allocated(target: str, buffer: MemoryRegion) -> None:
    @EXAMPLES
    @given(tile_shapes("float32", target, buffer, most_free=2**20))
    def allocates(shape: tuple[int, int]) -> None:
        def kernel() -> None:
            current_core().allocate(shape, "float32", buffer)

        simulate.World(target).launch(kernel, [((), {})], simulate.Mode.dry)

    allocates()


@pytest.mark.parametrize("target", TARGETS)
def test_borders_are_drawn(target: str) -> None:
    chip = simulate.hardware(target)
    most_columns = capacity_bytes(chip, MemoryRegion.sbuf) // 2
    drawn: list[tuple[int, int]] = []

    @settings(EXAMPLES, max_examples=400)
    @given(tile_shapes("bfloat16", target, most_free=2**20))
    def collect(shape: tuple[int, int]) -> None:
        drawn.append(shape)

    collect()
    rows, columns = ({shape[dim] for shape in drawn} for dim in (0, 1))
    assert {1, 63, 64, 65, chip.partitions - 1, chip.partitions} <= rows
    assert {1, 127, 128, 129, most_columns - 1, most_columns} <= columns
    assert max(rows) == chip.partitions and max(columns) == most_columns


def test_partitions_end_where_asked_for() -> None:
    assert find(partitions(most=5), lambda count: count == 5) == 5

    @EXAMPLES
    @given(partitions(most=5))
    def stays(count: int) -> None:
        assert 1 <= count <= 5

    stays()


def test_arrays_have_the_dtype_and_stay_in_range() -> None:
    @EXAMPLES
    @given(st.data(), dtypes())
    def right(data: st.DataObject, dtype: str) -> None:
        array = data.draw(tiles((3, 4), dtype, largest=5.0))
        assert array.shape == (3, 4)
        assert array.dtype == simulate.numerics.as_dtype(dtype).storage
        assert np.abs(array.astype(np.float64)).max() <= 5.0

    right()


def test_whole_numbers_are_whole() -> None:
    @EXAMPLES
    @given(tiles((3, 4), integral=True))
    def check_integral(array: np.ndarray) -> None:
        assert np.array_equal(array, np.round(array))

    check_integral()


def test_views_hold_something_and_keep_the_partitions_together() -> None:
    @EXAMPLES
    @given(views((7, 9, 4)))
    def holds(index: tuple[slice, ...]) -> None:
        assert np.empty((7, 9, 4))[index].size > 0
        assert index[0].step == 1

    holds()


def test_a_tile_and_a_host_array_have_the_same_views() -> None:
    import nki.isa as nisa
    import nki.language as nl

    def kernel(x, index):
        view = nl.load(x)[index]
        out = nl.ndarray(view.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=view)
        return out

    @EXAMPLES
    @given(tiles((6, 10)), views((6, 10)))
    def agree(x: np.ndarray, index: tuple[slice, ...]) -> None:
        (out,) = simulate.launch(kernel, [((x, index), {})]).outputs
        assert np.array_equal(out, x[index])

    agree()


def test_the_old_name_of_integral_warns_and_other_names_are_refused() -> None:
    with pytest.warns(DeprecationWarning, match="write integral="):
        array = find(tiles((3, 4), whole=True), lambda array: array.any())
    assert (array == np.round(array)).all()
    with pytest.raises(TypeError, match="tiles has no argument 'wide'"):
        find(tiles((3, 4), wide=True), lambda array: True)
