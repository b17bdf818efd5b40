"""Rows of fp8 with a scale for each row, in `mlp`: values, every chip, two cores, cut sequences and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from nki_kernels.projection.quantised_rows import quantise_rows_reference
from tests.kernels.accuracy import as_tuple, in_order, last_place, named
from tests.kernels.case import KernelCase, KernelTests, refuse, vary
from tests.kernels.test_feed_forward import DTYPES, F32, FP8, INT8, quantised_block


@wraps(quantised_block)
def block_of_quantised_rows(**settings: Any) -> tuple[Any, ...]:
    """Return the arguments of an fp8 block whose rows are quantised; settings are those of `quantised_block`."""
    arguments = named(kernels.mlp, quantised_block(**settings))
    return in_order(kernels.mlp, **(arguments | dict(quantises_rows=True)))


def within_half_of_rounding(outputs: Sequence[np.ndarray], reference: Any, arguments: Sequence[Any]) -> None:
    """Assert that outputs are nearer to the reference than half of what its rounding of rows changes, and a last place.

    Sums in another order move a row's element across a boundary between two codes at times. The element then changes
    by a step, twice the largest rounding of one element. Independent roundings of K elements change a sum by sqrt(K /
    3) of the largest rounding of one, so one step is a third of them together for K = 127, and less for more.
    """
    rounded = as_tuple(reference(*arguments))
    plain_rows = as_tuple(reference(**named(reference, arguments) | dict(quantises_rows=False)))
    for output, truth, plain in zip(outputs, rounded, plain_rows, strict=True):
        truth, plain = truth.astype(np.float64), plain.astype(np.float64)
        bound = np.abs(truth - plain).max() / 2 + last_place(output.dtype, float(np.abs(truth).max()))
        assert np.abs(output.astype(np.float64) - truth).max() <= bound


class TestQuantisedRows(KernelTests):
    """Rows and intermediate are rounded to fp8; the reference rounds them too.

    Odd numbers of K blocks have a last block without a partner; groups of rows follow each other from 513 rows on. Of
    300 rows 256 or 512 columns of the intermediate are computed and measured at a time.
    """

    case = KernelCase(
        kernels.mlp,
        block_of_quantised_rows,
        values=[
            *vary(tokens=[1, 33, 127, 128, 129], hidden=[136, 256], inner=172),
            *vary(tokens=[2, 300], hidden=136, inner=[32, 64, 160, 192, 320], biases=True),
            *vary(tokens=[5, 600], hidden=[127, 384], inner=200, dtype=F32),
            *vary(tokens=300, hidden=136, inner=[700, 1024], w_gate=[True, False]),
            *vary(tokens=[5, 140], hidden=264, inner=140, norm_weight=[True, False], w_gate=[True, False]),
            *vary(tokens=140, hidden=136, inner=140, norm_bias=True),
            *vary(tokens=[5, 140], hidden=[127, 136], inner=140, row_gate=True, dtype=[*DTYPES]),
            *vary(tokens=[5, 140], hidden=136, inner=140, residual=False),
        ],
        fits=[*vary(tokens=[1, 300], hidden=8192, inner=896)],
        every_chip=[*vary(tokens=[5, 130], hidden=136, inner=172)],
        refusals=[
            refuse(
                "all with scales; w_gate has no scales or is int8 beside w_up of float8_e4m3; leave quantises_rows out",
                dict(elements=FP8),
                w_gate=lambda weight: weight.astype(INT8),
            ),
        ],
        two_sums=[*vary(tokens=[1, 64, 129, 300], hidden=172, inner=172)],
        tolerance=within_half_of_rounding,
    )


@pytest.mark.parametrize(
    "settings", [dict(tokens=5), dict(tokens=140, w_gate=False), dict(tokens=33, dtype=F32)]
)
def test_rows_of_e4m3fn_on_a_chip_that_multiplies_them(settings: dict[str, Any]) -> None:
    elements = np.dtype(ml_dtypes.float8_e4m3fn)
    TestQuantisedRows.case.check(dict(hidden=136, inner=172, elements=elements) | settings, "trn3")


def test_a_row_of_zeros_stays_zero_and_does_not_divide_by_it() -> None:
    arguments = named(kernels.mlp, block_of_quantised_rows(tokens=3, hidden=24, inner=40, norm_weight=False))
    arguments["x"] = np.zeros_like(arguments["x"])
    output = np.asarray(kernels.mlp(**arguments)).astype(F32)
    assert not output.any()


def test_every_row_has_its_largest_element_and_a_step_of_an_eighth() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 300)).astype(F32)
    codes, scales = quantise_rows_reference(rows, FP8, np.dtype(F32))
    rounded = codes * scales
    most = np.abs(rows).max(axis=1, keepdims=True)
    # 1 / 240, the scale and their product are rounded once each.
    assert np.allclose(np.abs(rounded).max(axis=1, keepdims=True), most, rtol=3 * 2.0**-24, atol=0)
    # Half of the last of three binary places, or of the least subnormal, 2^-9 of 240.
    assert (np.abs(rounded - rows) <= np.maximum(np.abs(rows) / 16, most / 240 * 2.0**-10) * 1.0001).all()


def divide_columns(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of `mlp` on each of two ranks, which have half of the intermediate's columns each."""
    half = arguments["w_up"].shape[1] // 2
    names = ("w_up", "w_gate", "w_up_scales", "w_gate_scales")
    return [
        arguments
        | {name: arguments[name][:, columns].copy() for name in names}
        | dict(w_down=arguments["w_down"][columns].copy())
        for columns in (slice(0, half), slice(half, None))
    ]


@pytest.mark.parametrize("tokens", [3, 140])
def test_ranks_take_scales_from_their_own_columns(tokens: int) -> None:
    """Two ranks give x and the sum of what each gives alone for its columns."""
    arguments = named(kernels.mlp, block_of_quantised_rows(tokens=tokens, hidden=40, inner=72))
    shards = divide_columns(arguments)
    alone = [np.asarray(kernels.mlp(**(shard | dict(residual=False)))).astype(np.float64) for shard in shards]
    group = ReplicaGroup([[0, 1]])
    world = simulate.World("trn2", 2)
    launches = [((), shard | dict(replica_group=group)) for shard in shards]
    outputs = [np.asarray(output) for output in world.launch(kernels.mlp, launches).outputs]
    expected = arguments["x"].astype(np.float64) + sum(alone)
    # Partial sums, their sum and y are rounded to bfloat16: three halves of a last place of the largest number.
    bound = 3 / 2 * 2.0**-7 * np.abs([*alone, expected]).max()
    for output in outputs:
        assert np.array_equal(output, outputs[0])
        assert np.abs(output.astype(np.float64) - expected).max() <= bound
