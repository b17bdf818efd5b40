"""Hardware record `TRN2`: Trainium2, whose core is NeuronCore-v3."""

from __future__ import annotations

from simulate.hardware.common import (
    COLLECTIVES_GUIDE,
    COMMON,
    COST_FORMULAS,
    CS149_TRACES,
    DGE_GUIDE,
    DMA_GUIDE,
    EXPLORER,
    GUIDE_GEN3,
    ISA,
    KILN,
    MEGAKERNEL,
    TRN2_TRACES,
)
from simulate.hardware.record import Hardware, build, derived, documented, guessed

_DEVICE_PAGE = "Trainium2 device page"
_PROFILER = "profiler metadata in public trn2 traces"
_SWEEP = "published nccom-test sweep on trn1"

_IDENTITY = {
    "name": documented("trn2", ISA),
    "generation": documented(3, GUIDE_GEN3),
    "sub_version": guessed(0, ISA, "public kernels ask for it on gen4 only"),
    "core": documented("NeuronCore-v3", GUIDE_GEN3),
    "chip": documented("Trainium2", _DEVICE_PAGE),
    "physical_cores_per_chip": documented(8, _DEVICE_PAGE),
    "logical_core_sizes": documented((1, 2), _DEVICE_PAGE),
}

_CLOCKS = {
    "tensor_clock_ghz": documented(2.4, GUIDE_GEN3),
    "tensor_throttled_clock_ghz": derived(1.2, TRN2_TRACES, "effective rate of the activity throttle at 4/8"),
    "vector_clock_ghz": documented(0.96, GUIDE_GEN3),
    "scalar_clock_ghz": documented(1.2, GUIDE_GEN3),
    "gpsimd_clock_ghz": documented(1.2, GUIDE_GEN3),
    "sync_clock_ghz": derived(1.2, _PROFILER),
}

_MEMORY = {
    "sbuf_physical_bytes_per_partition": documented(229376, GUIDE_GEN3),
    "sbuf_usable_bytes_per_partition": documented(212984, GUIDE_GEN3, "the runtime reserves the rest"),
    "hbm_bytes_per_chip": documented(96 * 2**30, _DEVICE_PAGE),
    "hbm_bytes_per_core": derived(12 * 2**30, _DEVICE_PAGE, "an eighth of the chip's"),
    "hbm_gb_per_s_per_chip": documented(2900.0, _DEVICE_PAGE, "the architecture guide says 3000"),
    "hbm_gb_per_s_per_core": derived(358.0, _PROFILER, "half of a stack's 716, while both of its cores work"),
    "hbm_gb_per_s_per_stack": derived(
        716.0, _PROFILER, "the limit in the traces' metadata; four stacks a chip"
    ),
}

_LIMITS = {
    "contraction_max_double_row": documented(256, GUIDE_GEN3),
    "moving_free_max_psum_bf16": documented(512, ISA),
    "moving_free_max_psum_fp32": documented(512, ISA),
    "matmul_tile_sizes": documented((32, 64, 128), ISA),
}

_CAPABILITIES = {
    "core_barrier": documented(True, ISA),
    "sendrecv": documented(True, ISA),
    "hardware_dge": documented(True, DGE_GUIDE),
    "dma_priority": documented(False, ISA),
    "indirect_dma_transpose": documented(True, ISA),
    "indirect_views": documented(False, ISA),
    "scalar_engine_tensor_copy": documented(True, ISA),
    "scalar_engine_tensor_scalar": documented(True, ISA),
    "activation_immediate_bias": documented(True, ISA),
    "activation_reciprocal_bias": documented(True, ISA),
    "activate2": documented(False, ISA),
    "matmul_transpose_mode": documented(True, ISA),
    "matmul_transpose_fp8": documented(False, ISA, "its fp8 results take 16-bit PSUM elements"),
    "matmul_crosses_psum_banks": documented(False, ISA),
    "matmul_bf16_destination": documented(False, ISA),
    "matmul_e4m3fn": documented(False, ISA),
    "matmul_double_row": documented(True, ISA),
    "psum_accumulate_after_other_write": documented(False, ISA),
    "mx": documented(False, ISA),
    "alu_extended_operators": documented(False, ISA),
    "vector_exponential": documented(False, ISA),
    "range_select": documented(True, ISA),
    "nonzero_with_count": documented(True, ISA),
    "gpsimd_random": documented(True, ISA),
    "random_state": documented(True, ISA),
    "vector_random_state": documented(False, ISA),
    "rand2": documented(False, ISA),
    "receive_displacements": documented(False, ISA),
}

_SHARED = {
    "vector_gpsimd_share_sbuf_port": documented(False, GUIDE_GEN3),
    "vector_scalar_share_psum_port": documented(False, GUIDE_GEN3, "parallel unless both address one bank"),
    "vector_fast_modes_share_bus_with_gpsimd": documented(True, GUIDE_GEN3, "arbitrated"),
    "psum_same_bank_slowdown_factor": guessed(2.0, GUIDE_GEN3, "the conflict is documented, its cost is not"),
    "activity_throttle": documented(True, EXPLORER),
    "activity_throttle_window_ns": derived(3413.0, TRN2_TRACES, "intervals are multiples of it"),
    "activity_throttle_busy_fraction": derived(0.5, TRN2_TRACES, "fit: busy share of a window that opens it"),
}

_TENSOR = {
    "matmul_issue_overhead_cycles": derived(2.7 * 2.4, TRN2_TRACES, "2.7 ns per MATMUL at 2.4 GHz"),
    "matmul_latency_ns": derived(164.0, TRN2_TRACES, "from the end of the stream"),
    "matmul_throttled_latency_ns": derived(204.0, TRN2_TRACES),
    "matmul_fp32_passes": documented(4, COST_FORMULAS, "traces: two MATMULs of two passes"),
    "matmul_fp32_instructions": derived(2, TRN2_TRACES, "low and high halves, each with its own LDWEIGHTS"),
    "transpose_fp32_passes": derived(2, CS149_TRACES, "one MATMUL of two passes"),
    "load_weights_cycles_per_row": derived(
        0.25,
        CS149_TRACES,
        "the documented fast load, up to 4x: matmuls of 28 columns hold the engine for 25 ns each, "
        "less than 128 cycles",
    ),
    "load_weights_latency_ns": derived(97.0, TRN2_TRACES, "hidden behind the previous MATMUL"),
    "load_weights_fp32_latency_ns": derived(191.0, TRN2_TRACES, "per half product"),
}

_VECTOR = {
    "vector_interval_overhead_ns": derived(64.0, CS149_TRACES, "PSUM source or reduction"),
    "vector_fast_mode_interval_overhead_ns": derived(
        130.0, CS149_TRACES, "float32 at two elements per cycle"
    ),
    "vector_latency_overhead_ns": derived(159.0, CS149_TRACES),
    "vector_tensor_tensor_sbuf_cycles_per_element": derived(
        1.0, CS149_TRACES, "2000 elements in 2.243 us, although the formulas print 2"
    ),
    "vector_scalar_tensor_tensor_cycles_per_element": guessed(
        1.0, CS149_TRACES, "as tensor_tensor, whose operands it reads"
    ),
    "vector_reciprocal_cycles_per_element": guessed(
        1.0,
        COST_FORMULAS,
        "the formula 8 N is printed without a generation; our timing notes apply it to gen2",
    ),
    "vector_fast_mode_16bit": documented(4.0, GUIDE_GEN3, "elements per cycle, contiguous, SBUF to SBUF"),
    "vector_fast_mode_16bit_strided": documented(2.0, GUIDE_GEN3, "also with one side in PSUM"),
    "vector_fast_mode_fp32": derived(2.0, TRN2_TRACES, "1.6 to 2 elements per cycle, SBUF to SBUF"),
    "vector_bitwise_32bit_elements_per_cycle": guessed(
        2.0, GUIDE_GEN3, "as arithmetic on float32, whose elements have the same bytes"
    ),
    "vector_tensor_tensor_16bit": documented(2.0, GUIDE_GEN3, "elements per cycle, all operands in SBUF"),
    "vector_quantize_mx_elements_per_cycle": guessed(1.0, GUIDE_GEN3, "no MX here; one element per lane"),
    "vector_exponential_elements_per_cycle": guessed(1.0, GUIDE_GEN3, "not here; one element per lane"),
    "vector_random_elements_per_cycle": guessed(1.0, GUIDE_GEN3, "rng has no published cost; one per lane"),
}

_SCALAR = {
    "scalar_interval_overhead_ns": derived(50.0, TRN2_TRACES),
    "scalar_latency_overhead_ns": derived(158.0, TRN2_TRACES),
    "scalar_table_function_interval_ns": derived(140.0, TRN2_TRACES, "exp from PSUM"),
    "scalar_table_function_latency_ns": derived(258.0, TRN2_TRACES, "exp from PSUM"),
    "scalar_table_function_sbuf_interval_ns": derived(185.0, TRN2_TRACES, "exp from SBUF"),
    "scalar_table_function_sbuf_latency_ns": derived(280.0, TRN2_TRACES, "exp from SBUF"),
    "activation_table_load_ns": derived(1283.0, TRN2_TRACES),
}

_CONTROL = {
    "semaphore_ns": derived(45.0, TRN2_TRACES, "23 to 67 ns when already satisfied"),
    "same_engine_wait_ns": derived(
        54.0,
        CS149_TRACES,
        "a tensor_scalar starts 213 ns after the reciprocal it needs, whose latency is 159",
    ),
    "register_load_hbm_ns": derived(650.0, TRN2_TRACES),
    "device_loop_iteration_ns": guessed(1400.0, KILN, "measured on gen2"),
    "device_loop_first_iteration_ns": guessed(
        4850.0,
        KILN,
        "the bound is loaded into a register, 650 ns; entry and exit fetch instructions anew, as each iteration does",
    ),
    "core_barrier_ns": derived(1340.0, MEGAKERNEL, "geometric middle of the published 0.6 to 3 us"),
    "sendrecv_latency_ns": derived(400.0, MEGAKERNEL, "4 KiB between two cores of a pair stay below it"),
    "sendrecv_gb_per_s": derived(153.0, GUIDE_GEN3, "half of the GpSimd DMA's 307 GB/s, one way"),
}

_DMA = {
    "dma_engine_bytes_per_ns": derived(
        27.2, _PROFILER, "slope of one descriptor; the guide's 23 include fixed costs"
    ),
    "dma_cast_bytes_per_ns": derived(
        15.5, TRN2_TRACES, "of the wider side: 41 ns for 512 B of float32 to bfloat16, less the 8 ns start"
    ),
    "dma_descriptor_ns": derived(8.0, CS149_TRACES, "5 to 8 ns between queued descriptors"),
    "dma_piece_ns": derived(
        6.5,
        CS149_TRACES,
        "the middle of 5 to 8 ns: pieces inside a descriptor follow no faster than descriptors do",
    ),
    "dma_piece_bytes_per_ns": documented(27.2, DMA_GUIDE, "the engine's peak"),
    "dma_descriptor_latency_ns": derived(270.0, CS149_TRACES, "beyond the interval"),
    "dma_static_trigger_ns": derived(59.0, CS149_TRACES),
    "dma_static_first_ns": documented(1003.0, DMA_GUIDE, "traces: 0.8 to 1.0 us"),
    "dma_static_store_first_ns": derived(727.0, CS149_TRACES, "786 ns from the trigger, which takes 59"),
    "dma_hwdge_trigger_ns": derived(560.0, TRN2_TRACES, "520 to 605 ns; the guide rounds to 600"),
    "dma_hwdge_first_ns": derived(1260.0, TRN2_TRACES),
    "dma_hwdge_descriptors_free": derived(
        535, MEGAKERNEL, "0.54 us for 535 descriptors, as for fewer; 5.74 us for 3130"
    ),
    "dma_hwdge_descriptor_ns": derived(2.0, MEGAKERNEL, "per descriptor beyond those"),
    "dma_swdge_trigger_ns": derived(50.0, TRN2_TRACES, "30 to 75 ns"),
    "dma_swdge_gpsimd_ns": derived(
        1220.0,
        MEGAKERNEL,
        "per DMA of 32 or 48 packets alike, in four versions of one kernel with 809 to 221 DMAs",
    ),
    "dma_swdge_known_gpsimd_ns": derived(
        750.0,
        MEGAKERNEL,
        "per DMA of 32 packets in three one-core versions of an attention block with 324 to 466 of them, less 3.7 us "
        "for each value that goes through HBM; two-core ones leave at most 0.7 us",
    ),
    "dma_swdge_descriptor_ns": derived(
        9.5, MEGAKERNEL, "fit to three versions of a kernel whose largest DMAs are 1.5 MB in 384 packets"
    ),
    "dma_swdge_first_ns": derived(675.0, TRN2_TRACES, "0.6 to 0.75 us after the trigger"),
    "dma_load_skew_ns": derived(
        400.0,
        DMA_GUIDE,
        "0.1 us in a load of 32 KiB, 0.4 in the guide's curve, 1.0 at the start of megabyte bursts",
    ),
    "dma_store_skew_ns": derived(200.0, CS149_TRACES),
    "dma_completion_ns": documented(316.0, DMA_GUIDE),
    "dma_outstanding_per_queue": guessed(16, CS149_TRACES, "seen as 17 triggers in a row, then a pause"),
    "dma_transpose_hbm_fraction": documented(0.9, GUIDE_GEN3, "at best"),
    "dma_transpose_sbuf_fraction": documented(0.5, GUIDE_GEN3, "at best"),
    "dma_compute_fraction": documented(
        0.5, "NKI architecture guide for Trainium3", "its remark on earlier chips"
    ),
}

_KERNEL = {
    "kernel_start_ns": derived(13700.0, TRN2_TRACES),
    "kernel_end_ns": derived(2500.0, TRN2_TRACES),
    "kernel_handover_ns": guessed(
        1550.0,
        "no published trace",
        "from one to the next in a graph: geometric middle of 1 to 2.4 us, seen in chains",
    ),
    "benchmark_overhead_ns": derived(
        9100.0,
        TRN2_TRACES,
        "of start and end what a benchmark holds: four kernels take 6.3 to 8.4 us, 7.1 on average, more in a profile",
    ),
    "host_overhead_ns": derived(80000.0, "fit to published benchmarks"),
}

_BY_LINKS = "trn1's by the ratio of link bandwidths, 1280 to 384"

_LINKS = {
    "neuronlink_gb_per_s_per_chip": documented(1280.0, _DEVICE_PAGE),
    "collective_efa_step_ns": guessed(
        15000.0, COLLECTIVES_GUIDE, "its hop of about 15 us; nothing is published of the software on top"
    ),
    "collective_latency_ns": guessed(
        {2: 3600.0, 4: 7200.0, 8: 10800.0, 32: 15600.0},
        MEGAKERNEL,
        "4 ranks: 13.3 us of an 8 KB all-reduce less 6.1 us of waiting for peers; the rest scaled as on trn1",
    ),
    "collective_ring_latency_ns": guessed(
        {2: 3600.0, 8: 21000.0, 32: 93000.0}, COLLECTIVES_GUIDE, "2 (n - 1) steps of its hop of 1 to 2 us"
    ),
    "collective_mesh_gb_per_s": guessed({2: 200.0, 8: 50.0, 32: 63.0}, _SWEEP, _BY_LINKS),
    "collective_bus_gb_per_s": guessed({2: 190.0, 8: 223.0, 32: 427.0}, _SWEEP, _BY_LINKS),
    "collective_switch_bytes": guessed(
        {2: 1_000_000, 8: 2_000_000, 32: 4_194_304}, _SWEEP, "trn1's; the guide says 1 MB for all"
    ),
}

TRN2: Hardware = build(
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
