"""mlp with weights of 4 bits: all nibbles, zero points, blocks behind whole runs, both ways to operands, and ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
from model.formats import Int4
from nki_kernels.nibbles import count_packed_rows, widen_nibbles_reference
from tests.kernels.accuracy import compare, find_faults, in_order, named, run
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, Ranks, refuse, vary
from tests.kernels.test_feed_forward import QUANTISED, block


def pack(weight: np.ndarray, group: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return packed elements, and scales and zero points [1 or K / group, N], of a weight [K, N] of floats."""
    format = Int4("compressed-tensors", group, symmetric=False)
    passed = format.pass_to_kernels(format.pack(np.pad(weight, ((0, weight.shape[0] % 2), (0, 0))).T))
    rows = {name: np.ascontiguousarray(array.T) for name, array in passed.items()}
    return format.arrange("elements", rows["elements"]), rows["scales"], rows["zeros"]


def packed_block(
    tokens: int = 3,
    hidden: int = 24,
    inner: int = 40,
    dtype: Any = BF16,
    zeros: bool = True,
    w_gate: bool = True,
    biases: bool = False,
    norm_weight: bool = True,
    norm_bias: bool = False,
    row_gate: bool = False,
    group: int | None = None,
    scale_dtype: Any = F32,
) -> tuple[Any, ...]:
    """Return the arguments of a block whose matrices have 4 bits; without `zeros` all zero points are 8.

    group: rows that share a scale, None for all. scale_dtype: dtype of the scales.
    """
    arguments = named(
        kernels.mlp,
        block(tokens, hidden, inner, dtype, F32, w_gate, biases, norm_weight, norm_bias, row_gate),
    )
    for name in QUANTISED:
        if arguments[name] is not None:
            arguments[name], scales, zero_rows = pack(arguments[name], group)
            arguments[f"{name}_scales"] = scales.astype(scale_dtype)
            arguments[f"{name}_zeros"] = zero_rows if zeros else None
    for name, argument in arguments.items():
        is_row = isinstance(argument, np.ndarray) and argument.shape[0] == 1
        if is_row and not name.endswith(("_scales", "_zeros")) and argument.dtype != np.uint8:
            arguments[name] = argument.astype(dtype)  # norms and biases
    return in_order(kernels.mlp, **arguments)


PACKED_WEIGHTS = dict(w_gate=1, w_up=1, w_down=0, w_gate_scales=1, w_up_scales=1)
PACKED_ZEROS = dict(w_gate_zeros=1, w_up_zeros=1)


class TestPackedMlp(KernelTests):
    """Rows around the sizes at which the layout of few rows changes, and weights around runs and blocks of nibbles."""

    case = KernelCase(
        kernels.mlp,
        packed_block,
        values=[
            *vary(tokens=[1, 3, 33, 64, 65, 129], hidden=[136, 127], inner=172),
            *vary(
                tokens=[3, 140], hidden=[32, 96, 256, 300, 448], inner=[127, 128, 129], zeros=[True, False]
            ),
            *vary(tokens=[2, 300], hidden=136, inner=[32, 64, 160, 192, 255, 320, 642], biases=True),
            dict(tokens=5, hidden=264, inner=200, dtype=F32),
            *vary(tokens=[5, 140], hidden=264, inner=140, norm_weight=[True, False], w_gate=[True, False]),
            *vary(tokens=[5, 140], hidden=264, inner=140, norm_bias=True),
            *vary(tokens=[5, 140], hidden=136, inner=140, row_gate=True),
            *vary(tokens=[5, 140], hidden=136, inner=140, residual=False),
            *vary(tokens=[3, 140], hidden=264, inner=300, zeros=[True, False], nibble_dtype="bfloat16"),
            # Groups of columns of the PE array for gate and up: pieces of 128, 64 and 32 columns, and several units.
            *vary(tokens=[1, 32, 33, 64], hidden=[264, 1100], inner=[512, 768, 896], zeros=[True, False]),
            # Rows in paired runs, with gate and up in groups of columns and without.
            *vary(
                tokens=[1, 16, 17, 40, 64], hidden=[256, 1024], inner=[448, 512], norm_weight=[True, False]
            ),
            *vary(tokens=[2, 40], hidden=[100, 130], inner=[128, 256, 4352], w_gate=[True, False]),
            *vary(tokens=[2, 40], hidden=264, inner=512, nibble_dtype="bfloat16", residual=False),
        ],
        fits=[*vary(tokens=[1, 300], hidden=16384, inner=200)],
        every_chip=[
            *vary(tokens=[5, 130], hidden=264, inner=300, nibble_dtype=["float8_e4m3", "bfloat16"]),
            *vary(tokens=[5, 40], hidden=264, inner=512),
        ],
        refusals=[
            refuse(
                "w_gate has 23 rows for a hidden size of 24", w_up=lambda w: w[1:], w_gate=lambda w: w[1:]
            ),
            refuse("w_down is [32, 24], not (31, 24)", w_down=lambda w: w[1:]),
            refuse("w_up_scales is float32 [1, 40], one for each column", w_up_scales=lambda s: s[:, 1:]),
            refuse("zero points are uint8 [1, 40], one for each column", w_up_zeros=lambda z: z[:, 1:]),
            refuse("zero points are uint8 [1, 24], one for each", w_down_zeros=lambda z: z.astype(F32)),
            refuse("zero points are those of uint8 elements", w_up=np.zeros((24, 40), ml_dtypes.float8_e4m3)),
            refuse(
                "one of gate and up is packed nibbles and the other is not; pack both or neither",
                w_up=np.zeros((24, 40), np.int8),
                w_up_zeros=None,
            ),
            refuse(
                "zero points are given without their weight",
                dict(w_gate=False),
                w_gate_zeros=np.zeros((1, 40), np.uint8),
            ),
            refuse("nibble_dtype is float8_e4m3 or bfloat16, not int8", nibble_dtype="int8"),
            refuse("weights of 4 bits have scales", w_up_scales=None),
        ],
        two_sums=[
            *vary(tokens=[1, 64, 129, 300], hidden=264, inner=[512, 896, 1100], zeros=[True, False]),
        ],
        ranks=[
            *(
                Ranks(
                    ranks,
                    PACKED_WEIGHTS | (PACKED_ZEROS if zeros else {}),
                    dict(tokens=tokens, hidden=40, inner=256 * ranks, zeros=zeros),
                )
                for ranks in (2, 4)
                for tokens, zeros in ((9, True), (140, False))
            ),
            Ranks(
                2,
                PACKED_WEIGHTS | PACKED_ZEROS | dict(x=0),
                dict(tokens=258, hidden=72, inner=512),
                dict(sequence_ranks=2),
                joined=True,
                alike=False,
            ),
        ],
    )


@pytest.mark.parametrize("nibble_dtype", ["float8_e4m3", "bfloat16"])
def test_every_nibble_is_multiplied_exactly(nibble_dtype: str) -> None:
    """Rows of ones and zeros and scales of powers of two: all products and sums are exact, up to the gate and y."""
    hidden, inner = 256, 128
    nibbles = (np.arange(hidden)[:, None] + np.arange(inner)) % 16
    up = (nibbles[:128] | nibbles[128:] << 4).astype(np.uint8)
    x = np.zeros((16, hidden), F32)
    x[np.arange(16), np.arange(16) * 17] = 1
    down = np.full((64, hidden), 0x99, np.uint8)  # 9 - 8 = 1 everywhere
    scales = np.full((1, inner), 512.0, F32)
    y = run(
        kernels.mlp,
        in_order(
            kernels.mlp,
            x=x,
            w_up=up,
            w_down=down,
            w_up_scales=scales,
            w_down_scales=np.full((1, hidden), 512.0, F32),
            activation="relu",
            residual=False,
            nibble_dtype=nibble_dtype,
        ),
    )
    sums = np.maximum(nibbles[np.arange(16) * 17] - 8, 0).sum(axis=1)
    assert np.array_equal(y, np.broadcast_to(sums[:, None], y.shape).astype(F32))
    assert set(nibbles[np.arange(16) * 17].ravel()) == set(range(16))
    assert np.array_equal(widen_nibbles_reference(up, hidden) * 512, nibbles - 8)
    assert count_packed_rows(hidden, hidden) == len(up)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(300, 264, 200), (40, 256, 384)])
def test_sums_in_float32_are_as_exact_as_those_of_numpy(
    tokens: int, hidden: int, inner: int, zeros: bool
) -> None:
    """Nibbles and zero points are added apart in numpy as well: their sums are larger than those of weights."""
    arguments = named(
        kernels.mlp, packed_block(tokens, hidden, inner, F32, zeros, w_gate=False, norm_weight=False)
    )
    arguments |= {"activation": "relu", "residual": False}

    def compute(dtype: Any) -> np.ndarray:
        rows = arguments["x"].astype(dtype)
        for name, depth in (("w_up", hidden), ("w_down", inner)):
            elements, scales, zero_row = (arguments[name + suffix] for suffix in ("", "_scales", "_zeros"))
            zero_points = np.full((1, scales.shape[1]), 8) if zero_row is None else zero_row
            nibbles = widen_nibbles_reference(elements, depth, np.zeros_like(scales)).astype(dtype)
            zero_terms = rows.sum(axis=1, keepdims=True) * zero_points.astype(dtype) / dtype(512)
            rows = (rows @ nibbles - zero_terms) * scales.astype(dtype)
            rows = np.maximum(rows, 0) if name == "w_up" else rows
        return rows

    y = run(kernels.mlp, in_order(kernels.mlp, **arguments))
    compare(y, compute(np.float64), compute(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_no_finding_in_weights_of_4_bits(target: str) -> None:
    def launches() -> None:
        for tokens in (5, 40, 140):
            for nibble_dtype in ("float8_e4m3", "bfloat16"):
                arguments = named(kernels.mlp, packed_block(tokens, 264, 300))
                run(kernels.mlp, in_order(kernels.mlp, **arguments | {"nibble_dtype": nibble_dtype}), target)

    assert find_faults(launches) == []
