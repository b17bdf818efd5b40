"""qkv_projection, output_projection and mlp, on one rank and sharded over several."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import (
    ODD_SIZES,
    TARGETS,
    check,
    compare,
    compare_all,
    in_float64,
    normal,
    run,
    whole_numbers,
)

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
DTYPES = [(np.float32, np.float32), (np.float32, BF16), (BF16, BF16)]
QKV = (kernels.qkv_projection, kernels.qkv_projection_reference)
OUTPUT = (kernels.output_projection, kernels.output_projection_reference)
MLP = (kernels.mlp, kernels.mlp_reference)


def weights(seed: int, rows: int, columns: int, dtype: Any = np.float32) -> np.ndarray:
    """A weight that keeps the scale of what it multiplies."""
    return normal(seed, rows, columns, dtype=dtype, scale=rows**-0.5)


def qkv_arguments(
    tokens: int, hidden: int, q: int, kv: int, x: Any = np.float32, w: Any = np.float32
) -> tuple[Any, ...]:
    return (
        normal(1, tokens, hidden, dtype=x),
        normal(2, 1, hidden, dtype=w),
        weights(3, hidden, q + 2 * kv, w),
        EPS,
        q,
        kv,
    )


def output_arguments(
    tokens: int, depth: int, hidden: int, x: Any = np.float32, w: Any = np.float32
) -> tuple[Any, ...]:
    return normal(1, tokens, depth, dtype=x), weights(2, depth, hidden, w), normal(3, tokens, hidden, dtype=x)


def mlp_arguments(
    tokens: int, hidden: int, inner: int, x: Any = np.float32, w: Any = np.float32
) -> tuple[Any, ...]:
    return (
        normal(1, tokens, hidden, dtype=x),
        normal(2, 1, hidden, dtype=w),
        weights(3, hidden, inner, w),
        weights(4, hidden, inner, w),
        weights(5, inner, hidden, w),
        EPS,
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("x", "w"), DTYPES)
def test_dtypes_on_every_chip(target: str, x: type, w: type) -> None:
    check(*QKV, qkv_arguments(130, 172, 96, 24, x, w), target)
    check(*OUTPUT, output_arguments(130, 72, 172, x, w), target)
    check(*MLP, mlp_arguments(130, 72, 172, x, w), target)


@pytest.mark.parametrize("size", [1, *ODD_SIZES])
def test_any_number_of_tokens(size: int) -> None:
    check(*QKV, qkv_arguments(size, 40, 24, 8))
    check(*OUTPUT, output_arguments(size, 24, 40))
    check(*MLP, mlp_arguments(size, 24, 40))


@pytest.mark.parametrize("size", ODD_SIZES)
def test_any_width(size: int) -> None:
    check(*QKV, qkv_arguments(3, size, 24, 8))
    check(*QKV, qkv_arguments(3, 24, size, 8))
    check(*OUTPUT, output_arguments(3, size, 40))
    check(*OUTPUT, output_arguments(3, 40, size))
    check(*MLP, mlp_arguments(3, size, 40))
    check(*MLP, mlp_arguments(3, 40, size))


def test_outputs_of_qkv_projection_that_end_inside_a_column_group() -> None:
    check(*QKV, qkv_arguments(2, 40, 2000, 120))
    check(*QKV, qkv_arguments(300, 40, 500, 270))


def test_intermediate_of_several_column_groups_and_row_groups() -> None:
    check(*MLP, mlp_arguments(3, 40, 2200))
    check(*MLP, mlp_arguments(520, 24, 530))


def sharded_outputs(ranks: int, world_arguments: list[tuple[Any, ...]], kernel: Any) -> list[np.ndarray]:
    group = ReplicaGroup([list(range(ranks))])
    launch = simulate.World("trn1", ranks=ranks).launch(
        kernel, [((*one, group), {}) for one in world_arguments]
    )
    return launch.outputs


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("x", "w"), DTYPES)
def test_output_projection_sums_over_ranks(ranks: int, x: type, w: type) -> None:
    o, weight, residual = output_arguments(130, 24 * ranks, 40, x, w)
    parts = np.split(np.arange(24 * ranks), ranks)
    outputs = sharded_outputs(
        ranks, [(o[:, part].copy(), weight[part], residual) for part in parts], kernels.output_projection
    )
    for output in outputs:
        assert np.array_equal(output, outputs[0])
    compare_all(outputs[:1], kernels.output_projection_reference, (o, weight, residual))


@pytest.mark.parametrize("ranks", [2, 4])
def test_output_projection_of_whole_numbers_is_exact_on_any_number_of_ranks(ranks: int) -> None:
    o, weight, residual = (
        whole_numbers(1, 5, 8 * ranks),
        whole_numbers(2, 8 * ranks, 600),
        whole_numbers(3, 5, 600),
    )
    parts = np.split(np.arange(8 * ranks), ranks)
    outputs = sharded_outputs(
        ranks, [(o[:, part].copy(), weight[part], residual) for part in parts], kernels.output_projection
    )
    for output in outputs:
        assert np.array_equal(output, residual + o @ weight)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("x", "w"), DTYPES)
def test_mlp_sums_over_ranks(ranks: int, x: type, w: type) -> None:
    hidden_rows, norm, gate, up, down, eps = mlp_arguments(9, 40, 36 * ranks, x, w)
    parts = np.split(np.arange(36 * ranks), ranks)
    outputs = sharded_outputs(
        ranks,
        [(hidden_rows, norm, gate[:, part].copy(), up[:, part].copy(), down[part], eps) for part in parts],
        kernels.mlp,
    )
    for output in outputs:
        assert np.array_equal(output, outputs[0])
    compare_all(outputs[:1], kernels.mlp_reference, (hidden_rows, norm, gate, up, down, eps))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_reduce_of_whole_numbers_is_exact(target: str, ranks: int) -> None:
    group = ReplicaGroup([list(range(ranks))])
    parts = [whole_numbers(rank, 129, 17) for rank in range(ranks)]
    launch = simulate.World(target, ranks=ranks).launch(
        kernels.all_reduce, [((part, group), {}) for part in parts]
    )
    for output, expected in zip(launch.outputs, kernels.all_reduce_reference(parts, group)):
        assert np.array_equal(output, expected)
        assert np.array_equal(output, np.sum(parts, axis=0))


def test_all_reduce_stays_inside_each_list_of_the_group() -> None:
    group = ReplicaGroup([[0, 3], [2, 1]])
    parts = [np.full((2, 3), 10.0**rank, np.float32) for rank in range(4)]
    launch = simulate.World("trn2", ranks=4).launch(
        kernels.all_reduce, [((part, group), {}) for part in parts]
    )
    assert [output[0, 0] for output in launch.outputs] == [1001, 110, 110, 1001]


def test_reference_of_mlp_agrees_with_silu_written_by_tanh() -> None:
    x, norm, gate, up, down, eps = (in_float64(a) for a in mlp_arguments(5, 24, 40))
    normalised = kernels.rmsnorm_reference(x, norm, eps)
    gates = normalised @ gate
    truth = x + (gates * (1 + np.tanh(gates / 2)) / 2 * (normalised @ up)) @ down
    reference = kernels.mlp_reference(x, norm, gate, up, down, eps)
    compare(reference.astype(np.float32), truth, truth.astype(np.float32))


def test_refuses_tensors_of_another_rank() -> None:
    x, norm, *rest = mlp_arguments(3, 16, 8)
    with pytest.raises(AssertionError, match=r"expected x \[T, H\], not a tensor of shape \(48,\)"):
        run(kernels.mlp, (x.reshape(-1), norm, *rest))
    with pytest.raises(AssertionError, match=r"expected w_o \[K, H\], not a tensor of shape \(16,\)"):
        run(kernels.output_projection, (x, norm.reshape(-1), x))


def test_refuses_shapes_that_do_not_fit() -> None:
    x, norm, w_qkv, eps, q, kv = qkv_arguments(3, 16, 8, 4)
    with pytest.raises(AssertionError, match=r"w_qkv is \[16, 8 \+ 2 \* 5 \+ 0\], not \(16, 16\)"):
        run(kernels.qkv_projection, (x, norm, w_qkv, eps, q, kv + 1))
    with pytest.raises(AssertionError, match=r"norm_weight is \[1, 16\], not \(1, 15\)"):
        run(kernels.qkv_projection, (x, norm[:, 1:].copy(), w_qkv, eps, q, kv))
    o, w_o, residual = output_arguments(3, 16, 8)
    with pytest.raises(AssertionError, match="w_o has 15 rows for o of width 16"):
        run(kernels.output_projection, (o, w_o[1:], residual))
    with pytest.raises(AssertionError, match=r"residual is \[3, 8\], not \(2, 8\)"):
        run(kernels.output_projection, (o, w_o, residual[1:]))
    with pytest.raises(AssertionError, match="residual is bfloat16, o is float32"):
        run(kernels.output_projection, (o, w_o, residual.astype(BF16)))
    x, norm, gate, up, down, eps = mlp_arguments(3, 16, 8)
    with pytest.raises(AssertionError, match="w_gate has 15 rows for a hidden size of 16"):
        run(kernels.mlp, (x, norm, gate[1:], up, down, eps))
    with pytest.raises(AssertionError, match=r"w_gate is \(16, 8\), w_up is \(15, 8\)"):
        run(kernels.mlp, (x, norm, gate, up[1:], down, eps))
    with pytest.raises(AssertionError, match=r"w_down is \[8, 16\], not \(7, 16\)"):
        run(kernels.mlp, (x, norm, gate, up, down[1:], eps))


def test_takes_the_widest_rows_and_refuses_the_next() -> None:
    check(*QKV, qkv_arguments(2, 8192, 8, 4))
    check(*OUTPUT, output_arguments(2, 8, 8192))
    with pytest.raises(AssertionError, match="qkv_projection takes a hidden size of at most 8192, not 8193"):
        run(kernels.qkv_projection, qkv_arguments(2, 8193, 8, 4))
    with pytest.raises(
        AssertionError, match="output_projection takes a hidden size of at most 8192, not 8193"
    ):
        run(kernels.output_projection, output_arguments(2, 8, 8193))
    with pytest.raises(AssertionError, match="mlp takes a hidden size of at most 8192, not 8193"):
        run(kernels.mlp, mlp_arguments(2, 8193, 8))
    with pytest.raises(AssertionError, match="mlp takes an intermediate size of at most 16384, not 16385"):
        run(kernels.mlp, mlp_arguments(2, 8, 16385))


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_rows_of_bfloat16_may_be_twice_as_wide(target: str) -> None:
    """Where the rows of a norm's offset or of biases do not lie beside them."""

    def dry(kernel: Any, *arguments: Any) -> None:
        simulate.World(target).launch(kernel, [(arguments, {})], simulate.Mode.dry)

    wide, wider = 16384, 16385
    x, norm, gate, up, down, eps = mlp_arguments(300, wide, 24, BF16, np.float32)
    dry(kernels.mlp, x, norm, gate, up, down, eps)
    dry(kernels.output_projection, *output_arguments(300, 8, wide, BF16, np.float32))
    rest = (None, "silu", None, None, None, None, 1.0)
    with pytest.raises(AssertionError, match="mlp takes a hidden size of at most 8192, not 16384"):
        dry(kernels.mlp, x, norm, gate, up, down, eps, *rest)
    with pytest.raises(AssertionError, match="mlp takes a hidden size of at most 16384, not 16385"):
        dry(kernels.mlp, *mlp_arguments(3, wider, 8, BF16, BF16))
    with pytest.raises(AssertionError, match="output_projection takes a hidden size of at most 16384"):
        dry(kernels.output_projection, *output_arguments(3, 8, wider, BF16, BF16))


@pytest.mark.slow
@pytest.mark.parametrize("x", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 512])
def test_the_largest_sizes_fit_on_the_smallest_chip(tokens: int, x: type) -> None:
    """Planned and placed without computing numbers; a launch refuses tiles that do not fit."""
    world = simulate.World("trn1")
    hidden, inner = 8192, 16384
    rows, norm = np.empty((tokens, hidden), x), np.empty((1, hidden), BF16)
    wide, other, narrow = (
        np.empty((hidden, inner), BF16),
        np.empty((hidden, inner), BF16),
        np.empty((inner, hidden), BF16),
    )
    heads = np.empty((tokens, inner), x)
    for kernel, arguments in (
        (kernels.qkv_projection, (rows, norm, np.empty((hidden, 1536), BF16), EPS, 1024, 256)),
        (kernels.output_projection, (heads, narrow[:, :2048].copy(), rows[:, :2048].copy())),
        (kernels.mlp, (rows, norm, wide, other, narrow, EPS)),
    ):
        world.launch(kernel, [(arguments, {})], mode=simulate.Mode.dry)
