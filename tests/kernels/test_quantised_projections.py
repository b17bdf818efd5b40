"""Rows of fp8 with a scale for each row, in `qkv_projection` and `output_projection`."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import as_tuple, find_faults, in_order, named
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    exactly,
    refuse,
    slow,
    vary,
)
from tests.kernels.test_feed_forward import FP8, INT8
from tests.kernels.test_projections import scaled_heads
from tests.kernels.test_qkv_projection import FORMS, GATES, VALUES, scaled
from tests.kernels.test_quantised_rows import within_half_of_rounding


@wraps(scaled)
def quantised(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `qkv_projection` with an fp8 w_qkv, whose rows are quantised."""
    arguments = named(kernels.qkv_projection, scaled(**settings))
    return in_order(kernels.qkv_projection, **(arguments | dict(quantises_rows=True)))


@wraps(scaled_heads)
def quantised_heads(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `output_projection` with an fp8 w_o, whose rows are quantised."""
    arguments = named(kernels.output_projection, scaled_heads(**settings))
    return in_order(kernels.output_projection, **(arguments | dict(quantises_rows=True)))


class TestQuantisedQkvProjection(KernelTests):
    """Rows are rounded to fp8; the reference rounds them too.

    Contractions around 256 end in a block of pairs with one partition or with half a pair. Rows of 4,100 elements are
    normalised in place, and their magnitudes searched in pieces. Later groups of columns take the transposes of the
    first one, or quantise 300 rows of 4,100 elements of float32 again.
    """

    case = KernelCase(
        kernels.qkv_projection,
        quantised,
        values=[
            *vary(tokens=[1, 33, 127, 128, 129, 700], hidden=[136, 300], rotated=16),
            *vary(tokens=[3, 140], hidden=[127, 128, 129, 255, 256, 257, 258, 511, 513]),
            *vary(tokens=[1, 16, 17, 33, 64, 65], hidden=384, rotated=16, norm=[True, False]),
            *vary(tokens=[1, 40], hidden=128, heads=26, kv_heads=3, head=80, rotated=80, bias=True),
            *vary(tokens=[1, 200], hidden=[4100, 4353], rotated=16),
            *(form | dict(tokens=tokens, hidden=264) for form in FORMS for tokens in (5, 131)),
            *(form | dict(tokens=tokens) for form in VALUES for tokens in (5, 131)),
            *vary(tokens=[5, 140], hidden=136, rotated=16, dtype=F32),
            *vary(tokens=300, hidden=136, heads=26, kv_heads=3, head=80, norm=[True, False], bias=True),
            *slow(dict(tokens=300, hidden=4100, heads=22, kv_heads=3, head=80, dtype=F32)),
            *vary(tokens=[20, 300], hidden=136, heads=26, kv_heads=3, head=80, rotated=80, bias=True),
            dict(tokens=140, hidden=136, rotated=16, norm_offset=1.0),
            *vary(tokens=[5, 70, 140], hidden=136, heads=0, kv_heads=2, norm=False, bias=True),
            GATES | dict(tokens=131, hidden=136),
        ],
        every_chip=[*vary(tokens=[5, 130], hidden=[136, 257], rotated=16)],
        refusals=[
            refuse(
                "takes a w_qkv of float8_e4m3 or int8 with scales; it is bfloat16 with scales; leave quantises_rows",
                w_qkv=lambda weight: weight.astype(BF16),
            ),
            refuse("it is float8_e4m3 without scales; leave quantises_rows out", w_qkv_scales=lambda _: None),
        ],
        fits=[
            *vary(tokens=[1, 300], hidden=[4096, 8192], heads=8, kv_heads=1, head=128, rotated=128),
            *vary(tokens=[1, 300], hidden=16384, heads=8, kv_heads=1, head=128, rotated=128, bias=True),
            *vary(tokens=300, hidden=8192, heads=64, kv_heads=8, head=128, rotated=128, dtype=[*DTYPES]),
        ],
        undefined=[
            Undefined({"x": [3]}, dict(tokens=tokens, hidden=260, rotated=16), rows=[3])
            for tokens in (8, 140)
        ],
        two_cores=[*vary(tokens=[1, 127, 128, 129, 300], hidden=172, head=8, rotated=8)],
        tolerance=within_half_of_rounding,
    )


class TestQuantisedOutputProjection(KernelTests):
    """Rows are rounded to fp8; weights stay in SBUF or stream."""

    case = KernelCase(
        kernels.output_projection,
        quantised_heads,
        values=[
            *vary(tokens=[1, 33, 127, 128, 129, 600], depth=[136, 264], hidden=600),
            *vary(tokens=[5, 140], depth=[127, 128, 129, 255, 256, 257, 384], hidden=[130, 2500]),
            *vary(tokens=[5, 140], depth=72, hidden=600, bias=[False, True], residual=[False, True]),
            *vary(tokens=[5, 140], depth=136, hidden=600, gate=True),
            *vary(tokens=[5, 140], depth=136, hidden=600, dtype=F32),
            dict(tokens=600, depth=4224, hidden=2100),
        ],
        every_chip=[*vary(tokens=[5, 130], depth=264, hidden=600)],
        refusals=[
            refuse(
                "takes a w_o of float8_e4m3 or int8 with scales; it is bfloat16 with scales; leave quantises_rows out",
                w_o=lambda weight: weight.astype(BF16),
            ),
            refuse("it is float8_e4m3 without scales; leave quantises_rows out", w_o_scales=lambda _: None),
        ],
        two_cores=[*vary(tokens=[1, 127, 128, 129, 300], depth=72, hidden=1100, bias=True)],
        fits=[
            *vary(tokens=[1, 300], depth=[512, 1024], hidden=[4096, 8192]),
            *vary(tokens=[1, 512], depth=[8192, 16384], hidden=8192),
        ],
        tolerance=within_half_of_rounding,
    )


@wraps(scaled)
def integers(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `qkv_projection` with an int8 w_qkv, whose rows are quantised."""
    return quantised(**(dict(elements=INT8) | settings))


@wraps(scaled_heads)
def integer_heads(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `output_projection` with an int8 w_o, whose rows are quantised."""
    return quantised_heads(**(dict(elements=INT8) | settings))


class TestDefinedQkvProjection(KernelTests):
    """Without norms and rotation all steps round as NumPy does: the bytes of the definition.

    K is around 128 and around 1,024, the length of a group.
    """

    case = KernelCase(
        kernels.qkv_projection,
        integers,
        values=[
            *vary(tokens=[1, 127, 128, 129], hidden=[127, 136], norm=False, dtype=[*DTYPES]),
            *vary(tokens=2, hidden=[128, 129, 1024, 1025, 2177], norm=False),
            *vary(tokens=[3, 140], hidden=72, heads=26, kv_heads=3, head=80, norm=False, bias=True),
        ],
        two_cores=[*vary(tokens=[2, 128, 129, 300], hidden=136, norm=False)],
        tolerance=exactly,
    )


class TestIntegerQkvProjection(KernelTests):
    """Norms and rotation, whose roundings move an integer at times."""

    case = KernelCase(
        kernels.qkv_projection,
        integers,
        values=[
            *vary(tokens=[1, 129], hidden=[136, 264], rotated=16, dtype=[*DTYPES]),
            *(form | dict(tokens=131, hidden=264) for form in FORMS),
            *(form | dict(tokens=5) for form in VALUES),
        ],
        fits=[
            *vary(tokens=[1, 300], hidden=8192, heads=8, kv_heads=1, head=128, rotated=128, dtype=[*DTYPES]),
            dict(tokens=300, hidden=16384, heads=8, kv_heads=1, head=128, rotated=128, bias=True),
        ],
        tolerance=within_half_of_rounding,
    )


class TestDefinedOutputProjection(KernelTests):
    """Integers, sums, scales and the residual: the bytes of the definition."""

    case = KernelCase(
        kernels.output_projection,
        integer_heads,
        values=[
            *vary(tokens=[1, 127, 128, 129], depth=[127, 136], hidden=600, dtype=[*DTYPES]),
            *vary(tokens=3, depth=[128, 129, 1024, 1025, 2177], hidden=130, residual=[False, True]),
            *vary(tokens=[5, 300], depth=72, hidden=2500),
        ],
        every_chip=[*vary(tokens=[5, 130], depth=136, hidden=600, dtype=[*DTYPES])],
        two_cores=[*vary(tokens=[1, 128, 129, 300], depth=136, hidden=1100)],
        fits=[*vary(tokens=[1, 300], depth=[1024, 16384], hidden=8192)],
        tolerance=exactly,
    )


@pytest.mark.parametrize("elements", [FP8, INT8])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tokens", [4, 300])
def test_ranks_take_scales_of_heads_from_their_own_columns(tokens: int, cut: bool, elements: Any) -> None:
    """Two ranks give the residual and the sum of what each gives alone for its heads, also where they cut the rows."""
    arguments = named(
        kernels.output_projection, quantised_heads(tokens=tokens, depth=72, hidden=136, elements=elements)
    )
    residual = arguments.pop("residual")
    shards = [
        arguments | dict(o=arguments["o"][:, heads].copy(), w_o=arguments["w_o"][heads].copy())
        for heads in (slice(0, 36), slice(36, None))
    ]
    alone = [np.asarray(kernels.output_projection(**shard)).astype(np.float64) for shard in shards]
    group = ReplicaGroup([[0, 1]])
    rows = np.split(residual, 2) if cut else 2 * [residual]
    over_ranks = dict(replica_group=group, sequence_ranks=2 if cut else 1)
    launches = [
        ((), shard | over_ranks | dict(residual=rank_rows.copy())) for shard, rank_rows in zip(shards, rows)
    ]
    outputs = [
        np.asarray(output)
        for output in simulate.World("trn2", 2).launch(kernels.output_projection, launches).outputs
    ]
    outputs = [np.concatenate(outputs)] if cut else outputs
    expected = residual.astype(np.float64) + sum(alone)
    # Partial sums, their sum and y are rounded to bfloat16: three halves of a last place of the largest number.
    bound = 3 / 2 * 2.0**-7 * np.abs([*alone, expected]).max()
    defined = kernels.output_projection_reference(**arguments | dict(residual=residual, replica_group=group))
    for output in outputs:
        assert np.abs(output.astype(np.float64) - expected).max() <= bound
        # The reference rounds once more, in y.
        assert (
            np.abs(output.astype(np.float64) - defined.astype(np.float64)).max()
            <= bound + 2.0**-8 * np.abs(expected).max()
        )
    one_scale = kernels.output_projection_reference(**arguments | dict(residual=residual))
    assert not np.array_equal(one_scale, defined)


@pytest.mark.parametrize("tokens", [4, 300])
def test_ranks_quantise_rows_that_they_gather(tokens: int) -> None:
    """Rows arrive normalised and rounded, so the definition is that of rows without a norm."""
    arguments = named(kernels.qkv_projection, quantised(tokens=tokens, hidden=136, rotated=16))
    normed = kernels.rmsnorm_reference(arguments["x"], arguments["norm_weight"], arguments["eps"])
    settings = dict(replica_group=ReplicaGroup([[0, 1]]), sequence_ranks=2)
    launches = [((), arguments | settings | dict(x=rows.copy())) for rows in np.split(arguments["x"], 2)]
    outputs = simulate.World("trn2", 2).launch(kernels.qkv_projection, launches).outputs
    defined = in_order(kernels.qkv_projection, **(arguments | dict(x=normed, norm_weight=None)))
    for output in outputs:
        within_half_of_rounding(output, kernels.qkv_projection_reference, defined)


@pytest.mark.parametrize("tokens", [1, 40, 100])
def test_a_row_is_quantised_alike_among_few_and_many_rows(tokens: int) -> None:
    """Sums are added in another order, so a result may be rounded to the next number; codes of rows are the same."""
    settings = dict(hidden=384, heads=4, head=128, rotated=128)
    many = named(kernels.qkv_projection, quantised(tokens=200, **settings))
    few = many | dict(x=many["x"][:tokens].copy(), positions=many["positions"][:tokens].copy())
    for output, all_rows in zip(kernels.qkv_projection(**few), kernels.qkv_projection(**many)):
        expected = np.asarray(all_rows)[:tokens].astype(np.float64)
        difference = np.abs(np.asarray(output).astype(np.float64) - expected)
        assert (difference <= 2.0**-7 * np.maximum(np.abs(expected), 2.0**-8)).all()
        assert (difference == 0).mean() > 0.99


@pytest.mark.parametrize("elements", [FP8, INT8])
@pytest.mark.parametrize("tokens", [5, 140])
def test_no_finding_in_launches_that_quantise_rows(tokens: int, elements: Any) -> None:
    world = simulate.World("trn2")
    for kernel, drawn_arguments in (
        (kernels.qkv_projection, quantised(tokens=tokens, hidden=256, rotated=16, elements=elements)),
        (kernels.output_projection, quantised_heads(tokens=tokens, depth=136, hidden=600, elements=elements)),
    ):
        launches = [(drawn_arguments, {})]
        assert find_faults(lambda: world.launch(kernel, launches), orders=2) == []  # noqa: B023


def test_rows_of_zeros_stay_zero() -> None:
    for kernel, inputs, rows in (
        (kernels.qkv_projection, quantised(tokens=3, hidden=24), "x"),
        (kernels.output_projection, quantised_heads(residual=False), "o"),
    ):
        arguments = named(kernel, inputs)
        outputs = as_tuple(kernel(**arguments | {rows: np.zeros_like(arguments[rows])}))
        assert not any(np.asarray(output).astype(F32).any() for output in outputs)
