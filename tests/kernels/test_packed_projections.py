"""qkv_projection and output_projection with weights of 4 bits: few rows and many, zero points, ranks and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from nki_kernels.nibbles import widen_nibbles_reference
from tests.kernels.accuracy import compare, find_faults, in_order, named, run
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, Ranks, Undefined, refuse, together, vary
from tests.kernels.test_nibbles import pack
from tests.kernels.test_projections import heads
from tests.kernels.test_qkv_projection import FORMS, HALVES, VALUES, arguments, over_sequence


def pack_weight(kernel: Any, name: str, arrays: Any, zeros: bool) -> tuple[Any, ...]:
    """Return arguments whose weight `name` is packed; without `zeros` all zero points are 8."""
    inputs = named(kernel, arrays)
    inputs[name], inputs[f"{name}_scales"], zero_row = pack(inputs[name].astype(F32))
    return in_order(kernel, **inputs | {f"{name}_zeros": zero_row if zeros else None})


def packed_projection(
    tokens: int = 9, hidden: int = 24, zeros: bool = True, **settings: Any
) -> tuple[Any, ...]:
    arrays = arguments(tokens, hidden, **{"dtype": BF16} | settings)
    return pack_weight(kernels.qkv_projection, "w_qkv", arrays, zeros)


class TestPackedQkvProjection(KernelTests):
    """Up to 32 and up to 64 rows share the PE array in groups of columns; others meet weights without zero points."""

    case = KernelCase(
        kernels.qkv_projection,
        packed_projection,
        values=[
            *vary(tokens=[1, 3, 16, 17, 32, 33, 64, 65, 129, 300], hidden=[136, 300], zeros=[True, False]),
            *vary(tokens=[5, 20], hidden=[127, 128, 129, 2304], rotated=16),
            # Rows in paired runs, loaded in runs and transposed, and rows in blocks.
            *vary(
                tokens=[1, 16, 17, 40], hidden=[256, 512, 768, 1024, 4096], rotated=16, zeros=[True, False]
            ),
            *(form | dict(tokens=tokens, hidden=264) for form in FORMS for tokens in (5, 40, 131)),
            *(form | dict(tokens=tokens) for form in VALUES for tokens in (5, 131)),
            *vary(tokens=[5, 140], hidden=136, rotated=16, dtype=F32, zeros=[True, False]),
            *vary(tokens=[20, 140], hidden=136, heads=26, kv_heads=3, head=80, rotated=80, bias=True),
            *together("heads kv_heads", (6, 1), (13, 1), tokens=[1, 40, 64], hidden=136, rotated=16),
            *vary(tokens=[5, 40], hidden=136, heads=4, head=128, rotated=128, gate_size=[0, 512]),
            *vary(tokens=[5, 40, 140], hidden=136, norm=False, rotated=16, nibble_dtype="bfloat16"),
        ],
        every_chip=[*vary(tokens=[5, 40, 140], hidden=264, rotated=16, zeros=[True, False])],
        refusals=[
            refuse("w_qkv is [24, 48 + 2 * 16 + 0], not (23, 80)", dict(hidden=24), w_qkv=lambda w: w[1:]),
            refuse("zero points are uint8 [1, 80], one for each column", w_qkv_zeros=lambda z: z[:, 1:]),
            refuse("weights of 4 bits have scales", w_qkv_scales=lambda _: None),
            refuse("w_qkv_scales is float32 [1, 80]", w_qkv_scales=lambda s: np.repeat(s, 2, axis=0)),
            refuse("nibble_dtype is float8_e4m3 or bfloat16, not int8", nibble_dtype="int8"),
        ],
        fits=[*vary(tokens=[1, 64, 300], hidden=16384, heads=16, kv_heads=2, head=128, rotated=128)],
        two_sums=[
            form | dict(tokens=tokens, hidden=264)
            for tokens in (1, 64, 129, 300)
            for form in (HALVES, dict(head=8, rotated=8))
        ],
        undefined=[
            Undefined({"x": [3]}, dict(tokens=tokens, hidden=264, rotated=16), bad, rows=[3])
            for tokens in (5, 40)
            for bad in (np.nan, np.inf)
        ],
        ranks=[over_sequence(2, tokens=260, hidden=264, dtype=BF16)],
    )


def packed_heads(zeros: bool = True, nibble_dtype: str = "float8_e4m3", **settings: Any) -> tuple[Any, ...]:
    arrays = heads(**{"dtype": BF16} | settings)
    inputs = named(kernels.output_projection, pack_weight(kernels.output_projection, "w_o", arrays, zeros))
    return in_order(kernels.output_projection, **inputs | {"nibble_dtype": nibble_dtype})


class TestPackedOutputProjection(KernelTests):
    """Heads around blocks and runs of nibbles; a w_o that stays in SBUF, and one that streams."""

    case = KernelCase(
        kernels.output_projection,
        packed_heads,
        values=[
            *vary(tokens=[1, 3, 32, 33, 64, 65, 129, 300], depth=136, hidden=600, zeros=[True, False]),
            *vary(tokens=[3, 40], depth=[32, 64, 127, 128, 129, 256, 384], hidden=512),
            *vary(tokens=[5, 140, 600], depth=1100, hidden=2048),
            *vary(tokens=[5, 140], depth=264, hidden=600, nibble_dtype="bfloat16"),
        ],
        every_chip=[*vary(tokens=[5, 40, 130], depth=264, hidden=512)],
        refusals=[
            refuse("w_o has 20 rows for o of width", w_o=lambda w: w[:20]),
            refuse("weights of 4 bits have scales", w_o_scales=lambda _: None),
            refuse("w_o_scales is float32 [1, ", w_o_scales=lambda s: np.repeat(s, 2, axis=0)),
            refuse("zero points are uint8", w_o_zeros=lambda z: z.astype(F32)),
        ],
        ranks=[
            Ranks(2, dict(o=1, w_o=0), dict(tokens=tokens, depth=512, hidden=520, zeros=zeros))
            for tokens, zeros in ((9, True), (140, False))
        ],
    )


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("tokens", [5, 300])
def test_sums_in_float32_are_as_exact_as_those_of_numpy(tokens: int, zeros: bool) -> None:
    """Nibbles and zero points are added apart in numpy as well: their sums are larger than those of weights."""
    arrays = packed_heads(zeros, tokens=tokens, depth=264, hidden=200, dtype=F32, residual=False)
    inputs = named(kernels.output_projection, arrays)

    def compute(dtype: Any) -> np.ndarray:
        scales = inputs["w_o_scales"].astype(dtype)
        zero_points = np.full_like(scales, 8) if inputs["w_o_zeros"] is None else inputs["w_o_zeros"]
        nibbles = widen_nibbles_reference(inputs["w_o"], 264, np.zeros_like(scales)).astype(dtype)
        rows = inputs["o"].astype(dtype)
        zero_terms = rows.sum(axis=1, keepdims=True) * zero_points.astype(dtype) / dtype(512)
        return (rows @ nibbles - zero_terms) * scales

    y = run(kernels.output_projection, arrays)
    compare(y, compute(np.float64), compute(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_no_finding_in_packed_projections(target: str) -> None:
    def launches() -> None:
        for tokens in (5, 40, 140):
            run(kernels.qkv_projection, packed_projection(tokens, 264, rotated=16), target)
            run(kernels.output_projection, packed_heads(tokens=tokens, depth=264, hidden=512), target)

    assert find_faults(launches) == []
