"""qkv_projection and output_projection with weights of 8 bits that have a scale for each 128 rows and 128 columns."""

from __future__ import annotations

from typing import Any

import numpy as np

import nki_kernels as kernels
from tests.kernels.accuracy import in_order, named, normal
from tests.kernels.case import (
    BF16,
    F32,
    GEN3_ON,
    KernelCase,
    KernelTests,
    Ranks,
    Undefined,
    limit,
    refuse,
    slow,
    vary,
)
from tests.kernels.test_feed_forward import FP8, INT8, SEQUENCE, quantise_blocks
from tests.kernels.test_projections import WEIGHTS, heads
from tests.kernels.test_qkv_projection import FORMS, arguments, over_sequence


def scaled(tokens: int = 9, hidden: int = 24, elements: Any = FP8, **settings: Any) -> tuple[Any, ...]:
    """Return arguments of qkv_projection; `elements` is the dtype of w_qkv."""
    inputs = named(kernels.qkv_projection, arguments(tokens, hidden, **{"dtype": BF16} | settings))
    inputs["w_qkv"], inputs["w_qkv_block_scales"] = quantise_blocks(inputs["w_qkv"].astype(F32), elements)
    return in_order(kernels.qkv_projection, **inputs)


class TestQkvProjection(KernelTests):
    """Up to 64 bfloat16 rows on one rank are scaled instead of fp8 elements; heads of 80 columns cut blocks."""

    case = KernelCase(
        kernels.qkv_projection,
        scaled,
        values=[
            *vary(tokens=[1, 3, 16, 17, 32, 33, 64, 65, 129, 300], hidden=[136, 300], elements=[FP8, INT8]),
            *vary(tokens=[5, 20], hidden=[127, 128, 129, 2304], rotated=16),
            *(form | dict(tokens=tokens, hidden=264) for form in FORMS for tokens in (5, 40, 131)),
            *vary(tokens=[5, 140], hidden=136, rotated=16, dtype=F32, elements=[FP8, INT8]),
            *vary(tokens=[20, 140], hidden=136, heads=26, kv_heads=3, head=80, rotated=80, bias=True),
            *vary(tokens=[1, 40, 64], hidden=136, heads=[1, 2, 6, 13], head=48, rotated=48),
            *vary(tokens=[5, 40], hidden=136, heads=4, head=128, rotated=128, gate_size=[0, 512]),
            *vary(tokens=[5, 40, 140], hidden=136, norm=False, rotated=16),
            *vary(tokens=[5, 40], hidden=136, rotated=16, norm_offset=1.0),
        ],
        every_chip=[*vary(tokens=[5, 40], hidden=136, head=48, rotated=[0, 16], elements=[FP8, INT8])],
        refusals=[
            refuse(
                "w_qkv_block_scales is float32 (1, 1), one for each 128 rows and 128 columns of w_qkv, not bfloat16",
                w_qkv_block_scales=lambda scales: scales.astype(BF16),
            ),
            refuse("w_qkv has scales and block scales; pass one of them", w_qkv_scales=normal(1, 1, 80)),
            refuse(
                "takes a w_qkv of float8_e4m3 or int8 with scales; it is float8_e4m3 without scales",
                quantises_rows=lambda _: True,
            ),
        ],
        limits=[
            limit(
                "heads", 126, "has 8256 scales; at most 8192 stay", dry=True, hidden=8192, head=128, tokens=1
            )
        ],
        fits=slow(*vary(tokens=[1, 64, 512], hidden=16384, heads=16, kv_heads=2, head=128, rotated=128)),
        two_sums=[
            dict(head=head, heads=4, kv_heads=2, rotated=head, tokens=tokens, hidden=172)
            for tokens in (1, 5, 64, 128, 129, 300)
            for head in (8, 80, 128)
        ],
        undefined=[
            Undefined(
                {"x": [3]}, dict(tokens=tokens, hidden=hidden, rotated=16), bad, rows=[3], chips=GEN3_ON
            )
            for tokens, hidden in ((8, 260), (20, 256))
            for bad in (np.nan, np.inf)
        ],
        ranks=[over_sequence(ranks, tokens=tokens) for ranks, tokens in SEQUENCE[:3] + SEQUENCE[-2:-1]],
    )


def scaled_heads(elements: Any = FP8, **settings: Any) -> tuple[Any, ...]:
    """Return arguments of output_projection; `elements` is the dtype of w_o."""
    inputs = named(kernels.output_projection, heads(**{"dtype": BF16, "weights": F32} | settings))
    inputs["w_o"], inputs["w_o_block_scales"] = quantise_blocks(inputs["w_o"], elements)
    return in_order(kernels.output_projection, **inputs)


SCALED_WEIGHTS = WEIGHTS | dict(w_o_block_scales=0)


class TestOutputProjection(KernelTests):
    """Up to 64 bfloat16 rows on one rank are scaled instead of fp8 elements; 512 and 2048 columns of y take groups."""

    case = KernelCase(
        kernels.output_projection,
        scaled_heads,
        values=[
            *vary(tokens=[1, 3, 32, 33, 64, 65, 129, 300], depth=136, hidden=600, elements=[FP8, INT8]),
            *vary(depth=[8, 127, 128, 129, 172], hidden=[512, 2048, 2500], tokens=[5, 40]),
            *vary(
                tokens=[5, 40, 130], depth=72, hidden=[512, 600], bias=[False, True], residual=[False, True]
            ),
            *vary(tokens=[5, 140], depth=136, hidden=600, gate=True),
            *vary(tokens=[5, 140], depth=136, hidden=600, dtype=F32, elements=[FP8, INT8]),
            *vary(tokens=[40, 600], depth=1300, hidden=2000),
        ],
        every_chip=[*vary(tokens=[5, 40, 130], depth=136, hidden=[512, 600], elements=[FP8, INT8])],
        refusals=[
            refuse(
                "w_o_block_scales is float32 (1, 1), one for each 128 rows and 128 columns of w_o, not float32 (1, 2)",
                w_o_block_scales=normal(1, 1, 2),
            ),
            refuse("w_o has scales and block scales; pass one of them", w_o_scales=normal(1, 1, 40)),
            refuse(
                "takes a w_o of float8_e4m3 or int8 with scales; it is float8_e4m3 without scales",
                quantises_rows=lambda _: True,
            ),
        ],
        limits=[limit("depth", 8192, "has 8320 scales; at most 8192 stay", step=128, dry=True, hidden=16384)],
        fits=slow(
            *vary(tokens=[1, 64, 512], depth=[8, 2048], hidden=16384),
            *vary(tokens=[1, 64, 512], depth=16384, hidden=8192),
        ),
        two_sums=vary(
            tokens=[1, 5, 64, 65, 129, 300], depth=[72, 200], hidden=[200, 1100], bias=[False, True]
        ),
        ranks=[
            *(
                Ranks(ranks, SCALED_WEIGHTS, dict(tokens=tokens, depth=128 * ranks, hidden=hidden))
                for ranks in (2, 4)
                for tokens in (9, 130)
                for hidden in (40, 512)
            ),
            *(
                Ranks(
                    ranks,
                    SCALED_WEIGHTS | dict(residual=0),
                    dict(tokens=tokens, depth=128 * ranks, hidden=172, bias=True),
                    dict(sequence_ranks=ranks),
                    joined=True,
                    alike=False,
                )
                for ranks, tokens in SEQUENCE[:3] + SEQUENCE[-2:-1]
            ),
        ],
    )
