"""Cleared accumulators: a memset of zero in PSUM takes no time where matmuls take over what it cleared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulate.hardware import hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.profile.gaps import find_gaps
from simulate.profile.moments import Moments
from simulate.run import Mode
from simulate.timing import Reading, schedule, write_trace
from simulate.world import launch
from tests.isa.tiles import plan, tile
from tests.timing.checker import violations
from tests.timing.streams import EXACT, Builder, box

CLEAR = Cost(100.0, 150.0, clears=True)
MATMUL = Cost(64.0, 128.0)
COPY = Cost(80.0, 90.0)


class Bank:
    """A PSUM tile of 128 x 64 bytes, cleared by the Vector engine as the first event."""

    def __init__(self, cost: Cost = CLEAR, buffer: MemoryRegion = MemoryRegion.psum) -> None:
        self.build = Builder()
        self.operand = self.build.tensor("operand")
        self.bank = self.build.tensor("bank", buffer=buffer)
        self.build.event(Engine.vector, writes=(self.bank,), cost=cost)

    def matmul(self, columns: tuple[int, int] = (0, 64), rows: tuple[int, int] = (0, 128)) -> Bank:
        """Issue a matmul that accumulates onto a part of the bank."""
        accumulator = box(self.bank, rows, columns)
        self.build.event(Engine.tensor, (self.operand,), (accumulator,), MATMUL, accumulate=True)
        return self

    def copied(self, columns: tuple[int, int] = (0, 64)) -> Bank:
        """Read a part of the bank by the Scalar engine."""
        out = self.build.tensor("out")
        self.build.event(Engine.scalar, (box(self.bank, (0, 128), columns),), (out,), COPY)
        return self

    def held_ns(self, event: int = 0) -> float:
        """Return how long an event, the memset unless told, holds its engine; the same in every reading."""
        lengths = set()
        for reading in Reading:
            timeline = schedule(self.build.stream, EXACT, reading)
            assert violations((self.build.stream,), EXACT, timeline) == []
            (piece,) = (candidate for candidate in timeline.slices() if candidate.event == event)
            lengths.add(piece.end_ns - piece.start_ns)
        (only,) = lengths
        return only


def test_a_memset_that_a_matmul_takes_over_takes_no_time() -> None:
    bank = Bank().matmul().copied()
    assert bank.held_ns() == 0.0
    timeline = schedule(bank.build.stream, EXACT)
    assert timeline.start_ns.tolist() == [0.0, 0.0, 128.0 + EXACT.semaphore_ns]
    assert timeline.busy_ns["Vector"] == 0.0


@pytest.mark.parametrize(
    ("cost", "buffer"),
    [(replace(CLEAR, clears=False), MemoryRegion.psum), (CLEAR, MemoryRegion.sbuf)],
    ids=["other values", "in SBUF"],
)
def test_another_memset_takes_its_time(cost: Cost, buffer: MemoryRegion) -> None:
    assert Bank(cost, buffer).matmul().copied().held_ns() == 100.0


def test_a_memset_that_no_matmul_follows_takes_its_time() -> None:
    assert Bank().held_ns() == 100.0
    assert Bank().copied().held_ns() == 100.0


@pytest.mark.parametrize(("read", "held_ns"), [(31, 0.0), (32, 0.0), (33, 100.0)])
def test_what_is_read_was_written_by_matmuls_to_the_last_byte(read: int, held_ns: float) -> None:
    assert Bank().matmul((0, 32)).copied((0, read)).held_ns() == held_ns


@pytest.mark.parametrize(("rows", "held_ns"), [(127, 100.0), (128, 0.0)])
def test_what_is_read_was_written_by_matmuls_to_the_last_row(rows: int, held_ns: float) -> None:
    assert Bank().matmul(rows=(0, rows)).copied().held_ns() == held_ns


def test_several_matmuls_take_over_parts_of_one_memset() -> None:
    assert Bank().matmul((0, 32)).matmul((32, 64)).copied().held_ns() == 0.0
    assert Bank().matmul((32, 64)).copied((32, 64)).matmul((0, 32)).copied().held_ns() == 0.0


def test_what_is_read_before_its_matmul_needs_the_zeros() -> None:
    assert Bank().copied((0, 1)).matmul().copied().held_ns() == 100.0
    assert Bank().matmul((0, 32)).copied((32, 33)).matmul((32, 64)).held_ns() == 100.0


def test_a_second_memset_settles_the_first() -> None:
    bank = Bank().matmul().copied()
    bank.build.event(Engine.vector, writes=(bank.bank,), cost=CLEAR)
    bank.copied()
    assert (bank.held_ns(), bank.held_ns(3)) == (0.0, 100.0)
    bank = Bank().matmul().copied()
    bank.build.event(Engine.vector, writes=(bank.bank,), cost=CLEAR)
    bank.matmul().copied()
    assert (bank.held_ns(), bank.held_ns(3)) == (0.0, 0.0)


def test_a_matmul_waits_for_what_read_and_wrote_its_bank_before_the_memset() -> None:
    """The memset was behind a copy of its own engine, in order; the matmul must not overtake that copy's result."""
    build = Builder()
    operand, bank = build.tensor("operand"), build.tensor("bank", buffer=MemoryRegion.psum)
    build.event(Engine.vector, writes=(bank,), cost=Cost(50.0, 300.0))
    build.event(Engine.vector, writes=(bank,), cost=CLEAR)
    build.event(Engine.tensor, (operand,), (bank,), MATMUL, accumulate=True)
    for reading in Reading:
        timeline = schedule(build.stream, EXACT, reading)
        assert timeline.start_ns.tolist() == [0.0] + [300.0 + EXACT.semaphore_ns] * 2, reading
        assert violations((build.stream,), EXACT, timeline) == []
        path = [step.event for step in timeline.critical_path]
        assert (path[0], path[-1]) == (0, 2)


def test_an_omitted_memset_ends_no_gap_and_is_not_drawn(tmp_path) -> None:
    bank = Bank().matmul().copied()
    timeline = schedule(bank.build.stream, EXACT)
    vector = timeline.tracks.index("Vector")
    assert all(gap.track != vector for gap in find_gaps(Moments((bank.build.stream,), timeline)))
    write_trace(tmp_path / "trace.json", [("kernel", bank.build.stream, timeline)])
    assert '"name":"Vector"' not in (tmp_path / "trace.json").read_text(encoding="utf-8")
    kept = Bank().copied()
    write_trace(tmp_path / "trace.json", [("kernel", kept.build.stream, schedule(kept.build.stream, EXACT))])
    assert '"name":"Vector"' in (tmp_path / "trace.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("dtype", "value", "buffer", "clears"),
    [
        ("float32", 0.0, MemoryRegion.psum, True),
        ("bfloat16", 0.0, MemoryRegion.psum, True),
        ("float32", 1.0, MemoryRegion.psum, False),
        ("float32", 0.0, MemoryRegion.sbuf, False),
        ("int32", 0, MemoryRegion.psum, False),
    ],
)
def test_which_memsets_clear_an_accumulator(
    dtype: str, value: float, buffer: MemoryRegion, clears: bool
) -> None:
    made = plan("trn2", "memset", dst=tile((128, 8), dtype, buffer), value=value)
    assert made.cost.clears is clears


def _product(a, b, clear):
    """Compute a.T @ b, onto a bank that is cleared by a memset or overwritten by the first matmul."""
    out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    bank = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
    if clear:
        nisa.memset(dst=bank, value=0.0)
    for k in range(a.shape[0] // 128):
        rows = slice(k * 128, k * 128 + 128)
        nisa.nc_matmul(
            dst=bank, stationary=nl.load(a[rows]), moving=nl.load(b[rows]), accumulate=clear or k > 0
        )
    result = nl.ndarray((128, 512), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=bank)
    nisa.dma_copy(dst=out, src=result)
    return out


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("reading", Reading)
def test_a_product_that_clears_its_bank_takes_no_longer(target: str, reading: Reading) -> None:
    lengths = []
    for clear in (False, True):
        arguments = (np.zeros((256, 128), np.float32), np.zeros((256, 512), np.float32), clear)
        done = launch(_product, [(arguments, {})], hardware(target), mode=Mode.dry)
        lengths.append(schedule(done.streams, done.hardware, reading).length_ns)
    assert lengths[0] == lengths[1]
