"""Hardware record `TRN3`: Trainium3, whose core is NeuronCore-v4.

Capacities, clocks and rates are documented; almost no timing of this generation has been published. Those
numbers are gen3's, in nanoseconds where the clock is the same and converted through cycles on the Vector
engine, whose clock rose. An unchanged decode kernel ran within 2 % of its gen3 time.
"""

from __future__ import annotations

from simulate.hardware.common import (
    COLLECTIVES_GUIDE,
    COMMON,
    COST_FORMULAS,
    DGE_GUIDE,
    DMA_GUIDE,
    EXPLORER,
    GUIDE_GEN4,
    ISA,
    MEGAKERNEL,
)
from simulate.hardware.gen3 import TRN2
from simulate.hardware.record import Hardware, Number, build, carry_over, derived, documented, guessed

_DEVICE_PAGE = "Trainium3 device page"


def _vector_cycles(name: str) -> Number:
    """Return gen3's number `name`, a time of the Vector engine in ns, converted to gen4's clock.

    The time takes as many cycles at 1.2 GHz as gen3's time takes at gen3's clock; rounded to 0.1 ns, and a guess.
    """
    value = round(getattr(TRN2, name) * TRN2.vector_clock_ghz / 1.2, 1)
    return guessed(value, f"trn2: {TRN2.provenance[name].source}", "gen3's in cycles, at 1.2 GHz")


_IDENTITY = {
    "name": documented("trn3", ISA),
    "generation": documented(4, GUIDE_GEN4),
    "sub_version": derived(
        1, "nki-library kernels", "B0 parts, which have nisa.exponential; 0 is the A0 stepping"
    ),
    "core": documented("NeuronCore-v4", GUIDE_GEN4),
    "chip": documented("Trainium3", _DEVICE_PAGE),
    "physical_cores_per_chip": documented(8, _DEVICE_PAGE),
    "logical_core_sizes": documented((1, 2), _DEVICE_PAGE),
}

_CLOCKS = {
    "tensor_clock_ghz": documented(2.4, GUIDE_GEN4),
    "tensor_throttled_clock_ghz": derived(1.2, EXPLORER, "half of the full rate"),
    "vector_clock_ghz": documented(1.2, GUIDE_GEN4),
    "scalar_clock_ghz": documented(1.2, GUIDE_GEN4),
    "gpsimd_clock_ghz": documented(1.2, GUIDE_GEN4),
    "sync_clock_ghz": guessed(1.2, GUIDE_GEN4, "assumed equal to the Scalar engine"),
}

_MEMORY = {
    "sbuf_physical_bytes_per_partition": derived(262144, GUIDE_GEN4, "32 MiB over 128 partitions"),
    "sbuf_usable_bytes_per_partition": documented(245752, GUIDE_GEN4),
    "hbm_bytes_per_chip": documented(144 * 2**30, _DEVICE_PAGE),
    "hbm_bytes_per_core": derived(18 * 2**30, _DEVICE_PAGE, "an eighth of the chip's"),
    "hbm_gb_per_s_per_chip": documented(4900.0, _DEVICE_PAGE, "the architecture guide says 4700"),
    "hbm_gb_per_s_per_core": derived(612.5, _DEVICE_PAGE, "an eighth of the chip's"),
    "hbm_gb_per_s_per_stack": derived(1225.0, _DEVICE_PAGE, "a quarter of the chip's, as on gen3"),
}

_LIMITS = {
    "contraction_max_double_row": documented(256, ISA),
    "moving_free_max_psum_bf16": documented(8192, ISA, "the whole PSUM instead of one bank"),
    "moving_free_max_psum_fp32": documented(4096, ISA, "the whole PSUM instead of one bank"),
    "matmul_tile_sizes": documented((32, 64, 128), ISA),
}

_CAPABILITIES = {
    "core_barrier": documented(True, ISA),
    "sendrecv": documented(True, ISA),
    "hardware_dge": documented(True, DGE_GUIDE),
    "dma_priority": documented(True, ISA),
    "indirect_dma_transpose": documented(True, ISA),
    "indirect_views": documented(True, ISA),
    "scalar_engine_tensor_copy": documented(True, ISA),
    "scalar_engine_tensor_scalar": documented(True, ISA),
    "activation_immediate_bias": documented(True, ISA),
    "activation_reciprocal_bias": documented(True, ISA),
    "activate2": documented(True, ISA),
    "matmul_transpose_mode": documented(True, ISA),
    "matmul_transpose_fp8": derived(True, ISA, "the 16-bit results are those of gen3 only"),
    "matmul_crosses_psum_banks": documented(True, ISA, "the whole PSUM instead of one bank"),
    "matmul_bf16_destination": documented(True, ISA),
    "matmul_e4m3fn": documented(True, ISA),
    "matmul_double_row": documented(True, ISA),
    "psum_accumulate_after_other_write": derived(True, ISA, "excluded on gen2 and gen3 only"),
    "mx": documented(True, ISA),
    "alu_extended_operators": documented(True, ISA),
    "vector_exponential": documented(True, ISA),
    "range_select": documented(True, ISA),
    "nonzero_with_count": documented(True, ISA),
    "gpsimd_random": documented(True, ISA),
    "random_state": documented(True, ISA),
    "vector_random_state": documented(True, ISA),
    "rand2": documented(True, ISA),
    "receive_displacements": documented(True, ISA),
}

_SHARED = {
    "activity_throttle": documented(True, EXPLORER),
    **carry_over(
        TRN2,
        "vector_gpsimd_share_sbuf_port",
        "vector_scalar_share_psum_port",
        "vector_fast_modes_share_bus_with_gpsimd",
        "psum_same_bank_slowdown_factor",
        "activity_throttle_window_ns",
        "activity_throttle_busy_fraction",
        reason="gen3 value",
    ),
}

_TENSOR = {
    "matmul_fp32_passes": derived(4, GUIDE_GEN4, "20 of 79 TFLOPS"),
    **carry_over(
        TRN2,
        "matmul_issue_overhead_cycles",
        "matmul_latency_ns",
        "matmul_throttled_latency_ns",
        "matmul_fp32_instructions",
        "transpose_fp32_passes",
        "load_weights_cycles_per_row",
        "load_weights_latency_ns",
        "load_weights_fp32_latency_ns",
        reason="gen3 value: same clock, same array",
    ),
}

_VECTOR = {
    "vector_interval_overhead_ns": _vector_cycles("vector_interval_overhead_ns"),
    "vector_fast_mode_interval_overhead_ns": _vector_cycles("vector_fast_mode_interval_overhead_ns"),
    "vector_latency_overhead_ns": _vector_cycles("vector_latency_overhead_ns"),
    "vector_fast_mode_16bit": documented(4.0, GUIDE_GEN4, "elements per cycle: 512 over 128 lanes, fp8 too"),
    "vector_fast_mode_fp32": documented(2.0, GUIDE_GEN4, "elements per cycle: 256 over 128 lanes"),
    "vector_bitwise_32bit_elements_per_cycle": guessed(
        2.0, GUIDE_GEN4, "as arithmetic on float32, whose elements have the same bytes"
    ),
    "vector_quantize_mx_elements_per_cycle": documented(4.0, GUIDE_GEN4),
    "vector_exponential_elements_per_cycle": documented(
        4.0, GUIDE_GEN4, "4x the Scalar engine, at its clock"
    ),
    "vector_random_elements_per_cycle": documented(4.0, GUIDE_GEN4, "rand2"),
    "vector_reciprocal_cycles_per_element": guessed(
        1.0,
        COST_FORMULAS,
        "the formula 8 N is printed without a generation; our timing notes apply it to gen2",
    ),
    **carry_over(
        TRN2,
        "vector_tensor_tensor_sbuf_cycles_per_element",
        "vector_scalar_tensor_tensor_cycles_per_element",
        "vector_fast_mode_16bit_strided",
        "vector_tensor_tensor_16bit",
        reason="gen3 value",
    ),
}

_SCALAR = {
    **carry_over(
        TRN2,
        "scalar_interval_overhead_ns",
        "scalar_latency_overhead_ns",
        "scalar_table_function_interval_ns",
        "scalar_table_function_latency_ns",
        "scalar_table_function_sbuf_interval_ns",
        "scalar_table_function_sbuf_latency_ns",
        "activation_table_load_ns",
        reason="gen3 value: same clock",
    ),
}

_CONTROL = carry_over(
    TRN2,
    "semaphore_ns",
    "same_engine_wait_ns",
    "register_load_hbm_ns",
    "device_loop_iteration_ns",
    "device_loop_first_iteration_ns",
    "core_barrier_ns",
    "sendrecv_latency_ns",
    "sendrecv_gb_per_s",
    reason="gen3 value",
)

_DMA = {
    "dma_engine_bytes_per_ns": documented(38.4, DMA_GUIDE, "33 are documented as achieved"),
    "dma_piece_bytes_per_ns": documented(38.4, DMA_GUIDE, "the engine's peak"),
    "dma_swdge_gpsimd_ns": derived(
        980.0, MEGAKERNEL, "GpSimd active 44 % of 88.96 us, in which a core asks for 40 DMAs"
    ),
    "dma_compute_fraction": documented(1.0, GUIDE_GEN4, "read-add-write into SBUF at the full DMA rate"),
    **carry_over(
        TRN2,
        "dma_cast_bytes_per_ns",
        "dma_descriptor_ns",
        "dma_piece_ns",
        "dma_descriptor_latency_ns",
        "dma_static_trigger_ns",
        "dma_static_first_ns",
        "dma_static_store_first_ns",
        "dma_hwdge_trigger_ns",
        "dma_hwdge_first_ns",
        "dma_hwdge_descriptors_free",
        "dma_hwdge_descriptor_ns",
        "dma_swdge_trigger_ns",
        "dma_swdge_known_gpsimd_ns",
        "dma_swdge_descriptor_ns",
        "dma_swdge_first_ns",
        "dma_load_skew_ns",
        "dma_store_skew_ns",
        "dma_completion_ns",
        "dma_outstanding_per_queue",
        "dma_transpose_hbm_fraction",
        "dma_transpose_sbuf_fraction",
        reason="gen3 value",
    ),
}

_KERNEL = carry_over(
    TRN2,
    "kernel_start_ns",
    "kernel_end_ns",
    "kernel_handover_ns",
    "benchmark_overhead_ns",
    "host_overhead_ns",
    reason="gen3 value",
)

_BY_LINKS = "trn2's guesses by the ratio of link bandwidths, 2560 to 1280"

_LINKS = {
    "neuronlink_gb_per_s_per_chip": documented(2560.0, _DEVICE_PAGE),
    "collective_mesh_gb_per_s": guessed({2: 400.0, 8: 100.0, 32: 126.0}, COLLECTIVES_GUIDE, _BY_LINKS),
    "collective_bus_gb_per_s": guessed({2: 380.0, 8: 446.0, 32: 854.0}, COLLECTIVES_GUIDE, _BY_LINKS),
    **carry_over(
        TRN2,
        "collective_latency_ns",
        "collective_ring_latency_ns",
        "collective_switch_bytes",
        "collective_efa_step_ns",
        reason="gen3 value",
    ),
}

TRN3: Hardware = build(
    Hardware,
    {
        **COMMON,
        **_IDENTITY,
        **_CLOCKS,
        **_MEMORY,
        **_LIMITS,
        **_CAPABILITIES,
        **_SHARED,
        **_TENSOR,
        **_VECTOR,
        **_SCALAR,
        **_CONTROL,
        **_DMA,
        **_KERNEL,
        **_LINKS,
    },
)
