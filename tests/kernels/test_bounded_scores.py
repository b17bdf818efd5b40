"""attention_prefill with scores that the caller bounds, which takes no maximum."""

from __future__ import annotations

from typing import Any

import nki_kernels as kernels
from nki_kernels.prefill.checks import MAX_BOUNDED_SCORE
from tests.kernels.accuracy import compare_all, normal
from tests.kernels.case import BF16, DTYPES, KernelCase, KernelTests, refuse, together, vary
from tests.kernels.test_uncached_attention import joint


def bounded(
    queries: int = 20, text: int = 0, depth: int = 16, bounded: bool = True, **more: Any
) -> tuple[Any, ...]:
    """Draw arguments of scores up to the bound, of both signs.

    In the first head row 0 has the largest score for key 3 and the smallest for all others, and row 1 the opposite. In
    other heads all scores of row 0 are the smallest, and those of row 1 the largest. Scores of other rows are about 1.
    """
    arguments = joint(queries, max(text, 1), depth=depth, **more)
    q, k = (arguments[index].copy() for index in (0, 4))
    factor = (MAX_BOUNDED_SCORE * depth**0.5) ** 0.5
    q[:2], q[:, ::depth] = 0, 0
    q[0, ::depth], q[1, ::depth] = factor, -factor
    k[:, ::depth] = -factor
    k[min(3, len(k) - 1), 0] = factor
    text_q, text_k, text_v = arguments[-4:-1] if text else (None, None, None)
    if text_k is not None:
        text_k = text_k.copy()
        text_k[:, ::depth] = -factor
    return (q, *arguments[1:4], k, *arguments[5:-4], text_q, text_k, text_v, bounded)


class TestBoundedScores(KernelTests):
    """Sizes around a block, the 1,536 keys of an exp and the 3,072 keys after which products follow."""

    case = KernelCase(
        kernels.attention_prefill,
        bounded,
        values=[
            *vary(queries=[2, 127, 128, 129, 300], depth=[8, 64], dtype=[*DTYPES]),
            *together("queries text", (128, 129), (127, 1), (300, 128), sequences=[1, 2], depth=[8]),
            dict(queries=70, text=30, heads=4, kv_heads=1),
            dict(queries=33, heads=4, kv_heads=1, depth=192, dtype=BF16),
            dict(queries=140, sequences=2, lengths=(77, -1), dtype=BF16),
        ],
        every_chip=[
            *vary(queries=[1535, 1536, 1537], heads=1, kv_heads=1, depth=64, dtype=BF16),
            dict(queries=1300, text=333, heads=1, kv_heads=1, depth=64),
        ],
        refusals=[
            refuse("bounded scores go without caches, causal attention and sinks", causal=True),
            refuse("bounded scores go without caches, causal attention and sinks", cached=True),
            refuse("bounded scores go without caches", sinks=normal(5, 1, 2)),
            refuse("bounded scores go without a soft cap and position_bias", softcap=5.0),
            refuse("bounded scores go without a soft cap", position_bias=normal(1, 2, 39)),
        ],
        fits=[
            *vary(queries=8192, heads=1, kv_heads=1, depth=128, dtype=[*DTYPES]),
            dict(queries=8192, text=4096, heads=1, kv_heads=1, depth=128, dtype=BF16),
        ],
        two_sums=[*together("heads kv_heads", (4, 2), (4, 1), (1, 1), queries=200, text=[0, 30])],
        tolerance=compare_all,
        seeds=0,
    )
