"""The core scheduler: rendezvous of ranks, deadlocks, disagreements, random schedules, and no thread left behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import simulate
from nkw.errors import Deadlock, RendezvousMismatch, RuleViolation
from simulate.run.scheduler import CoreScheduler

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def reduce_kernel(x, group, op):
    inside = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm, name="inside")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm, name="total")
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=inside, src=x)
    ncc.all_reduce(srcs=[inside], dsts=[total], replica_group=group, op=op)
    nisa.dma_copy(dst=out, src=total)
    return out


def run(kernel, arguments):
    world = simulate.World("trn1", ranks=len(arguments))
    return world.launch(kernel, [(args, {}) for args in arguments]).outputs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_all_reduce_sums_exactly(ranks: int, dtype: type) -> None:
    rng = np.random.default_rng(ranks)
    arrays = [rng.integers(-1000, 1000, (5, 7)).astype(dtype) for _ in range(ranks)]
    group = ncc.ReplicaGroup([list(range(ranks))])
    for out in run(reduce_kernel, [(array, group, nl.add) for array in arrays]):
        assert np.array_equal(out, np.sum(arrays, axis=0))
    for out in run(reduce_kernel, [(array, group, nl.maximum) for array in arrays]):
        assert np.array_equal(out, np.max(arrays, axis=0))


def schedule_of(count: int, seed: int | None) -> list[int]:
    """Return the core that ran at each step, where every core has four steps."""
    scheduler, order = CoreScheduler(count, seed=seed), []

    def body(core: int) -> None:
        for _ in range(4):
            if scheduler.is_random:
                scheduler.preempt(core)
            order.append(core)

    scheduler.run([lambda core=core: body(core) for core in range(count)])
    return order


def test_without_a_seed_every_core_runs_as_long_as_it_can() -> None:
    assert schedule_of(3, None) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_seeds_give_equal_schedules(count: int) -> None:
    drawn = [schedule_of(count, seed) for seed in range(64)]
    assert drawn == [schedule_of(count, seed) for seed in range(64)]
    assert all(sorted(order) == sorted(drawn[0]) for order in drawn)
    if count > 1:
        assert len(set(map(tuple, drawn))) > 32
        assert {order[0] for order in drawn} == set(range(count))


def test_an_error_under_a_random_schedule_ends_every_core() -> None:
    scheduler = CoreScheduler(3, seed=5)

    def body(core: int) -> None:
        for step in range(9):
            scheduler.preempt(core)
            if (core, step) == (1, 4):
                raise KeyError("core 1")

    with pytest.raises(KeyError, match="core 1"):
        scheduler.run([lambda core=core: body(core) for core in range(3)])


def test_groups_are_separate() -> None:
    group = ncc.ReplicaGroup([[0, 2], [1, 3]])
    arrays = [np.full((2, 2), 10.0**rank, np.float32) for rank in range(4)]
    outs = run(reduce_kernel, [(array, group, nl.add) for array in arrays])
    assert [out[0, 0] for out in outs] == [101, 1010, 101, 1010]


def test_gather_and_scatter_follow_the_order_of_the_rank_list() -> None:
    group = ncc.ReplicaGroup([[1, 0]])

    def gather(x, g):
        out = nl.ndarray((4, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        ncc.all_gather(srcs=[x], dsts=[out], replica_group=g, collective_dim=0)
        return out

    def scatter(x, g):
        out = nl.ndarray((2, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        ncc.reduce_scatter(srcs=[x], dsts=[out], replica_group=g, collective_dim=0, op=nl.add)
        return out

    arrays = [np.full((2, 3), rank, np.float32) for rank in range(2)]
    for out in run(gather, [(array, group) for array in arrays]):
        assert out[:, 0].tolist() == [1, 1, 0, 0]
    wholes = [np.arange(12, dtype=np.float32).reshape(4, 3) * (rank + 1) for rank in range(2)]
    outs = run(scatter, [(array, group) for array in wholes])
    total = wholes[0] + wholes[1]
    assert np.array_equal(outs[0], total[2:4]) and np.array_equal(outs[1], total[0:2])


def test_a_deadlock_names_the_rendezvous_of_every_core() -> None:
    def only_rank_0(x, group, rank):
        if rank == 0:
            return reduce_kernel(x, group, nl.add)
        return x

    group = ncc.ReplicaGroup([[0, 1]])
    x = np.ones((2, 2), np.float32)
    with pytest.raises(Deadlock) as refused:
        run(only_rank_0, [(x, group, 0), (x.copy(), group, 1)])
    text = str(refused.value)
    assert "core 0 waits in all_reduce at " in text and "for member 1" in text
    assert "core 1 has ended" in text


def test_a_member_outside_the_world_is_a_deadlock_at_once() -> None:
    with pytest.raises(Deadlock, match="for member 1"):
        run(reduce_kernel, [(np.ones((2, 2), np.float32), ncc.ReplicaGroup([[0, 1]]), nl.add)])


def test_members_that_disagree_are_all_named() -> None:
    group = ncc.ReplicaGroup([[0, 1]])
    x = np.ones((2, 2), np.float32)
    with pytest.raises(RendezvousMismatch) as refused:
        run(reduce_kernel, [(x, group, nl.add), (np.ones((2, 3), np.float32), group, nl.maximum)])
    lines = str(refused.value).splitlines()
    assert lines[0] == "[NKW-RENDEZVOUS] the members of a rendezvous disagree"
    assert lines[1].startswith("  op: member 0 says add (") and lines[2].startswith(
        "  op: member 1 says maximum ("
    )
    assert lines[3].startswith("  srcs: member 0 says [((2, 2), 'float32')] (")


def test_the_first_error_of_any_core_is_the_one_shown() -> None:
    def fails_on_rank_1(x, group, rank):
        if rank == 1:
            raise ValueError("rank 1 fails first")
        return reduce_kernel(x, group, nl.add)

    group = ncc.ReplicaGroup([[0, 1]])
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="rank 1 fails first"):
        run(fails_on_rank_1, [(x, group, 0), (x, group, 1)])


def test_runs_are_deterministic_over_ranks() -> None:
    group = ncc.ReplicaGroup([[0, 1, 2]])
    texts = set()
    for _ in range(5):
        world = simulate.World("trn2", ranks=3)
        arrays = [np.full((2, 2), rank, np.float32) for rank in range(3)]
        done = world.launch(reduce_kernel, [((array, group, nl.add), {}) for array in arrays])
        texts.add("".join(stream.text() for stream in done.streams))
    assert len(texts) == 1


@pytest.mark.parametrize("groups", [[[0, 0]], [[0], [0]], [], [[]], [[-1]], 3])
def test_refuses_malformed_groups(groups: object) -> None:
    with pytest.raises(RuleViolation, match="NKW-GROUP-FORM"):
        ncc.ReplicaGroup(groups)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(RuleViolation, match="rank 0, which calls it, lies outside every group"):
        run(reduce_kernel, [(np.ones((2, 2), np.float32), ncc.ReplicaGroup([[1]]), nl.add)])


def test_dry_launches_complete_rendezvous() -> None:
    group = ncc.ReplicaGroup([[0, 1]])
    x = np.ones((2, 2), np.float32)
    world = simulate.World("trn1", ranks=2)
    done = world.launch(reduce_kernel, [((x, group, nl.add), {})] * 2, mode=simulate.Mode.dry)
    assert [len(stream) for stream in done.streams] == [3, 3]
    assert done.streams[0].rendezvous == done.streams[1].rendezvous == {1: 0}


def barrier_unless(x, skipped):
    """Meet at a barrier with both physical cores of a rank, unless the second one skips it."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=nl.load(x))
    if not (skipped and nl.program_id(0) == 1):
        nisa.core_barrier(out, (0, 1))
    return out


@pytest.mark.parametrize(("skipped", "healthy"), [((False, False), True), ((True, False), False)])
def test_a_barrier_joins_the_cores_of_its_own_rank(skipped: tuple[bool, bool], healthy: bool) -> None:
    world = simulate.World("trn2", ranks=2, logical_core_size=2)
    arguments = [((np.ones((2, 2), np.float32), skips), {}) for skips in skipped]
    if healthy:
        assert all((out == 1).all() for out in world.launch(barrier_unless, arguments).outputs)
    else:
        with pytest.raises(Deadlock, match="core_barrier"):
            world.launch(barrier_unless, arguments)


def test_a_deadlock_of_many_ranks_names_the_missing_member() -> None:
    group = ncc.ReplicaGroup([[0, 1, 2, 3]])

    def kernel(x, skips):
        inside, total = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm) for _ in range(2))
        nisa.dma_copy(dst=inside, src=x)
        if not skips:
            ncc.all_reduce(srcs=[inside], dsts=[total], replica_group=group, op=nl.add)
        return inside

    with pytest.raises(Deadlock) as seen:
        run(kernel, [(np.ones((2, 2), np.float32), rank == 3) for rank in range(4)])
    waits = [line.rpartition(" for ")[2] for line in str(seen.value).splitlines() if " waits in " in line]
    assert waits == ["member 3"] * 3
