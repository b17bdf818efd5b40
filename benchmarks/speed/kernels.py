"""Wall time of simulated kernels against the same work in plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import nki_kernels
import simulate
from benchmarks.speed.measure import SPIN_SECONDS, Row, against

_RNG = np.random.default_rng(0)


def _floats(*shape: int) -> np.ndarray:
    """Return random float32 numbers."""
    return _RNG.standard_normal(shape, np.float32)


def _narrow(*shape: int) -> np.ndarray:
    """Return random bfloat16 numbers."""
    return _floats(*shape).astype(ml_dtypes.bfloat16)


def rows() -> Iterator[Row]:
    """Yield the times of matmuls of 1024 and 2048, and of each kernel of `layer`."""
    for size in (1024, 2048):
        a, b = _narrow(size, size), _narrow(size, size)
        wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
        yield against(
            f"matmul {size}x{size}x{size}, bf16, eager",
            "numpy float32 A @ B",
            launcher("matmul", {"a": a, "b": b}, simulate.Mode.eager),
            lambda: wide_a @ wide_b,  # noqa: B023  (called before the next size)
            pause=SPIN_SECONDS,
        )
    for name, arguments in layer():
        yield from _against_reference(name, arguments)


def layer() -> list[tuple[str, dict[str, Any]]]:
    """Return (kernel, arguments by name) for each kernel of a layer like that of a 1B Llama, shrunk to 128 tokens."""
    tokens, hidden, heads, kv_heads, size, inner, length = 128, 512, 8, 4, 64, 1024, 256
    x, norm = _floats(tokens, hidden), _floats(1, hidden)
    q_width, kv_width = heads * size, kv_heads * size
    w_qkv, w_o = _narrow(hidden, q_width + 2 * kv_width), _narrow(q_width, hidden)
    w_gate, w_up, w_down = _narrow(hidden, inner), _narrow(hidden, inner), _narrow(inner, hidden)
    head, table = _narrow(hidden, 4096), _narrow(4096, hidden)
    ids = _RNG.integers(0, 4096, (tokens, 1)).astype(np.int32)
    positions = np.arange(tokens, dtype=np.int32)[:, None]
    angles = _floats(length, size // 2)
    q, k, v = _floats(tokens, q_width), _floats(tokens, kv_width), _floats(tokens, kv_width)
    caches = {
        "k_cache": np.zeros((1, kv_heads, size, length), np.float32),
        "v_cache": np.zeros((1, kv_heads, length, size), np.float32),
    }
    last, first_id = np.array([[tokens]], np.int32), np.zeros((1, 1), np.int32)
    return [
        ("embedding", dict(ids=ids, table=table)),
        ("rmsnorm", dict(x=x, weight=norm, eps=1e-5)),
        (
            "qkv_projection",
            dict(x=x, norm_weight=norm, w_qkv=w_qkv, eps=1e-5, q_size=q_width, kv_size=kv_width),
        ),
        ("rope", dict(x=q, positions=positions, cos=np.cos(angles), sin=np.sin(angles), heads=heads)),
        ("attention_prefill", dict(q=q, k=k, v=v, **caches, scale=size**-0.5)),
        (
            "attention_decode",
            dict(q=q[:1], k=k[:1], v=v[:1], **caches, positions=last, scale=size**-0.5),
        ),
        ("output_projection", dict(o=q, w_o=w_o, residual=x)),
        ("mlp", dict(x=x, norm_weight=norm, w_gate=w_gate, w_up=w_up, w_down=w_down, eps=1e-5)),
        ("lm_head", dict(x=x[:1], norm_weight=norm, w_head=head, eps=1e-5, top_k=8, vocab_offset=first_id)),
    ]


def _against_reference(name: str, arguments: dict[str, Any]) -> Iterator[Row]:
    """Yield a kernel's time eager and replayed, with the ratio to its numpy reference."""
    reference: Callable[..., Any] = getattr(nki_kernels, f"{name}_reference")
    for how, mode in (("eager", simulate.Mode.eager), ("replayed", simulate.Mode.replay)):
        yield against(
            f"{name}, {how}",
            f"{name}_reference",
            launcher(name, arguments, mode),
            lambda: reference(**arguments),
        )


def launcher(name: str, arguments: dict[str, Any], mode: simulate.Mode) -> Callable[[], Any]:
    """Return a function that launches a shipped kernel on one rank in a mode."""
    kernel: Callable[..., Any] = getattr(nki_kernels, name)
    world = simulate.World()
    return lambda: world.launch(kernel, [((), arguments)], mode=mode)
