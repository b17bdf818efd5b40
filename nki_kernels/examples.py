"""Arguments for every kernel of the package: a small launch of each, in the words of `nkw time KERNEL ARGUMENTS`.

`nkw bundle --catalogue nki_kernels` bundles them, and the stored timelines are of these launches. Integers of an array
count 0, 1, 2 …, floats are random; `group` is the replica group of all ranks.
"""

RANKS = {
    "experts_dispatch": 2,
    "experts_combine": 2,
    "all_reduce": 2,
    "send_receive": 2,
    "exchange_heads": 2,
}
"""The ranks that the launch of a kernel needs, where that is not one."""

_CACHES = ("f32[1,1,64,256]", "f32[1,1,256,64]")
_NUMBER = "i32[1,1]"
_CHOICE = ("weights=f32[1,1]", f"ids={_NUMBER}")
_FEED_FORWARD = ("w_gate=bf16[128,128]", "w_up=bf16[128,128]", "w_down=bf16[128,128]")
_EXPERTS = (
    *("n=f32[1,256]", *_CHOICE),
    *("w_gate=bf16[2,256,128]", "w_up=bf16[2,256,128]", "w_down=bf16[2,128,256]"),
)
_LATENT = (
    *("bf16[1,24]", "bf16[1,128,24]", _NUMBER, "f32[1,16]", "1e-5"),
    *("f32[128,4]", "f32[128,4]", "bf16[16,16]", "bf16[16,16]"),
)


_DELTA = (
    *("bf16[1,1]", "bf16[1,1]", "bf16[1,16]", "f32[2,1,16,16]", _NUMBER, _NUMBER, _NUMBER, "1", "1e-6"),
)
"""One key head and one value head of 16 of one sequence."""

EXAMPLES = {
    "matmul": ("f32[130,256]", "bf16[256,640]"),
    "embedding": ("i32[130,1]", "bf16[1024,256]"),
    "rmsnorm": ("f32[130,256]", "f32[1,256]", "1e-5"),
    "qkv_projection": (
        *("x=f32[4,256]", "norm_weight=f32[1,256]", "w_qkv=bf16[256,640]", "eps=1e-5"),
        *("q_size=512", "kv_size=64"),
    ),
    "rope": ("f32[130,128]", "i32[130,1]", "f32[256,32]", "f32[256,32]", "2"),
    "attention_prefill": ("f32[130,128]", *_CACHES, "0.125", "k=f32[130,64]", "v=f32[130,64]"),
    "attention_decode": ("f32[1,128]", *_CACHES, _NUMBER, "0.125", "k=f32[1,64]", "v=f32[1,64]"),
    "attention_mixed": (
        *("f32[9,128]", "f32[32,16,1,64]", "f32[32,16,1,64]", "i32[9,1]", "0.125", "1"),
        *("f32[9,64]", "f32[9,64]", "1", "i32[9,1]", "i32[1,8]", "i32[1,1]"),
    ),
    "latent_attention_decode": ("bf16[1,32]", *_LATENT[:3], "0.25", *_LATENT[3:]),
    "latent_keys_values": (*_LATENT, "2"),
    "attention_block_decode": (
        *("f32[1,256]", "f32[1,256]", "bf16[256,256]", "1e-5", "128", "64", *_CACHES, _NUMBER, "0.125"),
        *("bf16[128,256]", "1", "f32[256,32]", "f32[256,32]"),
    ),
    "decoder_layer_decode": (
        *("f32[1,128]", "f32[1,128]", "bf16[128,192]", "1e-5", "64", "64", *_CACHES, _NUMBER, "0.125"),
        *("bf16[64,128]", "mlp_norm_weight=f32[1,128]", *_FEED_FORWARD),
    ),
    "output_projection": ("f32[4,256]", "bf16[256,640]", "f32[4,640]"),
    "mlp": (
        *("x=f32[4,256]", "norm_weight=f32[1,256]", "eps=1e-5"),
        *("w_gate=bf16[256,640]", "w_up=bf16[256,640]", "w_down=bf16[640,256]"),
    ),
    "per_layer_input": ("f32[4,256]", "bf16[256,64]", "f32[4,192]", "bf16[64,256]", "64"),
    "copy_pages": ("bf16[9,4,2,8]", "bf16[9,4,2,8]", _NUMBER, _NUMBER),
    "pack_pages": (
        *("u8[3,20,1,32]", "u8[3,16,1,36]", "bf16[2,16,1,64]", "bf16[2,16,1,64]", _NUMBER, _NUMBER),
    ),
    "router": ("f32[4,256]", "f32[1,256]", "bf16[256,16]", "1e-5", "2"),
    "experts_decode": ("residual=f32[1,256]", *_EXPERTS),
    "experts_prefill": ("residual=f32[1,256]", *_EXPERTS),
    "experts_dispatch": (
        *("n=f32[1,256]", *_CHOICE, f"first={_NUMBER}", "experts=2", "replica_group=group", "ranks=2"),
    ),
    "experts_combine": ("results=f32[2,256]", "residual=f32[1,256]", "replica_group=group", "ranks=2"),
    "gated_delta": ("f32[4,48]", "f32[4,18]", *_DELTA),
    "gated_delta_step": ("bf16[1,48]", "bf16[1,18]", *_DELTA),
    "causal_conv1d": (
        *("bf16[4,256]", "bf16[4,256]", "bf16[1,256]", "bf16[2,3,256]", _NUMBER, _NUMBER, _NUMBER),
    ),
    "selective_scan": (
        *(
            "bf16[4,256]",
            "bf16[4,12]",
            "bf16[8,256]",
            "bf16[1,256]",
            "bf16[256,2]",
            "bf16[1,256]",
            "bf16[4,256]",
        ),
        *("f32[2,256,2]", _NUMBER, _NUMBER, _NUMBER),
    ),
    "ssd": (
        *("bf16[4,160]", "bf16[4,2]", "bf16[1,2]", "bf16[1,2]", "bf16[1,2]", "bf16[4,128]", "f32[2,16,128]"),
        *(_NUMBER, _NUMBER, _NUMBER),
    ),
    "conv1d": ("bf16[1,16,20]", "bf16[3,16,32]", "f32[1,32]", "2", "1", "'gelu'"),
    "conv2d": ("bf16[1,16,9,10]", "bf16[3,3,16,32]", "f32[1,32]", "(2,2)", "(1,1)", "'relu'"),
    "patch_embedding": ("bf16[1,4,8,10]", "bf16[2,2,4,24]", "f32[1,24]", "f32[20,24]"),
    "patch_output": (
        *("bf16[12,256]", "bf16[256,12]", "bf16[2,256]", "bf16[2,256]", "1e-6", "2", "3", "2"),
        "bias=bf16[1,12]",
    ),
    "timestep_embedding": (
        *("f32[2,1]", "bf16[256,128]", "bf16[1,128]", "bf16[128,128]", "bf16[1,128]"),
        "added=bf16[2,128]",
    ),
    "modulation": ("bf16[2,256]", "bf16[256,384]", "f32[1,384]", "chunks=3"),
    "upsample_conv2d": ("bf16[1,16,9,10]", "bf16[3,3,16,24]", "f32[1,24]", "'silu'"),
    "group_norm": ("bf16[1,16,9,10]", "f32[1,16]", "f32[1,16]", "4", "1e-6", "'silu'"),
    "max_pool": ("bf16[1,16,9,10]", "(3,3)", "(2,2)", "(1,1)"),
    "average_pool": ("bf16[1,16,9,10]", "(2,2)"),
    "lm_head": ("f32[4,256]", "f32[1,256]", "bf16[256,640]", "1e-5", "8", _NUMBER),
    "sample": ("f32[4,64]", "f32[4,1]", "f32[4,1]", "f32[4,1]", "f32[4,1]", "f32[4,1]", "8"),
    "all_reduce": ("f32[128,512]", "group"),
    "send_receive": ("f32[128,512]", "[(0,1)]"),
    "exchange_heads": ("bf16[64,512]", "group", "2", "bf16[64,512]", "bf16[64,512]"),
    "ladder:tile_by_tile": ("bf16[256,256]", "bf16[256,512]"),
}
