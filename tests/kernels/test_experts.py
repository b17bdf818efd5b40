"""experts_decode and experts_prefill: the experts that each token chose, weighted, whatever it chose."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nki_kernels.experts import block_layout
from nki_kernels.experts.block_layout import choose_block_rows, count_reserved_rows, plan_blocks
from tests.kernels.accuracy import compare_all, copied, in_order, named, normal, run
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    GEN3_ON,
    MIXED_DTYPES,
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


def arguments(
    tokens: int = 5,
    hidden: int = 24,
    experts: int = 6,
    inner: int = 10,
    top_k: int = 2,
    dtype: type = np.float32,
    weights: Any = None,
    biases: bool = False,
    activation: str = "silu",
    ids: np.ndarray | None = None,
) -> tuple[Any, ...]:
    """Draw arguments with random choices, or with the given ones."""
    weight_dtype, rng = weights or dtype, np.random.default_rng(tokens)
    if ids is None:
        ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    return in_order(
        kernels.experts_decode,
        residual=normal(1, tokens, hidden, dtype=dtype),
        n=normal(2, tokens, hidden, dtype=dtype),
        weights=rng.random((tokens, top_k)).astype(np.float32),
        ids=ids.astype(np.int32),
        w_gate=normal(3, experts, hidden, inner, dtype=weight_dtype, scale=hidden**-0.5),
        w_up=normal(4, experts, hidden, inner, dtype=weight_dtype, scale=hidden**-0.5),
        w_down=normal(5, experts, inner, hidden, dtype=weight_dtype, scale=inner**-0.5),
        activation=activation,
        b_gate=normal(6, experts, inner, dtype=weight_dtype) if biases else None,
        b_up=normal(7, experts, inner, dtype=weight_dtype) if biases else None,
        b_down=normal(8, experts, hidden, dtype=weight_dtype) if biases else None,
    )


CHOICES = {
    "all to one expert": lambda tokens, experts: np.full((tokens, 1), experts - 2),
    "all to two experts": lambda tokens, experts: np.tile([0, experts - 1], (tokens, 1)),
    "one token to an expert": lambda tokens, experts: np.stack([np.arange(tokens) % experts], axis=1),
    "one token elsewhere": lambda tokens, experts: np.eye(tokens, 1, -(tokens // 2), dtype=int),
    "all to all": lambda tokens, experts: np.stack([np.arange(experts)] * tokens),
    "in descending order": lambda tokens, experts: (experts - 1 - np.arange(tokens) * experts // tokens)[
        :, None
    ],
}


def chosen(choices: str, tokens: int, experts: int = 6) -> dict[str, Any]:
    ids = CHOICES[choices](tokens, experts)
    return dict(tokens=tokens, experts=experts, top_k=ids.shape[1], ids=lambda _: ids.astype(np.int32))


# Sums up to some twenty: both clamps are reached.
CLAMPED = dict(hidden=72, inner=140, biases=True, activation="swigluoai", n=lambda n: n * 8)
BOTH_VALUES = [
    *slow(
        *together("dtype weights", *MIXED_DTYPES, tokens=[3, 30], hidden=140, experts=9, inner=136, top_k=3)
    ),
    *vary(tokens=2, hidden=[1, 64, 127, 128, 129], experts=5, inner=24),
    *vary(tokens=3, inner=[1, 64, 127, 128, 129], experts=5),
    *slow(*vary(tokens=40, hidden=16, experts=[2, 127, 128, 129], inner=8)),
    *slow(dict(tokens=40, hidden=16, experts=1, inner=8, top_k=1)),
    *(dict(tokens=tokens) | CLAMPED for tokens in (3, 40)),
    dict(tokens=3, hidden=72, inner=40, dtype=BF16, biases=True),
    *vary(tokens=4, activation=["gelu", "gelu_tanh", "relu"]),
    *slow(dict(tokens=2, hidden=1030, experts=3, inner=1300)),
]
REFUSALS = [
    refuse("n is (4, 24)", n=normal(1, 4, 24)),
    refuse("n is (5, 24) bfloat16, residual is (5, 24) float32", n=normal(1, 5, 24, dtype=BF16)),
    refuse("weights are (5, 3), ids are (5, 2)", weights=normal(1, 5, 3)),
    refuse("ids has 4 rows, n has 5", ids=np.zeros((4, 2), np.int32)),
    refuse("w_gate and w_up are (6, 24, 10), not (6, 24, 11)", w_up=normal(1, 6, 24, 11)),
    refuse("w_down is [6, 10, 24], not (6, 24, 10)", w_down=normal(1, 6, 24, 10)),
    refuse("activation is silu, gelu, gelu_tanh, gelu_sigmoid or relu, not tanh", activation="tanh"),
    refuse("b_gate and b_up come together", b_gate=normal(1, 6, 10)),
    refuse(
        "a bias is [6, 10], not (6, 11)",
        dict(biases=True),
        b_gate=normal(1, 6, 11),
        b_up=normal(1, 6, 11),
    ),
]
UNEVEN = dict(tokens=5, hidden=72, inner=40, biases=True)
OVER_RANKS = [Ranks(2, dict(w_gate=2, w_up=2, w_down=1, b_gate=1, b_up=1), UNEVEN)]


def limits(*tokens: int) -> list[Any]:
    """Return limits of the hidden size: what the tiles take of SBUF, with weights of the other dtype too."""
    return slow(
        *(
            limit(
                "hidden",
                most,
                f"a hidden size of at most {most}, not {most + 1}",
                dry=True,
                tokens=count,
                experts=8,
                inner=300,
                dtype=dtype,
                weights=weights,
            )
            for dtype, most in ((F32, 4096), (BF16, 8192))
            for weights in DTYPES
            for count in tokens
        )
    )


class TestExpertsDecode(KernelTests):
    """Rows of tokens that did not choose an expert are multiplied with it too: what comes of that is dropped."""

    case = KernelCase(
        kernels.experts_decode,
        arguments,
        values=[
            *BOTH_VALUES,
            *vary(tokens=[1, 127, 128]),
            *(chosen(choices, tokens) for choices in CHOICES for tokens in (127, 128)),
        ],
        refusals=[
            *REFUSALS,
            refuse(
                "ids names 3 experts for a token, but there are 2",
                dict(experts=2),
                weights=normal(1, 5, 3),
                ids=np.zeros((5, 3), np.int32),
            ),
        ],
        limits=[limit("tokens", 128, "takes at most 128 tokens, not 129"), *limits(1, 128)],
        undefined=[Undefined(dict(n=7), dict(tokens=30), np.inf, rows=[7], chips=GEN3_ON)],
        two_cores=[dict(hidden=72, inner=40)],
        ranks=OVER_RANKS,
    )


class TestExpertsPrefill(KernelTests):
    """A PSUM bank has the choices of four, three or two tiles; there are five."""

    case = KernelCase(
        kernels.experts_prefill,
        arguments,
        every_chip=[
            *BOTH_VALUES[:6],
            *vary(tokens=[1, 127, 128, 129, 260, 700]),
        ],
        values=[
            *BOTH_VALUES[6:],
            *vary(tokens=520, experts=[127, 128, 129, 256]),
            *slow(
                *together(
                    "tokens",
                    *((500,), (900,), (1400,), (4000,)),
                    hidden=64,
                    experts=4,
                    inner=48,
                    dtype=BF16,
                )
            ),
        ],
        refusals=REFUSALS,
        limits=limits(129, 300),
        # Blocks that no row is in may have any expert: nobody reads them.
        undefined=[
            Undefined(
                dict.fromkeys(
                    ("w_gate", "w_up", "w_down"),
                    lambda arguments: np.setdiff1d(np.arange(6), arguments["ids"]),
                ),
                chosen(choices, tokens),
                chips=["trn2"],
            )
            for choices in CHOICES
            for tokens in (127, 128, 129, 300)
        ],
        two_cores=[dict(hidden=72, inner=40)],
        ranks=OVER_RANKS,
    )


FP8, INT8 = np.dtype(ml_dtypes.float8_e4m3), np.dtype(np.int8)
STACKS = ("w_gate", "w_up", "w_down")


def quantise(stack: np.ndarray, elements: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return elements [E, K, N] with the largest magnitude of their dtype in each column, and scales [E, 1, N]."""
    largest = 240 if elements == FP8 else 127
    scales = (np.abs(stack).max(axis=1, keepdims=True) / largest).astype(F32)
    scales[scales == 0] = 1
    quotients = stack / scales
    return (quotients if elements == FP8 else np.rint(quotients)).astype(elements), scales


def quantised(
    kernel: Any, elements: Any = FP8, quantised_stacks: Any = STACKS, blocks: bool = False, **sizes: Any
) -> tuple[Any, ...]:
    """Return arguments of an experts kernel whose stacks have 8 bits; `elements` is their dtype.

    With `blocks` a scale belongs to 128 rows and columns of an expert, else to a column.
    """
    dtype = sizes.pop("dtype", BF16)
    plain = named(kernels.experts_decode, arguments(dtype=dtype, weights=F32, **sizes))
    for name, argument in list(plain.items()):
        if name in quantised_stacks:
            if blocks:
                plain[name], plain[f"{name}_block_scales"] = quantise_blocks(argument, elements)
            else:
                plain[name], plain[f"{name}_scales"] = quantise(argument, elements)
        elif isinstance(argument, np.ndarray) and name.startswith(("w_", "b_")):
            plain[name] = argument.astype(dtype)
    return in_order(kernel, **{name: argument for name, argument in plain.items() if argument is not None})


def quantise_blocks(stack: np.ndarray, elements: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return elements [E, K, N] and scales [E, ceil(K / 128), ceil(N / 128)], which differ by powers of up to 2^3."""
    largest = 240 if elements == FP8 else 127
    experts, depth, columns = stack.shape
    scales = np.empty((experts, -(-depth // 128), -(-columns // 128)), F32)
    quotients = np.empty_like(stack)
    rng = np.random.default_rng(17)
    for expert, k, n in np.ndindex(*scales.shape):
        block = (expert, slice(128 * k, 128 * k + 128), slice(128 * n, 128 * n + 128))
        scales[expert, k, n] = np.abs(stack[block]).max() / largest * rng.uniform(1, 8)
        quotients[block] = stack[block] / scales[expert, k, n]
    return (quotients if elements == FP8 else np.rint(quotients)).astype(elements), scales


QUANTISED_VALUES = [
    *vary(tokens=[1, 3, 8, 40], hidden=[127, 128, 136], inner=140, elements=[FP8, INT8]),
    *vary(tokens=[1, 30], hidden=72, inner=[64, 127, 129, 300], experts=9, top_k=3),
    *vary(tokens=[2, 30], hidden=140, inner=136, dtype=F32, elements=[FP8, INT8]),
    *vary(tokens=[3, 40], hidden=72, inner=140, biases=True, activation=["silu", "swigluoai"]),
    *vary(
        tokens=[3, 40],
        hidden=72,
        inner=140,
        quantised_stacks=[STACKS[:2], STACKS[1:], STACKS[2:]],
        biases=True,
    ),
    dict(tokens=3, hidden=2056, inner=24, experts=40, top_k=3),
]
MANY_EXPERTS = dict(tokens=30, hidden=2056, inner=24, experts=40, top_k=3)
"""Sizes with which a prompt has reserved blocks, and a loop over dealt ones."""
QUANTISED_REFUSALS = [
    refuse(
        "w_up_scales is float32 [6, 1, 10], one for each expert and column of w_up, not bfloat16 (6, 1, 10)",
        w_up_scales=lambda scales: scales.astype(BF16),
    ),
    refuse(
        "w_down_scales is float32 [6, 1, 24], one for each expert and column of w_down, not float32 (6, 24)",
        w_down_scales=lambda scales: scales[:, 0],
    ),
]
SCALED_RANKS = dict(w_gate=2, w_up=2, w_down=1, b_gate=1, b_up=1, w_gate_scales=2, w_up_scales=2)


class TestQuantisedExpertsDecode(KernelTests):
    """Weights of 8 bits with a scale for each expert and column; 40 passes of experts are two windows of scales."""

    case = KernelCase(
        kernels.experts_decode,
        partial(quantised, kernels.experts_decode),
        values=[*QUANTISED_VALUES, MANY_EXPERTS, dict(tokens=128, hidden=136, inner=140)],
        refusals=QUANTISED_REFUSALS,
        undefined=[Undefined(dict(n=7), dict(tokens=30), np.inf, rows=[7], chips=GEN3_ON)],
        ranks=[
            Ranks(2, SCALED_RANKS, dict(tokens=tokens, hidden=72, inner=40, biases=True)) for tokens in (2, 5)
        ],
    )


BLOCK_VALUES = [
    *vary(tokens=[1, 3, 40], hidden=[127, 128, 300], inner=[64, 140], elements=[FP8, INT8]),
    *vary(tokens=[2, 30], hidden=264, inner=[127, 128, 129, 300], experts=9, top_k=3),
    *vary(tokens=[2, 30], hidden=140, inner=136, dtype=F32),
    *vary(tokens=[3, 40], hidden=272, inner=140, biases=True, activation=["silu", "swigluoai"]),
    *vary(tokens=[3, 40], hidden=140, inner=140, quantised_stacks=[STACKS[:2], STACKS[1:], STACKS[2:]]),
]
BLOCK_REFUSALS = [
    refuse(
        "w_up_block_scales is float32 (6, 1, 1), one for each expert and 128 rows and columns of w_up, not float32",
        w_up_block_scales=normal(1, 6, 1, 2),
    ),
    refuse(
        "w_down has scales and block scales; pass one of them", w_down_scales=np.ones((6, 1, 24), np.float32)
    ),
]


class TestBlockScaledExpertsDecode(KernelTests):
    """A scale for each 128 rows and columns; it multiplies sums of up to 8 rows, and copies of more rows."""

    case = KernelCase(
        kernels.experts_decode,
        partial(quantised, kernels.experts_decode, blocks=True),
        values=[*(row for row in BLOCK_VALUES if row["tokens"] < 9), dict(tokens=8, hidden=300, inner=140)],
        every_chip=[
            *(row for row in BLOCK_VALUES if row["tokens"] >= 9),
            *vary(tokens=[9, 128], hidden=300, inner=140),
        ],
        refusals=BLOCK_REFUSALS,
    )


class TestBlockScaledExpertsPrefill(KernelTests):
    """Elements are multiplied by their scales as they are loaded, as a prompt has many rows."""

    case = KernelCase(
        kernels.experts_prefill,
        partial(quantised, kernels.experts_prefill, blocks=True),
        values=[*BLOCK_VALUES, *vary(tokens=300, hidden=264, inner=140, elements=[FP8, INT8])],
        every_chip=[*vary(tokens=[30, 260], hidden=136, inner=140)],
        refusals=BLOCK_REFUSALS,
    )


class TestQuantisedExpertsPrefillInALoop(KernelTests):
    """Choices decide how many dealt blocks have rows, and so which results are written: replay is refused."""

    case = KernelCase(
        kernels.experts_prefill,
        partial(quantised, kernels.experts_prefill),
        every_chip=[MANY_EXPERTS],
        replays=False,
    )


class TestQuantisedExpertsPrefill(KernelTests):
    """Weights of 8 bits with a scale for each expert and column."""

    case = KernelCase(
        kernels.experts_prefill,
        partial(quantised, kernels.experts_prefill),
        values=[*QUANTISED_VALUES, *vary(tokens=300, hidden=136, inner=140, elements=[FP8, INT8])],
        every_chip=[*vary(tokens=[30, 260], hidden=136, inner=140, biases=[True, False])],
        refusals=QUANTISED_REFUSALS,
        ranks=[Ranks(2, SCALED_RANKS, dict(tokens=140, hidden=72, inner=40, biases=True))],
    )


@pytest.mark.parametrize(("size", "tokens"), [(128, 500), (192, 900), (256, 1400), (384, 4000)])
def test_blocks_have_the_size_that_takes_least_time(size: int, tokens: int) -> None:
    assert choose_block_rows(2 * tokens, 4, 64, 48, 2) == size


@pytest.mark.parametrize(
    ("choices", "experts"),
    [case for case in product([None, *CHOICES], [6, 8, 16, 40, 136]) if case != ("all to all", 136)],
)
def test_rows_beyond_reserved_blocks_take_dealt_ones(
    choices: str | None, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop runs over the dealt blocks that have rows: for lists of tokens by expert, and without."""
    monkeypatch.setattr(block_layout, "LOOP_NS", -1e9)
    tokens = 300
    ids = None if choices is None else CHOICES[choices](tokens, experts)
    top_k = 2 if ids is None else ids.shape[1]
    inputs = arguments(tokens, 72, experts, 40, top_k, ids=ids)
    layout = plan_blocks(tokens * top_k, experts, 72, 40, 4, True)
    assert layout.reserved > 0
    launch = simulate.World("trn2").launch(kernels.experts_prefill, [(copied(inputs), {})])
    compare_all((launch.outputs[0],), kernels.experts_prefill_reference, inputs)
    counts = np.bincount(named(kernels.experts_prefill, inputs)["ids"].ravel(), minlength=experts)
    expected = int(np.ceil(np.maximum(counts - count_reserved_rows(layout), 0) / layout.rows).sum())
    assert len(launch.streams[0].iterations) == expected <= layout.dealt


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("biases", [False, True])
def test_dealt_blocks_of_a_loop_take_biases_and_every_dtype(
    dtype: type, biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_layout, "LOOP_NS", -1e9)
    for activation in ("silu", "swigluoai") if biases else ("silu",):
        ids = np.minimum(np.arange(600).reshape(300, 2) // 200, 7) + np.array([[0, 4]])
        inputs = arguments(300, 72, 8, 140, 2, dtype, biases=biases, activation=activation, ids=ids)
        launch = simulate.World("trn3").launch(kernels.experts_prefill, [(copied(inputs), {})])
        compare_all((launch.outputs[0],), kernels.experts_prefill_reference, inputs)
        assert launch.streams[0].iterations


def test_gen2_has_no_loop_over_dealt_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide to loops over registers is for Trn2 and Trn3: on trn1 all blocks are dealt beforehand."""
    monkeypatch.setattr(block_layout, "LOOP_NS", -1e9)
    inputs = arguments(300, 72, 16, 40, 1, ids=np.full((300, 1), 5))
    for target, loops in (("trn1", False), ("trn2", True)):
        launch = simulate.World(target).launch(kernels.experts_prefill, [(copied(inputs), {})])
        compare_all((launch.outputs[0],), kernels.experts_prefill_reference, inputs)
        assert bool(launch.streams[0].iterations) is loops


@pytest.mark.parametrize("loop_ns", [-1e9, 1e9])
def test_an_expert_that_a_row_names_twice_leaves_other_rows_alone(
    loop_ns: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the router may for a row of NaN."""
    monkeypatch.setattr(block_layout, "LOOP_NS", loop_ns)
    ids = np.stack([np.arange(300) % 16, (np.arange(300) + 1) % 16], axis=1)
    ids[::7] = 3
    inputs = arguments(300, 24, 16, 10, 2, ids=ids)
    compare_all((run(kernels.experts_prefill, inputs, "trn2"),), kernels.experts_prefill_reference, inputs)


def test_rows_of_a_prompt_give_what_they_give_in_a_decode_step() -> None:
    inputs = arguments(100, 72, 12, 40, 3)
    outputs = [
        run(getattr(kernels, kernel), inputs, "trn2") for kernel in ("experts_decode", "experts_prefill")
    ]
    for output in outputs:
        compare_all((output,), kernels.experts_decode_reference, inputs)
