"""mlp in every form, in groups of rows, and summed over ranks in the dtype of the activations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
from nki_kernels.precision import erf_reference
from tests.kernels.accuracy import ODD_SIZES, compare, find_faults, in_float64, in_order, named, normal, run
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    GEN3_ON,
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

SIZES = [1, *ODD_SIZES]


def block(
    tokens: int = 3,
    hidden: int = 24,
    inner: int = 40,
    dtype: Any = F32,
    weights: Any = None,
    w_gate: bool = True,
    biases: bool = False,
    norm_weight: bool = True,
    norm_bias: bool = False,
    row_gate: bool = False,
    activation: str = "silu",
    outputs: int = 0,
) -> tuple[Any, ...]:
    weight_dtype = weights or dtype

    def weight(seed: int, rows: int, columns: int) -> np.ndarray:
        return normal(seed, rows, columns, dtype=weight_dtype, scale=rows**-0.5)

    def row(seed: int, columns: int, present: bool) -> np.ndarray | None:
        return normal(seed, 1, columns, dtype=weight_dtype) if present else None

    return in_order(
        kernels.mlp,
        x=normal(1, tokens, hidden, dtype=dtype),
        norm_weight=row(2, hidden, norm_weight),
        w_gate=weight(3, hidden, inner) if w_gate else None,
        w_up=weight(4, hidden, inner),
        w_down=weight(5, inner, outputs or hidden),
        eps=1e-5,
        activation=activation,
        b_gate=row(6, inner, biases and w_gate),
        b_up=row(7, inner, biases),
        b_down=row(8, outputs or hidden, biases),
        norm_bias=row(9, hidden, norm_bias),
        row_gate=normal(10, hidden, 1, dtype=dtype) if row_gate else None,
    )


FORMS = [
    dict(w_gate=False, activation="gelu"),
    dict(activation="gelu_tanh", biases=True),
    dict(w_gate=False, activation="relu", biases=True, norm_bias=True),
    dict(w_gate=False, activation="gelu_sigmoid", biases=True, norm_bias=True),
    dict(norm_offset=1.0),
]
WEIGHTS = dict(w_gate=1, w_up=1, w_down=0)
SEQUENCE = [(2, 2), (2, 254), (2, 256), (2, 258), (2, 1100), (3, 381), (4, 512), (4, 1028)]
"""Ranks, and rows: one of each rank, around a row tile, several pieces and groups, the last of them ragged.

Of three ranks a row tile has 126 rows.
"""


def over_sequence(ranks: int, seeds: int = 0, **settings: Any) -> Ranks:
    """Return ranks that cut the rows of x as well."""
    settings = dict(hidden=72, inner=40 * ranks) | settings
    return Ranks(
        ranks,
        WEIGHTS | dict(x=0),
        settings,
        dict(sequence_ranks=ranks),
        joined=True,
        alike=False,
        seeds=seeds,
    )


class TestMlp(KernelTests):
    """Blocks of 32 and 64 columns of gate and up lie side by side, in groups of 512, 128 and 60 rows.

    A group of rows is prepared while the one before is multiplied: three groups of which the last is ragged, and more
    units of the intermediate than chunks of the result.
    """

    case = KernelCase(
        kernels.mlp,
        block,
        values=[
            *vary(tokens=SIZES),
            *vary(hidden=[*ODD_SIZES]),
            *vary(inner=[*ODD_SIZES]),
            dict(hidden=40, inner=2200),
            dict(tokens=520, inner=530),
            *vary(tokens=[2, 128, 572], inner=[32, 64, 160, 192, 320], biases=True),
            dict(tokens=1153, hidden=40, inner=1100, dtype=BF16),
            *vary(
                tokens=[3, 130],
                outputs=[1, 40, *ODD_SIZES, 600],
                residual=False,
                w_gate=False,
                biases=True,
                dtype=[*DTYPES],
            ),
            *together(
                "norm_weight residual",
                *((False, True), (True, False), (False, False)),
                tokens=[1, 129, 300],
                hidden=136,
                inner=200,
                dtype=[*DTYPES],
                biases=True,
            ),
        ],
        every_chip=[
            *together(
                "dtype weights", (F32, F32), (F32, BF16), (BF16, BF16), tokens=130, hidden=72, inner=172
            ),
            *(
                form | dict(tokens=tokens, hidden=hidden, inner=inner, dtype=dtype)
                for form, (tokens, hidden, inner) in zip(
                    2 * FORMS, 2 * [(5, 72, 172), (130, 136, 192), (129, 40, 160), (5, 72, 172)]
                )
                for dtype in DTYPES
            ),
            *together(
                "tokens residual",
                *((1, True), (129, True), (300, False), (600, True)),
                hidden=136,
                inner=200,
                dtype=[*DTYPES],
                norm_offset=1.0,
                row_gate=True,
            ),
        ],
        refusals=[
            refuse("expected x [T, H], not a tensor of shape (72,)", x=lambda x: x.reshape(-1)),
            refuse("2 cores divide at least 2 columns, not 1", dict(inner=2), cores=2, inner=1),
            refuse("w_gate has 23 rows for a hidden size of 24", w_gate=lambda w: w[1:]),
            refuse("w_gate is (24, 40), w_up is (23, 40)", w_up=lambda w: w[1:]),
            refuse("w_down is [40, 24], not (39, 24)", w_down=lambda w: w[1:]),
            refuse("w_down is [40, 24], not (40, 30)", dict(outputs=30, residual=False), residual=True),
            refuse(
                "activation is silu, gelu, gelu_tanh, gelu_sigmoid or relu, not swish", activation="swish"
            ),
            refuse("b_gate is given without w_gate", dict(w_gate=False), b_gate=normal(1, 1, 40)),
            refuse("b_down is [1, 24], not (1, 40)", dict(biases=True), b_down=normal(1, 1, 40)),
            refuse("row_gate is [24, 1], not (1, 24)", dict(row_gate=True), row_gate=normal(1, 1, 24)),
            refuse("without b_down", dict(biases=True), row_gate=normal(1, 24, 1)),
        ],
        limits=[
            limit("hidden", 8192, "mlp takes a hidden size of at most 8192, not 8193", dry=True),
            limit("outputs", 8192, "mlp takes at most 8192 outputs, not 8193", dry=True, residual=False),
            limit("inner", 16384, "mlp takes an intermediate size of at most 16384, not 16385", dry=True),
            limit(
                "hidden", 16384, "mlp takes a hidden size of at most 16384, not 16385", dry=True, dtype=BF16
            ),
            limit(
                "hidden",
                8192,
                "mlp takes a hidden size of at most 8192, not 8193",
                dry=True,
                dtype=BF16,
                norm_offset=1.0,
            ),
        ],
        fits=[
            dict(tokens=300, hidden=16384, dtype=BF16, weights=F32),
            *slow(*vary(tokens=[1, 512], hidden=8192, inner=16384, dtype=[*DTYPES], weights=BF16)),
        ],
        undefined=[
            Undefined(dict(x=7), dict(tokens=130, hidden=40, inner=72), bad, rows=[7], chips=GEN3_ON)
            for bad in (np.nan, np.inf)
        ],
        two_sums=[
            *vary(tokens=[1, 5, 127, 128, 129, 300], hidden=172, inner=172, dtype=[*DTYPES], biases=True),
            *vary(
                hidden=40,
                inner=[2, 127, 128, 129, 192, 320, 896],
                dtype=BF16,
                w_gate=[True, False],
                biases=True,
            ),
        ],
        ranks=[
            *slow(Ranks(2, WEIGHTS, dict(tokens=5, hidden=40, inner=128), seeds=64)),
            *(
                Ranks(
                    ranks, WEIGHTS, dict(tokens=9, hidden=40, inner=36 * ranks, dtype=dtype, weights=weights)
                )
                for ranks in (2, 4)
                for dtype, weights in ((F32, F32), (F32, BF16), (BF16, BF16))
            ),
            # The sum over ranks is that of products that are gated already.
            *(
                Ranks(2, WEIGHTS, dict(tokens=tokens, hidden=136, inner=144, row_gate=True))
                for tokens in (3, 300)
            ),
            Ranks(2, WEIGHTS, dict(tokens=5, inner=80, outputs=40, residual=False)),
            # What is the same on every rank is added once.
            Ranks(
                2,
                WEIGHTS | dict(b_gate=1, b_up=1),
                dict(tokens=600, hidden=40, inner=128, biases=True, norm_bias=True),
            ),
            *(
                over_sequence(ranks, tokens=tokens, dtype=dtype, **form)
                for ranks, tokens in SEQUENCE
                for dtype in DTYPES
                for form in (dict(norm_bias=ranks == 3), dict(row_gate=True))
            ),
            *slow(
                *(
                    over_sequence(2, 64 if tokens == 6 else 8, tokens=tokens, row_gate=row_gate)
                    for tokens in (6, 258)
                    for row_gate in (False, True)
                )
            ),
        ],
    )


FP8, INT8 = np.dtype(ml_dtypes.float8_e4m3), np.dtype(np.int8)
QUANTISED = ("w_gate", "w_up", "w_down")


def quantise(weight: np.ndarray, elements: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return elements whose largest magnitude in each column is that of their dtype, and scales [1, N]."""
    largest = 127 if elements == INT8 else float(ml_dtypes.finfo(elements).max)
    scales = (np.abs(weight).max(axis=0, keepdims=True) / largest).astype(F32)
    scales[scales == 0] = 1  # columns of zeros
    # The largest element may be above the largest number by a rounding, which float8_e4m3fn does not represent.
    quotients = np.clip(weight / scales, -largest, largest)
    return (np.rint(quotients) if elements == INT8 else quotients).astype(elements), scales


def quantise_blocks(weight: np.ndarray, elements: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return elements [K, N] and scales [ceil(K / 128), ceil(N / 128)], which differ by factors of up to 8."""
    largest = 127 if elements == INT8 else float(ml_dtypes.finfo(elements).max)
    depth, columns = weight.shape
    starts = np.arange(0, depth, 128), np.arange(0, columns, 128)
    most = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), starts[0], 0), starts[1], 1)
    scales = (most / largest * np.random.default_rng(17).uniform(1, 8, most.shape)).astype(F32)
    scales[scales == 0] = 1
    quotients = weight / scales[np.arange(depth)[:, None] // 128, np.arange(columns) // 128]
    return (np.rint(quotients) if elements == INT8 else quotients).astype(elements), scales


def quantised_block(
    tokens: int = 3,
    hidden: int = 24,
    inner: int = 40,
    dtype: Any = BF16,
    elements: Any = FP8,
    w_gate: bool = True,
    biases: bool = False,
    norm_weight: bool = True,
    norm_bias: bool = False,
    row_gate: bool = False,
    blocks: Any = (),
) -> tuple[Any, ...]:
    """Return the arguments of a block whose matrices have 8 bits; `elements` is their dtype.

    The matrices in `blocks` have a scale for each 128 rows and columns, the others one for each column.
    """
    plain = block(tokens, hidden, inner, dtype, F32, w_gate, biases, norm_weight, norm_bias, row_gate)
    arguments = named(kernels.mlp, plain)
    for name in QUANTISED:
        if arguments[name] is not None and name in blocks:
            arguments[name], arguments[f"{name}_block_scales"] = quantise_blocks(arguments[name], elements)
        elif arguments[name] is not None:
            arguments[name], arguments[f"{name}_scales"] = quantise(arguments[name], elements)
    for name, argument in arguments.items():
        if isinstance(argument, np.ndarray) and argument.shape[0] == 1 and not name.endswith("_scales"):
            arguments[name] = argument.astype(dtype)  # norms and biases
    return in_order(kernels.mlp, **arguments)


SCALED_WEIGHTS = WEIGHTS | dict(w_gate_scales=1, w_up_scales=1)


class TestQuantisedMlp(KernelTests):
    """Weights of 8 bits with a scale for each column.

    Up to 32 and up to 64 rows take runs and groups of columns of the PE array, if the columns of y are a multiple of
    the groups; more rows take row tiles. Biases of y, several ranks and other widths of y take no groups.
    """

    case = KernelCase(
        kernels.mlp,
        quantised_block,
        values=[
            *vary(tokens=[1, 3, 32, 33, 64, 65, 129], hidden=[136, 127], inner=172, elements=[FP8, INT8]),
            *vary(tokens=[2, 64, 300], hidden=136, inner=[32, 64, 160, 192, 320], biases=True),
            *vary(tokens=5, hidden=[2048, 2560, 4100], inner=130),
            *vary(tokens=[5, 600], hidden=136, inner=200, dtype=F32, elements=[FP8, INT8]),
            *vary(tokens=[5, 40], hidden=264, inner=140, norm_weight=[True, False], w_gate=[True, False]),
            *vary(tokens=[5, 40], hidden=136, inner=140, norm_bias=True),
            *vary(tokens=[5, 140], hidden=136, inner=140, row_gate=True),
            *vary(tokens=[5, 140], hidden=136, inner=140, residual=False),
            *vary(tokens=[5, 140], hidden=136, inner=140, norm_offset=1.0),
        ],
        fits=[*vary(tokens=[1, 65, 300], hidden=16384, inner=200)],
        every_chip=[*vary(tokens=[5, 40, 130], hidden=136, inner=172, elements=[FP8, INT8])],
        refusals=[
            refuse(
                "w_up_scales is float32 [1, 40], one for each column of w_up, not bfloat16 (1, 40)",
                w_up_scales=lambda scales: scales.astype(BF16),
            ),
            refuse(
                "w_down_scales is float32 [1, 24], one for each column of w_down, not float32 (1, 40)",
                w_down_scales=normal(1, 1, 40),
            ),
            refuse(
                "w_gate_scales is given without w_gate; leave it out",
                dict(w_gate=False),
                w_gate_scales=normal(1, 1, 40),
            ),
        ],
        two_sums=[*vary(tokens=[1, 5, 64, 129, 300], hidden=172, inner=172), dict(inner=896, hidden=40)],
        ranks=[
            *(
                Ranks(ranks, SCALED_WEIGHTS, dict(tokens=tokens, hidden=40, inner=36 * ranks))
                for ranks in (2, 4)
                for tokens in (9, 140)
            ),
            Ranks(
                2,
                SCALED_WEIGHTS | dict(x=0),
                dict(tokens=258, hidden=72, inner=80),
                dict(sequence_ranks=2),
                joined=True,
                alike=False,
            ),
        ],
    )


BLOCK_SCALED_WEIGHTS = WEIGHTS | dict(w_gate_block_scales=1, w_up_block_scales=1, w_down_block_scales=0)


class TestBlockScaledMlp(KernelTests):
    """Weights of 8 bits with a scale for each 128 rows and columns, which multiplies copies of up to 64 rows."""

    case = KernelCase(
        kernels.mlp,
        partial(quantised_block, blocks=QUANTISED),
        values=[
            *vary(tokens=[1, 40], hidden=[127, 128, 129, 300], inner=[127, 128, 129, 300]),
            *vary(tokens=[3, 32, 33, 64, 65, 128, 129, 300], hidden=264, inner=200, elements=[FP8, INT8]),
            *vary(tokens=[5, 600], hidden=136, inner=200, dtype=F32, elements=[FP8, INT8]),
            *vary(tokens=[2, 64, 300], hidden=136, inner=[64, 160, 320], biases=True),
            *vary(tokens=[5, 40], hidden=264, inner=140, norm_weight=[True, False], w_gate=[True, False]),
            *vary(tokens=[5, 140], hidden=136, inner=140, norm_bias=[True, False], norm_offset=[0.0, 1.0]),
            *vary(tokens=[5, 140], hidden=136, inner=140, row_gate=True),
            *vary(tokens=[5, 140], hidden=136, inner=140, residual=False),
            *vary(
                tokens=[5, 140], hidden=136, inner=140, blocks=[QUANTISED[:1], QUANTISED[:2], QUANTISED[2:]]
            ),
            *vary(tokens=[5, 530], hidden=2600, inner=130),
            dict(tokens=3, hidden=136, inner=2200),
        ],
        every_chip=[*vary(tokens=[5, 40, 130], hidden=136, inner=172, elements=[FP8, INT8])],
        refusals=[
            refuse(
                "w_up_block_scales is float32 (1, 2), one for each 128 rows and 128 columns of w_up, not float32",
                dict(inner=200),
                w_up_block_scales=normal(1, 1, 1),
            ),
            refuse(
                "w_down_block_scales is float32 (1, 1), one for each 128 rows and 128 columns of w_down, not bfloat16",
                w_down_block_scales=lambda scales: scales.astype(BF16),
            ),
            refuse(
                "w_up with block scales is float8_e4m3, float8_e5m2 or int8, not bfloat16",
                w_up=lambda weight: weight.astype(BF16),
            ),
            refuse("w_up has scales and block scales; pass one of them", w_up_scales=normal(1, 1, 40)),
            refuse(
                "w_gate_block_scales is given without w_gate; leave it out",
                dict(w_gate=False),
                w_gate_block_scales=normal(1, 1, 1),
            ),
            refuse(
                "quantises_rows takes float8_e4m3 weights or int8 weights, all with scales",
                quantises_rows=True,
            ),
        ],
        fits=[
            *vary(tokens=[1, 65, 300], hidden=8192, inner=200),
            *slow(
                *vary(tokens=[1, 65, 512], hidden=8192, inner=8192, dtype=[*DTYPES]),
                dict(tokens=512, hidden=4096, inner=16384),
                dict(tokens=512, hidden=4096, inner=8192, biases=True, norm_bias=True),
            ),
        ],
        limits=[
            limit("inner", 8192, "has 4160 scales; at most 4096 stay", step=128, dry=True, hidden=8192),
            limit("hidden", 8192, "mlp takes a hidden size of at most 8192, not 8193", dry=True),
        ],
        two_sums=[
            *vary(tokens=[1, 64, 129, 300], hidden=[130, 200], inner=[40, 172]),
            *vary(tokens=[5, 70], hidden=640, inner=[130, 896]),
        ],
        ranks=[
            *(
                Ranks(ranks, BLOCK_SCALED_WEIGHTS, dict(tokens=tokens, hidden=40, inner=128 * ranks))
                for ranks in (2, 4)
                for tokens in (9, 140)
            ),
            Ranks(
                2,
                BLOCK_SCALED_WEIGHTS | dict(x=0),
                dict(tokens=258, hidden=72, inner=256),
                dict(sequence_ranks=2),
                joined=True,
                alike=False,
            ),
        ],
    )


@pytest.mark.parametrize("tokens", [5, 64, 130])
def test_block_scales_of_e4m3fn_on_a_chip_that_multiplies_it(tokens: int) -> None:
    elements = np.dtype(ml_dtypes.float8_e4m3fn)
    TestBlockScaledMlp.case.check(dict(tokens=tokens, hidden=264, inner=300, elements=elements), "trn3")


@pytest.mark.slow
def test_groups_follow_one_another_on_a_chip_where_two_do_not_fit() -> None:
    """trn3 has room for two, and the same sums."""
    arguments = block(130, 8, 16384)
    assert np.array_equal(run(kernels.mlp, arguments, "trn1"), run(kernels.mlp, arguments, "trn3"))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_no_finding_in_groups_of_rows(target: str) -> None:
    def launches() -> None:
        for sizes in ((600, 72, 320), (5, 136, 300)):
            run(kernels.mlp, block(*sizes, BF16), target)
        for tokens in (5, 40, 140):
            run(kernels.mlp, quantised_block(tokens, 136, 300), target)
            run(kernels.mlp, quantised_block(tokens, 136, 300, blocks=QUANTISED), target)

    assert find_faults(launches) == []


def test_the_error_function_of_the_reference_agrees_with_that_of_python() -> None:
    values = np.linspace(-8, 8, 321)
    assert np.abs(erf_reference(values) - [math.erf(value) for value in values]).max() < 1e-13


def test_the_reference_agrees_with_silu_written_by_tanh() -> None:
    inputs = named(kernels.mlp, [*map(in_float64, block(5, 24, 40))])
    normed = kernels.rmsnorm_reference(inputs["x"], inputs["norm_weight"], inputs["eps"])
    gates = normed @ inputs["w_gate"]
    truth = (
        inputs["x"] + (gates * (1 + np.tanh(gates / 2)) / 2 * (normed @ inputs["w_up"])) @ inputs["w_down"]
    )
    reference = kernels.mlp_reference(**inputs)
    compare(reference.astype(F32), truth, truth.astype(F32))
