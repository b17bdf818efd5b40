"""HBM of the kernel's own in replays: constants and private tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import simulate
from simulate.replay import ReplayOptions
from simulate.world import process_replays

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def launched(kernel: Any, *arguments: Any, exact: bool = False, mode: Any = simulate.Mode.replay) -> Any:
    world = simulate.World("trn2", replay=ReplayOptions(exact=exact), replays=process_replays())
    return world.launch(kernel, [(arguments, {})], mode=mode).outputs[0]


def agrees(kernel: Any, *arguments: Any) -> None:
    """Launch a kernel six times on other data, exact and rewritten in alternation."""
    for step in range(6):
        x = np.full((4, 4), step, np.float32) + np.arange(4, dtype=np.float32)[:, None]
        wanted = launched(kernel, x.copy(), *arguments, mode=simulate.Mode.eager)
        assert np.array_equal(launched(kernel, x.copy(), *arguments, exact=step in (2, 3, 5)), wanted)


def stored(tile):
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def sum_with(x, constant):
    tile = nl.load(x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(constant), op=nl.add)
    return tile


def table():
    return nl.shared_constant(np.arange(16, dtype=np.float32).reshape(4, 4))


def adds_a_constant(x):
    return stored(sum_with(x, table()))


def gathers_by_a_constant(x):
    index = nl.load(nl.shared_constant(np.array([[1], [0], [3], [2]], np.int32)))
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(dst=tile, src=x.ap([[4, 4], [1, 4]], vector_offset=index))
    return stored(tile)


def goes_through_hbm(x):
    inside = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=inside, src=nl.load(x))
    return stored(sum_with(x, inside))


def gathers_from_hbm(x):
    """Gather from a tensor that a rewritten program keeps in its own memory; exact replays go on with its bytes."""
    inside = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=inside[0:2], src=x[2:4])
    nisa.dma_copy(dst=inside[2:4], src=nl.load(x[0:2]))
    index = nl.load(nl.shared_constant(np.array([[1], [0], [3], [2]], np.int32)))
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(dst=tile, src=inside.ap([[4, 4], [1, 4]], vector_offset=index))
    nisa.dma_copy(dst=inside.ap([[4, 4], [1, 4]], vector_offset=index), src=nl.load(x))
    return stored(tile), stored(nl.load(inside))[0:4]


@pytest.mark.parametrize("kernel", [adds_a_constant, gathers_by_a_constant, goes_through_hbm])
def test_memory_of_a_kernels_own_is_replayed(cache, kernel) -> None:
    agrees(kernel)
    assert (cache.report.hits, cache.report.rewritten) == (5, 1)


def test_memory_of_a_kernels_own_with_run_time_addresses_is_replayed(cache) -> None:
    agrees(lambda x: gathers_from_hbm(x)[0])
    agrees(lambda x: gathers_from_hbm(x)[1])
    assert cache.report.hits == 10


def writes_to_a_constant(x):
    constant = table()
    tile = sum_with(x, constant)
    nisa.dma_copy(dst=constant, src=tile)
    return stored(tile)


def returns_a_constant(x):
    return table()


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(writes_to_a_constant, "a constant is written"), (returns_a_constant, "a constant is returned")],
)
def test_kernels_whose_constants_change_are_launched_eagerly(cache, kernel, reason) -> None:
    agrees(kernel)
    assert cache.report.refusals == {reason: 6}


def test_a_constant_in_a_file_is_read_at_every_launch(cache, tmp_path) -> None:
    path = str(tmp_path / "constant.npy")

    def kernel(x):
        return stored(sum_with(x, nl.shared_constant(path)))

    for step in range(3):
        np.save(path, np.full((4, 4), step, np.float32))
        assert np.array_equal(launched(kernel, np.ones((4, 4), np.float32)), np.full((4, 4), 1 + step))
    assert cache.report.refusals == {"a constant is read from a file": 3}
