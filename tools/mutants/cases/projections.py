"""Cases of the kernels qkv_projection, output_projection and mlp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels
from tests.kernels.accuracy import compare, copied, in_float64, normal
from tools.mutants.cases.case import BF16, EPS, Case, Outputs, arguments_of, by_name, two_cores, weights


def _projection(hidden: int, q: int, kv: int, w: Any = np.float32) -> dict[str, Any]:
    """Return the arguments of qkv_projection other than x; q and kv are the widths of queries and of keys."""
    weight = weights(3, hidden, q + 2 * kv, w)
    norm = normal(2, 1, hidden, dtype=w)
    return {"norm_weight": norm, "w_qkv": weight, "eps": EPS, "q_size": q, "kv_size": kv}


def _qkv(
    target: str, tokens: int, hidden: int, q: int, kv: int, x: Any = np.float32, w: Any = np.float32
) -> Case:
    """Return a case of qkv_projection; x and w are the dtypes of rows and of weights."""
    rows = normal(1, tokens, hidden, dtype=x)
    return by_name("qkv_projection", target, {"x": rows, **_projection(hidden, q, kv, w)})


def _qkv_heads(
    target: str,
    tokens: int,
    hidden: int,
    *options: str,
    dtype: Any = np.float32,
    heads: int = 3,
    depth: int = 8,
) -> Case:
    """Return a case of qkv_projection with the bias, norms and rotation that `options` name."""
    arguments = {
        "x": normal(1, tokens, hidden, dtype=dtype),
        "head_dim": depth,
        "v_norm": "v_norm" in options,
    }
    arguments |= _projection(hidden, heads * depth, depth, dtype)
    arguments |= {"norm_offset": 1.0} if "offset" in options else {}
    arguments |= {"norm_weight": None} if "no norm" in options else {}
    rows = {"bias": (heads + 2) * depth, "q_norm": depth, "k_norm": depth, "norm_bias": hidden}
    for seed, (name, columns) in enumerate(rows.items()):
        arguments |= {name: normal(20 + seed, 1, columns, dtype=dtype)} if name in options else {}
    if "rope" in options:
        angles = np.arange(60)[:, None] / 100 ** (np.arange(3) / 3)
        arguments["positions"] = np.random.default_rng(6).integers(0, 60, (tokens, 1)).astype(np.int32)
        arguments |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    return by_name("qkv_projection", target, arguments)


def _output(
    target: str,
    tokens: int,
    depth: int,
    hidden: int,
    ranks: int = 1,
    w: Any = np.float32,
    residual: bool = True,
    **options: Any,
) -> Case:
    """Return a case of output_projection, whose inner dimension `depth` is divided over the ranks."""
    full = {"o": normal(1, tokens, depth), "w_o": weights(2, depth, hidden, w), **options}
    full["residual"] = normal(3, tokens, hidden) if residual else None
    return by_name("output_projection", target, full, _cut(full, ranks, o=1, w_o=0))


def _cut(full: Mapping[str, Any], ranks: int, **axes: int) -> list[dict[str, Any]]:
    """Return each rank's arguments that replace whole ones: arrays cut along the named axes, and the group.

    The list is empty for one rank.
    """
    if ranks == 1:
        return []
    rank_arguments = {
        name: np.split(full[name], ranks, axis) for name, axis in axes.items() if full.get(name) is not None
    }
    group = ReplicaGroup([list(range(ranks))])
    return [
        {"replica_group": group} | {name: values[rank].copy() for name, values in rank_arguments.items()}
        for rank in range(ranks)
    ]


MLP_AXES = {"w_gate": 1, "w_up": 1, "w_down": 0, "b_gate": 1, "b_up": 1}


def _feed_forward(
    tokens: int, hidden: int, inner: int, x: Any = np.float32, w: Any = np.float32
) -> dict[str, Any]:
    """Return arguments of mlp."""
    return {
        "x": normal(1, tokens, hidden, dtype=x),
        "norm_weight": normal(2, 1, hidden, dtype=w),
        "w_gate": weights(3, hidden, inner, w),
        "w_up": weights(4, hidden, inner, w),
        "w_down": weights(5, inner, hidden, w),
        "eps": EPS,
    }


def _mlp(target: str, tokens: int, hidden: int, inner: int, ranks: int = 1, w: Any = np.float32) -> Case:
    """Return a case of mlp, whose intermediate size is divided over the ranks."""
    full = _feed_forward(tokens, hidden, inner, w=w)
    return by_name("mlp", target, full, _cut(full, ranks, **MLP_AXES))


def _over_sequence(
    kernel: str, target: str, tokens: int, hidden: int, width: int, ranks: int, row_gated: bool = False
) -> Case:
    """Return a projection whose rows are divided over ranks, each of which has `width` columns or rows of weights."""
    full = _feed_forward(tokens, hidden, width * ranks)
    axes = {"x": 0}
    if kernel == "qkv_projection":
        full = {"x": full["x"], **_projection(hidden, 24, 8)}
    elif kernel == "mlp":
        full |= {"row_gate": normal(7, hidden, 1)} if row_gated else {}
        axes |= MLP_AXES
    else:
        o = normal(6, tokens, width * ranks)
        full = {"o": o, "w_o": full["w_down"], "residual": full["x"]}
        axes = {"o": 1, "w_o": 0, "residual": 0}
    rank_arguments = _cut(full, ranks, **axes)
    shards = tuple(
        arguments_of(kernel, **{**full, **changes, "sequence_ranks": ranks}) for changes in rank_arguments
    )
    arguments = arguments_of(kernel, **full)
    reference = getattr(nki_kernels, f"{kernel}_reference")
    plain, exact = reference(*copied(arguments)), reference(*(in_float64(values) for values in arguments))

    def judge(outputs: Outputs) -> None:
        if kernel == "qkv_projection":
            for output in outputs:
                for got, truth, same_dtype in zip(output, exact, plain):
                    compare(got, truth, same_dtype)
        else:
            compare(np.concatenate([output[0] for output in outputs]), exact, plain)

    return Case(kernel, target, shards, judge)


def _forms() -> list[Case]:
    """Return forms of mlp and output_projection that Llama models lack: biases, other activations, gates."""

    def form(
        target: str,
        tokens: int,
        hidden: int,
        inner: int,
        gated: bool,
        function: str,
        ranks: int = 1,
        dtype: Any = BF16,
    ) -> Case:
        full = _feed_forward(tokens, hidden, inner, dtype) | {
            "activation": function,
            "b_gate": normal(6, 1, inner),
            "b_up": normal(7, 1, inner),
            "b_down": normal(8, 1, hidden),
            "norm_bias": normal(9, 1, hidden),
            "norm_offset": 0.5,
        }
        full |= {} if gated else {"w_gate": None, "b_gate": None}
        return by_name("mlp", target, full, _cut(full, ranks, **MLP_AXES))

    plain = _feed_forward(300, 40, 72)
    bare = {"x": normal(3, 300, 40), "w_gate": normal(4, 40, 72), "w_up": normal(5, 40, 72)}
    return [
        form("trn2", 260, 40, 192, True, "gelu"),
        form("trn1", 5, 40, 160, False, "gelu_tanh"),
        form("trn2", 3, 24, 40, True, "gelu_tanh", dtype=np.float32),
        form("trn3", 1100, 24, 72, False, "relu"),
        form("trn2", 520, 24, 320, True, "silu", ranks=2),
        _mlp("trn2", 130, 513, 8),
        _mlp("trn2", 1100, 24, 320),
        _mlp("trn2", 1, 24, 72),
        _output("trn2", 300, 72, 40, bias=normal(4, 1, 40)),
        _output("trn2", 300, 72, 40, residual=False),
        _output("trn1", 5, 72, 40, residual=False, bias=normal(4, 1, 40)),
        by_name("mlp", "trn2", plain | bare | {"norm_weight": None, "w_down": normal(6, 72, 40)}),
        _bare_mlp("trn2", 5, 40, 72, 2),
        _row_gated("trn2", 5, 40, 72),
        _row_gated("trn1", 300, 1100, 40),
        _row_gated("trn2", 130, 600, 40, residual=False),
        _row_gated("trn2", 130, 600, 40, ranks=2),
        _output("trn2", 300, 72, 40, gate=normal(5, 300, 72)),
        by_name("qkv_projection", "trn2", _gated_heads(5)),
        _output("trn2", 300, 8, 5000, ranks=2),
        _output("trn2", 600, 1300, 2000, w=BF16),
        _mlp("trn1", 130, 8, 16384),
        _output("trn1", 3, 16384, 136),
    ]


def _bare_mlp(target: str, tokens: int, hidden: int, inner: int, ranks: int) -> Case:
    """Return an ungated mlp without a norm and without a residual, divided over ranks."""
    full = _feed_forward(tokens, hidden, inner) | {"activation": "relu", "residual": False}
    full |= {"w_gate": None, "norm_weight": None}
    return by_name("mlp", target, full, _cut(full, ranks, w_up=1, w_down=0))


def _row_gated(
    target: str, tokens: int, hidden: int, inner: int, residual: bool = True, ranks: int = 1
) -> Case:
    """Return an mlp whose result is multiplied by a gate per row."""
    full = _feed_forward(tokens, hidden, inner) | {"residual": residual, "row_gate": weights(6, hidden, 1)}
    return by_name("mlp", target, full, _cut(full, ranks, **MLP_AXES))


def _gated_heads(tokens: int) -> dict[str, Any]:
    """Return the arguments of qkv_projection with queries, keys, values, and gates as wide as the queries."""
    weight = weights(3, 24, 16 + 8 + 8 + 16)
    return {"x": normal(1, tokens, 24), **_projection(24, 16, 8), "w_qkv": weight, "gate_size": 16}


def projections() -> list[Case]:
    """Return cases of the three kernels at sizes around their tiles and banks, on one and on two ranks."""
    return [
        _qkv("trn2", 5, 172, 96, 24, w=BF16),
        _qkv("trn1", 130, 72, 40, 8),
        _qkv("trn3", 5, 40, 24, 8, BF16, BF16),
        _qkv("trn2", 520, 24, 500, 70),
        _qkv("trn1", 512, 8, 16, 8),
        _qkv("trn1", 513, 8, 16, 8),
        _qkv("trn2", 3, 8, 2032, 8),
        _qkv("trn2", 3, 8, 2048, 8),
        _qkv("trn3", 3, 8, 2047, 1),
        _qkv_heads("trn2", 5, 173, "rope", "q_norm", "k_norm", "offset"),
        _qkv_heads("trn3", 130, 1418, "rope", "bias"),
        _qkv_heads("trn2", 130, 172, "rope", "bias", "norm_bias"),
        _qkv_heads("trn1", 130, 300, "rope", "bias", "norm_bias", dtype=BF16),
        _qkv_heads("trn2", 5, 300, "bias", "norm_bias", "k_norm"),
        _qkv_heads("trn2", 300, 24, "norm_bias"),
        _qkv_heads("trn3", 130, 520, "bias", "no norm"),
        _qkv_heads("trn2", 5, 24, "no norm"),
        _qkv_heads("trn2", 5, 24, "rope", "q_norm", "k_norm", heads=100, depth=24),
        _qkv_heads("trn2", 5, 24, "rope", "q_norm", "v_norm"),
        _qkv_heads("trn1", 130, 24, "v_norm", heads=20, depth=200),
        _qkv("trn2", 5, 172, 96, 0),
        _output("trn2", 130, 72, 172),
        _output("trn1", 5, 72, 40, ranks=2),
        _output("trn1", 520, 24, 530, w=BF16),
        _output("trn3", 130, 48, 40, ranks=2, w=BF16),
        _output("trn2", 512, 8, 16),
        _output("trn2", 513, 8, 16),
        _output("trn1", 3, 8, 2048),
        _output("trn1", 3, 8, 2049),
        _output("trn2", 128, 8, 16, ranks=2),
        _output("trn2", 129, 8, 16, ranks=2),
        _mlp("trn1", 512, 8, 16),
        _mlp("trn1", 513, 8, 16),
        _mlp("trn2", 3, 8, 2048),
        _mlp("trn2", 3, 8, 2049),
        _mlp("trn2", 130, 72, 172, w=BF16),
        _mlp("trn1", 5, 40, 72, ranks=2),
        _mlp("trn2", 3, 24, 2200),
        _mlp("trn3", 520, 24, 530),
        _over_sequence("qkv_projection", "trn2", 1100, 24, 20, ranks=2),
        _over_sequence("mlp", "trn2", 1028, 24, 16, ranks=4, row_gated=True),
        _over_sequence("mlp", "trn2", 381, 24, 16, ranks=3, row_gated=True),
        _over_sequence("qkv_projection", "trn3", 129, 24, 20, ranks=3),
        _over_sequence("qkv_projection", "trn2", 6, 24, 20, ranks=2),
        _over_sequence("mlp", "trn2", 1100, 24, 16, ranks=2),
        _over_sequence("mlp", "trn3", 129, 24, 16, ranks=3),
        _over_sequence("output_projection", "trn2", 264, 24, 16, ranks=2),
        _over_sequence("output_projection", "trn1", 129, 24, 16, ranks=3),
        two_cores(_mlp("trn2", 3, 40, 300)),
        two_cores(_mlp("trn3", 130, 40, 24, ranks=2)),
        two_cores(_output("trn2", 3, 24, 520)),
        two_cores(_qkv("trn2", 3, 24, 48, 8)),
        *_forms(),
    ]
