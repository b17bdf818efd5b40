"""quantize_mx: fp16 or bf16 data to MXFP8, four values to an element, and the scales."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, mx, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.isa.shapes import flat
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import DTYPES, from_float32, to_float32

# Exponent of the largest finite value of each element format.
_LARGEST_EXPONENT = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}
_VALUES_OF = {"float8_e4m3fn_x4": DTYPES["float8_e4m3fn"], "float8_e5m2_x4": DTYPES["float8_e5m2"]}


@instruction
def quantize_mx(
    hardware: Hardware, dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> Plan:
    """Convert src to MXFP8 in dst and dst_scale, in groups of 8 partitions x 4 elements, on the Vector engine. gen4.

    src: [P, F] float16 or bfloat16 @ SBUF, P a multiple of 32, F of 4. dst: [P, F / 4] float8_e4m3fn_x4 or
    float8_e5m2_x4 @ SBUF, element f packing src elements 4 f to 4 f + 3, the first in the lowest byte.
    dst_scale: uint8 or float8_e8m0fnu @ SBUF, laid out as `simulate.isa.mx` says; other rows of it are left
    alone.

    A group is divided by 2^(floor(log2 amax) - (E - 1)) with E = 8 or 15, twice the scale of the OCP sample,
    so that no finite value saturates; the stored byte is that exponent plus 127. Decided where nothing is
    documented: the byte is clamped to 0 from below (a group of zeros stores 0), and a group with NaN or
    infinity stores 255 and NaN throughout, as the OCP format has it.

    Raises RuleViolation. Cost: four elements per cycle.
    """
    mx.mx_on_chip(hardware)
    rules.check_tile(hardware, "src", src, MemoryRegion.sbuf)
    rules.check_tile(hardware, "dst", dst, MemoryRegion.sbuf)
    rules.dtype_among("src", src, "float16", "bfloat16")
    rules.dtype_among("dst", dst, *_VALUES_OF)
    mx.whole_quadrants(hardware, "src", src)
    rules.same_partitions("dst", dst, "src", src)
    four_to_one(dst, src)
    columns = dst.free_size
    mx.check_scale(hardware, "dst_scale", dst_scale, src, columns)
    scales = mx.slice_scale_rows(hardware, dst_scale, src, columns)
    largest, element = _LARGEST_EXPONENT[dst.dtype], _VALUES_OF[dst.dtype]

    def compute(data: np.ndarray) -> tuple[np.ndarray, ...]:
        groups = flat(to_float32(data, src.dtype)).reshape(-1, mx.GROUP_PARTITIONS, columns, mx.PACKED)
        amax = np.abs(groups).max(axis=(1, 3))
        exponents = np.frexp(amax)[1] - 1 - (largest - 1)
        biased = np.where(amax == 0, 0, np.maximum(exponents + mx.SCALE_BIAS, 0))
        biased[~np.isfinite(amax)] = mx.SCALE_NAN
        # Powers of two, so that the quotient is exact; NaN where the scale is.
        scaled = groups / mx.decode_exponents(biased)[:, None, :, None]
        packed = (
            np.ascontiguousarray(from_float32(scaled, element))
            .view(np.uint8)
            .reshape(-1, mx.PACKED * columns)
        )
        stored = mx.encode_scales(biased, dst_scale.dtype)
        return packed.view("<u4"), *np.split(stored, len(scales), axis=0)

    return Plan(
        engine=Engine.vector,
        reads=(src,),
        writes=(dst, *scales),
        domain=Domain.bits,
        compute=compute,
        cost=costs.vector(hardware, src.free_size, "vector_quantize_mx_elements_per_cycle"),
        name=name,
        propagate=propagation.quantized,
    )


@rule("NKW-QUANTIZE-SIZE", limit="4 to 1", hint="allocate dst with a quarter of src's elements per partition")
def four_to_one(dst: NkiTensor, src: NkiTensor) -> None:
    """Four elements of src make one of dst.

    Raises RuleViolation if dst has not a quarter of src's elements per partition.
    """
    if src.free_size != mx.PACKED * dst.free_size:
        raise RuleViolation(
            four_to_one, f"src has {src.free_size} elements per partition, dst has {dst.free_size}"
        )
