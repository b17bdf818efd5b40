"""qkv_projection with norms, biases and rotations, for few rows and for many."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, compare, in_float64, normal, run

BF16 = ml_dtypes.bfloat16
CASE = (kernels.qkv_projection, kernels.qkv_projection_reference)
EPS = 1e-5
NAMES = "bias positions cos sin head_dim q_norm k_norm norm_bias norm_offset".split()
BESIDE_GATES = {"replica_group": None, "sequence_ranks": 1, "v_norm": False}


def arguments(
    tokens: int,
    hidden: int,
    heads: int = 3,
    kv_heads: int = 1,
    head: int = 16,
    rotated: int = 0,
    dtype: Any = np.float32,
    norm: bool = True,
    **options: Any,
) -> tuple[Any, ...]:
    """Arguments of the kernel; `options` that are True become tensors of their shape, others stay."""
    width = (heads + 2 * kv_heads) * head + options.get("gate_size", 0)
    shapes = {"bias": width, "q_norm": head, "k_norm": head, "norm_bias": hidden}
    for seed, (name, columns) in enumerate(shapes.items()):
        if options.get(name):
            options[name] = normal(10 + seed, 1, columns, dtype=dtype)
    if rotated:
        angles = np.arange(500)[:, None] / 1000 ** (np.arange(rotated // 2) / (rotated // 2))
        options["positions"] = np.random.default_rng(5).integers(0, 500, (tokens, 1)).astype(np.int32)
        options["cos"], options["sin"] = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    defaults = dict.fromkeys(NAMES[:-1]) | {"norm_offset": 0.0}
    defaults |= BESIDE_GATES if "gate_size" in options else {}
    return (
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype) if norm else None,
        normal(3, hidden, width, dtype=dtype, scale=hidden**-0.5),
        EPS,
        heads * head,
        kv_heads * head,
        *(defaults | options).values(),
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [5, 131])
def test_everything_on_every_chip(target: str, dtype: Any, tokens: int) -> None:
    gemma = {"rotated": 16, "q_norm": True, "k_norm": True, "norm_offset": 1.0}
    partial = {"rotated": 6, "head_dim": 16, "bias": True, "norm_bias": True}
    gates = {**gemma, "rotated": 4, "head_dim": 16, "gate_size": 48, "bias": True}
    for options in (gemma, partial, gates, {"norm": False, "bias": True}, {"norm": False}):
        check(*CASE, arguments(tokens, 300, dtype=dtype, **options), target)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("hidden", [127, 128, 129, 2300])
def test_ragged_tokens_and_hidden_sizes(tokens: int, hidden: int) -> None:
    for target in ("trn1", "trn2"):
        options = {"rotated": 4, "k_norm": True} if tokens % 2 else {"norm_bias": True}
        check(*CASE, arguments(tokens, hidden, head=8, head_dim=8, **options), target)


@pytest.mark.parametrize("tokens", [20, 140])
def test_columns_of_several_groups_and_heads_that_end_inside_a_bank(tokens: int) -> None:
    """Columns of 80 leave a bank short, and 32 heads of 80 are more than four banks and more than stay in SBUF."""
    check(*CASE, arguments(tokens, 2200, 26, 3, 80, 80, q_norm=True, bias=True), "trn2")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [20, 140])
@pytest.mark.parametrize("options", [{}, {"norm_bias": True}], ids=["RMSNorm", "LayerNorm"])
def test_an_undefined_row_reaches_no_other_row(target: str, tokens: int, options: dict[str, Any]) -> None:
    x, *rest = arguments(tokens, 260, rotated=16, **options)
    padded = x.copy()
    padded[[3, tokens - 1]] = np.array([[np.nan], [np.inf]])
    rows = np.delete(np.arange(tokens), (3, tokens - 1))
    for clean, other in zip(
        run(kernels.qkv_projection, (x, *rest), target), run(kernels.qkv_projection, (padded, *rest), target)
    ):
        assert np.array_equal(clean[rows], other[rows])


def test_the_mean_of_a_row_may_be_larger_than_its_deviation() -> None:
    x, *rest = arguments(7, 300, norm_bias=True)
    check(*CASE, (x + 100, *rest), "trn2")


def test_the_reference_agrees_with_the_norm_written_by_moments() -> None:
    x, weight, w_qkv, eps, q, kv, *rest = map(in_float64, arguments(4, 24, norm_bias=True, norm_offset=1.0))
    spread = np.sqrt((x**2).mean(1, keepdims=True) - x.mean(1, keepdims=True) ** 2 + eps)
    shift = rest[NAMES.index("norm_bias")]
    truth = ((x - x.mean(1, keepdims=True)) / spread * (1 + weight) + shift) @ w_qkv
    outputs = kernels.qkv_projection_reference(x, weight, w_qkv, eps, q, kv, *rest)
    for part, output in zip(np.split(truth, [q, q + kv], axis=1), outputs):
        compare(output.astype(np.float32), part, part.astype(np.float32))


@pytest.mark.parametrize(
    ("options", "wrong", "message"),
    [
        ({"bias": True}, {"bias": np.zeros((1, 3), np.float32)}, r"bias is \[1, 80\], not \(1, 3\)"),
        ({"norm_bias": True}, {"norm_weight": None}, "norm_bias is given without norm_weight"),
        ({"rotated": 16}, {"sin": None}, r"cos is \(500, 8\), sin is None"),
        ({"rotated": 16}, {"positions": None}, r"positions are \[9, 1\], not None"),
        ({"rotated": 16}, {"head_dim": 12}, "tables of width 8 turn 16 elements of a head of 12"),
        ({"rotated": 16}, {"head_dim": 32}, "q_size 48 and kv_size 16 are no heads of 32"),
        ({"q_norm": True, "head_dim": 16}, {"head_dim": None}, "q_norm, k_norm and v_norm need head_dim"),
        ({"q_norm": True, "head_dim": 16}, {"head_dim": 8}, r"q_norm is \[1, 8\], not \(1, 16\)"),
    ],
)
def test_refuses_what_does_not_fit(options: dict[str, Any], wrong: dict[str, Any], message: str) -> None:
    names = ["x", "norm_weight", "w_qkv", "eps", "q_size", "kv_size", *NAMES]
    given = dict(zip(names, arguments(9, 24, **options)))
    run(kernels.qkv_projection, tuple(given.values()))
    with pytest.raises(AssertionError, match=message):
        run(kernels.qkv_projection, tuple((given | wrong).values()))


@pytest.mark.parametrize("tokens", [128, 1500])
def test_x_and_the_weight_are_read_once(tokens: int) -> None:
    x, norm, w_qkv, *rest = (
        narrow.astype(BF16) if isinstance(narrow, np.ndarray) else narrow
        for narrow in arguments(tokens, 1024, 4, 1, 128)
    )
    traffic = simulate.profile(kernels.qkv_projection, x, norm, w_qkv, *rest, target="trn2").traffic
    assert {each.name: each.reads for each in traffic if each.argument} == {
        "x": 1,
        "norm_weight": 1,
        "w_qkv": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "hidden"), [(np.float32, 8192), (BF16, 16384)])
@pytest.mark.parametrize("options", [{"rotated": 128}, {"norm_bias": True, "bias": True}, {"norm": False}])
@pytest.mark.parametrize("tokens", [128, 1100])
def test_the_widest_rows_fit_on_every_chip(
    dtype: Any, hidden: int, options: dict[str, Any], tokens: int
) -> None:
    """Planned and placed without computing numbers; the weight has a wider dtype than rows in bfloat16."""
    _, norm, w_qkv, *rest = arguments(1, 8, 10, 2, 128, dtype=dtype, **options)
    wide = np.empty((hidden, w_qkv.shape[1]), np.float32)
    rows = [None if each is None else np.empty((1, hidden), dtype) for each in (norm, rest[-2])]
    rest[-2] = rows[1]
    if "rotated" in options:
        rest[NAMES.index("positions") + 3] = np.empty((tokens, 1), np.int32)
    given = np.empty((tokens, hidden), dtype), rows[0], wide, *rest
    for target in TARGETS:
        simulate.World(target).launch(kernels.qkv_projection, [(given, {})], mode=simulate.Mode.dry)


def test_refuses_rows_that_are_too_wide() -> None:
    with pytest.raises(
        AssertionError, match="qkv_projection takes a hidden size of at most 16384, not 16385"
    ):
        run(kernels.qkv_projection, arguments(1, 16385, dtype=BF16))
