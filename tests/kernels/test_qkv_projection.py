"""qkv_projection with norms, biases and rotations, for few rows and for many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import ODD_SIZES, TARGETS, compare, in_float64, in_order, named, normal
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Ranks,
    Undefined,
    limit,
    refuse,
    slow,
    together,
    vary,
)
from tests.kernels.test_feed_forward import FP8, INT8, SEQUENCE, quantise

CASE = (kernels.qkv_projection, kernels.qkv_projection_reference)
EPS = 1e-5


def arguments(
    tokens: int,
    hidden: int,
    heads: int = 3,
    kv_heads: int = 1,
    head: int = 16,
    rotated: int = 0,
    dtype: Any = F32,
    norm: bool = True,
    **options: Any,
) -> tuple[Any, ...]:
    """Return arguments of the kernel; `options` that are True become tensors of their shape, others stay."""
    width = (heads + 2 * kv_heads) * head + options.get("gate_size", 0)
    shapes = {"bias": width, "q_norm": head, "k_norm": head, "norm_bias": hidden}
    for seed, (name, columns) in enumerate(shapes.items()):
        if options.get(name):
            options[name] = normal(10 + seed, 1, columns, dtype=dtype)
    if rotated:
        angles = np.arange(500)[:, None] / 1000 ** (np.arange(rotated // 2) / (rotated // 2))
        options["positions"] = np.random.default_rng(5).integers(0, 500, (tokens, 1)).astype(np.int32)
        options["cos"], options["sin"] = (f(angles).astype(F32) for f in (np.cos, np.sin))
    return in_order(
        kernels.qkv_projection,
        x=normal(1, tokens, hidden, dtype=dtype),
        norm_weight=normal(2, 1, hidden, dtype=dtype) if norm else None,
        w_qkv=normal(3, hidden, width, dtype=dtype, scale=hidden**-0.5),
        eps=EPS,
        q_size=heads * head,
        kv_size=kv_heads * head,
        **options,
    )


def over_sequence(ranks: int, seeds: int = 0, **settings: Any) -> Ranks:
    """Return ranks that cut the rows of x, and return all rows."""
    settings = dict(hidden=72, head=8, rotated=8, bias=True) | settings
    return Ranks(ranks, dict(x=0), settings, dict(sequence_ranks=ranks), alike=False, seeds=seeds)


def plain(
    tokens: int = 3, hidden: int = 40, q: int = 24, kv: int = 8, dtype: Any = F32, weights: Any = None
) -> tuple[Any, ...]:
    """Return arguments without heads."""
    weight_dtype = weights or dtype
    return in_order(
        kernels.qkv_projection,
        x=normal(1, tokens, hidden, dtype=dtype),
        norm_weight=normal(2, 1, hidden, dtype=weight_dtype),
        w_qkv=normal(3, hidden, q + 2 * kv, dtype=weight_dtype, scale=hidden**-0.5),
        eps=EPS,
        q_size=q,
        kv_size=kv,
    )


class TestPlainQkvProjection(KernelTests):
    """Outputs may end inside a column group."""

    case = KernelCase(
        kernels.qkv_projection,
        plain,
        values=[
            *together(
                "dtype weights", (F32, F32), (F32, BF16), (BF16, BF16), tokens=130, hidden=172, q=96, kv=24
            ),
            *vary(tokens=[1, *ODD_SIZES]),
            *vary(hidden=[*ODD_SIZES]),
            *vary(hidden=24, q=[*ODD_SIZES]),
            *together(
                "tokens q kv", (2, 2000, 120), (300, 500, 270), (5, 0, 40), (120, 0, 1152), (130, 0, 72)
            ),
        ],
        every_chip=vary(dtype=[*DTYPES]),
        refusals=[
            refuse("w_qkv is [40, 24 + 2 * 9 + 0], not (40, 40)", kv_size=9),
            refuse(
                "q_size is 0, kv_size 16 and gate_size 8; keys and", dict(q=0, kv=20), kv_size=16, gate_size=8
            ),
            refuse(
                "keys and values alone take a kv_size, no gates", dict(q=0, kv=20), q_norm=normal(1, 1, 20)
            ),
            refuse("norm_weight has to be [1, 40], not (1, 39)", norm_weight=normal(1, 1, 39)),
        ],
        limits=[
            limit("hidden", 8192, "qkv_projection takes a hidden size of at most 8192, not 8193", tokens=2)
        ],
        fits=slow(*vary(tokens=[1, 512], hidden=8192, q=1024, kv=256, dtype=[*DTYPES], weights=BF16)),
    )


def drawn(tokens: int = 9, hidden: int = 24, **settings: Any) -> tuple[Any, ...]:
    return arguments(tokens, hidden, **settings)


GEMMA = dict(rotated=16, q_norm=True, k_norm=True, norm_offset=1.0)
GATES = GEMMA | dict(rotated=4, head_dim=16, gate_size=48, bias=True)
FORMS = [
    GEMMA,
    dict(rotated=6, head_dim=16, bias=True, norm_bias=True),
    GATES,
    dict(norm=False, bias=True),
    dict(norm=False),
]


HALVES = dict(head=8, rotated=8, bias=True, q_norm=True, k_norm=True)
QUERIES = dict(w_qkv=lambda weight: weight[:, :48], kv_size=lambda _: 0, q_norm=True, bias=normal(10, 1, 48))
"""Of a layer that reads another layer's caches: queries alone are projected."""
VALUES = [
    dict(hidden=300, rotated=6, head_dim=16, q_norm=True, k_norm=True, v_norm=True),
    dict(hidden=64, heads=12, kv_heads=6, head=144, head_dim=144, bias=True, v_norm=True),
]
"""Heads of values are normalised beside those of queries and keys, and alone; columns of several groups."""


class TestQkvProjection(KernelTests):
    """Columns of 80 leave a bank short, and 32 heads of 80 are more than four banks and more than stay in SBUF.

    The mean of a row may be larger than its deviation.
    """

    case = KernelCase(
        kernels.qkv_projection,
        drawn,
        every_chip=[
            *(
                form | setting
                for form in FORMS
                for setting in vary(
                    tokens=[5, 131] if "norm_bias" in form else 5, hidden=300, dtype=[*DTYPES]
                )
            ),
        ],
        values=[
            *(
                form | setting
                for form in FORMS
                for setting in vary(tokens=131, hidden=300, dtype=[*DTYPES])
                if "norm_bias" not in form
            ),
            *(
                dict(tokens=tokens, hidden=hidden, head=8, head_dim=8) | form
                for hidden in (127, 128, 129, 2300)
                for tokens in (1, 127, 128, 129, 300)
                for form in (dict(rotated=4, k_norm=True), dict(norm_bias=True))
            ),
            *vary(
                tokens=[20, 140],
                hidden=2200,
                heads=26,
                kv_heads=3,
                head=80,
                rotated=80,
                q_norm=True,
                bias=True,
            ),
            dict(tokens=7, hidden=300, norm_bias=True, x=lambda x: x + 100),
            *vary(tokens=[5, 131], heads=0, kv_heads=2, rotated=16, k_norm=True, bias=True),
            *(
                form | setting
                for form in (QUERIES | dict(hidden=300, rotated=16, norm_offset=1.0), *VALUES)
                for setting in vary(tokens=[5, 131], dtype=[*DTYPES])
            ),
        ],
        refusals=[
            refuse("bias is [1, 80], not (1, 3)", dict(bias=True), bias=normal(1, 1, 3)),
            refuse(
                "norm_bias is given without norm_weight", dict(norm_bias=True), norm_weight=lambda _: None
            ),
            refuse("cos is (500, 8), sin is None", dict(rotated=16), sin=lambda _: None),
            refuse("positions are [9, 1], not None", dict(rotated=16), positions=lambda _: None),
            refuse("tables of width 8 turn 16 elements of a head of 12", dict(rotated=16), head_dim=12),
            refuse("q_size 48 and kv_size 16 are no heads of 32", dict(rotated=16), head_dim=32),
            refuse(
                "q_norm, k_norm and v_norm need head_dim",
                dict(q_norm=True, head_dim=16),
                head_dim=lambda _: None,
            ),
            *(
                refuse(
                    "k_norm or v_norm is given, and kv_size is 0", QUERIES | dict(head_dim=16), **{name: True}
                )
                for name in ("k_norm", "v_norm")
            ),
            refuse("q_norm is [1, 8], not (1, 16)", dict(q_norm=True, head_dim=16), head_dim=lambda _: 8),
        ],
        limits=[
            limit(
                "hidden",
                16384,
                "qkv_projection takes a hidden size of at most 16384, not 16385",
                dry=True,
                tokens=1,
                dtype=BF16,
            )
        ],
        undefined=[
            Undefined({"x": [3]}, dict(tokens=tokens, hidden=260, rotated=16, **norm), value, rows=[3])
            for tokens in (20, 140)
            for norm in ({}, dict(norm_bias=True))
            for value in (np.nan, np.inf)
        ],
        two_sums=[
            HALVES | setting
            for setting in vary(tokens=[1, 5, 127, 128, 129, 300], hidden=172, dtype=[*DTYPES])
        ],
        ranks=[
            *slow(Ranks(1, {}, HALVES | dict(tokens=5, hidden=40), seeds=64)),
            *(
                over_sequence(
                    ranks, tokens=tokens, dtype=dtype, **({"norm_bias": True} if ranks == 3 else {})
                )
                for ranks, tokens in SEQUENCE
                for dtype in DTYPES
            ),
            *slow(over_sequence(2, 64, tokens=6), over_sequence(2, 8, tokens=258)),
        ],
    )


def scaled(tokens: int = 9, hidden: int = 24, elements: Any = FP8, **settings: Any) -> tuple[Any, ...]:
    """Return arguments whose w_qkv has elements of 8 bits and a scale for each column."""
    inputs = named(kernels.qkv_projection, arguments(tokens, hidden, **{"dtype": BF16} | settings))
    inputs["w_qkv"], inputs["w_qkv_scales"] = quantise(inputs["w_qkv"].astype(F32), elements)
    return in_order(kernels.qkv_projection, **inputs)


class TestScaledQkvProjection(KernelTests):
    """Weights of 8 bits with a scale for each column.

    Up to 32 and up to 64 rows share the PE array in groups of columns, more rows and rows of several ranks do not.
    """

    case = KernelCase(
        kernels.qkv_projection,
        scaled,
        values=[
            *vary(tokens=[1, 3, 16, 17, 32, 33, 64, 65, 129, 300], hidden=[136, 300], elements=[FP8, INT8]),
            *vary(tokens=[5, 20], hidden=[127, 128, 129, 2304], rotated=16),
            *(form | dict(tokens=tokens, hidden=264) for form in FORMS for tokens in (5, 40, 131)),
            *(form | dict(tokens=tokens) for form in VALUES for tokens in (5, 131)),
            *vary(tokens=[5, 140], hidden=136, rotated=16, dtype=F32, elements=[FP8, INT8]),
            *vary(tokens=[20, 140], hidden=136, heads=26, kv_heads=3, head=80, rotated=80, bias=True),
            *together(
                "heads kv_heads",
                (6, 1),
                (2, 1),
                (1, 1),
                (13, 1),
                (2, 2),
                tokens=[1, 5, 40, 64],
                hidden=136,
                rotated=16,
            ),
            *vary(tokens=[5, 40], hidden=136, heads=4, head=128, rotated=128, gate_size=[0, 512]),
            *vary(tokens=[5, 40], hidden=136, norm=False, rotated=16),
            *vary(tokens=[5, 40], hidden=136, rotated=16, norm_offset=1.0),
        ],
        every_chip=[*vary(tokens=[5, 40], hidden=136, rotated=16, elements=[FP8, INT8])],
        refusals=[
            refuse(
                "w_qkv_scales is float32 [1, 80], one for each column of w_qkv, not bfloat16 (1, 80)",
                w_qkv_scales=lambda scales: scales.astype(BF16),
            ),
            refuse(
                "w_qkv_scales is float32 [1, 80], one for each column of w_qkv, not float32 (80, 1)",
                w_qkv_scales=lambda scales: scales.T,
            ),
        ],
        fits=slow(*vary(tokens=[1, 64, 512], hidden=16384, heads=16, kv_heads=2, head=128, rotated=128)),
        two_sums=[
            form | dict(tokens=tokens, hidden=172)
            for tokens in (1, 5, 64, 128, 129, 300)
            for form in (HALVES, dict(head=8, rotated=8))
        ],
        undefined=[
            Undefined({"x": [3]}, dict(tokens=tokens, hidden=hidden, rotated=16), bad, rows=[3])
            for tokens, hidden in ((8, 260), (20, 256), (20, 260), (70, 256))
            for bad in (np.nan, np.inf)
        ],
        ranks=[over_sequence(ranks, tokens=tokens) for ranks, tokens in SEQUENCE[:3] + SEQUENCE[-2:-1]],
    )


def test_the_reference_agrees_with_the_norm_written_by_moments() -> None:
    drawn = arguments(4, 24, norm_bias=True, norm_offset=1.0)
    inputs = named(kernels.qkv_projection, [*map(in_float64, drawn)])
    x, mean = inputs["x"], inputs["x"].mean(1, keepdims=True)
    spread = np.sqrt((x**2).mean(1, keepdims=True) - mean**2 + EPS)
    truth = ((x - mean) / spread * (1 + inputs["norm_weight"]) + inputs["norm_bias"]) @ inputs["w_qkv"]
    outputs = kernels.qkv_projection_reference(**inputs)
    for expected, output in zip(np.split(truth, [48, 64], axis=1), outputs):
        compare(output.astype(F32), expected, expected.astype(F32))


def test_the_reference_normalises_values_as_their_moments_say() -> None:
    plain, normed = (
        kernels.qkv_projection_reference(*arguments(4, 24, 2, 2, 8, head_dim=8, norm=False, v_norm=flag))
        for flag in (False, True)
    )
    heads = plain[2].reshape(4, 2, 8).astype(np.float64)
    truth = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + EPS)
    # A sum of squares passes at most 9 roundings: of a square, 7 sums, the sum with eps. The root halves their error.
    # The root, its reciprocal and a product are three more.
    assert np.allclose(normed[2].reshape(4, 2, 8), truth, rtol=(4.5 + 3) * 2.0**-24, atol=0)
    assert np.array_equal(normed[1], plain[1])


@pytest.mark.parametrize("tokens", [128, 1500])
def test_x_and_the_weight_are_read_once(tokens: int) -> None:
    inputs = arguments(tokens, 1024, 4, 1, 128, dtype=BF16)
    traffic = simulate.profile(kernels.qkv_projection, *inputs, target="trn2").traffic
    assert {tensor.name: tensor.reads for tensor in traffic if tensor.argument} == {
        "x": 1,
        "norm_weight": 1,
        "w_qkv": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "hidden"), [(F32, 8192), (BF16, 16384)])
@pytest.mark.parametrize("options", [{"rotated": 128}, {"norm_bias": True, "bias": True}, {"norm": False}])
@pytest.mark.parametrize("tokens", [128, 1100])
def test_the_widest_rows_fit_on_every_chip(
    dtype: Any, hidden: int, options: dict[str, Any], tokens: int
) -> None:
    """Planned and placed without computing numbers; the weight has a wider dtype than rows in bfloat16."""
    inputs = named(kernels.qkv_projection, arguments(1, 8, 10, 2, 128, dtype=dtype, **options))
    inputs["x"] = np.empty((tokens, hidden), dtype)
    inputs["w_qkv"] = np.empty((hidden, inputs["w_qkv"].shape[1]), F32)
    for name in ("norm_weight", "norm_bias"):
        inputs[name] = None if inputs[name] is None else np.empty((1, hidden), dtype)
    if "rotated" in options:
        inputs["positions"] = np.empty((tokens, 1), np.int32)
    for target in TARGETS:
        simulate.World(target).launch(kernels.qkv_projection, [((), inputs)], mode=simulate.Mode.dry)
