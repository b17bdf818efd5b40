"""mlp and output_projection in every form, in groups of rows, and summed over ranks in the dtype of the activations."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from nki_kernels.precision import erf_reference
from tests.kernels.accuracy import check, compare_all, find_faults, normal, run

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
FORMS = {
    "plain gelu": {"w_gate": False, "activation": "gelu"},
    "gelu_tanh with biases": {"activation": "gelu_tanh", "biases": True},
    "plain relu with biases and LayerNorm": {
        "w_gate": False,
        "activation": "relu",
        "biases": True,
        "norm_bias": True,
    },
    "silu with an offset of the norm": {"norm_offset": 1.0},
}


def mlp_arguments(
    tokens: int,
    hidden: int,
    inner: int,
    dtype: Any = np.float32,
    w_gate: bool = True,
    activation: str = "silu",
    biases: bool = False,
    norm_bias: bool = False,
    norm_offset: float = 0.0,
) -> tuple[Any, ...]:
    def weight(seed: int, rows: int, columns: int) -> np.ndarray:
        return normal(seed, rows, columns, dtype=dtype, scale=rows**-0.5)

    def row(seed: int, columns: int, given: bool) -> np.ndarray | None:
        return normal(seed, 1, columns, dtype=dtype) if given else None

    return (
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype),
        weight(3, hidden, inner) if w_gate else None,
        weight(4, hidden, inner),
        weight(5, inner, hidden),
        EPS,
        None,
        activation,
        row(6, inner, biases and w_gate),
        row(7, inner, biases),
        row(8, hidden, biases),
        row(9, hidden, norm_bias),
        norm_offset,
    )


def output_arguments(tokens: int, depth: int, hidden: int, dtype: Any = np.float32) -> tuple[Any, ...]:
    return (
        normal(1, tokens, depth, dtype=dtype),
        normal(2, depth, hidden, dtype=dtype, scale=depth**-0.5),
        normal(3, tokens, hidden, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_block_on_every_chip(form: str, dtype: type) -> None:
    for target, shape in (("trn1", (5, 72, 172)), ("trn2", (130, 136, 192)), ("trn3", (129, 40, 160))):
        check(kernels.mlp, kernels.mlp_reference, mlp_arguments(*shape, dtype=dtype, **FORMS[form]), target)


@pytest.mark.parametrize("inner", [32, 64, 160, 192, 320])
def test_a_short_last_block_of_the_intermediate_shares_the_array(inner: int) -> None:
    """Blocks of 32 and 64 columns of gate and up lie side by side; groups of 512, 128 and 60 rows."""
    for tokens in (2, 128, 572):
        check(kernels.mlp, kernels.mlp_reference, mlp_arguments(tokens, 24, inner, biases=True), "trn2")


def test_a_group_of_rows_is_prepared_while_the_one_before_is_multiplied() -> None:
    """Three groups of which the last is ragged, and more units of the intermediate than chunks of the result."""
    check(kernels.mlp, kernels.mlp_reference, mlp_arguments(1153, 40, 1100, BF16), "trn2")


def test_groups_follow_one_another_on_a_chip_where_two_do_not_fit() -> None:
    """trn3 has room for two, and the same sums."""
    for kernel, arguments in (
        (kernels.mlp, mlp_arguments(130, 8, 16384)),
        (kernels.output_projection, output_arguments(3, 16384, 136)),
    ):
        assert np.array_equal(run(kernel, arguments, "trn1"), run(kernel, arguments, "trn3"))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 129, 300])
@pytest.mark.parametrize(("norm", "residual"), [(False, True), (True, False), (False, False)])
def test_mlp_without_a_norm_or_without_a_residual(tokens, norm, residual, dtype) -> None:
    given = list(mlp_arguments(tokens, 136, 200, dtype, biases=True))
    given[1] = given[1] if norm else None
    check(kernels.mlp, kernels.mlp_reference, (*given, residual), "trn2")


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(("tokens", "residual"), [(1, True), (129, True), (300, False), (600, True)])
def test_mlp_of_rows_that_have_a_gate(tokens, residual, dtype) -> None:
    given = (
        *mlp_arguments(tokens, 136, 200, dtype, norm_offset=1.0),
        residual,
        1,
        normal(10, 136, 1, dtype=dtype),
    )
    for target in ("trn1", "trn2"):
        check(kernels.mlp, kernels.mlp_reference, given, target)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 129, 600])
def test_output_projection_of_gated_rows(tokens, dtype) -> None:
    """The second takes columns of a row tile in two parts, and its weight does not stay in SBUF."""
    for depth, hidden in ((136, 600), (2100, 1100)):
        gate = normal(4, tokens, depth, dtype=dtype)
        given = (*output_arguments(tokens, depth, hidden, dtype), None, None, 1, gate)
        check(kernels.output_projection, kernels.output_projection_reference, given)


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        ("mlp", (*mlp_arguments(3, 8, 8), True, 1, np.ones((1, 8), np.float32)), r"row_gate is \[8, 1\]"),
        (
            "mlp",
            (*mlp_arguments(3, 8, 8, biases=True), True, 1, np.ones((8, 1), np.float32)),
            "without b_down",
        ),
        (
            "output_projection",
            (*output_arguments(3, 8, 8), None, None, 1, np.ones((3, 7), np.float32)),
            r"gate is \(3, 8\), as o is",
        ),
        (
            "output_projection",
            (*output_arguments(3, 8, 8), None, None, 1, np.ones((3, 8), BF16)),
            "o is float32",
        ),
    ],
)
def test_refuses_gates_that_do_not_fit(kernel, given, message) -> None:
    with pytest.raises(AssertionError, match=message):
        run(getattr(kernels, kernel), given, "trn2")


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 129, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_output_projection_without_a_residual(tokens, biased, dtype) -> None:
    o, weight, _ = output_arguments(tokens, 136, 600, dtype)
    bias = normal(4, 1, 600, dtype=dtype) if biased else None
    check(kernels.output_projection, kernels.output_projection_reference, (o, weight, None, None, bias))


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("tokens", [1, 129, 300])
def test_output_projection_adds_a_bias(tokens: int, target: str) -> None:
    arguments = (*output_arguments(tokens, 136, 600, BF16), None, normal(4, 1, 600, dtype=BF16))
    check(kernels.output_projection, kernels.output_projection_reference, arguments, target)


def test_output_projection_of_a_weight_that_does_not_stay_in_sbuf() -> None:
    arguments = output_arguments(600, 1300, 2000, BF16)
    check(kernels.output_projection, kernels.output_projection_reference, arguments, "trn2")


def over_ranks(kernel: Any, arguments: list[tuple[Any, ...]], target: str = "trn2") -> list[np.ndarray]:
    """What a kernel returns on every rank, without findings."""
    world = simulate.World(target, ranks=len(arguments))
    outputs: list[np.ndarray] = []
    found = find_faults(
        lambda: outputs.extend(world.launch(kernel, [(each, {}) for each in arguments]).outputs), orders=2
    )
    assert found == []
    for output in outputs:
        assert np.array_equal(output, outputs[0])
    return outputs


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_over_ranks_round_partial_products_and_their_sum(ranks: int, dtype: type) -> None:
    """The reference rounds where the kernel does: so the bound holds for every number of ranks."""
    o, weight, residual = output_arguments(300, 72 * ranks, 1100, dtype)
    bias = normal(4, 1, 1100, dtype=dtype)
    parts = np.split(np.arange(72 * ranks), ranks)
    group = ReplicaGroup([list(range(ranks))])

    def reference(o: np.ndarray, weight: np.ndarray, residual: np.ndarray, bias: np.ndarray) -> np.ndarray:
        wide = np.result_type(o.dtype, np.float32)
        partial = [(o[:, own].astype(wide) @ weight[own].astype(wide)).astype(o.dtype) for own in parts]
        total = sum(each.astype(wide) for each in partial).astype(o.dtype)
        return (total.astype(wide) + bias.astype(wide) + residual.astype(wide)).astype(o.dtype)

    outputs = over_ranks(
        kernels.output_projection,
        [(o[:, own].copy(), weight[own].copy(), residual, group, bias) for own in parts],
    )
    compare_all(outputs[:1], reference, (o, weight, residual, bias))


@pytest.mark.parametrize("tokens", [3, 300])
def test_gates_of_rows_over_ranks(tokens: int) -> None:
    """The sum over ranks is that of products that are gated already; both kernels round it in two places more."""
    x, norm, gate, up, down, *others = mlp_arguments(tokens, 136, 144)
    row_gate = normal(10, 136, 1)
    parts, group = np.split(np.arange(144), 2), ReplicaGroup([[0, 1]])
    given = [(x, norm, gate[:, own].copy(), up[:, own].copy(), down[own].copy()) for own in parts]
    options = (*others[2:], True, 1, row_gate)
    outputs = over_ranks(kernels.mlp, [(*each, EPS, group, *options) for each in given])
    compare_all(outputs[:1], kernels.mlp_reference, (x, norm, gate, up, down, EPS, None, *options))
    o, weight, residual = output_arguments(tokens, 144, 136)
    of_heads = normal(11, tokens, 144)
    given = [(o[:, own].copy(), weight[own].copy(), residual) for own in parts]
    of_ranks = [(*each, group, None, 1, of_heads[:, own].copy()) for each, own in zip(given, parts)]
    outputs = over_ranks(kernels.output_projection, of_ranks)
    reference = kernels.output_projection_reference
    compare_all(outputs[:1], reference, (o, weight, residual, None, None, 1, of_heads))


def test_mlp_adds_what_is_the_same_on_every_rank_once() -> None:
    x, norm, gate, up, down, eps, _, function, b_gate, b_up, *others = mlp_arguments(
        600, 40, 128, biases=True, norm_bias=True
    )
    group = ReplicaGroup([[0, 1]])
    parts = [
        (x, norm, gate[:, own].copy(), up[:, own].copy(), down[own].copy(), eps, group, function)
        + (b_gate[:, own].copy(), b_up[:, own].copy(), *others)
        for own in np.split(np.arange(128), 2)
    ]
    outputs = over_ranks(kernels.mlp, parts)
    whole = (x, norm, gate, up, down, eps, None, function, b_gate, b_up, *others)
    compare_all(outputs[:1], kernels.mlp_reference, whole)


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_no_finding_in_groups_of_rows(target: str) -> None:
    def launches() -> None:
        for kernel, arguments in (
            (kernels.mlp, mlp_arguments(600, 72, 320, BF16)),
            (kernels.mlp, mlp_arguments(5, 136, 300, BF16)),
            (kernels.output_projection, output_arguments(300, 136, 2100, BF16)),
        ):
            simulate.World(target).launch(kernel, [(arguments, {})])

    assert find_faults(launches) == []


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_a_row_that_is_no_number_leaves_the_others_as_they_are(target: str) -> None:
    arguments = mlp_arguments(130, 40, 72)
    expected = run(kernels.mlp, arguments, target)
    for bad in (np.nan, np.inf):
        arguments[0][7] = bad
        output = run(kernels.mlp, arguments, target)
        assert np.isnan(output[7]).all()
        others = np.arange(130) != 7
        assert np.array_equal(output[others], expected[others])


def test_the_error_function_of_the_reference_agrees_with_that_of_python() -> None:
    values = np.linspace(-8, 8, 321)
    assert np.abs(erf_reference(values) - [math.erf(value) for value in values]).max() < 1e-13


def test_refuses_what_does_not_fit() -> None:
    x, norm, gate, up, down, eps, *_ = mlp_arguments(3, 16, 8)
    row = np.zeros((1, 8), np.float32)
    with pytest.raises(AssertionError, match="activation is silu, gelu, gelu_tanh or relu, not swish"):
        run(kernels.mlp, (x, norm, gate, up, down, eps, None, "swish"))
    with pytest.raises(AssertionError, match="b_gate is given without w_gate"):
        run(kernels.mlp, (x, norm, None, up, down, eps, None, "relu", row))
    with pytest.raises(AssertionError, match=r"b_down is \[1, 16\], not \(1, 8\)"):
        run(kernels.mlp, (x, norm, gate, up, down, eps, None, "relu", row, row, row))
    o, w_o, residual = output_arguments(3, 16, 24)
    with pytest.raises(AssertionError, match=r"bias is \[1, 24\], not \(1, 8\)"):
        run(kernels.output_projection, (o, w_o, residual, None, row))
