"""Rules of the cost formulas that published measurements support, on every chip."""

from __future__ import annotations

import pytest

from simulate.hardware import TARGETS, hardware
from simulate.isa import costs, dma_costs
from simulate.isa.enums import DgeMode, Engine


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
    found = dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, 4, 4, True, at_run_time=True).dma
    many = dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, 1024 * 4, 4, True, by_row=True).dma
    assert few is not None and many is not None and found is not None
    assert few.gpsimd_ns == chip.dma_swdge_known_gpsimd_ns
    assert found.gpsimd_ns == chip.dma_swdge_gpsimd_ns >= few.gpsimd_ns
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
        dma = dma_costs.dma(chip, Engine.sync, DgeMode.none, size, 1 << 16, True, sides).dma
        assert dma is not None
        engines_ns = size / (chip.dma_engines * chip.dma_engine_bytes_per_ns)
        assert dma.busy_ns >= max(engines_ns, sides * size / chip.hbm_gb_per_s_per_core)
        assert dma.transfer_ns >= dma.busy_ns


@pytest.mark.parametrize("target", TARGETS)
def test_a_cast_is_no_faster_than_a_copy_and_slow_where_its_engines_are(target: str) -> None:
    chip = hardware(target)
    size = 1 << 16
    copy, cast = (
        dma_costs.dma(chip, Engine.gpsimd, DgeMode.swdge, size, 512, True, 1, to).dma for to in (0, size // 2)
    )
    assert copy is not None and cast is not None
    assert cast.busy_ns >= copy.busy_ns
    assert cast.busy_ns >= size / 2 / chip.dma_cast_bytes_per_ns / chip.dma_engines


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
