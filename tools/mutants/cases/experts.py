"""Cases of the router and of routed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels
from tests.kernels.accuracy import as_tuple, normal, whole_numbers
from tools.mutants.cases.case import (
    BF16,
    EPS,
    Case,
    Outputs,
    arguments_of,
    by_name,
    by_reference,
    two_cores,
    weights,
)


def experts() -> list[Case]:
    """Return cases of each way to choose experts, of experts for few and many tokens, and of divided experts."""
    return [*_routers(), *_decode(), *_prefill(), *_divided()]


def _router(
    target: str,
    tokens: int,
    hidden: int,
    count: int,
    *options: Any,
    dtype: Any = np.float32,
    weight_dtype: Any = None,
) -> Case:
    """Return a case of the router with these options after `eps`."""
    x, norm = normal(1, tokens, hidden, dtype=dtype), 1 + normal(2, 1, hidden, dtype=dtype)
    return by_reference(
        "router", target, x, norm, weights(3, hidden, count, weight_dtype or dtype), EPS, *options
    )


def _routers() -> list[Case]:
    grouped = ("sigmoid", normal(4, 1, 32), normal(5, 1, 32, scale=0.1), 4, 2, 2.5)
    return [
        _router("trn2", 3, 40, 5, 2),
        *(_router("trn2", rows, 40, 5, 2, True, "softmax", None, None, 1, 1, 1.0, 1.0) for rows in (1, 3)),
        _router("trn2", 300, 172, 12, 9, False, dtype=BF16),
        _router("trn3", 3, 40, 32, 3, True, *grouped),
        _router("trn2", 3, 40, 32, 3, False, "softmax", None, None, 4, 2, 16.0),
        _router("trn1", 3, 40, 5, 2, False, "sigmoid"),
        _router("trn2", 3, 173, 5, 2, dtype=BF16, weight_dtype=np.float32),
        _router("trn2", 129, 5405, 8, 2),
        two_cores(_router("trn2", 3, 40, 9, 2)),
        two_cores(_router("trn2", 260, 40, 9, 2)),
    ]


def _draw_arguments(
    sizes: Sequence[int], dtype: Any, weight_dtype: Any, biases: bool, activation: str | None = None
) -> dict[str, Any]:
    """Draw the arguments of an expert kernel by name.

    sizes: tokens, hidden size, number of experts, intermediate size, and experts per token.
    """
    tokens, hidden, count, inner, top_k = sizes
    rng = np.random.default_rng(tokens)
    rows = {"b_gate": (6, inner), "b_up": (7, inner), "b_down": (8, hidden)} if biases else {}
    return {
        "residual": normal(1, tokens, hidden, dtype=dtype),
        "n": normal(2, tokens, hidden, dtype=dtype, scale=3.0),
        "weights": rng.random((tokens, top_k)).astype(np.float32),
        "ids": np.stack([rng.permutation(count)[:top_k] for _ in range(tokens)]).astype(np.int32),
        "w_gate": normal(3, count, hidden, inner, dtype=weight_dtype, scale=hidden**-0.5),
        "w_up": normal(4, count, hidden, inner, dtype=weight_dtype, scale=hidden**-0.5),
        "w_down": normal(5, count, inner, hidden, dtype=weight_dtype, scale=inner**-0.5),
        "activation": activation or ("swigluoai" if biases else "silu"),
        **{name: normal(seed, count, columns, dtype=weight_dtype) for name, (seed, columns) in rows.items()},
    }


def _case(
    kernel: str,
    target: str,
    *sizes: int,
    dtype: Any = np.float32,
    weight_dtype: Any = np.float32,
    biases: bool = False,
) -> Case:
    """Return a case of an expert kernel on one rank; `sizes` are as in `_draw_arguments`."""
    return by_name(kernel, target, _draw_arguments(sizes, dtype, weight_dtype, biases))


def _on_two_ranks(kernel: str, target: str, *sizes: int) -> Case:
    """Return a case of an expert kernel whose intermediate size is divided over two ranks."""
    arguments = _draw_arguments(sizes, np.float32, np.float32, False)
    group, half = ReplicaGroup([[0, 1]]), sizes[3] // 2
    ranks = [
        {name: np.ascontiguousarray(arguments[name][:, :, columns]) for name in ("w_gate", "w_up")}
        | {"w_down": np.ascontiguousarray(arguments["w_down"][:, columns]), "replica_group": group}
        for columns in (slice(0, half), slice(half, None))
    ]
    return by_name(kernel, target, arguments, ranks)


def _decode() -> list[Case]:
    return [
        _case("experts_decode", "trn2", 2, 40, 7, 24, 2),
        _case("experts_decode", "trn2", 5, 141, 3, 136, 2, biases=True),
        _case("experts_decode", "trn1", 3, 173, 9, 300, 2, dtype=BF16, weight_dtype=np.float32, biases=True),
        _case("experts_decode", "trn3", 9, 40, 3, 24, 2, dtype=BF16, weight_dtype=BF16),
        _case("experts_decode", "trn2", 2, 1030, 3, 1300, 2),
        _on_two_ranks("experts_decode", "trn2", 3, 40, 5, 24, 2),
        two_cores(_case("experts_decode", "trn2", 2, 40, 7, 24, 2)),
    ]


def _prefill() -> list[Case]:
    return [
        _case("experts_prefill", "trn2", 3, 40, 7, 24, 2),
        _case(
            "experts_prefill", "trn1", 300, 141, 5, 136, 3, dtype=BF16, weight_dtype=np.float32, biases=True
        ),
        _case("experts_prefill", "trn2", 130, 40, 140, 24, 2),
        _case("experts_prefill", "trn3", 900, 64, 4, 48, 2, dtype=BF16, weight_dtype=BF16),
        _case("experts_prefill", "trn2", 2, 1030, 3, 1300, 2),
        _on_two_ranks("experts_prefill", "trn2", 130, 40, 5, 24, 2),
        two_cores(_case("experts_prefill", "trn2", 3, 40, 7, 24, 2)),
        _looped("trn2", 130, 520, 8, 130, 3, activation="swigluoai"),
        _looped("trn2", 260, 64, 256, 32, 2),
        _looped("trn3", 130, 1030, 20, 32, 2, dtype=BF16, weight_dtype=BF16, biases=True),
    ]


def _looped(
    target: str,
    *sizes: int,
    dtype: Any = np.float32,
    weight_dtype: Any = np.float32,
    biases: bool = False,
    activation: str | None = None,
) -> Case:
    """Return a case in which half of the tokens choose the same experts, more than fit in blocks, so a loop runs."""
    arguments = _draw_arguments(sizes, dtype, weight_dtype, biases, activation)
    arguments["ids"][: sizes[0] // 2] = np.arange(sizes[4])
    return by_name("experts_prefill", target, arguments)


def _absent(kernel: str, target: str, *sizes: int, residual: bool, biases: bool) -> Case:
    """Return a case in which the id `count` stands for an expert of another rank, with weight 0."""
    tokens, _, count, _, top_k = sizes
    arguments, rng = _draw_arguments(sizes, np.float32, np.float32, biases), np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(count + 3)[:top_k] for _ in range(tokens)])
    arguments["weights"] = np.where(ids < count, arguments["weights"], 0).astype(np.float32)
    arguments |= {"ids": np.minimum(ids, count).astype(np.int32), "absent": True}
    return by_name(kernel, target, arguments if residual else arguments | {"residual": None})


def _absent_gate_of_nan() -> Case:
    """Return a case in which a local expert's gate is NaN.

    It is loaded for other ranks' choices and must not matter.
    """
    arguments = _draw_arguments((2, 40, 4, 24, 2), np.float32, np.float32, False) | {
        "residual": None,
        "absent": True,
    }
    arguments["weights"] = np.array([[0.5, 0.0], [0.0, 0.25]], np.float32)
    arguments["ids"] = np.array([[1, 4], [4, 2]], np.int32)
    arguments["w_gate"][3] = np.nan
    return by_name("experts_decode", "trn2", arguments)


def _between_ranks(kernel: str, target: str, arrays: Mapping[str, list[Any]], **shared: Any) -> Case:
    """Return a case of two ranks, compared exactly.

    arrays: for each argument, its values on both ranks; the reference takes these lists. shared: arguments equal on
    both.
    """
    shared |= {"replica_group": ReplicaGroup([[0, 1]]), "ranks": 2}
    expected_outputs = getattr(nki_kernels, f"{kernel}_reference")(**arrays, **shared)
    ranks = [{name: values[rank] for name, values in arrays.items()} for rank in range(2)]

    def judge(outputs: Outputs) -> None:
        for output, expected in zip(outputs, expected_outputs):
            for got, exact in zip(output, as_tuple(expected)):
                assert got.dtype == exact.dtype
                assert np.array_equal(got, exact)

    return Case(
        kernel,
        target,
        tuple(arguments_of(kernel, **rank_arguments, **shared) for rank_arguments in ranks),
        judge,
    )


def _dispatched(target: str, tokens: int, count: int) -> Case:
    """Return a dispatch of tokens to the rank that has their experts."""
    rng = np.random.default_rng(tokens)
    rows = [normal(rank, tokens, 40) for rank in range(2)]
    shares = [rng.random((tokens, 3)).astype(np.float32) for _ in range(2)]
    ids = [
        np.stack([rng.permutation(2 * count)[:3] for _ in range(tokens)]).astype(np.int32) for _ in range(2)
    ]
    first = [np.array([[rank * count]], np.int32) for rank in range(2)]
    arrays = {"n": rows, "weights": shares, "ids": ids, "first": first}
    return _between_ranks("experts_dispatch", target, arrays, experts=count)


def _gathered(target: str, tokens: int) -> Case:
    """Return a dispatch without `first`: each rank gets the rows and choices of all ranks unchanged."""
    rng = np.random.default_rng(tokens)
    rows = [normal(rank, tokens, 40) for rank in range(2)]
    shares = [rng.random((tokens, 3)).astype(np.float32) for _ in range(2)]
    ids = [rng.integers(0, 8, (tokens, 3)).astype(np.int32) for _ in range(2)]
    arrays = {"n": rows, "weights": shares, "ids": ids, "first": [None, None]}
    return _between_ranks("experts_dispatch", target, arrays, experts=8)


def _combined_alone(target: str, tokens: int, biases: bool, absent: bool = False) -> Case:
    """Return a combination without a residual, with the experts' output biases or without.

    Numbers are whole, so that the order of addition does not matter. absent: some ids mean no expert.
    """
    results = [whole_numbers(rank, 2 * tokens, 40) for rank in range(2)]
    rng = np.random.default_rng(tokens)
    shares = [rng.integers(0, 3, (tokens, 3)).astype(np.float32) for _ in range(2)]
    ids = [
        np.where(share > 0, rng.integers(0, 5, share.shape), 5 if absent else 0).astype(np.int32)
        for share in shares
    ]
    arrays = {"results": results, "residual": [None, None]}
    if not biases:
        return _between_ranks("experts_combine", target, arrays)
    arrays |= {"weights": shares, "ids": ids}
    b_down = whole_numbers(7, 5, 40)
    return _between_ranks("experts_combine", target, arrays, b_down=b_down, absent=absent)


def _combined(target: str, tokens: int) -> Case:
    """Return a combination with a residual, of whole numbers so that the order of addition does not matter."""
    results = [whole_numbers(rank, 2 * tokens, 40) for rank in range(2)]
    rows = [whole_numbers(2 + rank, tokens, 40) for rank in range(2)]
    return _between_ranks("experts_combine", target, {"results": results, "residual": rows})


def _divided() -> list[Case]:
    return [
        _absent("experts_decode", "trn2", 2, 40, 9, 24, 3, residual=False, biases=False),
        _absent("experts_decode", "trn2", 5, 40, 3, 24, 2, residual=False, biases=True),
        _absent_gate_of_nan(),
        _absent("experts_prefill", "trn2", 130, 40, 5, 24, 2, residual=False, biases=False),
        _absent("experts_prefill", "trn2", 3, 40, 5, 24, 2, residual=True, biases=True),
        _dispatched("trn2", 3, 4),
        _dispatched("trn1", 70, 4),
        two_cores(_dispatched("trn2", 3, 4)),
        _gathered("trn2", 3),
        _combined_alone("trn2", 3, biases=False),
        _combined_alone("trn2", 3, biases=True),
        _combined_alone("trn1", 130, biases=True, absent=True),
        _combined("trn2", 3),
        _combined("trn1", 130),
        two_cores(_combined("trn2", 3)),
    ]
