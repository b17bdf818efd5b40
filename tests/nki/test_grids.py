"""Grids of tiles and blocks: coordinates against slices of numpy, boundaries, on-chip allocations, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate import nki
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import recorded


def _array(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def _inside(use, *arrays: np.ndarray, level: str = "0.7"):
    """Return what `use` returns inside a kernel."""
    from simulate.world import launch

    seen = []

    def kernel(*tensors):
        seen.append(use(*tensors))
        return tensors[0]

    launch(kernel, [(arrays, {})], level=level)
    return seen[0]


def test_the_documented_grid() -> None:
    def use(x):
        grid = nl.tiles(x, tile_shape=(128, 256))
        properties = (
            grid.shape,
            grid.tile_shape,
            grid.element_shape,
            grid.index_step_elements,
            grid.is_remainder,
        )
        views = [
            (g.shape, g.element_shape, g.data.shape)
            for g in (grid[1, 2], grid[1, :], grid[:, 2], grid[1:3, 0:2])
        ]
        return properties, views, grid.dtype, grid.buffer, type(grid[0, 0])

    properties, views, dtype, buffer, grid_type = _inside(use, _array(512, 1024))
    assert properties == ((4, 4), (128, 256), (512, 1024), (128, 256), False)
    assert views == [
        ((), (128, 256), (128, 256)),
        ((4,), (128, 1024), (128, 1024)),
        ((4,), (512, 256), (512, 256)),
        ((2, 2), (256, 512), (256, 512)),
    ]
    assert (str(dtype), buffer, grid_type) == ("float32", nl.private_hbm, nl.NkiTileGrid)


@nki.jit
def copy_by_tiles(x, tile_shape):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    sources, targets = nl.tiles(x, tile_shape=tile_shape), nl.tiles(out, tile_shape=tile_shape)
    for index in itertools.product(*map(range, sources.shape)):
        tile = nl.ndarray(sources[index].element_shape, x.dtype)
        nisa.dma_copy(dst=tile.data, src=sources[index].data)
        nisa.dma_copy(dst=targets[index].data, src=tile)
    return out


@nki.jit
def copy_by_blocks(x, tile_shape, block_shape):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    sources = nl.blocks(x, tile_shape=tile_shape, block_shape=block_shape)
    targets = nl.blocks(nl.tiles(out, tile_shape=tile_shape), block_shape=block_shape)
    assert sources.block_shape == targets.block_shape == block_shape
    for index in itertools.product(*map(range, sources.shape)):
        inner = nl.tiles(sources[index])
        for within in itertools.product(*map(range, inner.shape)):
            tile = nl.load(inner[within].data)
            nisa.dma_copy(dst=nl.tiles(targets[index])[within].data, src=tile)
    return out


@nki.jit
def copy_through_the_chip(x, tile_shape, block_shape):
    """Fill an on-chip grid tile by tile, and store what lies side by side in one DMA."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    sources, targets = nl.tiles(x, tile_shape=tile_shape), nl.tiles(out, tile_shape=tile_shape)
    kept = nl.alloc_tiles(tile_shape=tile_shape, element_shape=x.shape, buffer=nl.sbuf, dtype=x.dtype)
    assert (kept.shape, kept.element_shape) == (sources.shape, x.shape)
    for index in itertools.product(*map(range, sources.shape)):
        nisa.dma_copy(dst=kept[index].data, src=sources[index].data)
    for row in itertools.product(*map(range, kept.shape[:-1])):
        nisa.dma_copy(dst=targets[row].data, src=kept[row].data)
    return out


SHAPES = [(512, 1024), (127, 300), (128, 256), (129, 257), (1, 1), (255, 511)]


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_by_coordinate_give_the_whole_tensor(shape: tuple[int, int]) -> None:
    x = _array(*shape)
    np.testing.assert_array_equal(copy_by_tiles(x, (128, 256)), x)
    np.testing.assert_array_equal(copy_by_blocks(x, (128, 128), (2, 3)), x)
    np.testing.assert_array_equal(copy_through_the_chip(x, (128, 256), None), x)


def test_dims_before_the_tile_are_indexed_slab_by_slab() -> None:
    x = _array(3, 130, 70)
    np.testing.assert_array_equal(copy_by_tiles(x, (128, 64)), x)
    np.testing.assert_array_equal(copy_through_the_chip(x, (128, 64), None), x)

    def use(x):
        grid = nl.tiles(x, tile_shape=(128, 64))
        return grid.shape, grid[2, 1, 1].element_shape, grid[2].element_shape, grid[0, 1, 1].is_remainder

    assert _inside(use, x) == ((3, 2, 2), (2, 6), (130, 70), True)


def test_tiles_of_three_dims() -> None:
    x = _array(130, 5, 70)
    np.testing.assert_array_equal(copy_by_tiles(x, (128, 2, 64)), x)

    def use(x):
        kept = nl.alloc_tiles(tile_shape=(128, 2, 64), element_shape=x.shape, buffer=nl.sbuf, dtype=x.dtype)
        return kept.shape, kept[0, 2, 1].data.shape, kept[0, :, 0].is_data_representable

    assert _inside(use, x) == ((2, 3, 2), (128, 1, 6), False)


def test_an_on_chip_grid_is_one_allocation_with_room_for_whole_tiles() -> None:
    @nki.jit
    def kernel(x):
        grid = nl.alloc_blocks(
            tile_shape=(128, 256),
            block_shape=(1, 2),
            element_shape=(130, 1000),
            buffer=nl.sbuf,
            dtype=nl.bfloat16,
            name="grid",
        )
        assert (grid.shape, grid.block_shape, grid[1, 1].element_shape) == ((2, 2), (1, 2), (2, 488))
        offsets = [grid_tile.data.offset for grid_tile in (nl.tiles(grid)[0, 1], nl.tiles(grid)[1, 0])]
        assert offsets == [256, 4 * 256]
        nisa.memset(dst=grid[1, 1].data, value=1.0)
        return x

    with recorded() as launches:
        kernel(_array(1, 1))
    (record,) = [tensor for tensor in launches[0].streams[0].tensors if tensor.name == "grid"]
    assert record.row_bytes == 2 * 4 * 256 * 2


def test_grids_issue_nothing_and_data_may_not_be_representable() -> None:
    with recorded() as launches:

        def use(x):
            grid = nl.alloc_tiles(
                tile_shape=(128, 8), element_shape=(256, 16), buffer=nl.psum, dtype=nl.float32
            )
            assert grid[0].is_data_representable and not grid[:, 0].is_data_representable
            with pytest.raises(RuleViolation, match="NKW-GRID-DATA"):
                _ = grid.data
            return nl.blocks(grid, block_shape=(2, 1))[0, 1].element_shape

        assert _inside(use, _array(1, 1)) == (256, 8)
    assert len(launches[0].streams[0]) == 0


REFUSED = [
    (TypeError, lambda x: nl.tiles(x, tile_shape=[128, 8])),
    (TypeError, lambda x: nl.tiles(x, tile_shape=(128, np.int64(8)))),
    (TypeError, lambda x: nl.tiles(x, tile_shape=(128, True))),
    (TypeError, lambda x: nl.tiles(np.ones((4, 4)), tile_shape=(2, 2))),
    (ValueError, lambda x: nl.tiles(x)),
    (ValueError, lambda x: nl.tiles(x, tile_shape=(128,))),
    (ValueError, lambda x: nl.tiles(x, tile_shape=(1, 128, 8))),
    (ValueError, lambda x: nl.tiles(x, tile_shape=(0, 8))),
    (ValueError, lambda x: nl.blocks(x, tile_shape=(2, 2), block_shape=(2,))),
    (ValueError, lambda x: nl.blocks(x, tile_shape=(2, 2), block_shape=(0, 1))),
    (IndexError, lambda x: nl.tiles(x, tile_shape=(2, 2))[2, 0]),
    (IndexError, lambda x: nl.tiles(x, tile_shape=(2, 2))[-1, 0]),
    (IndexError, lambda x: nl.tiles(x, tile_shape=(2, 2))[0, 0:3]),
    (IndexError, lambda x: nl.tiles(x, tile_shape=(2, 2))[0, 0, 0]),
    (IndexError, lambda x: nl.tiles(x, tile_shape=(2, 2))[0, ::2]),
    (
        TypeError,
        lambda x: nl.alloc_tiles(tile_shape=(2, 2), element_shape=(4, 4), buffer="sbuf", dtype=nl.float32),
    ),
    (
        AssertionError,
        lambda x: nl.alloc_tiles(
            tile_shape=(129, 2), element_shape=(129, 2), buffer=nl.sbuf, dtype=nl.float32
        ),
    ),
    (
        ValueError,
        lambda x: nl.tiles(
            nl.alloc_tiles(tile_shape=(2, 2), element_shape=(4, 4), buffer=nl.sbuf, dtype=nl.float32),
            tile_shape=(4, 4),
        ),
    ),
]


@pytest.mark.parametrize(("error", "use"), REFUSED)
def test_what_is_no_grid_is_refused(error: type[Exception], use) -> None:
    with pytest.raises(error):
        _inside(use, _array(4, 4))
    assert _inside(lambda x: nl.tiles(x, tile_shape=(2, 2))[1, 1].data.shape, _array(4, 4)) == (2, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: nl.tiles(x, tile_shape=(2, 2)),
        lambda x: nl.blocks(x, tile_shape=(2, 2), block_shape=(1, 1)),
        lambda x: nl.alloc_tiles(tile_shape=(2, 2), element_shape=(4, 4), buffer=nl.sbuf, dtype=nl.float32),
        lambda x: nl.alloc_blocks(
            tile_shape=(2, 2), block_shape=(1, 1), element_shape=(4, 4), buffer=nl.sbuf, dtype=nl.float32
        ),
    ],
)
def test_grids_exist_from_0_7_on(use) -> None:
    assert _inside(use, _array(4, 4)).shape == (2, 2)
    with pytest.raises(RuleViolation, match=r"nl\.\w+ exists from level 0.7 on; NKI_LEVEL is 0.6"):
        _inside(use, _array(4, 4), level="0.6")
