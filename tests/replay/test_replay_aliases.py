"""Arrays that overlap in the host's memory: a replay reads and writes them as an eager launch does."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import simulate
from simulate.replay import ReplayOptions
from simulate.replay.verify import copy_arrays
from simulate.world import process_replays

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

ROWS, COLUMNS = 16, 8
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint8, ml_dtypes.float8_e5m2, np.int8)


def random_kernel(seed: int, group: Any) -> Any:
    """Return a kernel of drawn loads, stores, copies in HBM and rendezvous; it returns arguments, views and results."""

    def kernel(*arguments):
        draw = np.random.default_rng(seed)
        dtype = arguments[0].dtype
        out, inside = (
            nl.ndarray((ROWS, COLUMNS), dtype=dtype, buffer=buffer)
            for buffer in (nl.shared_hbm, nl.private_hbm)
        )
        tiles = [nl.load(argument) for argument in arguments]
        nisa.dma_copy(dst=inside, src=tiles[0])
        nisa.dma_copy(dst=out, src=tiles[-1])
        tensors = [*arguments, inside, out]
        for _ in range(18):
            one, other = (tiles[i] for i in draw.integers(0, len(tiles), 2))
            target, source = (tensors[i] for i in draw.integers(0, len(tensors), 2))
            first, top = int(draw.integers(0, COLUMNS - 1)), int(draw.integers(0, ROWS - 1))
            columns = slice(first, int(draw.integers(first + 1, COLUMNS + 1)))
            rows = slice(top, int(draw.integers(top + 1, ROWS + 1)))
            low, mirrored = slice(0, rows.stop - top), slice(ROWS - rows.stop, ROWS - top)
            choice = draw.integers(0, 8)
            if choice == 0:
                nisa.dma_copy(dst=target[rows, columns], src=one[low, columns])
            elif choice == 1:
                nisa.dma_copy(dst=one[low, columns], src=target[rows, columns])
            elif choice == 2:
                tile = one[:, columns]
                nisa.tensor_tensor(dst=tile, data1=tile, data2=other[:, columns], op=nl.add)
            elif choice == 3:
                nisa.tensor_scalar(dst=one[:, columns], data=other[:, columns], op0=nl.minimum, operand0=3.0)
            elif choice == 4:
                nisa.tensor_copy(dst=one[:, columns], src=other[:, columns])
            elif choice == 5:
                nisa.dma_copy(dst=target[:, columns], src=source[:, columns])
            elif choice == 6:
                nisa.dma_copy(dst=target[rows, columns], src=source[mirrored, columns])
            elif group is not None:
                mine, largest = (nl.ndarray((ROWS, COLUMNS), dtype=dtype, buffer=nl.hbm) for _ in range(2))
                nisa.dma_copy(dst=mine, src=target)
                ncc.all_reduce(srcs=[mine], dsts=[largest], replica_group=group, op=nl.maximum)
                nisa.dma_copy(dst=one, src=largest)
        return [out, (out, out, arguments[0]), (arguments[-1], out[0:4]), {"a": arguments[0], "o": out}][
            int(draw.integers(0, 4))
        ]

    return kernel


def laid_out(seed: int, step: int, ranks: int, dtype: Any) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
    """Draw a pool, and every rank's two arrays in it: at random offsets, overlapping, apart, or one array twice."""
    draw = np.random.default_rng((seed, step))
    size, how = ROWS * COLUMNS, draw.integers(0, 4)
    pool = draw.integers(0, 4, 4 * size).astype(dtype)
    rank_arrays = []
    for _ in range(ranks):
        starts = draw.integers(0, 2 * size, 2) if how == 0 else size * draw.integers(0, 2, 2)
        arrays = [pool[start : start + size].reshape(ROWS, COLUMNS) for start in starts]
        if how == 2:
            arrays = [draw.permutation(array.reshape(-1)).reshape(ROWS, COLUMNS) for array in arrays]
        rank_arrays.append((arrays[0], arrays[0] if how == 3 else arrays[1]))
    return pool, rank_arrays


def all_bytes(value: Any) -> list[bytes]:
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    return [
        content
        for member in (value.values() if isinstance(value, dict) else value)
        for content in all_bytes(member)
    ]


@pytest.mark.parametrize("seed", range(28))
def test_random_kernels_on_overlapping_arrays_give_eagers_bytes(cache, seed) -> None:
    ranks, dtype = (1, 1, 2, 3)[seed % 4], DTYPES[seed % len(DTYPES)]
    kernel = random_kernel(seed, ncc.ReplicaGroup([list(range(ranks))]) if ranks > 1 else None)
    for step in range(6):
        options = ReplayOptions(exact=step in (2, 4), verify=step in (3, 4))
        world, seen = simulate.World("trn2", ranks=ranks, replay=options, replays=process_replays()), []
        for mode in (simulate.Mode.eager, simulate.Mode.replay):
            pool, rank_arrays = laid_out(seed, step % 4, ranks, dtype)
            launch = world.launch(kernel, [(arrays, {}) for arrays in rank_arrays], mode=mode)
            seen.append((all_bytes(launch.outputs), all_bytes(rank_arrays), pool.tobytes()))
        assert seen[0] == seen[1]
    reasons = cache.report.refusals
    assert set(reasons) <= ({"ranks share memory that one of them writes"} if ranks > 1 else set())
    assert cache.report.hits + cache.report.recorded + sum(reasons.values()) == 6


def writes_between_rendezvous(x, y, group):
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm)
    mine = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm)
    nisa.dma_copy(dst=mine, src=x)
    ncc.all_reduce(srcs=[mine], dsts=[total], replica_group=group, op=nl.add)
    tile = nl.load(x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(total), op=nl.add)
    nisa.dma_copy(dst=y, src=tile)
    return y


@pytest.mark.parametrize("written", [False, True])
def test_ranks_that_write_to_each_others_memory_are_launched_eagerly(cache, written) -> None:
    """Arrays that all ranks only read, as an embedding, are no reason."""
    group, world = ncc.ReplicaGroup([[0, 1]]), simulate.World("trn2", ranks=2, replays=process_replays())
    seen = []
    for mode in (simulate.Mode.eager, *3 * [simulate.Mode.replay]):
        x, apart = np.ones((4, 4), np.float32), np.zeros((2, 4, 4), np.float32)
        launches = [((x, x if written else apart[rank], group), {}) for rank in range(2)]
        outputs = world.launch(writes_between_rendezvous, launches, mode=mode).outputs
        seen.append([output.tobytes() for output in outputs])
    assert seen == 4 * [seen[0]]
    reasons = {"ranks share memory that one of them writes": 2} if written else {}
    assert (cache.report.refusals, cache.report.hits) == (reasons, 0 if written else 2)


def test_copies_lie_over_each_other_as_their_arrays_do() -> None:
    pool = np.arange(40, dtype=np.float32)
    one, two, three, apart = pool[0:8], pool[6:12], pool[12:16], np.ones(3, np.int8)
    (first, second, third), (again, alone) = copy_arrays([[one, two, three], [one, apart]])
    assert again is first
    assert np.may_share_memory(first, second) and first[6] == second[0] == 6.0
    assert not np.may_share_memory(second, third) and not np.may_share_memory(first, one)
    assert np.array_equal(third, three) and np.array_equal(alone, apart) and alone.dtype == np.int8
    assert np.array_equal(first, one)
