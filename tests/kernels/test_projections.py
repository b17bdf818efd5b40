"""output_projection and all_reduce, on one rank and over several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import (
    ODD_SIZES,
    TARGETS,
    compare_all,
    find_faults,
    in_order,
    named,
    normal,
    run,
    whole_numbers,
)
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Ranks,
    limit,
    refuse,
    slow,
    together,
    vary,
)
from tests.kernels.test_feed_forward import FP8, INT8, SEQUENCE, quantise

SIZES = [1, *ODD_SIZES]


def heads(
    tokens: int = 3,
    depth: int = 24,
    hidden: int = 40,
    dtype: Any = F32,
    weights: Any = None,
    residual: bool = True,
    bias: bool = False,
    gate: bool = False,
) -> list[Any]:
    return [
        normal(1, tokens, depth, dtype=dtype),
        normal(2, depth, hidden, dtype=weights or dtype, scale=depth**-0.5),
        normal(3, tokens, hidden, dtype=dtype) if residual else None,
        None,
        normal(4, 1, hidden, dtype=weights or dtype) if bias else None,
        1,
        normal(5, tokens, depth, dtype=dtype) if gate else None,
    ]


WEIGHTS = dict(o=1, w_o=0)


def over_sequence(ranks: int, seeds: int = 0, **settings: Any) -> Ranks:
    """Return ranks that cut the rows of the residual as well."""
    settings = dict(depth=24 * ranks, hidden=172, bias=True) | settings
    extra_arguments = dict(sequence_ranks=ranks)
    return Ranks(
        ranks, WEIGHTS | dict(residual=0), settings, extra_arguments, joined=True, alike=False, seeds=seeds
    )


class TestOutputProjection(KernelTests):
    """Gated rows may take columns of a row tile in two parts, and weights may not stay in SBUF."""

    case = KernelCase(
        kernels.output_projection,
        heads,
        values=[
            *vary(depth=[*ODD_SIZES]),
            *vary(hidden=[*ODD_SIZES]),
            *vary(
                tokens=[1, 129, 300],
                depth=136,
                hidden=600,
                dtype=[*DTYPES],
                residual=False,
                bias=[False, True],
            ),
            dict(tokens=600, depth=1300, hidden=2000, dtype=BF16),
            *slow(
                *together(
                    "depth hidden", (136, 600), (2100, 1100), tokens=[1, 129, 600], dtype=[*DTYPES], gate=True
                )
            ),
            *vary(tokens=SIZES),
        ],
        every_chip=[
            *together(
                "dtype weights", (F32, F32), (F32, BF16), (BF16, BF16), tokens=130, depth=72, hidden=172
            ),
            *vary(tokens=[1, 129, 300], depth=136, hidden=600, dtype=BF16, bias=True),
        ],
        refusals=[
            refuse("expected w_o [K, H], not a tensor of shape (960,)", w_o=lambda w: w.reshape(-1)),
            refuse("w_o has 23 rows for o of width 24", w_o=lambda w: w[1:]),
            refuse("residual is [3, 40], not (2, 40)", residual=lambda rows: rows[1:]),
            refuse("residual is bfloat16, o is float32", residual=lambda rows: rows.astype(BF16)),
            refuse("bias is [1, 40], not (1, 8)", dict(bias=True), bias=normal(1, 1, 8)),
            refuse("gate is (3, 24), as o is, not (3, 23)", dict(gate=True), gate=normal(1, 3, 23)),
            refuse("o is float32", dict(gate=True), gate=normal(1, 3, 24, dtype=BF16)),
            refuse("sequence_ranks is 2 without a replica_group", sequence_ranks=2),
        ],
        limits=[
            limit("hidden", 8192, "output_projection takes a hidden size of at most 8192, not 8193"),
            limit(
                "hidden",
                16384,
                "output_projection takes a hidden size of at most 16384, not 16385",
                dry=True,
                dtype=BF16,
            ),
        ],
        fits=[
            dict(tokens=300, depth=8, hidden=16384, dtype=BF16, weights=F32),
            *slow(*vary(tokens=[1, 512], depth=16384, hidden=2048, dtype=[*DTYPES], weights=BF16)),
        ],
        two_sums=vary(tokens=[1, 5, 127, 128, 129, 300], depth=72, hidden=1100, dtype=[*DTYPES], bias=True),
        ranks=[
            *slow(Ranks(1, {}, dict(tokens=130, bias=True), seeds=64)),
            *(
                Ranks(
                    ranks,
                    WEIGHTS,
                    dict(tokens=130, depth=24 * ranks, hidden=40, dtype=dtype, weights=weights),
                )
                for ranks in (1, 2, 4)
                for dtype, weights in ((F32, F32), (F32, BF16), (BF16, BF16))
            ),
            # The sum over ranks is that of products that are gated already.
            *(
                Ranks(2, WEIGHTS | dict(gate=1), dict(tokens=tokens, depth=144, hidden=136, gate=True))
                for tokens in (3, 300)
            ),
            *(
                over_sequence(ranks, tokens=tokens, dtype=dtype)
                for ranks, tokens in SEQUENCE
                for dtype in DTYPES
            ),
            *slow(over_sequence(2, 64, tokens=6), over_sequence(2, 8, tokens=258)),
        ],
    )


def scaled_heads(elements: Any = FP8, **settings: Any) -> tuple[Any, ...]:
    """Return arguments whose w_o has elements of 8 bits and a scale for each column."""
    inputs = named(kernels.output_projection, heads(**{"dtype": BF16, "weights": F32} | settings))
    inputs["w_o"], inputs["w_o_scales"] = quantise(inputs["w_o"], elements)
    return in_order(kernels.output_projection, **inputs)


class TestScaledOutputProjection(KernelTests):
    """Weights of 8 bits with a scale for each column.

    Up to 32 and up to 64 rows share the PE array in groups of columns. Weights may not stay in SBUF.
    """

    case = KernelCase(
        kernels.output_projection,
        scaled_heads,
        values=[
            *vary(tokens=[1, 3, 32, 33, 64, 65, 129, 300], depth=136, hidden=600, elements=[FP8, INT8]),
            *vary(depth=[*ODD_SIZES], hidden=[2048, 2500], tokens=[5, 40]),
            *vary(tokens=[5, 40, 130], depth=72, hidden=600, bias=[False, True], residual=[False, True]),
            *vary(tokens=[5, 140], depth=136, hidden=600, gate=True),
            *vary(tokens=[5, 140], depth=136, hidden=600, dtype=F32, elements=[FP8, INT8]),
            *vary(tokens=[40, 600], depth=1300, hidden=2000),
        ],
        every_chip=[*vary(tokens=[5, 40, 130], depth=136, hidden=600, elements=[FP8, INT8])],
        refusals=[
            refuse(
                "w_o_scales is float32 [1, 40], one for each column of w_o, not float32 (1, 24)",
                w_o_scales=normal(1, 1, 24),
            ),
            refuse(
                "w_o_scales is float32 [1, 40], one for each column of w_o, not bfloat16 (1, 40)",
                w_o_scales=lambda scales: scales.astype(BF16),
            ),
        ],
        fits=slow(
            *vary(tokens=[1, 64, 512], depth=[8, 2048], hidden=16384),
            dict(tokens=512, depth=16384, hidden=2048),
        ),
        two_sums=vary(tokens=[1, 5, 64, 65, 128, 129, 300], depth=72, hidden=1100, bias=[False, True]),
        ranks=[
            *(
                Ranks(ranks, WEIGHTS, dict(tokens=tokens, depth=24 * ranks))
                for ranks in (2, 4)
                for tokens in (9, 130)
            ),
            *(over_sequence(ranks, tokens=tokens) for ranks, tokens in SEQUENCE[:3] + SEQUENCE[-2:-1]),
        ],
    )


def test_groups_follow_one_another_on_a_chip_where_two_do_not_fit() -> None:
    """trn3 has room for two, and the same sums."""
    one, other = (run(kernels.output_projection, heads(3, 16384, 136), chip) for chip in ("trn1", "trn3"))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("target", TARGETS)
def test_no_finding_in_groups_of_rows(target: str) -> None:
    inputs = heads(300, 136, 2100, BF16)
    assert find_faults(lambda: run(kernels.output_projection, inputs, target)) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_numbers_are_exact_on_any_number_of_ranks(ranks: int) -> None:
    o, w_o, residual = (
        whole_numbers(seed, *shape) for seed, shape in enumerate([(5, 8 * ranks), (8 * ranks, 600), (5, 600)])
    )
    arguments = TestOutputProjection.case.arguments(dict(o=o, w_o=w_o, residual=residual))
    shards = [(shard, {}) for shard in Ranks(ranks, WEIGHTS).shards(arguments)]
    for output in simulate.World("trn1", ranks).launch(kernels.output_projection, shards).outputs:
        assert np.array_equal(output, residual + o @ w_o)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_over_ranks_round_partial_products_and_their_sum(ranks: int, dtype: type) -> None:
    """The reference rounds where the kernel does: so the bound holds for every number of ranks."""
    case = TestOutputProjection.case
    arguments = case.arguments(dict(tokens=300, depth=72 * ranks, hidden=1100, dtype=dtype, bias=True))
    columns_of_ranks = np.split(np.arange(72 * ranks), ranks)

    def reference(o: np.ndarray, weight: np.ndarray, residual: np.ndarray, bias: np.ndarray) -> np.ndarray:
        wide = np.result_type(o.dtype, F32)
        partial = [
            (o[:, columns].astype(wide) @ weight[columns].astype(wide)).astype(o.dtype)
            for columns in columns_of_ranks
        ]
        total = sum(product.astype(wide) for product in partial).astype(o.dtype)
        return (total.astype(wide) + bias.astype(wide) + residual.astype(wide)).astype(o.dtype)

    layout = Ranks(ranks, WEIGHTS)
    shards = [(shard, {}) for shard in layout.shards(arguments)]
    outputs = simulate.World("trn2", ranks).launch(kernels.output_projection, shards).outputs
    inputs = [arguments[name] for name in ("o", "w_o", "residual", "bias")]
    compare_all(layout.join_outputs(outputs)[0], reference, inputs)


def test_rows_that_ranks_do_not_divide_are_refused() -> None:
    arguments = TestOutputProjection.case.arguments(dict(tokens=3, depth=48))
    shards = Ranks(2, WEIGHTS, extra_arguments=dict(sequence_ranks=2)).shards(arguments)
    with pytest.raises(AssertionError, match="2 ranks do not divide 3 rows; pad them to a multiple of 2"):
        simulate.World("trn2", 2).launch(kernels.output_projection, [(shard, {}) for shard in shards])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_reduce_of_whole_numbers_is_exact(target: str, ranks: int) -> None:
    group = ReplicaGroup([list(range(ranks))])
    arrays = [whole_numbers(rank, 129, 17) for rank in range(ranks)]
    launch = simulate.World(target, ranks=ranks).launch(
        kernels.all_reduce, [((array, group), {}) for array in arrays]
    )
    for output, expected in zip(launch.outputs, kernels.all_reduce_reference(arrays, group)):
        assert np.array_equal(output, expected)
        assert np.array_equal(output, np.sum(arrays, axis=0))


def test_all_reduce_stays_inside_each_list_of_the_group() -> None:
    group = ReplicaGroup([[0, 3], [2, 1]])
    arrays = [np.full((2, 3), 10.0**rank, F32) for rank in range(4)]
    launch = simulate.World("trn2", ranks=4).launch(
        kernels.all_reduce, [((array, group), {}) for array in arrays]
    )
    assert [output[0, 0] for output in launch.outputs] == [1001, 110, 110, 1001]
