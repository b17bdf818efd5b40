"""Dry cases of the largest sizes that the kernels support; a mutant that no longer fits the chip is refused there."""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.mutants.cases.attention import prompt
from tools.mutants.cases.case import BF16, EPS, Case, arguments_of


def largest() -> list[Case]:
    """Return dry cases of the kernels at their largest sizes, on the chip with the least memory."""

    def empty(*shape: int, dtype: Any = BF16) -> np.ndarray:
        return np.empty(shape, dtype)

    def dry(kernel: str, *arguments: Any, **named: Any) -> Case:
        return Case(kernel, "trn1", (arguments_of(kernel, **named) if named else arguments,), None)

    start, offset = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32)
    rows = empty(512, 8192, dtype=np.float32)
    deep = empty(129, 16384, dtype=np.float32)
    return [
        dry("matmul", deep, empty(16384, 2600)),
        dry("matmul", empty(512, 4096, dtype=np.float32), empty(4096, 520)),
        dry("matmul", empty(1100, 256, dtype=np.float32), empty(256, 520)),
        dry("matmul", empty(3, 8, dtype=np.float32), empty(8, 4200)),
        dry("rmsnorm", empty(129, 8192, dtype=np.float32), empty(1, 8192, dtype=np.float32), EPS),
        dry(
            "rope",
            empty(129, 8192, dtype=np.float32),
            empty(129, 1, dtype=np.int32),
            *(empty(9, 64) for _ in "cs"),
            64,
        ),
        dry("embedding", empty(129, 1, dtype=np.int32), empty(100, 8192, dtype=np.float32)),
        *(
            dry(
                "qkv_projection",
                x=x,
                norm_weight=empty(1, x.shape[1]),
                w_qkv=empty(x.shape[1], q + 2 * kv),
                eps=EPS,
                q_size=q,
                kv_size=kv,
            )
            for x, q, kv in ((rows, 1024, 256), (rows[:3, :8].copy(), 4096, 1024), (empty(1100, 8), 4, 4))
        ),
        dry("output_projection", deep, empty(16384, 600), empty(129, 600, dtype=np.float32)),
        dry("output_projection", empty(3, 128, dtype=np.float32), empty(128, 8192), rows[:3]),
        dry("output_projection", empty(1100, 8), empty(8, 520), empty(1100, 520)),
        *(
            dry(
                "mlp",
                x=x,
                norm_weight=empty(1, x.shape[1]),
                w_gate=empty(x.shape[1], inner),
                w_up=empty(x.shape[1], inner),
                w_down=empty(inner, x.shape[1]),
                eps=EPS,
            )
            for x, inner in (
                (rows, 24),
                (empty(3, 8), 5000),
                (empty(512, 128, dtype=np.float32), 16384),
                (empty(1100, 8), 520),
            )
        ),
        dry(
            "attention_decode",
            **dict(zip("qkv", prompt(1, 128, 8, 128))),
            k_cache=empty(1, 8, 128, 8192),
            v_cache=empty(1, 8, 8192, 128),
            positions=start,
            scale=0.1,
        ),
        dry(
            "attention_prefill",
            **dict(zip("qkv", prompt(4200, 1, 1, 128))),
            k_cache=empty(1, 1, 128, 4200),
            v_cache=empty(1, 1, 4200, 128),
            scale=0.1,
        ),
        # Beside so many queries of a head the keys and values of one head fit, and not those of two.
        dry(
            "attention_prefill",
            **dict(zip("qkv", prompt(128, 64, 2, 256))),
            k_cache=empty(1, 2, 256, 1792, dtype=np.float32),
            v_cache=empty(1, 2, 1792, 256, dtype=np.float32),
            scale=0.1,
            num_kv_heads=2,
            positions=np.arange(1664, 1792, dtype=np.int32)[:, None],
            prefix=1664,
        ),
        dry("lm_head", rows[:128, :512].copy(), empty(1, 512), empty(512, 33000), EPS, 64, offset, None),
    ]
