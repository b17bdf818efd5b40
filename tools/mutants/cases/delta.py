"""Cases of the gated delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.kernels.accuracy import normal
from tests.kernels.test_gated_delta import bound, expected, gated
from tools.mutants.cases.case import BF16, Case, Outputs, by_reference, two_cores


def delta() -> list[Case]:
    """Return prompts of one and of several chunks, of unequal length and with padding, and decode steps.

    Heads share keys in different ways; some prompts have more heads than the kernel processes together.
    """
    return [
        _case("gated_delta", "trn2", 2, 5, (1, 2, 8, 8)),
        _case("gated_delta", "trn1", 1, 300, (2, 4, 16, 8)),
        _case("gated_delta", "trn2", 2, 700, (1, 6, 16, 8)),
        _case("gated_delta", "trn2", 1, 3, (5, 5, 8, 8)),
        _case("gated_delta", "trn2", 1, 3, (3, 6, 8, 8)),
        _case("gated_delta", "trn2", 1, 3, (2, 10, 8, 8)),
        _rounded(_case("gated_delta", "trn2", 4, 3, (1, 1, 8, 8), BF16)),
        _rounded(_case("gated_delta", "trn2", 2, 140, (1, 2, 8, 8), BF16)),
        _case("gated_delta_step", "trn2", 3, 1, (1, 2, 8, 8)),
        _case("gated_delta_step", "trn1", 9, 1, (2, 6, 16, 8), BF16),
        _case("gated_delta_step", "trn2", 6, 1, (5, 10, 9, 33)),
        _case("gated_delta_step", "trn2", 5, 1, (65, 130, 1, 2)),
        _case("gated_delta_step", "trn2", 25, 1, (1, 2, 37, 128)),
        two_cores(_case("gated_delta", "trn2", 1, 5, (1, 1, 8, 8))),
        two_cores(_case("gated_delta_step", "trn2", 2, 1, (1, 1, 8, 8))),
    ]


def _rounded(case: Case) -> Case:
    """Return a case judged per token within the error bound of bfloat16 products; its last sequence is padding only."""
    arguments = list(case.arguments[0])
    arguments[7], arguments[8] = arguments[7].copy(), arguments[8].copy()
    arguments[7][-1] = arguments[8][-1] = 0
    real = (np.arange(len(arguments[0]) // len(arguments[8])) < arguments[8]).ravel()
    o, states = expected(arguments)
    # As in the tests of the kernel: six products of a chunk and six levels of the inverse round their operands.
    most_y, most_states = bound(arguments, o, states, 12**0.5)

    def judge(outputs: Outputs) -> None:
        y, kept = outputs[0]
        assert y.dtype == BF16 and kept.dtype == np.float32
        far = np.abs(y.astype(np.float64) - gated(arguments, o))
        assert (far <= most_y)[real].all()
        assert np.abs(kept - states).max() <= most_states
        assert not kept[states == 0].any()
        assert not y[-len(y) // len(arguments[8]) :].any()

    return replace(case, arguments=(tuple(arguments),), judge=judge)


def _case(
    kernel: str,
    target: str,
    sequences: int,
    tokens: int,
    heads: tuple[int, int, int, int],
    dtype: Any = np.float32,
) -> Case:
    """Return a case; `heads` has the numbers of key heads and value heads, and their sizes."""
    keys, values, depth, width = heads
    rows, slots = sequences * tokens, sequences + 1
    arguments = (
        normal(1, rows, 2 * keys * depth + values * width, dtype=dtype),
        normal(2, rows, values * width + 2 * values, dtype=dtype),
        normal(3, 1, values, dtype=dtype, scale=0.5),
        normal(4, 1, values, dtype=dtype),
        1 + normal(5, 1, width, dtype=dtype, scale=0.1),
        normal(6, slots, values, depth, width, scale=0.3),
        np.arange(slots, dtype=np.int32)[:0:-1, None],
        np.array([3 * (sequence % 2) for sequence in range(sequences)], np.int32)[:, None],
        np.array([tokens - (sequence == 1 and tokens > 1) for sequence in range(sequences)], np.int32)[
            :, None
        ],
    )
    return by_reference(kernel, target, *arguments, keys, 1e-6)
