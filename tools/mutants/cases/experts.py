"""Cases of the router and of routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

from tests.kernels.accuracy import normal
from tools.mutants.cases.case import BF16, EPS, Case, by_reference, two_cores, weights


def experts() -> list[Case]:
    """Every way to choose, and experts for few tokens and for many."""
    return [*_routers(), *_decode(), *_prefill()]


def _router(
    target: str,
    tokens: int,
    hidden: int,
    count: int,
    *options: Any,
    dtype: Any = np.float32,
    held: Any = None,
) -> Case:
    x, norm = normal(1, tokens, hidden, dtype=dtype), 1 + normal(2, 1, hidden, dtype=dtype)
    return by_reference("router", target, x, norm, weights(3, hidden, count, held or dtype), EPS, *options)


def _routers() -> list[Case]:
    grouped = ("sigmoid", normal(4, 1, 32), normal(5, 1, 32, scale=0.1), 4, 2, 2.5)
    return [
        _router("trn2", 3, 40, 5, 2),
        _router("trn2", 130, 172, 12, 9, False, dtype=BF16),
        _router("trn3", 3, 40, 32, 3, True, *grouped),
        _router("trn1", 3, 40, 5, 2, False, "sigmoid"),
        _router("trn2", 3, 173, 5, 2, dtype=BF16, held=np.float32),
        two_cores(_router("trn2", 3, 40, 9, 2)),
        two_cores(_router("trn2", 260, 40, 9, 2)),
    ]


def _given(sizes: Sequence[int], dtype: Any, held: Any, biases: bool) -> list[Any]:
    """sizes: tokens, hidden, experts, intermediate, experts of a token."""
    tokens, hidden, count, inner, top_k = sizes
    rng = np.random.default_rng(tokens)
    return [
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, tokens, hidden, dtype=dtype, scale=3.0),
        rng.random((tokens, top_k)).astype(np.float32),
        np.stack([rng.permutation(count)[:top_k] for _ in range(tokens)]).astype(np.int32),
        normal(3, count, hidden, inner, dtype=held, scale=hidden**-0.5),
        normal(4, count, hidden, inner, dtype=held, scale=hidden**-0.5),
        normal(5, count, inner, hidden, dtype=held, scale=inner**-0.5),
        None,
        "swigluoai" if biases else "silu",
        *(
            (normal(6, count, inner, dtype=held), normal(7, count, inner, dtype=held))
            if biases
            else (None, None)
        ),
        normal(8, count, hidden, dtype=held) if biases else None,
    ]


def _case(
    kernel: str,
    target: str,
    *sizes: int,
    dtype: Any = np.float32,
    held: Any = np.float32,
    biases: bool = False,
) -> Case:
    return by_reference(kernel, target, *_given(sizes, dtype, held, biases))


def _on_two_ranks(kernel: str, target: str, *sizes: int) -> Case:
    whole = _given(sizes, np.float32, np.float32, False)
    group, half = ReplicaGroup([[0, 1]]), sizes[3] // 2
    ranks = tuple(
        (
            *whole[:4],
            *(np.ascontiguousarray(each[:, :, part]) for each in whole[4:6]),
            np.ascontiguousarray(whole[6][:, part]),
            group,
            *whole[8:],
        )
        for part in (slice(0, half), slice(half, None))
    )
    return by_reference(kernel, target, whole=whole, ranks=ranks)


def _decode() -> list[Case]:
    return [
        _case("experts_decode", "trn2", 2, 40, 7, 24, 2),
        _case("experts_decode", "trn2", 5, 141, 3, 136, 2, biases=True),
        _case("experts_decode", "trn1", 3, 173, 9, 300, 2, dtype=BF16, held=np.float32, biases=True),
        _case("experts_decode", "trn3", 9, 40, 3, 24, 2, dtype=BF16, held=BF16),
        _case("experts_decode", "trn2", 2, 1030, 3, 1300, 2),
        _on_two_ranks("experts_decode", "trn2", 3, 40, 5, 24, 2),
        two_cores(_case("experts_decode", "trn2", 2, 40, 7, 24, 2)),
    ]


def _prefill() -> list[Case]:
    return [
        _case("experts_prefill", "trn2", 3, 40, 7, 24, 2),
        _case("experts_prefill", "trn1", 300, 141, 5, 136, 3, dtype=BF16, held=np.float32, biases=True),
        _case("experts_prefill", "trn2", 130, 40, 140, 24, 2),
        _case("experts_prefill", "trn3", 900, 64, 4, 48, 2, dtype=BF16, held=BF16),
        _case("experts_prefill", "trn2", 2, 1030, 3, 1300, 2),
        _on_two_ranks("experts_prefill", "trn2", 130, 40, 5, 24, 2),
        two_cores(_case("experts_prefill", "trn2", 3, 40, 7, 24, 2)),
    ]
