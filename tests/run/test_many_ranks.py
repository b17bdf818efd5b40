"""All collectives over worlds of 1 to 32 ranks and lists of every form, against loops over positions in numpy."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import simulate
from nkw.errors import Deadlock

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

Groups = list[list[int]]
COLUMNS = 3
PART = 2
"""Rows of a rank's chunk."""


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def forms(ranks: int) -> dict[str, Groups]:
    """Return the groups of each form over a world of `ranks` ranks: whole, reversed, blocks, columns, and so on."""
    # A rank that is in none of a form's groups takes no part.
    everyone = list(range(ranks))
    half = max(1, ranks // 2)
    shuffled = [int(rank) for rank in np.random.default_rng(ranks).permutation(ranks)]
    lists_by_form = {
        "whole": [everyone],
        "reversed": [everyone[::-1]],
        "blocks": [everyone[:half], everyone[half : 2 * half]],
        "columns": [everyone[0::2], everyone[1::2]],
        "alone": [[rank] for rank in everyone],
        "uneven": [shuffled[: ranks // 4], shuffled[ranks // 4 : ranks // 3], shuffled[ranks // 3 :]],
        "some": [shuffled[: ranks // 3], shuffled[ranks // 3 : half]],
        "fours": [shuffled[first : first + 4] for first in range(0, ranks - 3, 4)],
    }
    return {
        form: kept
        for form, lists in lists_by_form.items()
        if (kept := [members for members in lists if members])
    }


def private(source: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Return a private HBM tensor: a copy of `source`, or of `shape` and filled with -1 in its dtype."""
    inner = nl.ndarray(shape or source.shape, dtype=source.dtype, buffer=nl.private_hbm)
    filled = source if shape is None else nl.full((1, math.prod(shape)), -1, source.dtype)
    nisa.dma_copy(dst=inner, src=filled)
    return inner


def everything(x: Any, metadata: Any, group: Any, pairs: Any, size: int, iterations: int) -> Any:
    """Issue every collective once over this rank's list of `size` ranks; x is (PART * size, COLUMNS) int32."""
    if size == 0:
        return (x,)
    rows = PART * size
    local, first_rows = private(x), private(x[0:PART])
    dst = [private(x, (rows, COLUMNS)) for _ in range(4)]
    gathered = private(x, (rows * size, COLUMNS))
    ncc.all_reduce([local], [dst[0]], group, nl.add)
    ncc.all_reduce([local], [dst[1]], group, nl.minimum)
    ncc.all_gather([local], [gathered], group, 0)
    chunk, moved = private(x, (PART, COLUMNS)), private(x, (PART, COLUMNS))
    ncc.reduce_scatter([local], [chunk], group, 0, nl.maximum)
    ncc.all_to_all([local], [dst[2]], group, 0)
    ncc.collective_permute([first_rows], [moved], pairs)
    ring, sums = private(x, (rows, COLUMNS)), private(x, (PART, COLUMNS))
    ncc.collective_permute_implicit([[local], [first_rows]], [[ring], [sums]], group, [0, 1])
    ncc.collective_permute_implicit_reduce([[local]], [[ring]], [[dst[3]]], group, nl.add)
    table = private(metadata)
    slots = private(x, (rows, COLUMNS))
    ncc.all_to_all_v([local], [slots], group, table)
    all_slots = private(x, (rows, COLUMNS))
    if size == 4:
        ncc.all_gather_v([local], [all_slots], group, private(metadata))
    wide = nl.ndarray((PART, COLUMNS * size), dtype=x.dtype)
    ncc.all_gather([nl.load(first_rows)], [wide], group, 1)
    numbers = nl.ndarray((1, 1 + iterations), dtype=nl.int32, buffer=nl.shared_hbm)
    nisa.register_store(numbers[:, 0:1], ncc.rank_id())
    for i in range(iterations):
        who = ncc.collective_permute_implicit_current_processing_rank_id(i, group)
        nisa.register_store(numbers[:, 1 + i : 2 + i], who)
    results = (*dst, gathered, chunk, moved, ring, sums, slots, table, all_slots)
    return (*(shared(tensor) for tensor in results), shared(wide), numbers)


def shared(source: Any) -> Any:
    """Return a result of the kernel."""
    out = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=source)
    return out


def data_of(groups: Groups, ranks: int, seed: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Return every member's x, and its counts and displacements for each rank of its list."""
    random = np.random.default_rng(seed)
    data, tables = {}, {}
    for group in groups:
        for rank in group:
            size = len(group)
            data[rank] = random.integers(-1000, 1000, (PART * size, COLUMNS)).astype(np.int32)
            counts = random.integers(0, PART * COLUMNS + 1, size)
            starts = random.integers(0, PART * COLUMNS * size - counts + 1)
            tables[rank] = np.array([counts, starts, np.full(size, 77)], np.uint32)
    return data, tables


def expected(
    rank: int,
    group: list[int],
    source: dict[int, int],
    data: dict[int, np.ndarray],
    tables: dict[int, np.ndarray],
) -> list[np.ndarray]:
    """Return what `everything` gives a rank; `source` tells from which rank the permutation moves to it."""
    size, position = len(group), group.index(rank)
    before = group[position - 1]
    second = group[position - 2] if size > 1 else rank
    sums = sum(data[member].astype(np.int64) for member in group).astype(np.int32)
    least, most = data[rank].copy(), data[rank].copy()
    for member in group:
        least, most = (
            np.where(data[member] < least, data[member], least),
            np.where(data[member] > most, data[member], most),
        )
    exchanged = [data[member][PART * position : PART * (position + 1)] for member in group]
    permuted = data[source[rank]][:PART] if rank in source else np.full((PART, COLUMNS), -1)
    slots, all_slots = (np.full(PART * COLUMNS * size, -1, np.int32) for _ in range(2))
    table = tables[rank].copy()
    for slot, sender in enumerate(group):
        flat, first = data[sender].reshape(-1), slot * PART * COLUMNS
        count, start = (int(tables[sender][row, position]) for row in (0, 1))
        slots[first : first + count] = flat[start : start + count]
        table[2, slot] = count
        count, start = (int(tables[sender][row, 0]) for row in (0, 1))
        if size == 4:
            all_slots[first : first + count] = flat[start : start + count]
    wide = np.full((PART, COLUMNS * size), 0, np.int32)
    for slot, member in enumerate(group):
        wide[:, COLUMNS * slot : COLUMNS * (slot + 1)] = data[member][:PART]
    steps = [group[(position - i) % size] for i in range(3)]
    shape = data[rank].shape
    return [
        sums,
        least,
        np.concatenate(exchanged),
        data[before] + data[second],  # what the predecessor joined: its own data and what it had been sent
        np.concatenate([data[member] for member in group]),
        most[PART * position : PART * (position + 1)],
        permuted,
        data[before],
        data[before][:PART],
        slots.reshape(shape),
        table,
        all_slots.reshape(shape),
        wide,
        np.array([[rank, *steps]]),
    ]


def check(ranks: int, groups: Groups) -> None:
    """Launch `everything` over the lists and compare every member's results."""
    data, tables = data_of(groups, ranks, seed=ranks)
    list_of = {rank: group for group in groups for rank in group}
    # Along each list two places on, and the last of each list to nobody.
    pairs = [(group[i], group[(i + 2) % len(group)]) for group in groups for i in range(len(group) - 1)]
    pairs = pairs or [(groups[0][0], groups[0][0])]
    source = {target: sender for sender, target in pairs}
    group = ncc.ReplicaGroup(groups)
    nothing = np.zeros((1, 1), np.int32)
    inputs = [
        (data.get(rank, nothing), tables.get(rank, nothing), group, pairs, len(list_of.get(rank, ())), 3)
        for rank in range(ranks)
    ]
    world = simulate.World("trn2", ranks=ranks)
    outputs = world.launch(everything, [(arguments, {}) for arguments in inputs]).outputs
    for rank, seen in enumerate(outputs):
        if rank not in list_of:
            assert np.array_equal(seen[0], nothing)
            continue
        wanted = expected(rank, list_of[rank], source, data, tables)
        assert len(seen) == len(wanted)
        for number, (one, other) in enumerate(zip(seen, wanted)):
            assert np.array_equal(one, other), (rank, number, one, other)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 33))
def test_every_rank_gets_what_the_loops_give(ranks: int) -> None:
    lists = forms(ranks)
    for form in lists if ranks in (*range(1, 10), 16, 32) else ("uneven", "some"):
        check(ranks, lists[form])


def by_core(x: Any, group: Any, pairs: Any, skips: int) -> Any:
    """Move and sum x[core] on each core, twice on core 1; `skips` is the core that leaves the last sum out."""
    core, rows = nl.program_id(0), x.shape[1]
    out = nl.ndarray((2, 3, rows, COLUMNS), dtype=x.dtype, buffer=nl.shared_hbm)
    local = private(x[core])
    total, moved, around = (private(local, (rows, COLUMNS)) for _ in range(3))
    ncc.collective_permute([local], [moved], pairs)
    ncc.collective_permute_implicit([[local]], [[around]], group)
    ncc.all_reduce([local], [total], group, nl.add)
    if core == 1 and skips != 1:
        ncc.all_reduce([private(total)], [total], group, nl.add)
    for index, result in enumerate((total, moved, around)):
        nisa.dma_copy(dst=out[core, index], src=result)
    nisa.core_barrier(out, cores=(0, 1))
    return out


def launch_two_cores(groups: Groups, skipping: dict[int, int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return what every rank gave `by_core` and got; `skipping` names the core of a rank that leaves a sum out."""
    ranks = 1 + max(rank for group in groups for rank in group)
    data = [
        np.random.default_rng(rank).integers(-99, 99, (2, 2, COLUMNS)).astype(np.int32)
        for rank in range(ranks)
    ]
    pairs = [(group[i], group[i - 1]) for group in groups for i in range(len(group))]
    group = ncc.ReplicaGroup(groups)
    world = simulate.World("trn2", ranks=ranks, logical_core_size=2)
    inputs = [((data[rank], group, pairs, skipping.get(rank, 0)), {}) for rank in range(ranks)]
    return data, world.launch(by_core, inputs).outputs


@pytest.mark.parametrize("groups", [[[0]], [[0, 1]], [[2, 0, 1]], [[0, 3], [2, 1, 4]]], ids=str)
def test_collectives_of_two_core_ranks_join_cores_of_equal_number(groups: Groups) -> None:
    data, outputs = launch_two_cores(groups, {})
    for group in groups:
        for position, rank in enumerate(group):
            for core in (0, 1):
                total = sum(data[member][core] for member in group)
                seen = outputs[rank][core]
                assert np.array_equal(seen[0], total * (len(group) if core else 1))
                assert np.array_equal(seen[1], data[group[(position + 1) % len(group)]][core])
                assert np.array_equal(seen[2], data[group[position - 1]][core])


def test_a_core_that_leaves_a_collective_out_is_named() -> None:
    with pytest.raises(Deadlock) as caught:
        launch_two_cores([[0, 1]], {1: 1})
    waits = [line.split() for line in str(caught.value).splitlines() if " waits in " in line]
    assert [(line[1], line[4]) for line in waits] == [("0", "core_barrier"), ("1", "all_reduce")]
    _, outputs = launch_two_cores([[0, 1]], {0: 1, 1: 1})  # left out by both ranks alike
    assert len(outputs) == 2


def test_31_of_32_ranks_wait_for_the_last_and_no_thread_is_left() -> None:
    def kernel(x: Any, comes: bool) -> Any:
        local = private(x)
        if comes:
            ncc.all_reduce([local], [private(x)], ncc.ReplicaGroup([list(range(32))]), nl.add)
        return shared(local)

    x = np.ones((2, 2), np.float32)
    world = simulate.World("trn2", ranks=32)
    with pytest.raises(Deadlock) as caught:
        world.launch(kernel, [((x, rank != 20), {}) for rank in range(32)])
    waits = [line for line in str(caught.value).splitlines() if " waits in all_reduce at " in line]
    assert len(waits) == 31 and all(line.endswith(" for member 20") for line in waits)
    assert len(world.launch(kernel, [((x, True), {})] * 32).outputs) == 32
