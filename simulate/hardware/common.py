"""Numbers that the architecture guides state for all generations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simulate.hardware.record import Number, derived, documented, guessed

GUIDES = "NKI architecture guides for Trainium/Inferentia2, Trainium2 and Trainium3"
GUIDE_GEN2 = "NKI architecture guide for Trainium/Inferentia2"
GUIDE_GEN3 = "NKI architecture guide for Trainium2"
GUIDE_GEN4 = "NKI architecture guide for Trainium3"
TILING = "NKI tiling overview (tile_size)"
ISA = "nki.isa reference, NKI 0.6.0"
COST_FORMULAS = "nki.isa reference, docs release 2.26 (the last with cost formulas)"
PERFORMANCE_GUIDE = "NKI performance guide"
DMA_GUIDE = "NKI DMA bandwidth guide"
DGE_GUIDE = "NKI descriptor generation engine guide"
COLLECTIVES_GUIDE = "Neuron collectives documentation"
EXPLORER = "Neuron Explorer documentation"
TRN2_TRACES = "trn2 device traces of public kernels (trainium-kernel-fusion)"
CS149_TRACES = "trn2 device traces of public CS149 kernels"
KILN = "Kiln platform notes (foxl-ai/kiln)"
MEGAKERNEL = "nki-moe-megakernel repository logs"

COMMON: Mapping[str, Number] = MappingProxyType(
    {
        "partitions": documented(128, GUIDES),
        "partitions_per_quadrant": documented(
            32, GUIDE_GEN2, "start partitions of small tiles are multiples of it"
        ),
        "psum_bytes_per_partition": documented(16384, GUIDES),
        "psum_banks": documented(8, GUIDES),
        "psum_bank_bytes": documented(2048, GUIDES),
        "free_elements_max_sbuf": documented(65536, GUIDE_GEN2, "64K elements of an SBUF tile's free axis"),
        "free_elements_max_psum": documented(4096, GUIDE_GEN2, "4K elements of a PSUM tile's free axis"),
        "access_pattern_free_dims_max": documented(4, GUIDE_GEN2, "many instructions take fewer"),
        "access_pattern_size_max": documented(65535, GUIDE_GEN2, "uint16 sizes"),
        "access_pattern_stride_max_elements": documented(32767, GUIDE_GEN2, "int16 strides"),
        "dims_max": documented(5, ISA),
        "contraction_max": documented(128, GUIDES),
        "stationary_free_max": documented(128, GUIDES),
        "moving_free_max": documented(512, TILING, "also on gen4, whose nc_matmul accepts more by PSUM size"),
        "bn_stats_free_max": documented(512, TILING),
        "vector_transpose_max": documented(32, ISA, "one 32 x 32 block"),
        "max8_free_min": documented(8, ISA),
        "max8_free_max": documented(16384, ISA),
        "exact_float_integer_max": derived(2**24, "IEEE 754 binary32", "24 bits of precision"),
        "partitions_per_gpsimd_core": documented(16, GUIDE_GEN2),
        "matmul_keeps_fp8_subnormals": guessed(
            True, ISA, "no document says that subnormal operands count as 0"
        ),
        "matmul_min_interval_cycles": documented(64, PERFORMANCE_GUIDE),
        "vector_min_interval_cycles": documented(64, COST_FORMULAS),
        "vector_accumulate_extra_cycles": documented(64, COST_FORMULAS, "tensor_scalar with a reduction"),
        "vector_scan_cycles_per_element": documented(2.0, COST_FORMULAS),
        "vector_copy_predicated_sbuf_cycles_per_element": documented(
            2.0, COST_FORMULAS, "1 when source or predicate is in PSUM"
        ),
        "vector_bn_aggr_cycles_per_element": documented(13 / 3, COST_FORMULAS),
        "vector_reduce_16bit": documented(2.0, COST_FORMULAS, "elements per cycle, bfloat16 add or maximum"),
        "vector_memset_zero_16bit": documented(2.0, COST_FORMULAS, "elements per cycle"),
        "scalar_min_interval_cycles": documented(64, COST_FORMULAS),
        "activation_accumulate_extra_cycles": documented(64, COST_FORMULAS),
        "gpsimd_fixed_cycles": documented(150, COST_FORMULAS, "iota, affine_select, local_gather"),
        "gpsimd_cycles_per_element": documented(1.0, COST_FORMULAS, "at best"),
        "gpsimd_topk_cycles_per_element": documented(4.0, ISA, "4 n + K"),
        "dma_engines": documented(16, GUIDES, "per core"),
        "dma_descriptor_bytes_max": documented(
            4096, DMA_GUIDE, "default; contiguous tiles were seen as 32,000-byte descriptors"
        ),
        "collective_hop_ns": derived(1500.0, COLLECTIVES_GUIDE, "middle of the documented 1 to 2 us"),
    }
)
"""Fields with one value on every generation. Cost formulas were last printed when gen2 and gen3 existed."""
