"""Arguments of the probes, with which `nkw bundle nki_kernels.probes --catalogue` bundles them."""

EXAMPLES = {
    "subnormals:multiply_subnormals": ("u8[1,16]",),
    "subnormals:multiply_subnormal_pairs": ("u8[1,16]",),
    "word_chains:stream_bits": ("i32[128,2048]",),
    "word_chains:stream_products": ("f32[128,2048]",),
    "word_chains:stream_copies": ("i32[128,2048]",),
}
