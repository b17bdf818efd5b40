"""Row maxima that ranks share, in `mlp` and `output_projection`: elements, scales and sums are those of one rank."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, in_order, named, normal, undrawn
from tests.kernels.case import BF16, F32, SMALLEST, KernelCase, KernelTests, Ranks, slow, vary
from tests.kernels.test_feed_forward import FP8, INT8, SCALED_WEIGHTS, quantised_block
from tests.kernels.test_integer_feed_forward import defined_block
from tests.kernels.test_mx_feed_forward import CHIP as MX_CHIP
from tests.kernels.test_mx_feed_forward import mx_block
from tests.kernels.test_projections import scaled_heads
from tests.kernels.test_quantised_projections import quantised_heads
from tests.kernels.test_quantised_rows import block_of_quantised_rows, within_half_of_rounding
from tests.kernels.test_static_rows import block_of_static_rows

SHARED = dict(shares_row_maxima=True)
CUT = dict(sequence_ranks=2)
HEADS = dict(o=1, w_o=0)


@wraps(block_of_quantised_rows)
def block(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `mlp` with float32 rows that are quantised, so that rounded sums of ranks hide nothing."""
    return block_of_quantised_rows(**(dict(dtype=F32) | settings))


@wraps(quantised_heads)
def heads(**settings: Any) -> tuple[Any, ...]:
    """Return arguments of `output_projection` with float32 rows that are quantised."""
    return quantised_heads(**(dict(dtype=F32) | settings))


class TestSharedMaximaOfIntermediates(KernelTests):
    """The reference has one scale for all columns of a row of the intermediate."""

    case = KernelCase(
        kernels.mlp,
        block,
        ranks=[
            *(
                Ranks(ranks, SCALED_WEIGHTS, settings, SHARED)
                for ranks in (2, 4)
                for settings in vary(
                    tokens=[1, 127, 128, 129, 600], hidden=40, inner=144, elements=[FP8, INT8]
                )
            ),
            *(
                Ranks(2, SCALED_WEIGHTS | dict(x=0), settings, SHARED | CUT, joined=True)
                for settings in vary(tokens=[6, 256, 1100], hidden=40, inner=144, elements=[FP8, INT8])
            ),
            *(
                Ranks(2, SCALED_WEIGHTS | dict(b_gate=1, b_up=1), settings, SHARED)
                for settings in vary(
                    tokens=[5, 140], hidden=136, inner=144, biases=True, elements=[FP8, INT8]
                )
            ),
            *(
                Ranks(2, SCALED_WEIGHTS, settings, SHARED)
                for settings in vary(tokens=[5, 140], hidden=136, inner=144, row_gate=True, dtype=BF16)
            ),
            *(
                Ranks(2, SCALED_WEIGHTS, settings, SHARED, seeds=8)
                for settings in vary(tokens=[5, 300], hidden=136, inner=288, elements=[FP8, INT8])
            ),
        ],
        tolerance=within_half_of_rounding,
    )


class TestSharedMaximaOfHeads(KernelTests):
    """The reference has one scale for all heads of a row. Weights stay in SBUF or stream."""

    case = KernelCase(
        kernels.output_projection,
        heads,
        ranks=[
            *(
                Ranks(ranks, HEADS, settings, SHARED)
                for ranks in (2, 4)
                for settings in vary(
                    tokens=[1, 127, 128, 129, 600], depth=144, hidden=136, elements=[FP8, INT8]
                )
            ),
            *(
                Ranks(2, HEADS | dict(residual=0), settings, SHARED | CUT, joined=True)
                for settings in vary(tokens=[6, 256, 1100], depth=144, hidden=136, elements=[FP8, INT8])
            ),
            *(
                Ranks(2, HEADS | dict(gate=1), settings, SHARED)
                for settings in vary(tokens=[5, 300], depth=144, hidden=136, gate=True, elements=[FP8, INT8])
            ),
            *(
                Ranks(2, HEADS, settings, SHARED, seeds=8)
                for settings in vary(tokens=[5, 300], depth=144, hidden=1100, elements=[FP8, INT8])
            ),
            *slow(Ranks(2, HEADS, dict(tokens=600, depth=8448, hidden=2100), SHARED)),
        ],
        tolerance=within_half_of_rounding,
    )


def launch(kernel: Any, arguments: dict[str, Any], layout: Ranks, target: str = "trn2") -> np.ndarray:
    """Return the output of a launch over ranks, each of which has a part of the arguments."""
    shards = [(shard, {}) for shard in layout.shards(named(kernel, in_order(kernel, **arguments)))]
    outputs = simulate.World(target, layout.count).launch(kernel, shards).outputs
    return np.asarray(layout.join_outputs(outputs)[0][0])


def draw_unmixed_block(tokens: int, elements: Any) -> dict[str, Any]:
    """Return arguments of `mlp` whose y has the elements of the intermediate times its scales.

    Every column of a weight has one number, so that no sum is rounded.
    """
    size = 72
    order = np.random.default_rng(size).permutation(size)
    identity, scales = np.eye(size).astype(elements), np.ones((1, size), F32)
    names = ("w_gate", "w_up", "w_down")
    return dict(
        x=normal(tokens, tokens, size),
        w_gate=identity[:, order].copy(),
        w_up=identity,
        w_down=identity.copy(),
        **{f"{name}_scales": scales.copy() for name in names},
        activation="relu",
        residual=False,
        quantises_rows=True,
    )


def draw_unmixed_heads(tokens: int, elements: Any) -> dict[str, Any]:
    """Return arguments of `output_projection` whose y has the elements of o times its scales."""
    identity = np.eye(72).astype(elements)
    return dict(
        o=normal(tokens, tokens, 72), w_o=identity, w_o_scales=np.ones((1, 72), F32), quantises_rows=True
    )


@pytest.mark.parametrize("elements", [FP8, INT8])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
@pytest.mark.parametrize(
    ("kernel", "draw", "axes"),
    [
        (kernels.mlp, draw_unmixed_block, SCALED_WEIGHTS),
        (kernels.output_projection, draw_unmixed_heads, HEADS),
    ],
)
def test_elements_and_scales_are_those_of_one_rank(
    kernel: Any, draw: Any, axes: dict[str, int], tokens: int, elements: Any
) -> None:
    arguments = draw(tokens, elements)
    one_rank = np.asarray(kernel(**arguments))
    assert np.count_nonzero(one_rank) > one_rank.size / 8
    for ranks in (2, 4):
        assert np.array_equal(launch(kernel, arguments, Ranks(ranks, axes, {}, SHARED)), one_rank)
        assert not np.array_equal(launch(kernel, arguments, Ranks(ranks, axes)), one_rank)


def define_sum(reference: Any, arguments: dict[str, Any], weight: str, added: str, ranks: int) -> np.ndarray:
    """Return y as the definition of integer products has it over ranks that share row maxima.

    A rank's partial product has the rows of all columns, and zeros for the rows of the weight that other ranks have.
    Each partial product is rounded, then their sum, and then y.
    """
    dtype, rows = arguments[added].dtype, np.split(np.arange(len(arguments[weight])), ranks)
    alone = arguments | {added: None} if added == "residual" else arguments | dict(residual=False)
    partial = []
    for rank_rows in rows:
        masked = np.zeros_like(arguments[weight])
        masked[rank_rows] = arguments[weight][rank_rows]
        partial.append(reference(**(alone | {weight: masked})).astype(F32))
    total = partial[0]
    for product in partial[1:]:
        total = total + product
    return (total.astype(dtype).astype(F32) + arguments[added].astype(F32)).astype(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "ranks"), [(1, 4), (127, 2), (128, 4), (129, 2), (300, 4)])
def test_sums_of_integers_over_ranks_have_the_bytes_of_their_definition(
    tokens: int, ranks: int, dtype: Any
) -> None:
    arguments = named(kernels.mlp, defined_block(tokens=tokens, hidden=136, inner=144, dtype=dtype))
    defined = define_sum(kernels.mlp_reference, arguments, "w_down", "x", ranks)
    output = launch(kernels.mlp, arguments, Ranks(ranks, SCALED_WEIGHTS, {}, SHARED))
    assert output.dtype == defined.dtype and np.array_equal(output, defined)
    drawn_heads = quantised_heads(tokens=tokens, depth=144, hidden=136, dtype=dtype, elements=INT8)
    arguments = named(kernels.output_projection, drawn_heads)
    defined = define_sum(kernels.output_projection_reference, arguments, "w_o", "residual", ranks)
    output = launch(kernels.output_projection, arguments, Ranks(ranks, HEADS, {}, SHARED))
    assert output.dtype == defined.dtype and np.array_equal(output, defined)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("elements", [FP8, INT8])
def test_every_chip_shares_row_maxima(target: str, elements: Any) -> None:
    for kernel, draw, axes in (
        (kernels.mlp, draw_unmixed_block, SCALED_WEIGHTS),
        (kernels.output_projection, draw_unmixed_heads, HEADS),
    ):
        arguments = draw(130, elements)
        one_rank = launch(kernel, arguments, Ranks(1, axes), target)
        assert np.array_equal(launch(kernel, arguments, Ranks(2, axes, {}, SHARED), target), one_rank)


@pytest.mark.parametrize("elements", [FP8, INT8])
def test_one_rank_has_nothing_to_share(elements: Any) -> None:
    for kernel, arguments in (
        (kernels.mlp, draw_unmixed_block(5, elements)),
        (kernels.output_projection, draw_unmixed_heads(5, elements)),
    ):
        assert np.array_equal(kernel(**arguments), kernel(**(arguments | SHARED)))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 300, 1100])
def test_large_sizes_fit_in_sbuf(tokens: int) -> None:
    """Planned on the chip with the smallest SBUF, without values."""
    cases: list[tuple[Any, Ranks, dict[str, Any]]] = []
    with undrawn():
        for settings in vary(hidden=8192, inner=2 * 896, elements=[FP8, INT8]):
            arguments = block_of_quantised_rows(tokens=tokens, **settings)
            cases.append((kernels.mlp, Ranks(2, SCALED_WEIGHTS, {}, SHARED), named(kernels.mlp, arguments)))
        for settings in vary(depth=[1024, 32768], hidden=8192, elements=[FP8, INT8]):
            arguments = quantised_heads(tokens=tokens, **settings)
            layout = Ranks(2, HEADS, {}, SHARED)
            cases.append((kernels.output_projection, layout, named(kernels.output_projection, arguments)))
        for kernel, layout, named_arguments in cases:
            shards = [(shard, {}) for shard in layout.shards(named_arguments)]
            simulate.World(SMALLEST, 2).launch(kernel, shards, mode=simulate.Mode.dry)


@pytest.mark.parametrize(
    ("kernel", "draw", "message", "target"),
    [
        (
            kernels.mlp,
            quantised_block,
            "is for rows that are quantised; pass quantises_rows, or leave it",
            "trn2",
        ),
        (
            kernels.output_projection,
            scaled_heads,
            "is for rows that are quantised; pass quantises_rows",
            "trn2",
        ),
        (kernels.mlp, block_of_static_rows, "rows with input scales have no maxima that ranks share", "trn2"),
        (kernels.mlp, mx_block, "rows in MXFP8 have a scale for each 32 columns, all of one rank", MX_CHIP),
    ],
)
def test_refuses_rows_without_maxima(kernel: Any, draw: Any, message: str, target: str) -> None:
    world, arguments = simulate.World(target), named(kernel, draw(tokens=3))
    world.launch(kernel, [((), arguments)])
    with pytest.raises(AssertionError, match=message):
        world.launch(kernel, [((), arguments | SHARED)])
