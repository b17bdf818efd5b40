"""Hardware records `TRN1` and `INF2`: Trainium and Inferentia2, two chips with the same core, NeuronCore-v2."""

from __future__ import annotations

from simulate.hardware.common import (
    COLLECTIVES_GUIDE,
    COMMON,
    COST_FORMULAS,
    DGE_GUIDE,
    DMA_GUIDE,
    GUIDE_GEN2,
    ISA,
    KILN,
    PERFORMANCE_GUIDE,
)
from simulate.hardware.record import Hardware, build, derived, documented, guessed

_DEVICE_PAGE = "Trainium device page"
_PROFILER = "profiler metadata in public trn1 traces"
_SWEEP = "published nccom-test sweep on 32 cores (instance inferred as trn1.32xlarge)"
_NKIBENCH = "fit to NKIBench and Autocomp kernels on trn1"
_GEN3_TRACES = "traces of gen3"

_IDENTITY = {
    "name": documented("trn1", ISA),
    "generation": documented(2, GUIDE_GEN2),
    "sub_version": guessed(0, ISA, "public kernels ask for it on gen4 only"),
    "core": documented("NeuronCore-v2", GUIDE_GEN2),
    "chip": documented("Trainium", _DEVICE_PAGE),
    "physical_cores_per_chip": documented(2, _DEVICE_PAGE),
    "logical_core_sizes": documented((1,), _DEVICE_PAGE, "LNC=2 exists from Trainium2 on"),
}

_CLOCKS = {
    "tensor_clock_ghz": documented(2.8, GUIDE_GEN2),
    "tensor_throttled_clock_ghz": derived(2.8, PERFORMANCE_GUIDE, "no throttle is known"),
    "vector_clock_ghz": documented(1.12, GUIDE_GEN2),
    "scalar_clock_ghz": documented(1.4, GUIDE_GEN2),
    "gpsimd_clock_ghz": documented(1.4, GUIDE_GEN2),
    "sync_clock_ghz": guessed(1.4, GUIDE_GEN2, "assumed equal to the Scalar engine"),
}

_MEMORY = {
    "sbuf_physical_bytes_per_partition": documented(196608, GUIDE_GEN2),
    "sbuf_usable_bytes_per_partition": documented(180224, GUIDE_GEN2),
    "hbm_bytes_per_chip": documented(32 * 2**30, _DEVICE_PAGE),
    "hbm_bytes_per_core": derived(16 * 2**30, KILN, "half of the chip's"),
    "hbm_gb_per_s_per_chip": documented(820.0, _DEVICE_PAGE),
    "hbm_gb_per_s_per_core": derived(410.0, _PROFILER),
    "hbm_gb_per_s_per_stack": derived(410.0, _DEVICE_PAGE, "half of the chip's; one core for each stack"),
}

_LIMITS = {
    "contraction_max_double_row": derived(128, ISA, "no double-row mode: the plain contraction limit"),
    "moving_free_max_psum_bf16": documented(512, ISA),
    "moving_free_max_psum_fp32": documented(512, ISA),
    "matmul_tile_sizes": documented((64, 128), ISA),
}

_CAPABILITIES = {
    "core_barrier": documented(False, ISA),
    "sendrecv": documented(False, ISA),
    "hardware_dge": documented(False, DGE_GUIDE),
    "dma_priority": documented(False, ISA),
    "indirect_dma_transpose": documented(False, ISA),
    "indirect_views": documented(False, ISA),
    "scalar_engine_tensor_copy": documented(False, ISA),
    "scalar_engine_tensor_scalar": documented(False, ISA),
    "activation_immediate_bias": documented(False, ISA),
    "activation_reciprocal_bias": documented(False, ISA),
    "activate2": documented(False, ISA),
    "matmul_transpose_mode": documented(False, ISA),
    "matmul_transpose_fp8": derived(False, ISA, "there is no transpose mode"),
    "matmul_crosses_psum_banks": documented(False, ISA),
    "matmul_bf16_destination": documented(False, ISA),
    "matmul_e4m3fn": documented(False, ISA),
    "matmul_double_row": documented(False, ISA),
    "psum_accumulate_after_other_write": documented(False, ISA),
    "mx": documented(False, ISA),
    "alu_extended_operators": documented(False, ISA),
    "vector_exponential": documented(False, ISA),
    "range_select": documented(False, ISA),
    "nonzero_with_count": documented(False, ISA),
    "gpsimd_random": documented(False, ISA),
    "random_state": documented(False, ISA),
    "vector_random_state": documented(False, ISA),
    "rand2": documented(False, ISA),
    "receive_displacements": documented(False, ISA),
}

_SHARED = {
    "vector_gpsimd_share_sbuf_port": documented(True, GUIDE_GEN2, "mutually exclusive"),
    "vector_scalar_share_psum_port": documented(True, GUIDE_GEN2, "mutually exclusive"),
    "vector_fast_modes_share_bus_with_gpsimd": documented(False, GUIDE_GEN2, "there are no fast modes"),
    "psum_same_bank_slowdown_factor": guessed(1.0, GUIDE_GEN2, "the shared port serialises already"),
    "activity_throttle": derived(False, PERFORMANCE_GUIDE, "no throttle is known"),
    "activity_throttle_window_ns": guessed(3413.0, _GEN3_TRACES, "gen3 value; without a throttle unused"),
    "activity_throttle_busy_fraction": guessed(0.5, _GEN3_TRACES, "gen3 value; without a throttle unused"),
}

_TENSOR = {
    "matmul_issue_overhead_cycles": derived(
        96.0, _NKIBENCH, "cycles per pass; 64 to 128 fit the published kernels, this is the middle"
    ),
    "matmul_latency_ns": derived(
        140.0, PERFORMANCE_GUIDE, "188 ns for 128 columns less their 46 ns of stream"
    ),
    "matmul_throttled_latency_ns": derived(140.0, PERFORMANCE_GUIDE, "no throttle is known"),
    "matmul_fp32_passes": documented(4, COST_FORMULAS),
    "matmul_fp32_instructions": guessed(2, _GEN3_TRACES, "the split into low and high halves seen on gen3"),
    "transpose_fp32_passes": derived(4, _NKIBENCH, "360 ns per 128 x 128 is four passes"),
    "load_weights_cycles_per_row": derived(
        0.86,
        KILN,
        "74 ns at most for each product with 4 columns in slots of experts, (110 + 96) cycles, 80 ns where every "
        "slot loads one; when the fast load applies is not published",
    ),
    "load_weights_latency_ns": documented(67.0, PERFORMANCE_GUIDE, "single-column load"),
    "load_weights_fp32_latency_ns": guessed(134.0, PERFORMANCE_GUIDE, "gen3 takes twice its 16-bit latency"),
}

_VECTOR = {
    "vector_interval_overhead_ns": derived(34.0, KILN, "91 ns for 64 elements less their 57 ns"),
    "vector_fast_mode_interval_overhead_ns": guessed(34.0, KILN, "no fast modes: the ordinary overhead"),
    "vector_latency_overhead_ns": guessed(136.0, _GEN3_TRACES, "gen3's 159 ns in cycles at 1.12 GHz"),
    "vector_tensor_tensor_sbuf_cycles_per_element": documented(
        2.0, COST_FORMULAS, "1 when one operand is in PSUM; 8192 elements were seen to take 14.99 us"
    ),
    "vector_scalar_tensor_tensor_cycles_per_element": documented(2.0, COST_FORMULAS),
    "vector_reciprocal_cycles_per_element": derived(
        1.0,
        _NKIBENCH,
        "the formulas print 8, but the engine's active shares of SiLU and AdamW leave no room for it",
    ),
    "vector_fast_mode_16bit": documented(1.0, GUIDE_GEN2, "elements per cycle; no fast modes"),
    "vector_fast_mode_16bit_strided": documented(1.0, GUIDE_GEN2, "elements per cycle; no fast modes"),
    "vector_fast_mode_fp32": documented(1.0, GUIDE_GEN2, "elements per cycle; no fast modes"),
    "vector_bitwise_32bit_elements_per_cycle": documented(1.0, GUIDE_GEN2, "no fast modes"),
    "vector_tensor_tensor_16bit": documented(
        1.0, COST_FORMULAS, "elements per cycle, both operands in SBUF, add, multiply or subtract"
    ),
    "vector_quantize_mx_elements_per_cycle": guessed(1.0, GUIDE_GEN2, "no MX here; one element per lane"),
    "vector_exponential_elements_per_cycle": guessed(1.0, GUIDE_GEN2, "not here; one element per lane"),
    "vector_random_elements_per_cycle": guessed(1.0, GUIDE_GEN2, "rng has no published cost; one per lane"),
}

_SCALAR = {
    "scalar_interval_overhead_ns": derived(23.0, KILN, "69 ns for 64 elements less their 46 ns"),
    "scalar_latency_overhead_ns": derived(158.0, PERFORMANCE_GUIDE, "159 ns for one element less its cycle"),
    "scalar_table_function_interval_ns": guessed(23.0, KILN, "published figures do not tell functions apart"),
    "scalar_table_function_latency_ns": guessed(
        158.0, PERFORMANCE_GUIDE, "published figures do not tell functions apart"
    ),
    "scalar_table_function_sbuf_interval_ns": guessed(23.0, KILN, "as from PSUM"),
    "scalar_table_function_sbuf_latency_ns": guessed(158.0, PERFORMANCE_GUIDE, "as from PSUM"),
    "activation_table_load_ns": guessed(1283.0, _GEN3_TRACES, "gen3 value; a DMA of the same table"),
}

_CONTROL = {
    "semaphore_ns": documented(9.0, PERFORMANCE_GUIDE, "when already satisfied"),
    "same_engine_wait_ns": documented(
        30.0, PERFORMANCE_GUIDE, "dependent activations of one element start 189 ns apart, one takes 159"
    ),
    "register_load_hbm_ns": guessed(650.0, _GEN3_TRACES, "gen3 value; 0.5 to 1.25 us are published"),
    "device_loop_iteration_ns": derived(1400.0, KILN, "loop bound in a register"),
    "device_loop_first_iteration_ns": guessed(
        4850.0,
        KILN,
        "the bound is loaded into a register, 650 ns; entry and exit fetch instructions anew, as each iteration does",
    ),
    "core_barrier_ns": guessed(1340.0, _GEN3_TRACES, "gen3 value; the instruction does not exist here"),
    "sendrecv_latency_ns": guessed(400.0, _GEN3_TRACES, "gen3 value; the instruction does not exist here"),
    "sendrecv_gb_per_s": guessed(153.0, _GEN3_TRACES, "gen3 value; the instruction does not exist here"),
}

_DMA = {
    "dma_engine_bytes_per_ns": documented(
        17.0,
        DMA_GUIDE,
        "as achieved; 27.2 is the peak, which no published kernel comes near: 250 to 263 GB/s over 16 engines",
    ),
    "dma_cast_bytes_per_ns": guessed(15.5, _GEN3_TRACES, "gen3 value"),
    "dma_descriptor_ns": derived(7.0, PERFORMANCE_GUIDE),
    "dma_piece_ns": guessed(6.5, _GEN3_TRACES, "gen3 value"),
    "dma_piece_bytes_per_ns": documented(27.2, DMA_GUIDE, "the engine's peak"),
    "dma_descriptor_latency_ns": guessed(270.0, _GEN3_TRACES, "gen3 value"),
    "dma_static_trigger_ns": guessed(59.0, _GEN3_TRACES, "gen3 value"),
    "dma_static_first_ns": guessed(1003.0, _GEN3_TRACES, "gen3 value"),
    "dma_static_store_first_ns": guessed(727.0, _GEN3_TRACES, "gen3 value"),
    "dma_hwdge_trigger_ns": guessed(560.0, _GEN3_TRACES, "gen3 value; no hardware DGE here"),
    "dma_hwdge_first_ns": guessed(1260.0, _GEN3_TRACES, "gen3 value; no hardware DGE here"),
    "dma_hwdge_descriptors_free": guessed(535, _GEN3_TRACES, "gen3 value; no hardware DGE here"),
    "dma_hwdge_descriptor_ns": guessed(2.0, _GEN3_TRACES, "gen3 value; no hardware DGE here"),
    "dma_swdge_trigger_ns": guessed(50.0, _GEN3_TRACES, "gen3 value"),
    "dma_swdge_gpsimd_ns": derived(1000.0, KILN),
    "dma_swdge_known_gpsimd_ns": guessed(1000.0, KILN, "as for addresses that follow from data"),
    "dma_swdge_descriptor_ns": derived(15.0, KILN),
    "dma_swdge_first_ns": guessed(675.0, _GEN3_TRACES, "gen3 value"),
    "dma_load_skew_ns": guessed(400.0, _GEN3_TRACES, "gen3 value"),
    "dma_store_skew_ns": guessed(200.0, _GEN3_TRACES, "gen3 value"),
    "dma_completion_ns": guessed(316.0, _GEN3_TRACES, "gen3 value"),
    "dma_outstanding_per_queue": guessed(16, _GEN3_TRACES, "gen3 value"),
    "dma_transpose_hbm_fraction": guessed(0.9, _GEN3_TRACES, "gen3 value"),
    "dma_transpose_sbuf_fraction": guessed(0.5, _GEN3_TRACES, "gen3 value"),
    "dma_compute_fraction": derived(
        0.5, "NKI architecture guide for Trainium3", "its remark on earlier chips"
    ),
}

_KERNEL = {
    "kernel_start_ns": documented(12500.0, PERFORMANCE_GUIDE),
    "kernel_end_ns": documented(5000.0, PERFORMANCE_GUIDE),
    "kernel_handover_ns": guessed(1550.0, _GEN3_TRACES, "gen3 value"),
    "benchmark_overhead_ns": guessed(
        9500.0, _GEN3_TRACES, "start and end less 8 us; on gen3 a benchmark leaves out 7.1 us of them"
    ),
    "host_overhead_ns": derived(50000.0, "fit to published benchmarks"),
}

_LINKS = {
    "neuronlink_gb_per_s_per_chip": documented(384.0, "Amazon EC2 Trn1/Trn1n architecture page"),
    "collective_efa_step_ns": derived(
        165000.0,
        "published nccom-test sweep of 32 ranks over two and four nodes (instance inferred as trn1.32xlarge)",
        "all-reduces of 256 KB less what they take inside, by two and by four steps; with the software of 2023",
    ),
    "collective_latency_ns": derived(
        {2: 2100.0, 8: 6300.0, 16: 7700.0, 32: 9100.0}, _SWEEP, "all-reduce of 1 KB; 16 ranks: half way"
    ),
    "collective_ring_latency_ns": derived(
        {2: 2100.0, 8: 21000.0, 16: 45000.0, 32: 93000.0},
        COLLECTIVES_GUIDE,
        "2 (n - 1) steps of its hop of 1 to 2 us; two ranks share a chip",
    ),
    "collective_mesh_gb_per_s": derived(
        {2: 60.0, 8: 15.0, 16: 17.0, 32: 19.0}, _SWEEP, "payload rate; 16 ranks: half way"
    ),
    "collective_bus_gb_per_s": derived(
        {2: 57.0, 8: 67.0, 16: 67.0, 32: 128.0}, _SWEEP, "plateau; 8 and 16 ranks use two of the four links"
    ),
    "collective_switch_bytes": derived(
        {2: 1_000_000, 8: 2_000_000, 16: 2_000_000, 32: 4_194_304},
        _SWEEP,
        f"for 2 ranks the 1 MB of the {COLLECTIVES_GUIDE}; there the two rates hardly differ",
    ),
}

TRN1: Hardware = build(
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

_INF2_PAGE = "Amazon EC2 Inf2 architecture page"
_RING = (
    "the sweep's value by the ratio of link bandwidths, 206 to 384; two ranks share a chip and keep theirs"
)

INF2: Hardware = TRN1.with_numbers(
    name=documented("inf2", ISA),
    chip=documented("Inferentia2", _INF2_PAGE),
    neuronlink_gb_per_s_per_chip=documented(206.0, _INF2_PAGE, "192 GiB/s, 2 links"),
    collective_latency_ns=guessed({2: 2100.0, 8: 6300.0, 24: 9100.0}, _SWEEP, "Trainium's; 24 ranks as 32"),
    collective_ring_latency_ns=guessed(
        {2: 2100.0, 8: 21000.0, 24: 69000.0}, COLLECTIVES_GUIDE, "2 (n - 1) steps of its hop"
    ),
    collective_mesh_gb_per_s=guessed({2: 60.0, 8: 8.0, 24: 10.0}, _SWEEP, _RING),
    collective_bus_gb_per_s=guessed({2: 57.0, 8: 36.0, 24: 69.0}, _SWEEP, _RING),
    collective_switch_bytes=guessed(
        {2: 1_000_000, 8: 2_000_000, 24: 4_194_304}, _SWEEP, "Trainium's; 24 ranks as 32"
    ),
)
