"""per_layer_input: a layer's own input times a gate of the hidden states, projected."""

from __future__ import annotations

from typing import Any

import numpy as np

import nki_kernels as kernels
from tests.kernels.accuracy import normal
from tests.kernels.case import (
    BF16,
    F32,
    MIXED_DTYPES,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    together,
    vary,
)


def arguments(
    tokens: int = 5,
    hidden: int = 24,
    width: int = 10,
    dtype: type = F32,
    weights: Any = None,
    layers: int = 1,
) -> list[Any]:
    """Draw arguments of the last of some layers; sums of the first product are of the order of 1."""
    weight_dtype = weights or dtype
    return [
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, hidden, width, dtype=weight_dtype, scale=hidden**-0.5),
        normal(3, tokens, layers * width, dtype=dtype),
        normal(4, width, hidden, dtype=weight_dtype),
        (layers - 1) * width,
    ]


class TestPerLayerInput(KernelTests):
    """Three row tiles; columns of two banks; columns of other layers are not read."""

    case = KernelCase(
        kernels.per_layer_input,
        arguments,
        values=[
            *together("dtype weights", *MIXED_DTYPES, tokens=130, hidden=172, width=40, layers=3),
            *vary(tokens=[1, 127, 128, 129]),
            *vary(tokens=3, hidden=[1, 127, 128, 129]),
            *vary(tokens=3, width=[1, 127, 128, 129]),
            *vary(hidden=72, width=12, activation=["silu", "gelu", "gelu_tanh", "relu"]),
            dict(tokens=300, hidden=600, width=20),
        ],
        refusals=[
            refuse("w_gate has 25 rows for a hidden size of 24", w_gate=normal(1, 25, 10)),
            refuse("w_output is [10, 24], not (10, 25)", w_output=normal(1, 10, 25)),
            refuse("inputs are [5, 10 or more], not (4, 10)", inputs=normal(1, 4, 10)),
            refuse("inputs are [5, 10 or more], not (5, 9)", inputs=normal(1, 5, 9)),
            refuse("inputs are bfloat16, x is float32", inputs=normal(1, 5, 10, dtype=BF16)),
        ],
        limits=[
            limit("width", 512, "takes inputs of at most 512 elements, not 513", tokens=2),
            limit("width", 128, "take 98560 bytes of a partition, more than 98304", tokens=2, hidden=8192),
            limit("hidden", 8192, "takes a hidden size of at most 8192, not 8193", tokens=2, width=8),
        ],
        undefined=[Undefined(dict(inputs=np.s_[:, :20]), dict(layers=3))],
    )
