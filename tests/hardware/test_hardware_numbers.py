"""The numbers against laws of arithmetic and against a table written down apart from the records."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.hardware import INSTANCES, TARGETS, Confidence, Hardware, hardware

RECORDS = [hardware(target) for target in TARGETS]
GIB = 2**30

# NKI architecture guides: target, GHz of Tensor, Vector, Scalar and GpSimd, SBUF MiB, bf16 TFLOPS.
GUIDE_TABLE = [
    ("trn1", 2.8, 1.12, 1.4, 1.4, 24, 92),
    ("inf2", 2.8, 1.12, 1.4, 1.4, 24, 92),
    ("trn2", 2.4, 0.96, 1.2, 1.2, 28, 79),
    ("trn3", 2.4, 1.2, 1.2, 1.2, 32, 79),
]

# Device pages: target, cores per chip, HBM GiB and GB/s per chip; NKI: bytes of SBUF left to kernels.
DEVICE_TABLE = [
    ("trn1", 2, 32, 820, 180224),
    ("inf2", 2, 32, 820, 180224),
    ("trn2", 8, 96, 2900, 212984),
    ("trn3", 8, 144, 4900, 245752),
]

each_record = pytest.mark.parametrize("hw", RECORDS, ids=lambda hw: hw.name)


@pytest.mark.parametrize(
    ("target", "tensor", "vector", "scalar", "gpsimd", "sbuf_mib", "tflops"), GUIDE_TABLE
)
def test_agrees_with_the_architecture_guides(
    target: str, tensor: float, vector: float, scalar: float, gpsimd: float, sbuf_mib: int, tflops: int
) -> None:
    hw = hardware(target)
    clocks = (hw.tensor_clock_ghz, hw.vector_clock_ghz, hw.scalar_clock_ghz, hw.gpsimd_clock_ghz)
    assert clocks == (tensor, vector, scalar, gpsimd)
    assert hw.sbuf_physical_bytes_per_partition * hw.partitions == sbuf_mib * 2**20
    assert hw.psum_bytes_per_partition * hw.partitions == 2 * 2**20
    peak = 2 * hw.contraction_max * hw.stationary_free_max * hw.tensor_clock_ghz / 1000
    assert round(peak) == tflops, "a peak rounded to whole TFLOPS"


@pytest.mark.parametrize(("target", "cores", "hbm_gib", "hbm_rate", "usable"), DEVICE_TABLE)
def test_agrees_with_the_device_pages(
    target: str, cores: int, hbm_gib: int, hbm_rate: int, usable: int
) -> None:
    hw = hardware(target)
    assert hw.physical_cores_per_chip == cores
    assert hw.hbm_bytes_per_chip == hbm_gib * GIB
    assert hw.hbm_gb_per_s_per_chip == hbm_rate
    assert hw.sbuf_usable_bytes_per_partition == usable
    for name in ("hbm_bytes_per_chip", "hbm_gb_per_s_per_chip", "sbuf_usable_bytes_per_partition"):
        assert hw.provenance[name].confidence is Confidence.documented


@each_record
def test_parts_do_not_exceed_the_whole(hw: Hardware) -> None:
    assert hw.sbuf_usable_bytes_per_partition < hw.sbuf_physical_bytes_per_partition
    assert hw.psum_banks * hw.psum_bank_bytes == hw.psum_bytes_per_partition
    assert hw.psum_bank_bytes == 4 * hw.moving_free_max, "one bank holds one float32 moving tile"
    assert hw.moving_free_max_psum_fp32 * 4 <= hw.psum_bytes_per_partition
    assert hw.moving_free_max_psum_bf16 * 2 <= hw.psum_bytes_per_partition
    assert hw.free_elements_max_psum * 4 == hw.psum_bytes_per_partition
    assert hw.hbm_bytes_per_core * hw.physical_cores_per_chip == hw.hbm_bytes_per_chip
    assert hw.hbm_gb_per_s_per_core * hw.physical_cores_per_chip <= hw.hbm_gb_per_s_per_chip
    assert hw.partitions % hw.partitions_per_quadrant == 0
    assert max(hw.matmul_tile_sizes) == hw.contraction_max
    assert hw.tensor_throttled_clock_ghz <= hw.tensor_clock_ghz
    assert all(hw.physical_cores_per_chip % size == 0 for size in hw.logical_core_sizes)


@each_record
def test_integers_are_exact_in_float32_up_to_the_stated_one(hw: Hardware) -> None:
    limit = hw.exact_float_integer_max
    assert int(np.float32(limit - 1)) == limit - 1
    assert int(np.float32(limit)) == limit
    assert int(np.float32(limit + 1)) != limit + 1


@each_record
def test_the_throttle_slows_only_where_it_exists(hw: Hardware) -> None:
    slows = hw.tensor_throttled_clock_ghz < hw.tensor_clock_ghz
    assert slows == hw.activity_throttle
    assert (hw.matmul_throttled_latency_ns > hw.matmul_latency_ns) == hw.activity_throttle


@each_record
def test_times_and_rates_are_positive(hw: Hardware) -> None:
    for name, number in hw.provenance.items():
        if isinstance(number.value, float):
            assert number.value > 0, name


@each_record
def test_collective_tables_cover_the_same_ranks_and_grow_with_them(hw: Hardware) -> None:
    rates = (hw.collective_mesh_gb_per_s, hw.collective_bus_gb_per_s, hw.collective_switch_bytes)
    assert len({tuple(table) for table in rates}) == 1
    assert set(hw.collective_bus_gb_per_s) <= set(hw.collective_latency_ns)
    for table in (hw.collective_latency_ns, hw.collective_switch_bytes):
        assert list(table.values()) == sorted(table.values())


def test_published_sweep_is_kept() -> None:
    assert dict(hardware("trn1").collective_latency_ns) == {2: 2100, 8: 6300, 16: 7700, 32: 9100}
    assert dict(hardware("trn1").collective_bus_gb_per_s) == {2: 57, 8: 67, 16: 67, 32: 128}


def test_generations_only_gain_capabilities() -> None:
    gen2, gen3, gen4 = (hardware(name) for name in ("gen2", "gen3", "gen4"))
    shared = {name for name in gen2.provenance if "_share_" in name} | {"activity_throttle"}
    for name, number in gen2.provenance.items():
        if isinstance(number.value, bool) and name not in shared:
            assert getattr(gen2, name) <= getattr(gen3, name) <= getattr(gen4, name), name


@pytest.mark.parametrize(
    ("capability", "since"),
    [
        ("core_barrier", 3),
        ("sendrecv", 3),
        ("hardware_dge", 3),
        ("range_select", 3),
        ("nonzero_with_count", 3),
        ("matmul_double_row", 3),
        ("matmul_transpose_mode", 3),
        ("activation_immediate_bias", 3),
        ("scalar_engine_tensor_copy", 3),
        ("gpsimd_random", 3),
        ("mx", 4),
        ("activate2", 4),
        ("rand2", 4),
        ("receive_displacements", 4),
        ("vector_exponential", 4),
        ("indirect_views", 4),
        ("dma_priority", 4),
        ("matmul_bf16_destination", 4),
        ("matmul_e4m3fn", 4),
        ("alu_extended_operators", 4),
        ("matmul_crosses_psum_banks", 4),
        ("matmul_transpose_fp8", 4),
    ],
)
def test_a_capability_appears_with_its_generation(capability: str, since: int) -> None:
    for hw in RECORDS:
        assert getattr(hw, capability) == (hw.generation >= since), hw.name


def test_limits_of_matmul_follow_the_generation() -> None:
    gen2, gen3, gen4 = (hardware(name) for name in ("gen2", "gen3", "gen4"))
    assert [hw.matmul_tile_sizes for hw in (gen2, gen3, gen4)] == [(64, 128), (32, 64, 128), (32, 64, 128)]
    assert [hw.moving_free_max_psum_fp32 for hw in (gen2, gen3, gen4)] == [512, 512, 4096]
    assert [hw.moving_free_max_psum_bf16 for hw in (gen2, gen3, gen4)] == [512, 512, 8192]


def test_ports_are_exclusive_on_gen2_only() -> None:
    for hw in RECORDS:
        assert hw.vector_gpsimd_share_sbuf_port == hw.vector_scalar_share_psum_port == (hw.generation == 2)


def test_a_matmul_costs_what_traces_and_benchmarks_show() -> None:
    """Published intervals: gen3 bf16 128 columns 56 ns, 512 216 ns; gen2 fp32 512 columns 0.86 to 0.97 us."""
    gen2, gen3 = hardware("gen2"), hardware("gen3")

    def interval_ns(hw: Hardware, columns: int, passes: int, calls: int) -> float:
        return (passes * columns + calls * hw.matmul_issue_overhead_cycles) / hw.tensor_clock_ghz

    assert round(interval_ns(gen3, 128, 1, 1)) == 56
    assert round(interval_ns(gen3, 512, 1, 1)) == 216
    fp32_passes = gen2.matmul_fp32_passes
    assert 860 < interval_ns(gen2, 512, fp32_passes, fp32_passes) < 970


def test_inferentia2_is_the_same_core_in_another_chip() -> None:
    trn1, inf2 = hardware("trn1"), hardware("inf2")
    differing = {name for name in trn1.provenance if getattr(trn1, name) != getattr(inf2, name)}
    assert differing == {
        "name",
        "chip",
        "neuronlink_gb_per_s_per_chip",
        "collective_latency_ns",
        "collective_ring_latency_ns",
        "collective_mesh_gb_per_s",
        "collective_bus_gb_per_s",
        "collective_switch_bytes",
    }


@pytest.mark.parametrize("instance", INSTANCES.values(), ids=lambda i: i.name)
def test_instances_are_made_of_their_chips(instance) -> None:
    hw = hardware(instance.target)
    assert instance.physical_cores == instance.chips * hw.physical_cores_per_chip
    assert instance.hbm_bytes == instance.chips * hw.hbm_bytes_per_chip
    assert (instance.neuronlink_gb_per_s_per_chip is None) == (instance.chips == 1)


def test_instances_of_the_documented_chips_are_known() -> None:
    assert {instance.target for instance in INSTANCES.values()} == {"trn1", "inf2", "trn2", "trn3"}
    assert INSTANCES["trn1.32xlarge"].chips == 16
    assert INSTANCES["trn2.48xlarge"].physical_cores == 128
    assert INSTANCES["trn3 UltraServer Gen2"].chips == 144
