"""Cases of convolutions and poolings."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.accuracy import normal
from tools.mutants.cases.case import BF16, Case, by_reference, two_cores


def _convolved(
    target: str,
    shape: tuple[int, ...],
    outputs: int,
    window: tuple[int, ...],
    *options: Any,
    dtype: Any = np.float32,
) -> Case:
    """Return a convolution of images, or of sequences if `shape` has three sizes, with float32 weights.

    options: whether there is a bias, then further arguments of the kernel.
    """
    biased, *epilogue = options
    weights = normal(2, *window, shape[1], outputs, scale=(shape[1] * np.prod(window)) ** -0.5)
    bias = normal(3, 1, outputs) if biased else None
    name = "conv1d" if len(shape) == 3 else "conv2d"
    return by_reference(name, target, normal(1, *shape, dtype=dtype), weights, bias, *epilogue)


def convolutions() -> list[Case]:
    """Return convolutions of small and large images, stored as images or rows, some with bias and added rows."""
    rows = normal(4, 150, 20, dtype=BF16)
    return [
        _convolved("trn1", (2, 130, 7, 6), 129, (3, 2), True, (2, 1), (1, 1), "relu"),
        _convolved("trn2", (1, 5, 60, 90), 6, (3, 3), False, (1, 1), (1, 1)),
        _convolved("trn2", (1, 5, 60, 90), 6, (3, 3), True, (1, 1), (1, 1)),
        _convolved("trn2", (2, 20, 2, 5), 6, (9, 1), True, (1, 1), (8, 0)),
        _convolved("trn2", (2, 20, 2, 5), 6, (9, 1), True, (4, 1), (8, 0)),
        _convolved("trn3", (1, 5, 2, 530), 6, (1, 3), True, (1, 2), (0, 2), "silu", dtype=BF16),
        _convolved("trn2", (2, 20, 300), 24, (3,), True, 2, 1, "gelu_tanh"),
        _convolved("trn2", (1, 130, 300), 20, (3,), True, 2, 1, "gelu", True, rows, dtype=BF16),
        _convolved("trn1", (2, 6, 20), 600, (2,), False, 1, 0, None, True),
        _convolved("trn2", (1, 128, 3), 136, (155,), False, 1, 154, None),
        _convolved("trn1", (1, 128, 3), 136, (155,), True, 1, 154, None, True),
        _convolved("trn1", (1, 6, 6000), 8, (2,), True, 1, 0, None, True),
        _convolved("trn2", (1, 8200, 200), 3, (1,), False, 1, 0, None),
        _convolved("trn2", (1, 8200, 12, 12), 1, (1, 1), False, (1, 1), (0, 0)),
        _convolved("trn2", (40, 8200, 2, 2), 1, (1, 1), False, (1, 1), (0, 0)),
        _convolved("trn2", (2, 3, 11, 13), 300, (7, 7), True, (2, 2), (3, 3), None),
        _convolved("trn2", (2, 64, 7, 9), 300, (3, 3), True, (2, 1), (1, 1), None),
        _convolved("trn2", (2, 80, 30), 300, (3,), True, 1, 1, None),
        _convolved("trn2", (1, 30, 2600), 40, (3,), True, 1, 1, None),
        _convolved("trn1", (3, 64, 21, 40), 64, (3, 3), True, (1, 1), (1, 1), None),
        _convolved("trn2", (3, 3, 40, 50), 32, (5, 5), True, (2, 1), (2, 2), "relu"),
        _convolved("trn2", (1, 33, 241, 40), 65, (2, 2), True, (1, 1), (0, 0), None),
        _convolved("trn2", (31, 64, 7, 7), 40, (3, 2), True, (1, 1), (1, 1), None),
        two_cores(_convolved("trn2", (1, 20, 60), 200, (3,), True, 2, 1, None, True)),
    ]


def poolings() -> list[Case]:
    """Return poolings of one and several groups of channels; averages count padding or leave it out."""
    x, sequences = normal(1, 2, 70, 9, 11), normal(2, 3, 43, 1100, dtype=BF16)
    pools = ("max_pool", ()), ("average_pool", (True,)), ("average_pool", (False,))
    return [
        case
        for name, options in pools
        for case in (
            by_reference(name, "trn2", x, (3, 2), (2, 1), (1, 1), *options),
            by_reference(name, "trn2", x, (1, 2), (2, 2), None, *options),
            by_reference(name, "trn1", sequences, (3,), None, None, *options),
            by_reference(name, "trn2", normal(2, 1, 3, 20000), (2,), None, None, *options),
            by_reference(name, "trn3", normal(3, 20, 40, 5, 4), (2, 3), (1, 2), (1, 0), *options),
            by_reference(name, "trn2", normal(4, 1, 228, 30, 40), (3, 3), (1, 1), None, *options),
            two_cores(by_reference(name, "trn2", normal(3, 1, 200, 30), (3,), (2,), (1,), *options)),
        )
    ]
