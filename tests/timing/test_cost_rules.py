"""Rules of the cost formulas that published measurements support, on every chip."""

from __future__ import annotations

import pytest

from simulate.hardware import TARGETS, hardware
from simulate.isa import costs, dma_costs
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Phase


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_stream_waits_for_the_weights_of_the_next(target: str) -> None:
    chip = hardware(target)
    load = chip.contraction_max * chip.load_weights_cycles_per_row
    for rows in (1, 63, 64, 65, 127, 128, 129, 512):
        cost = costs.matmul(chip, chip.contraction_max, 128, rows, fp32=False)
        streamed = max(chip.matmul_min_interval_cycles, rows)
        assert cost.interval_cycles == max(streamed, load) + chip.matmul_issue_overhead_cycles
    shallow = costs.matmul(chip, 1, 128, 64, fp32=False)
    assert shallow.interval_cycles == 64 + chip.matmul_issue_overhead_cycles


@pytest.mark.parametrize("target", TARGETS)
def test_more_bytes_never_make_a_collective_shorter(target: str) -> None:
    chip = hardware(target)
    for ranks, switch in chip.collective_switch_bytes.items():
        sizes = [1, 1024, switch - 1, switch, switch + 1, 2 * switch, 64 * switch]
        times = [dma_costs.collective(chip, ranks, size, 1.0).rendezvous_ns for size in sizes]
        assert times == sorted(times)


@pytest.mark.parametrize("target", TARGETS)
def test_software_descriptors_take_the_longer_of_their_addresses_and_their_writing(target: str) -> None:
    chip = hardware(target)
    few = dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, 4, 4, True).dma
    dynamic = dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, 4, 4, True, at_run_time=True).dma
    many = dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, 1024 * 4, 4, True, by_row=True).dma
    assert few is not None and many is not None and dynamic is not None
    assert few.gpsimd_ns == chip.dma_swdge_known_gpsimd_ns
    assert dynamic.gpsimd_ns == chip.dma_swdge_gpsimd_ns >= few.gpsimd_ns
    assert many.gpsimd_ns == 1024 * chip.dma_swdge_descriptor_ns


@pytest.mark.parametrize(("row_bytes", "packets"), [(256, 32), (1024, 48), (4096, 144)])
@pytest.mark.parametrize("target", TARGETS)
def test_software_fills_descriptors_with_short_rows_as_counts_of_packets_say(
    target: str, row_bytes: int, packets: int
) -> None:
    # Packets of a DMA of 128 rows in six versions of one kernel; 16 of them, one per DMA engine, signal its end.
    chip = hardware(target)
    packed = dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, 128 * row_bytes, row_bytes, True).dma
    apart = dma_costs.dma(
        chip, Engine.gpsimd, DgeMode.swdge, 128 * row_bytes, row_bytes, True, by_row=True
    ).dma
    assert packed is not None and apart is not None
    assert packed.descriptors == packets - chip.dma_engines
    assert apart.descriptors == 128


def test_hardware_descriptors_reach_the_first_byte_at_the_published_time_from_the_trigger() -> None:
    chip = hardware("trn2")
    dma = dma_costs.dma(chip, Engine.sync, DgeMode.hwdge, 1 << 19, 4096, True).dma
    assert dma is not None
    assert dma.trigger_ns + dma.first_byte_ns == chip.dma_hwdge_first_ns


@pytest.mark.parametrize("target", TARGETS)
def test_functions_from_a_table_are_slower_from_sbuf_and_copies_are_not(target: str) -> None:
    chip = hardware(target)
    psum, sbuf = (costs.scalar(chip, 512, "exp", False, from_psum) for from_psum in (True, False))
    assert psum.latency_cycles <= sbuf.latency_cycles and psum.interval_cycles <= sbuf.interval_cycles
    assert costs.scalar(chip, 512, "copy", False, True) == costs.scalar(chip, 512, "copy", False, False)


@pytest.mark.parametrize("target", TARGETS)
def test_a_fast_mode_leaves_more_time_between_instructions(target: str) -> None:
    chip = hardware(target)
    plain, fast = costs.vector(chip, 512.0), costs.vector(chip, 512.0, fast_mode=True)
    more = chip.vector_fast_mode_interval_overhead_ns - chip.vector_interval_overhead_ns
    assert (fast.interval_cycles - plain.interval_cycles > 0) is (more > 0)
    assert fast.latency_cycles == plain.latency_cycles


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sides", [0, 1, 2])
def test_no_dma_moves_hbm_bytes_faster_than_the_share_of_its_core(target: str, sides: int) -> None:
    chip = hardware(target)
    for size in (1, 511, 4096, 1 << 16, 1 << 22):
        dma = dma_costs.dma(chip, Engine.sync, DgeMode.none, size, 1 << 16, True, sides * size).dma
        assert dma is not None
        engines_ns = size / (chip.dma_engines * chip.dma_engine_bytes_per_ns)
        assert dma.busy_ns >= max(engines_ns, sides * size / chip.hbm_gb_per_s_per_core)
        assert dma.transfer_ns >= dma.busy_ns


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("run", [16, 512, 2048, 4096])
def test_a_cast_moves_the_wider_side_at_its_own_rate(target: str, run: int) -> None:
    chip = hardware(target)
    size = 1 << 16
    copy, cast = (
        dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, size, run, True, size, casts).dma
        for casts in (False, True)
    )
    assert copy is not None and cast is not None
    assert cast.busy_ns >= copy.busy_ns
    assert cast.busy_ns >= size / chip.dma_cast_bytes_per_ns / chip.dma_engines


@pytest.mark.parametrize(("rows", "beyond"), [(534, 0), (535, 0), (536, 1), (3130, 2595)])
def test_hardware_writes_so_many_descriptors_for_free(rows: int, beyond: int) -> None:
    chip = hardware("trn2")
    dma = dma_costs.dma(chip, Engine.sync, DgeMode.hwdge, rows * 64, 64, True).dma
    assert dma is not None and dma.descriptors == rows
    assert dma.trigger_ns == 560.0 + 2.0 * beyond  # 5.74 us are published for 3130


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("piece", "pieces"), [(16, 8), (256, 8), (512, 8), (513, 7), (2048, 2), (2049, 1), (4096, 1)]
)
def test_pieces_inside_a_descriptor_follow_no_faster_than_descriptors_do(
    target: str, piece: int, pieces: int, apart: bool
) -> None:
    chip = hardware(target)
    for count in (1, 16):  # descriptors, one for each DMA engine at most
        size = count * pieces * piece
        dma = dma_costs.dma(chip, Engine.sync, DgeMode.none, size, piece, True, 0, apart=apart).dma
        assert dma is not None and dma.descriptors == count
        piece_ns = piece / chip.dma_engine_bytes_per_ns
        later = max(piece_ns, chip.dma_piece_ns + apart * piece / chip.dma_piece_bytes_per_ns)
        expected = count * (chip.dma_descriptor_ns + piece_ns + (pieces - 1) * later) / chip.dma_engines
        assert dma.busy_ns == pytest.approx(expected, rel=1e-12)


def test_a_transpose_writes_at_its_fraction_of_the_rate_and_reads_hbm_at_full_rate() -> None:
    chip = hardware("trn2")
    size, slow = 1 << 16, chip.dma_transpose_hbm_fraction
    turned, read = (
        dma_costs.dma(
            chip, Engine.sync, DgeMode.none, size, 4096, True, hbm_bytes,
            result_bytes=size, fraction="dma_transpose_hbm_fraction",
        ).dma
        for hbm_bytes in (0, 1 << 24)
    )  # fmt: skip
    assert turned is not None and read is not None
    on_engines = 16 * chip.dma_descriptor_ns + size / chip.dma_engine_bytes_per_ns / slow
    assert turned.busy_ns == pytest.approx(on_engines / chip.dma_engines, rel=1e-12)
    assert read.busy_ns == (1 << 24) / chip.hbm_gb_per_s_per_core


@pytest.mark.parametrize(("sources", "slow"), [(1, True), (2, False), (3, False)])
def test_a_dma_that_adds_takes_the_longer_of_reading_and_of_writing_its_result(
    sources: int, slow: bool
) -> None:
    chip, result = hardware("trn2"), 1 << 14
    dma = dma_costs.dma(
        chip, Engine.gpsimd, DgeMode.none, sources * result, 4096, True, 0,
        result_bytes=result, fraction="dma_compute_fraction",
    ).dma  # fmt: skip
    assert dma is not None
    reading = sources * result / chip.dma_engine_bytes_per_ns
    writing = result / chip.dma_engine_bytes_per_ns / chip.dma_compute_fraction
    assert (writing > reading) is slow
    expected = (dma.descriptors * chip.dma_descriptor_ns + max(reading, writing)) / chip.dma_engines
    assert dma.busy_ns == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("hops", [0.5, 1.0])
def test_a_collective_goes_round_a_ring_above_the_switch_size(target: str, hops: float) -> None:
    chip = hardware(target)
    for ranks, switch in chip.collective_switch_bytes.items():
        mesh, bus = chip.collective_mesh_gb_per_s[ranks], chip.collective_bus_gb_per_s[ranks]
        first, around = chip.collective_latency_ns[ranks], chip.collective_ring_latency_ns[ranks]

        def took(size: int, ranks: int = ranks) -> float:
            return dma_costs.collective(chip, ranks, size, hops).rendezvous_ns

        for size in (1, switch - 1, switch):
            assert took(size) == pytest.approx(first + hops * size / mesh, rel=1e-12)
        for size in (switch + 1, 64 * switch):
            ring = max(first, hops * around) + hops * 2 * (ranks - 1) / ranks * size / bus
            assert took(size) == pytest.approx(max(ring, first + hops * switch / mesh), rel=1e-12)


def test_sixteen_and_thirty_two_ranks_of_a_torus_have_numbers_of_their_own() -> None:
    chip = hardware("trn1")
    assert chip.collective_ring_latency_ns[16] == 2 * 15 * 1500 and chip.collective_bus_gb_per_s[16] == 67.0
    assert chip.collective_switch_bytes[32] == 4 << 20
    for size, latency in ((4 << 20, "collective_latency_ns"), (16 << 20, "collective_ring_latency_ns")):
        terms = dma_costs.collective(chip, 32, size, 1.0).terms
        assert latency in {number for term in terms for number in term.numbers}


def test_a_collective_names_the_latency_that_it_pays() -> None:
    """Half a ring of two ranks has one step, which takes no less than a step of the mesh."""
    chip = hardware("trn1")
    for hops, ring_ns in ((0.5, 1050.0), (1.0, 2100.0)):
        cost = dma_costs.collective(chip, 2, 1 << 28, hops)
        (begins,) = (term for term in cost.terms if term.phase is Phase.data and not term.grows)
        assert hops * chip.collective_ring_latency_ns[2] == ring_ns and begins.ns == 2100.0
        number = "collective_latency_ns" if ring_ns < 2100.0 else "collective_ring_latency_ns"
        assert begins.numbers == (number,)


@pytest.mark.parametrize("target", TARGETS)
def test_stores_reach_their_first_descriptor_sooner_than_loads(target: str) -> None:
    chip = hardware(target)
    load, store = (
        dma_costs.dma(chip, Engine.sync, DgeMode.none, 1 << 19, 4096, load).dma for load in (True, False)
    )
    assert load is not None and store is not None
    assert (
        load.first_byte_ns == chip.dma_static_first_ns > store.first_byte_ns == chip.dma_static_store_first_ns
    )
