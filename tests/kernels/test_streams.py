"""The instruction stream of a kernel: the same twice, and short enough for a decode step of a small model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import copied, in_order, normal
from tests.kernels.test_attention_decode import step
from tests.kernels.test_attention_prefill import continued

HIDDEN, INNER, HEADS, KV_HEADS, DEPTH, POSITIONS, VOCABULARY = 256, 512, 4, 2, 64, 256, 4096
Q, KV = HEADS * DEPTH, KV_HEADS * DEPTH
EPS, SCALE = 1e-5, DEPTH**-0.5


def layer(tokens: int) -> dict[str, tuple[Any, ...]]:
    """Return the kernels of one layer of a small Llama with their arguments."""
    x, norm = normal(1, tokens, HIDDEN), normal(2, 1, HIDDEN)
    q, k, v = normal(3, tokens, Q), normal(4, tokens, KV), normal(5, tokens, KV)
    cos, sin = normal(6, POSITIONS, DEPTH // 2), normal(7, POSITIONS, DEPTH // 2)
    positions = np.arange(tokens, dtype=np.int32)[:, None]
    cache = normal(8, 1, KV_HEADS, DEPTH, POSITIONS), normal(9, 1, KV_HEADS, POSITIONS, DEPTH)
    wide = normal(10, HIDDEN, INNER), normal(11, HIDDEN, INNER), normal(12, INNER, HIDDEN)
    calls = {
        "qkv_projection": in_order(
            kernels.qkv_projection,
            x=x,
            norm_weight=norm,
            w_qkv=normal(13, HIDDEN, Q + 2 * KV),
            eps=EPS,
            q_size=Q,
            kv_size=KV,
        ),
        "rope": (q, positions, cos, sin, HEADS),
        "output_projection": (q, normal(14, Q, HIDDEN), x),
        "mlp": in_order(
            kernels.mlp, x=x, norm_weight=norm, w_gate=wide[0], w_up=wide[1], w_down=wide[2], eps=EPS
        ),
        "attention_prefill": (q, *cache, SCALE, k, v),
    }
    if tokens == 1:
        calls["attention_decode"] = (q, *cache, positions, SCALE, k, v)
        del calls["attention_prefill"]
    return calls


def stream(name: str, arguments: tuple[Any, ...], mode: simulate.Mode = simulate.Mode.eager) -> Any:
    launch = simulate.World("trn1").launch(getattr(kernels, name), [(copied(arguments), {})], mode=mode)
    return launch.streams[0]


@pytest.mark.parametrize("name", sorted({**layer(1), **layer(2)}))
def test_the_same_twice_and_without_numbers(name: str) -> None:
    arguments = {**layer(130), **layer(1)}[name]
    first = stream(name, arguments).text()
    assert stream(name, arguments).text() == first
    assert stream(name, arguments, simulate.Mode.dry).text() == first


def test_a_decode_step_stays_under_150_instructions_per_layer() -> None:
    calls = layer(1)
    counts = {name: len(stream(name, arguments)) for name, arguments in calls.items()}
    assert sum(counts.values()) + counts["rope"] < 150, counts


ROWS = normal(1, 1, HIDDEN), normal(2, 1, HIDDEN), normal(3, HIDDEN, VOCABULARY), EPS, 8


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("lm_head", [(*ROWS, np.int32([[first]])) for first in (0, 4096)]),
        ("attention_decode", [step(firsts, positions=256, half=8) for firsts in ((0, 0, 0), (100, 3, 255))]),
        (
            "attention_decode",
            [
                step(firsts, positions=128, block=16, shared=shared)
                for firsts, shared in (((0, 3), 0), ((100, 70), 2))
            ],
        ),
        ("attention_prefill", [continued(40, valid, page=16) for valid in ((0, 5), (100, 128))]),
    ],
)
def test_offsets_positions_and_pages_do_not_change_the_stream(
    name: str, launches: list[tuple[Any, ...]]
) -> None:
    assert len({stream(name, arguments).text() for arguments in launches}) == 1
