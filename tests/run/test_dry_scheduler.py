"""Dry launches run their ranks without threads; streams and errors are those of the eager launch, which has threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import simulate
from nkw.errors import Deadlock, RendezvousMismatch

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

PAIRS, CROSSED, ALL = [[0, 1], [2, 3]], [[1, 2], [3, 0]], [[0, 1, 2, 3]]


def sums(x: Any, lists: list[list[list[int]]], rank: int, fails: tuple[int, int, int]) -> Any:
    """Sum repeatedly over the given lists of ranks; `fails`: a rank, after how many sums, which error."""
    local, total = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm) for _ in range(2))
    nisa.dma_copy(dst=local, src=x)
    failing, after, error = fails
    for number, groups in enumerate(lists):
        op = nl.add
        if (rank, number) == (failing, after):
            if error == 0:
                raise ValueError(f"rank {rank} after {number} sums")
            if error == 1:
                break
            op = nl.maximum
        ncc.all_reduce(srcs=[local], dsts=[total], replica_group=ncc.ReplicaGroup(groups), op=op)
        for _ in range(rank):
            nisa.dma_copy(dst=local, src=total)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=local)
    return out


def streams_of(mode: simulate.Mode, lists: Any, fails: tuple[int, int, int] = (-1, 0, 0), **more: Any) -> Any:
    world = simulate.World("trn2", ranks=4)
    x = np.ones((2, 2), np.float32)
    done = world.launch(sums, [((x, lists, rank, fails), more) for rank in range(4)], mode=mode)
    return [(stream.resumed, stream.rendezvous, stream.text()) for stream in done.streams]


def error_of(mode: simulate.Mode, lists: Any, fails: tuple[int, int, int]) -> tuple[type, str]:
    with pytest.raises((ValueError, Deadlock, RendezvousMismatch)) as caught:
        streams_of(mode, lists, fails)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("lists", [[], [ALL], [PAIRS, CROSSED], [CROSSED, ALL, PAIRS], [PAIRS] * 3], ids=str)
def test_a_dry_launch_records_the_schedule_of_the_eager_one(lists: list[list[list[int]]]) -> None:
    assert streams_of(simulate.Mode.dry, lists) == streams_of(simulate.Mode.eager, lists)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize(("error", "error_type"), [(0, ValueError), (1, Deadlock), (2, RendezvousMismatch)])
def test_a_dry_launch_shows_the_error_of_the_eager_one(
    rank: int, after: int, error: int, error_type: type[Exception]
) -> None:
    lists, fails = [PAIRS, CROSSED, ALL], (rank, after, error)
    seen = error_of(simulate.Mode.dry, lists, fails)
    assert seen == error_of(simulate.Mode.eager, lists, fails)
    assert seen[0] is error_type


def failing(x: Any, rank: int, early: int, late: int) -> Any:
    """Fail on rank `early` before the ranks meet, and on rank `late` afterwards."""
    local, total = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm) for _ in range(2))
    nisa.dma_copy(dst=local, src=x)
    if rank == early:
        raise KeyError(f"early {rank}")
    ncc.all_reduce(srcs=[local], dsts=[total], replica_group=ncc.ReplicaGroup(ALL), op=nl.add)
    if rank >= late:
        raise StopIteration(f"late {rank}")
    return x


@pytest.mark.parametrize(
    ("early", "late", "shown"), [(2, 0, "early 2"), (4, 0, "late 3"), (4, 3, "late 3"), (4, 4, None)]
)
def test_an_error_behind_a_rendezvous_comes_after_those_before_it(
    early: int, late: int, shown: str | None
) -> None:
    arguments = [((np.ones((2, 2), np.float32), rank, early, late), {}) for rank in range(4)]
    for mode in (simulate.Mode.eager, simulate.Mode.dry):
        world = simulate.World("trn2", ranks=4)
        if shown is None:
            assert len(world.launch(failing, arguments, mode=mode).streams) == 4
            continue
        with pytest.raises((KeyError, StopIteration), match=shown):
            world.launch(failing, arguments, mode=mode)


def threads_of(mode: simulate.Mode, ranks: int, size: int) -> int:
    """Return in how many threads the kernel's Python ran."""
    seen = set()

    def kernel(x: Any) -> Any:
        seen.add(threading.get_ident())
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=out, src=x)
        if size == 2:
            nisa.core_barrier(out, (0, 1))
            tile = nl.load(out)  # core 1 reads what core 0 has written
            nisa.tensor_copy(dst=tile, src=tile)
        return out

    world = simulate.World("trn2", ranks=ranks, logical_core_size=size)
    world.launch(kernel, [((np.ones((2, 2), np.float32),), {})] * ranks, mode=mode)
    return len(seen)


def test_only_cores_that_share_no_memory_run_without_threads() -> None:
    assert threads_of(simulate.Mode.dry, 3, 1) == 1
    assert threads_of(simulate.Mode.eager, 3, 1) == 3
    assert threads_of(simulate.Mode.dry, 2, 2) == 4
