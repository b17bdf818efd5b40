"""Probes: small kernels whose results or times on a chip decide a guess of the hardware record.

    multiply_subnormals, multiply_subnormal_pairs   matmul_keeps_fp8_subnormals: by their results
    stream_bits, stream_products, stream_copies     vector_bitwise_32bit_elements_per_cycle: by their times

`nkw bundle nki_kernels.probes --catalogue --target CHIP --out DIR` bundles them all. docs/calibrate.md says how the
outcome is read.
"""
