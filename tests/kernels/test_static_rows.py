"""Rows of 8 bits with a static scale, in `mlp`: values, every chip, ranks, codes and refusals."""

from __future__ import annotations

from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import in_order, named, run
from tests.kernels.case import KernelCase, KernelTests, Ranks, refuse, vary
from tests.kernels.test_feed_forward import BF16, F32, FP8, INT8, SCALED_WEIGHTS, quantised_block
from tests.kernels.test_quantised_rows import within_half_of_rounding

E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)


@wraps(quantised_block)
def block_of_static_rows(**settings: Any) -> tuple[Any, ...]:
    """Return the arguments of a block whose rows have static scales; settings are those of `quantised_block`.

    The rows of the norm are clipped beyond two and a half, a few of a thousand.
    """
    arguments = named(kernels.mlp, quantised_block(**settings))
    largest = {INT8: 127.0, FP8: 224.0, E4M3FN: 448.0}[arguments["w_up"].dtype]
    scales = {"w_gate": 2.5, "w_up": 2.0, "w_down": 0.75}
    for name, most in scales.items():
        if arguments[name] is not None:
            arguments[f"{name}_input_scale"] = np.full((1, 1), most / largest, F32)
    return in_order(kernels.mlp, **(arguments | dict(quantises_rows=True)))


class TestStaticRows(KernelTests):
    """Rows and intermediate are clipped, divided by one scale each and rounded to 8 bits; so does the reference."""

    case = KernelCase(
        kernels.mlp,
        block_of_static_rows,
        values=[
            *vary(tokens=[1, 127, 128, 129], hidden=[136, 256], inner=172, elements=[FP8, INT8]),
            *vary(tokens=[2, 300], hidden=136, inner=[32, 64, 160, 192], biases=True),
            *vary(tokens=[5, 600], hidden=[127, 384], inner=200, dtype=F32),
            *vary(tokens=[5, 140], hidden=264, inner=140, norm_weight=[True, False], w_gate=[True, False]),
            *vary(tokens=[5, 140], hidden=136, inner=140, row_gate=True, elements=[FP8, INT8]),
            *vary(tokens=5, hidden=136, inner=140, residual=False),
        ],
        fits=[*vary(tokens=[1, 300], hidden=8192, inner=896)],
        every_chip=[*vary(tokens=[5, 130], hidden=136, inner=172, elements=[FP8, INT8])],
        refusals=[
            refuse(
                "some weights have an input scale and some have none; pass one for each weight, or none at all",
                dict(),
                w_down_input_scale=lambda scale: None,
            ),
            refuse(
                "an input scale is float32 (1, 1), not float32 (1, 2)",
                w_up_input_scale=lambda scale: np.ones((1, 2), F32),
            ),
            refuse(
                "an input scale is float32 (1, 1), not bfloat16 (1, 1)",
                w_down_input_scale=lambda scale: scale.astype(BF16),
            ),
            refuse(
                "an input scale is given without its weight or without quantises_rows; leave it out",
                quantises_rows=lambda _: False,
            ),
            refuse(
                "an input scale is given without its weight or without quantises_rows; leave it out",
                dict(w_gate=False),
                w_gate_input_scale=lambda _: np.ones((1, 1), F32),
            ),
        ],
        two_sums=[*vary(tokens=[1, 64, 129, 300], hidden=172, inner=172)],
        ranks=[
            Ranks(ranks, SCALED_WEIGHTS, dict(tokens=tokens, hidden=40, inner=36 * ranks))
            for ranks in (2, 4)
            for tokens in (9, 140)
        ],
        tolerance=within_half_of_rounding,
    )


def multiply_by_identity(rows: np.ndarray, scale: float, elements: np.dtype, target: str) -> np.ndarray:
    """Return rows [T, 128] that pass through both products of `mlp` unchanged but for their static scales.

    The block computes relu(n) - relu(-n): the weights have ones and minus ones in their diagonals.
    """
    identity = np.eye(128, dtype=F32)
    input_scale = np.full((1, 1), scale, F32)
    arguments = dict(
        x=rows,
        w_up=np.hstack([identity, -identity]).astype(elements),
        w_up_scales=np.ones((1, 256), F32),
        w_down=np.vstack([identity, -identity]).astype(elements),
        w_down_scales=np.ones((1, 128), F32),
        w_up_input_scale=input_scale,
        w_down_input_scale=input_scale,
        activation="relu",
        residual=False,
        quantises_rows=True,
    )
    return run(kernels.mlp, in_order(kernels.mlp, **arguments), target)


@pytest.mark.parametrize(
    "settings", [dict(tokens=5), dict(tokens=140, w_gate=False), dict(tokens=33, dtype=F32)]
)
def test_rows_of_e4m3fn_on_a_chip_that_multiplies_them(settings: dict[str, Any]) -> None:
    TestStaticRows.case.check(dict(hidden=136, inner=172, elements=E4M3FN) | settings, "trn3")


def test_every_number_of_a_checkpoint_comes_out_as_it_is_on_a_chip_with_e4m3fn() -> None:
    finite = np.arange(256, dtype=np.uint8).view(E4M3FN).astype(F32)
    rows = np.nan_to_num(finite).reshape(2, 128) * F32(0.5)
    assert np.array_equal(multiply_by_identity(rows, 0.5, E4M3FN, "trn3"), rows)
    beyond = np.full((1, 128), 500, F32)
    assert np.array_equal(multiply_by_identity(beyond, 1.0, E4M3FN, "trn3"), np.full((1, 128), 448, F32))


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_every_number_of_a_checkpoint_comes_out_as_it_is_or_halved_to_the_next(target: str) -> None:
    """Twice the scale and half of the number give a number again, but for odd multiples of 2^-9 below 2^-5."""
    codes = np.arange(256, dtype=np.uint8).view(E4M3FN).astype(F32)
    finite = codes[np.isfinite(codes)]
    scale = 0.5
    rows = np.append(finite, [0, 0]).astype(F32).reshape(2, 128) * F32(scale)
    output = multiply_by_identity(rows, 2 * scale, FP8, target)
    changed = np.abs(output - rows) / scale
    is_odd = (np.abs(rows / scale) < 2.0**-5) & (np.abs(rows / scale) * 512 % 2 == 1)
    assert is_odd.sum() == 16 and (changed[is_odd] == 2.0**-9).all() and not changed[~is_odd].any()


def test_rows_are_clipped_at_the_limits_of_a_checkpoint() -> None:
    rows = np.resize(np.array([446, 448, 449, 480, 1e6, -447, -448, -463, -1e6, 0.0], F32), (1, 128))
    expected = np.resize(np.array([448, 448, 448, 448, 448, -448, -448, -448, -448, 0.0], F32), (1, 128))
    assert np.array_equal(multiply_by_identity(rows, 2.0, FP8, "trn2"), expected)
    integers = np.resize(
        np.array([126.4, 126.6, 127.5, 1e6, -127.4, -127.6, -129, -1e6, 0.5, 1.5], F32), (1, 128)
    )
    rounded = np.resize(np.array([126, 127, 127, 127, -127, -128, -128, -128, 0, 2], F32), (1, 128))
    output = multiply_by_identity(integers, 1.0, INT8, "trn2")
    # The positive half of an integer block ends at 127, so that 128 in the intermediate becomes 127.
    assert np.array_equal(output, np.maximum(rounded, -127))
