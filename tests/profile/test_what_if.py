"""What halving a cost gains, against schedules that are known by hand or made anew."""

from __future__ import annotations

from typing import Any

import pytest

from simulate.hardware import guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.profile import profile
from simulate.profile.what_if import WhatIf
from simulate.timing import Reading, schedule
from tests.timing import kernels
from tests.timing.streams import EXACT, Builder, dma_cost, random_streams


def test_gains_of_two_engines_side_by_side() -> None:
    """Tensor takes 100 ns, Vector 40 beside it: Tensor at half time leaves 50, Vector gains nothing."""
    build = Builder()
    build.event(Engine.tensor, (), (build.tensor("a"),), Cost(100.0, 100.0), op="long")
    build.event(Engine.vector, (), (build.tensor("b"),), Cost(40.0, 40.0), op="short")
    rows = {(row.cost_name, bool(row.line)): row for row in profile(build.stream, EXACT).what_if}
    assert (rows["all of Tensor", False].length_ns, rows["all of Tensor", False].gain) == (50.0, 0.5)
    assert (rows["long", True].length_ns, rows["long", True].gain) == (50.0, 0.5)
    assert rows["all of Vector", False].gain == 0.0
    assert ("short", True) not in rows, "a line without a part of the critical path"


def test_halves_of_a_dma_are_told_apart() -> None:
    build = Builder()
    build.dma(
        (), (build.tensor("a"),), dma_cost(busy=200.0, trigger=8.0, first=100.0, completion=64.0), Engine.sync
    )
    lengths = {row.cost_name: row.length_ns for row in profile(build.stream, EXACT).what_if}
    assert lengths["data phase of all DMAs"] == 372.0 - 100.0
    assert lengths["start and end of all DMAs"] == 372.0 - 4.0 - 50.0 - 32.0
    assert lengths["dma_copy"] == 186.0


def test_numbers_of_the_chip_are_halved_too() -> None:
    build = Builder()
    tile = build.tensor("a")
    build.event(Engine.scalar, (), (tile,), Cost(30.0, 40.0, table="exp"))
    build.event(Engine.vector, (tile,), (build.tensor("b"),), Cost(10.0, 10.0))
    done = profile(build.stream, EXACT)
    lengths = {row.cost_name: row.length_ns for row in done.what_if}
    assert lengths["semaphores"] == done.length_ns - EXACT.semaphore_ns / 2
    assert lengths["activation table loads"] == done.length_ns - EXACT.activation_table_load_ns / 2


@pytest.mark.parametrize("reading", [Reading.serial, Reading.dataflow, Reading.scheduled])
def test_the_reading_that_is_profiled_is_scheduled_again(reading: Reading) -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    done = profile(launch.streams, launch.hardware, reading=reading)
    assert {row.before_ns for row in done.what_if} == {
        schedule(launch.streams, launch.hardware, reading).length_ns
    }
    assert done.what_if[0].gain > 0.0
    assert list(done.what_if) == sorted(
        done.what_if, key=lambda row: (row.length_ns, row.cost_name, row.line)
    )


def test_the_streams_are_left_as_they_were() -> None:
    streams = random_streams(3, 40, 2)
    before = [(stream.costs[:], stream.cost_ids[:], stream.text()) for stream in streams]
    assert profile(streams, EXACT).what_if
    assert before == [(stream.costs, stream.cost_ids, stream.text()) for stream in streams]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_gains_more_than_half(seed: int) -> None:
    for row in profile(random_streams(seed, 40), EXACT, reading=Reading.serial).what_if:
        assert 0.0 <= row.gain <= 0.5


def narrow_products(a):
    """Issue matmuls of eight columns with one stationary tile, whose loads the scheduled reading leaves out."""
    out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    stationary, moving = nl.load(a[:, 0:128]), nl.load(a[:, 0:8])
    for _ in range(64):
        total = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=stationary, moving=moving)
    nisa.dma_copy(dst=out, src=nl.copy(total, dtype=nl.float32))
    return out


def test_the_former_name_of_a_cost_is_deprecated() -> None:
    change = WhatIf("semaphores", "", 1.0, 2.0)
    with pytest.warns(DeprecationWarning, match=r"WhatIf\.what is deprecated; use WhatIf\.cost_name"):
        assert change.what == "semaphores"
    with pytest.raises(AttributeError, match="no attribute 'costs'"):
        _ = change.costs


@pytest.mark.parametrize("reading", list(Reading))
@pytest.mark.parametrize(
    "kernel", [narrow_products, kernels.matmul_exp], ids=["narrow products", "products and activations"]
)
def test_an_engine_at_half_time_is_one_of_twice_the_clock(kernel: Any, reading: Reading) -> None:
    """trn1 has no activity throttle, so that times in cycles are all that a clock decides."""
    arguments = [kernels.zeros(256, 512)] * 2 if kernel is kernels.matmul_exp else [kernels.zeros(128, 512)]
    launch = kernels.dry(kernel, *arguments, target="trn1")
    rows = {row.cost_name: row for row in profile(launch.streams, launch.hardware, reading=reading).what_if}
    for engine in ("tensor", "vector", "scalar", "gpsimd", "sync"):
        clock = f"{engine}_clock_ghz"
        faster = launch.hardware.with_numbers(
            **{clock: guessed(2 * getattr(launch.hardware, clock), "test", "doubled")}
        )
        row = rows[f"all of {'GpSimd' if engine == 'gpsimd' else engine.capitalize()}"]
        assert row.length_ns == pytest.approx(schedule(launch.streams, faster, reading).length_ns, rel=1e-9)
