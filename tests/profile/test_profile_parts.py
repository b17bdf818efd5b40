"""Critical path, gaps, traffic, lines and basis of small streams whose times are known by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from simulate.hardware import Confidence, derived, hardware
from simulate.isa import costs, dma_costs
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Cost, Phase, Term
from simulate.memory import MemoryRegion
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.profile import Profile, profile
from simulate.profile.gaps import DONE, FIRST_BYTE
from simulate.run import recorded
from simulate.timing import Reading, Reason, schedule
from tests.timing import kernels
from tests.timing.streams import EXACT, Builder, box, dma_cost, random_streams

SEMAPHORE = EXACT.semaphore_ns


def chain() -> Builder:
    """Build a load (8 + 100 + 200 + 64 ns), a matmul (50, ready after 80), a copy of its result (30, after 40)."""
    build = Builder()
    source = build.tensor("source", 128, 64, MemoryRegion.private_hbm)
    tile, total, result = (build.tensor(name) for name in ("tile", "total", "result"))
    build.dma((source,), (tile,), dma_cost(busy=200.0), Engine.sync)
    build.event(Engine.tensor, (tile,), (total,), Cost(50.0, 80.0, flops=1000), op="nc_matmul")
    build.event(Engine.vector, (total,), (result,), Cost(30.0, 40.0), op="tensor_copy")
    return build


LOAD, MATMUL = 8 + 100 + 200 + 64.0, 80 + SEMAPHORE


def test_stretches_of_the_critical_path_follow_each_other_and_fall_into_phases() -> None:
    path = profile(chain().stream, EXACT).critical_path
    assert [stretch.event for stretch in path] == [0, 1, 2]
    assert [stretch.reason for stretch in path] == [Reason.begin, Reason.operands, Reason.operands]
    assert [(stretch.start_ns, stretch.end_ns) for stretch in path] == [
        (0.0, LOAD),
        (LOAD, LOAD + MATMUL),
        (LOAD + MATMUL, LOAD + MATMUL + 40),
    ]
    assert [stretch.phases for stretch in path] == [
        ((Phase.issue, 8.0), (Phase.first_byte, 100.0), (Phase.data, 200.0), (Phase.completion, 64.0)),
        ((Phase.issue, 50.0), (Phase.pipeline, 30.0), (Phase.semaphore, SEMAPHORE)),
        ((Phase.issue, 30.0), (Phase.pipeline, 10.0)),
    ]


@pytest.mark.parametrize("reading", Reading)
@pytest.mark.parametrize("seed", range(6))
def test_the_critical_path_covers_the_length_under_every_reading(seed: int, reading: Reading) -> None:
    done = profile(random_streams(seed, 60, 1 + seed % 2), EXACT, reading=reading)
    path = done.critical_path
    assert path[0].start_ns == 0.0
    assert path[-1].end_ns == done.length_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
    for stretch in path:
        assert stretch.length_ns >= 0.0
        assert sum(length for _, length in stretch.phases) == stretch.length_ns
    assert sum(line.path_ns for line in done.lines) == pytest.approx(done.length_ns, rel=1e-12)


def test_a_dma_that_waits_for_the_dma_engines_counts_from_its_first_byte() -> None:
    build = Builder()
    for name in "ab":
        build.dma((), (build.tensor(name),), dma_cost(busy=500.0), Engine.sync)
    path = profile(build.stream, EXACT).critical_path
    assert [(stretch.event, stretch.reason, stretch.start_ns) for stretch in path] == [
        (0, Reason.begin, 0.0),
        (1, Reason.pool, 608.0),
    ]
    assert path[1].phases == ((Phase.data, 500.0), (Phase.completion, 64.0))


def test_a_table_load_is_a_phase_of_its_activation() -> None:
    build = Builder()
    build.event(Engine.scalar, (), (build.tensor("a"),), Cost(30.0, 40.0, table="exp"), op="activation")
    (only,) = profile(build.stream, EXACT).critical_path
    assert only.phases == (
        (Phase.table_load, EXACT.activation_table_load_ns),
        (Phase.issue, 30.0),
        (Phase.pipeline, 10.0),
    )


def described(done: Profile) -> list[tuple[str, float, float, str, int | None, int | None, str]]:
    stream = done.streams[0]
    return [
        (
            done.timeline.tracks[gap.track],
            gap.start_ns,
            gap.end_ns,
            gap.why,
            gap.event,
            gap.cause,
            "" if gap.tensor is None else stream.tensors[gap.tensor[1]].name,
        )
        for gap in done.gaps
    ]


def test_a_gap_names_what_ended_it_what_that_waited_for_and_the_tensor() -> None:
    done = profile(chain().stream, EXACT)
    end = LOAD + MATMUL + 40
    assert described(done) == [
        ("Tensor", 0.0, LOAD, "operand of", 1, 0, "tile"),
        ("Tensor", LOAD + 50, end, DONE, None, None, ""),
        ("Vector", 0.0, LOAD + MATMUL, "operand of", 2, 1, "total"),
        ("Vector", LOAD + MATMUL + 30, end, DONE, None, None, ""),
        ("Sync", 8.0, end, DONE, None, None, ""),
        ("DMA q Sync", 0.0, 108.0, FIRST_BYTE, 0, None, ""),
        ("DMA q Sync", 308.0, end, DONE, None, None, ""),
    ]


def test_a_gap_before_an_overwrite_names_the_reader() -> None:
    build = Builder()
    tile, other = build.tensor("tile"), build.tensor("other")
    build.event(Engine.tensor, (tile,), (other,), Cost(100.0, 100.0), op="reader")
    build.event(Engine.vector, (), (tile,), Cost(10.0, 10.0), op="writer")
    gaps = [gap for gap in described(profile(build.stream, EXACT)) if gap[0] == "Vector"]
    assert gaps == [("Vector", 0.0, 100.0 + SEMAPHORE, "destination read by", 1, 0, "tile")]


def test_engines_that_are_never_idle_have_no_gap() -> None:
    build = Builder()
    for _ in range(3):
        build.event(Engine.vector, (), (build.tensor("a"),), Cost(10.0, 10.0))
    assert profile(build.stream, EXACT).gaps == ()


@pytest.mark.parametrize("seed", range(4))
def test_gaps_of_a_track_add_up_to_its_idle_time(seed: int) -> None:
    done = profile(random_streams(seed, 60, 2), EXACT)
    used = {done.timeline.tracks[track] for track in done.timeline.track.tolist()}
    for number, name in enumerate(done.timeline.tracks):
        total = sum(gap.length_ns for gap in done.gaps if gap.track == number)
        assert total == (done.timeline.idle_ns[name] if name in used else 0.0)
    by_group = sum(group.total_ns for group in done.idle)
    assert by_group == sum(gap.length_ns for gap in done.gaps)
    assert sum(group.count for group in done.idle) == len(done.gaps)


def test_gaps_that_a_loop_repeats_are_one_group() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 256), kernels.zeros(256, 1024))
    done = profile(launch.streams, launch.hardware)
    waits = [group for group in done.idle if group.track == "Scalar" and group.cause_op]
    assert [(group.op, group.cause_op, group.cause_track, group.count) for group in waits] == [
        ("activation", "nc_matmul", "Tensor", 4)
    ]


def test_traffic_counts_rereads_and_what_had_to_move() -> None:
    """Read b [256, 1024] for each of 2 row tiles and a [256, 256] for each of 2 column tiles; write out once."""
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 256), kernels.zeros(256, 1024))
    done = profile(launch.streams, launch.hardware)
    a, b, out = 256 * 256 * 4, 256 * 1024 * 4, 256 * 1024 * 4
    tensors = {tensor.name: tensor for tensor in done.traffic}
    assert [(tensor.nbytes, tensor.read_bytes, tensor.written_bytes) for tensor in done.traffic] == [
        (b, 2 * b, 0),
        (out, 0, out),
        (a, 2 * a, 0),
    ]
    assert (tensors["a"].reads, tensors["b"].reads, tensors["b"].writes) == (2.0, 2.0, 0.0)
    roof = done.roofline
    assert roof.hbm_bytes == 2 * a + 2 * b + out
    assert roof.needed_bytes == a + b + out
    assert roof.flops == 2 * 256 * 256 * 1024
    assert roof.intensity == roof.flops / roof.hbm_bytes
    assert roof.algorithmic_intensity == roof.flops / roof.needed_bytes


def test_a_cast_moves_each_side_in_its_own_dtype() -> None:
    launch = kernels.dry(kernels.same_tiles, kernels.zeros(128, 512, kernels.BF16))
    tensors = {tensor.name: tensor for tensor in profile(launch.streams, launch.hardware).traffic}
    assert tensors["a"].read_bytes == 128 * (128 + 512) * 2
    assert tensors["a"].reads == 1.25


def test_a_view_of_another_dtype_moves_the_bytes_that_it_covers() -> None:
    def words(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=x.dtype)
        nisa.dma_copy(dst=tile.view(nl.uint32), src=x.view(nl.uint32))
        nisa.dma_copy(dst=out, src=tile)
        return out

    launch = kernels.dry(words, np.zeros((4, 8), np.uint8))
    moved = [
        (tensor.read_bytes, tensor.written_bytes)
        for tensor in profile(launch.streams, launch.hardware).traffic
    ]
    assert sorted(moved) == [(0, 32), (32, 0)]


def test_a_scratch_tensor_is_moved_but_not_needed() -> None:
    launch = kernels.dry(kernels.summed, kernels.zeros(128, 64), ranks=2)
    done = profile(launch.streams, launch.hardware)
    size = 2 * 128 * 64 * 4  # on both ranks
    assert [
        (tensor.nbytes, tensor.read_bytes, tensor.written_bytes, tensor.needed_bytes)
        for tensor in done.traffic
    ] == [
        (size, size, size, 0),
        (size, size, 0, size),
        (size, 0, size, size),
    ]


def test_part_of_a_tensor_is_needed_in_part() -> None:
    build = Builder()
    source = build.tensor("source", 128, 64, MemoryRegion.private_hbm)
    build.event(Engine.gpsimd, (box(source, (0, 2), (0, 16)),), (build.tensor("tile"),))
    (only,) = profile(build.stream, EXACT).traffic
    assert (only.read_bytes, only.reads, only.needed_bytes) == (32, 32 / 8192, 32)


def test_utilisation_is_against_the_peaks_of_all_cores() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    done = profile(launch.streams, launch.hardware)
    chip, roof = launch.hardware, done.roofline
    peak = 2 * 128 * 128 * chip.tensor_clock_ghz
    assert roof.peak == peak
    assert roof.operand_peak == pytest.approx(peak / chip.matmul_fp32_passes)
    assert roof.mfu == pytest.approx(roof.flops / done.length_ns / peak)
    assert roof.mbu == pytest.approx(roof.hbm_bytes / done.length_ns / chip.hbm_gb_per_s_per_core)
    assert roof.least_ns <= done.length_ns
    two = profile(kernels.dry(kernels.summed, kernels.zeros(128, 64), ranks=2).streams, chip).roofline
    assert (two.peak, two.hbm_peak) == (2 * peak, 2 * chip.hbm_gb_per_s_per_core)


@pytest.mark.parametrize("target", ["trn1", "inf2", "trn2", "trn3"])
def test_every_nanosecond_rests_on_numbers_of_the_record(target: str) -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 256), kernels.zeros(256, 1024), target=target)
    done = profile(launch.streams, launch.hardware)
    assert sum(length for _, length in done.basis.by_confidence) == pytest.approx(done.length_ns, rel=1e-9)
    for name, confidence, _ in done.basis.by_number:
        assert launch.hardware.provenance[name].confidence is confidence


def test_an_assumed_collective_is_told_from_a_derived_engine() -> None:
    build = Builder()
    tile = build.tensor("tile")
    overhead_ns = EXACT.vector_interval_overhead_ns
    terms = (Term(Phase.issue, ("vector_interval_overhead_ns",), overhead_ns, False),)
    build.event(Engine.vector, (), (tile,), Cost(overhead_ns, 1.0, explain=lambda: terms))
    first = dict(profile(build.stream, EXACT).basis.by_confidence)
    assert first[Confidence.derived] == overhead_ns
    terms = (
        Term(Phase.issue, ("dma_static_trigger_ns",), 1.0, False),
        Term(Phase.pipeline, ("collective_latency_ns",), 499.0, False),
    )
    build.event(
        Engine.dma,
        (tile,),
        (tile,),
        Cost(1.0, 500.0, rendezvous_ns=499.0, explain=lambda: terms),
        Engine.sync,
    )
    second = profile(build.stream, EXACT).basis
    assert dict(second.by_confidence)[Confidence.guessed] == 499.0
    assert second.by_number[0][0] == "collective_latency_ns"


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_a_collective_rests_on_its_latency_and_on_a_rate(target: str) -> None:
    launch = kernels.dry(kernels.summed, kernels.zeros(128, 64), ranks=2, target=target)
    ns_by_number = {name: ns for name, _, ns in profile(launch.streams, launch.hardware).basis.by_number}
    assert ns_by_number["collective_latency_ns"] == pytest.approx(
        launch.hardware.collective_latency_ns[2], rel=1e-9
    )
    assert ns_by_number["collective_mesh_gb_per_s"] > 0


@pytest.mark.parametrize(
    ("interval", "overhead", "elements"),
    [(6.0, 6.0, 0.0), (10.0, 10.0, 0.0), (30.0, 10.0, 20.0), (35.0, 10.0, 25.0)],
)
def test_a_phase_rests_on_its_terms_in_their_order_and_the_last_takes_what_is_added(
    interval: float, overhead: float, elements: float
) -> None:
    build = Builder()
    terms = (
        Term(Phase.issue, ("vector_interval_overhead_ns",), 10.0, False),
        Term(Phase.issue, ("vector_scan_cycles_per_element", "vector_clock_ghz"), 20.0, True),
    )
    build.event(Engine.vector, (), (build.tensor("a"),), Cost(interval, interval, explain=lambda: terms))
    ns_by_number = {name: ns for name, _, ns in profile(build.stream, EXACT).basis.by_number}
    # The clock is a guess of EXACT, and weaker than the documented cycles.
    assert ns_by_number == {
        name: ns
        for name, ns in (("vector_interval_overhead_ns", overhead), ("vector_clock_ghz", elements))
        if ns
    }


def helper(a):
    return nl.load(a)


def calls_twice(a):
    """Load twice by one helper, and store."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    first = helper(a)
    second = helper(a)
    nisa.tensor_tensor(dst=first, data1=first, data2=second, op=nl.add)
    nisa.dma_copy(dst=out, src=first)
    return out


def test_a_calling_line_counts_what_it_calls() -> None:
    with recorded(calls=True) as launches:
        kernels.dry(calls_twice, kernels.zeros(128, 64))
    done = profile(launches[0].streams, launches[0].hardware)
    load = done.lines[[line.events for line in done.lines].index(2)]
    assert [(line.events, line.line[0].co_name) for line in done.calling_lines] == [(1, "calls_twice")] * 2
    assert sum(line.held_ns for line in done.calling_lines) == pytest.approx(load.held_ns, rel=1e-12)
    assert sum(line.path_ns for line in done.calling_lines) == pytest.approx(load.path_ns, rel=1e-12)


def test_without_callers_no_line_calls() -> None:
    launch = kernels.dry(calls_twice, kernels.zeros(128, 64))
    assert profile(launch.streams, launch.hardware).calling_lines == ()


@pytest.mark.parametrize(
    ("columns", "loads"), [(8, True), (127, True), (128, False), (129, False), (512, False)]
)
def test_matmuls_of_fewer_columns_than_rows_rest_on_loading_the_stationary_tile(
    columns: int, loads: bool
) -> None:
    build = Builder()
    chip = hardware("trn2").with_numbers(load_weights_cycles_per_row=derived(1.0, "tests"))
    cost = costs.matmul(chip, 128, 128, columns, fp32=False)
    for _ in range(4):
        build.event(Engine.tensor, (build.tensor("a"),), (build.tensor("c"),), cost, op="nc_matmul")
    numbers = {name for name, _, _ in profile(build.stream, chip).basis.by_number}
    assert ("load_weights_cycles_per_row" in numbers) == loads


@pytest.mark.parametrize(
    ("rate", "limit"), [(10.0, "hbm_gb_per_s_per_core"), (1e6, "dma_engine_bytes_per_ns")]
)
def test_dmas_that_wait_for_each_other_rest_on_what_limits_the_dma_engines(rate: float, limit: str) -> None:
    chip = hardware("trn2").with_numbers(hbm_gb_per_s_per_core=derived(rate, "tests"))
    cost = dma_costs.dma(chip, Engine.sync, DgeMode.none, 1 << 20, 1 << 13, load=True)
    build = Builder()
    for number in range(50):
        build.dma((), (build.tensor(str(number)),), cost, Engine.sync)
    name, _, ns = profile(build.stream, chip).basis.by_number[0]
    assert name == limit
    assert ns > 0.9 * schedule(build.stream, chip).length_ns


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("dtype", [kernels.BF16, np.float32])
def test_long_matmuls_rest_on_the_clock_of_the_array(dtype: Any, target: str) -> None:
    launch = kernels.dry(kernels.same_tiles, kernels.zeros(128, 512, dtype), target=target)
    numbers = {name for name, _, _ in profile(launch.streams, launch.hardware).basis.by_number}
    assert "load_weights_cycles_per_row" not in numbers
    assert numbers & {"tensor_clock_ghz", "tensor_throttled_clock_ghz"}
