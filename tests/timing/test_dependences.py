"""Which events wait for which."""

from __future__ import annotations

import pytest

from simulate.isa.enums import Engine
from simulate.isa.plan import State
from simulate.memory import MemoryRegion
from simulate.timing import Wait, dependences
from tests.timing.streams import Builder, box, dma_cost, random_streams


def waits(build: Builder) -> list[list[tuple[int, Wait]]]:
    graph = dependences(build.stream)
    return [sorted(graph.list_waits(event)) for event in range(len(build.stream))]


def test_the_last_writer_and_the_reads_since_it_count() -> None:
    build = Builder()
    a, b = build.tensor("a"), build.tensor("b")
    build.event(Engine.vector, writes=(a,))
    build.event(Engine.scalar, writes=(a,))
    build.event(Engine.tensor, reads=(a,), writes=(b,))
    build.event(Engine.gpsimd, reads=(a,))
    build.event(Engine.vector, writes=(a,))
    assert waits(build) == [
        [],
        [(0, Wait.result)],
        [(1, Wait.result)],
        [(1, Wait.result)],
        [(1, Wait.result), (2, Wait.read), (3, Wait.read)],
    ]


def test_of_several_reads_of_one_engine_the_last_counts_and_of_dmas_every_one() -> None:
    build = Builder()
    a = build.tensor("a")
    for _ in range(2):
        build.event(Engine.tensor, reads=(a,))
        build.dma((a,), (), dma_cost(1.0), Engine.sync)
    build.event(Engine.vector, writes=(a,))
    assert waits(build)[-1] == [(1, Wait.read), (2, Wait.read), (3, Wait.read)]


def test_an_instruction_in_place_waits_for_nothing_of_its_own() -> None:
    build = Builder()
    a = build.tensor("a")
    build.event(Engine.vector, reads=(a,), writes=(a,))
    build.event(Engine.vector, reads=(a,), writes=(a,))
    assert waits(build) == [[], [(0, Wait.result), (0, Wait.read), (0, Wait.issue)]]


def test_writes_of_one_engine_keep_their_order_by_issue() -> None:
    build = Builder()
    a = build.tensor("a")
    build.event(Engine.tensor, writes=(a,))
    build.event(Engine.tensor, writes=(a,), accumulate=True)
    build.event(Engine.vector, writes=(a,))
    build.event(Engine.tensor, writes=(a,), accumulate=True)
    build.dma((), (a,), dma_cost(1.0), Engine.sync)
    build.dma((), (a,), dma_cost(1.0), Engine.sync)
    assert waits(build) == [
        [],
        [(0, Wait.issue)],
        [(1, Wait.result)],
        [(2, Wait.result)],
        [(3, Wait.result)],
        [(4, Wait.result)],
    ]


def test_uses_of_an_engines_registers_keep_their_order() -> None:
    build = Builder()
    for state in (State.vector_lfsr, State.vector_accumulator, None, State.vector_lfsr, State.vector_lfsr):
        build.event(Engine.vector, state=state)
    assert waits(build) == [[], [], [], [(0, Wait.issue)], [(3, Wait.issue)]]


@pytest.mark.parametrize(
    ("rows", "columns", "meets"),
    [
        ((0, 4), (0, 4), False),
        ((0, 5), (0, 4), False),
        ((0, 4), (0, 5), False),
        ((0, 5), (0, 5), True),
        ((4, 8), (4, 8), True),
        ((7, 9), (7, 9), True),
        ((8, 9), (7, 9), False),
        ((7, 9), (8, 9), False),
    ],
)
@pytest.mark.parametrize("divided", ["rows", "bytes"])
def test_boxes_meet_where_rows_and_bytes_do(
    rows: tuple[int, int], columns: tuple[int, int], meets: bool, divided: str
) -> None:
    build = Builder()
    a = build.tensor("a", 16, 16)
    build.event(Engine.vector, writes=(box(a, (4, 8), (4, 8)),))
    build.event(Engine.scalar, reads=(box(a, rows, columns),))
    for start in (9, 10, 11):  # boxes are compared along the side that divides the tensor more
        apart = (start, start + 1)
        build.event(
            Engine.gpsimd, reads=(box(a, *((apart, (9, 12)) if divided == "rows" else ((9, 12), apart))),)
        )
    assert waits(build) == [[], [(0, Wait.result)] if meets else [], [], [], []]


def test_a_write_hides_only_what_it_covers() -> None:
    build = Builder()
    a = build.tensor("a", 16, 16)
    build.event(Engine.vector, writes=(a,))
    build.event(Engine.scalar, writes=(box(a, (0, 8), (0, 16)),))
    build.event(Engine.tensor, reads=(a,))
    build.event(Engine.tensor, reads=(box(a, (0, 8), (0, 8)),))
    build.event(Engine.gpsimd, writes=(a,))
    build.event(Engine.tensor, reads=(box(a, (0, 8), (0, 16)),))
    waits_by_event = waits(build)
    assert waits_by_event[2] == [(0, Wait.result), (1, Wait.result)]
    assert waits_by_event[5] == [(4, Wait.result)]


def test_cores_of_a_rank_meet_in_shared_memory_only() -> None:
    first = Builder(rank=0, core=0)
    second = Builder(rank=0, core=1, table=first.table)
    other = Builder(rank=1)
    shared = first.tensor("shared", buffer=MemoryRegion.shared_hbm)
    elsewhere = other.tensor("elsewhere", buffer=MemoryRegion.shared_hbm)
    assert shared.storage.serial == elsewhere.storage.serial
    first.dma((), (shared,), dma_cost(1.0), Engine.sync)
    second.dma((shared,), (), dma_cost(1.0), Engine.sync)
    other.dma((elsewhere,), (), dma_cost(1.0), Engine.sync)
    graph = dependences([first.stream, second.stream, other.stream])
    assert [list(graph.list_waits(event)) for event in range(3)] == [[], [(0, Wait.result)], []]


def test_cores_take_turns_in_the_order_of_their_numbers_between_rendezvous() -> None:
    first = Builder(core=0)
    cores = [first, *(Builder(core=core, table=first.table) for core in (1, 2))]
    shared = first.tensor("shared", buffer=MemoryRegion.shared_hbm)
    for rendezvous in (0, 1):
        for build in cores:
            build.dma((), (shared,), dma_cost(1.0), Engine.sync)
            build.event(Engine.sync, rendezvous=rendezvous)
    graph = dependences([build.stream for build in cores])
    writes = [graph.bases[core] + event for event, core in ((0, 0), (0, 1), (0, 2), (2, 2), (2, 0), (2, 1))]
    assert [list(graph.list_waits(write)) for write in writes] == [
        [],
        *([(before, Wait.result)] for before in writes[:-1]),
    ]


def test_the_members_of_a_rendezvous_do_not_wait_for_each_other() -> None:
    first = Builder(rank=0, core=0)
    second = Builder(rank=0, core=1, table=first.table)
    shared = first.tensor("shared", buffer=MemoryRegion.shared_hbm)
    first.event(Engine.sync, writes=(shared,), rendezvous=0)
    second.event(Engine.sync, reads=(shared,), rendezvous=0)
    second.dma((shared,), (), dma_cost(1.0), Engine.sync)
    graph = dependences([first.stream, second.stream])
    assert [list(graph.list_waits(event)) for event in range(3)] == [[], [], [(0, Wait.result)]]


def test_values_and_cost_have_no_influence() -> None:
    (stream,) = random_streams(5)
    cheap = stream.with_costs([stream.costs[0]] * len(stream.costs))
    original, same = dependences(cheap), dependences(stream)
    assert original.packed.tolist() == same.packed.tolist() and original.ends.tolist() == same.ends.tolist()
