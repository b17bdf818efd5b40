"""Replayed launches against careful numpy: large shapes, blocks that fit the cache, no needless pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import nki_kernels
import simulate
from benchmarks.speed.measure import SPIN_SECONDS, Row, medians
from benchmarks.speed.rows import softmax
from simulate.replay import ReplayCache, ReplayOptions
from simulate.replay.fusion import speed

_RNG = np.random.default_rng(1)
_ROWS = 128  # of a block of careful numpy
_RUNS = 5


def rows() -> Iterator[Row]:
    """Yield the time of kernels replayed exactly, rewritten, and with torch, then the phases of an eager launch.

    torch is used only for kernels with bfloat16 arguments, if it is installed.
    """
    for size in (1024, 2048):
        a, b = (_floats(size, size).astype(ml_dtypes.bfloat16) for _ in range(2))
        wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
        yield from _ways(
            f"matmul {size}x{size}x{size}, bf16",
            "numpy float32 A @ B",
            nki_kernels.matmul,
            (a, b),
            lambda: wide_a @ wide_b,  # noqa: B023  (called before the next size)
        )
    x, weight = _floats(4096, 2048), _floats(1, 2048)
    yield from _ways(
        "rmsnorm (4096, 2048)",
        "careful numpy",
        nki_kernels.rmsnorm,
        (x, weight, 1e-5),
        lambda: _rmsnorm(x, weight),
    )
    yield from _ways("softmax (4096, 2048)", "careful numpy", softmax, (x,), lambda: _softmax(x))
    q, k, v = (_floats(2048, 128) for _ in range(3))
    caches = np.zeros((1, 1, 128, 2048), np.float32), np.zeros((1, 1, 2048, 128), np.float32)
    yield from _ways(
        "attention_prefill, 1 head, 2048 x 128, causal",
        "numpy over the whole score matrix",
        nki_kernels.attention_prefill,
        (q, *caches, 128**-0.5, k, v),
        lambda: _attention(q, k, v),
    )
    yield from _shares()


def _shares() -> Iterator[Row]:
    """Yield the time of each phase of an eager matmul, and of rewriting its program for replay, which happens once."""
    a, b = (_floats(1024, 1024).astype(ml_dtypes.bfloat16) for _ in range(2))

    replays = ReplayCache()

    def launch(mode: simulate.Mode, exact: bool = True) -> Callable[[], object]:
        world = simulate.World("trn2", replay=ReplayOptions(exact=exact), replays=replays)
        return lambda: world.launch(nki_kernels.matmul, [((a, b), {})], mode=mode)

    launch(simulate.Mode.replay)()
    eager, planned, numerics = medians(
        [launch(simulate.Mode.eager), launch(simulate.Mode.dry), launch(simulate.Mode.replay)],
        _RUNS,
        SPIN_SECONDS,
    )
    before = replays.report.seconds.get("rewriting", 0.0)
    launch(simulate.Mode.replay, exact=False)()
    once = replays.report.seconds["rewriting"] - before
    phases = (
        ("planning, placing, recording (a dry launch)", planned),
        ("numerics (an exact replay)", numerics),
        ("checks of what was written, and the rest", eager - planned - numerics),
        ("rewriting for replay, once", once),
    )
    for phase, seconds in phases:
        yield Row(f"matmul 1024, {phase}", "the whole eager launch", seconds * 1e3, "ms", seconds / eager)


def _ways(
    work: str, reference: str, kernel: Any, arguments: tuple[Any, ...], plain: Callable[[], object]
) -> Iterator[Row]:
    """Yield a row for each way of replaying a kernel, with the ratio to `plain`, which does the same in numpy."""
    ways = {"exact": ReplayOptions(exact=True), "rewritten": ReplayOptions()}
    narrow = sum(
        isinstance(argument, np.ndarray) and argument.dtype == ml_dtypes.bfloat16 for argument in arguments
    )
    if narrow and speed.is_torch_installed():
        ways["with torch"] = ReplayOptions(speed=True)
    actions: list[Callable[[], object]] = [plain]
    for options in ways.values():
        world = simulate.World("trn2", replay=options)
        actions.append(
            lambda world=world: world.launch(kernel, [(arguments, {})], mode=simulate.Mode.replay)  # type: ignore[misc]
        )
    for action in actions[1:]:
        action()  # the first launch is eager
    theirs, *mine = medians(actions, _RUNS, SPIN_SECONDS)
    for how, measured in zip(ways, mine):
        yield Row(f"{work}, replayed, {how}", reference, measured * 1e3, "ms", measured / theirs)


def _floats(*shape: int) -> np.ndarray:
    """Return random float32 numbers."""
    return _RNG.standard_normal(shape, np.float32)


def _rmsnorm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the RMSNorm of rows in blocks of _ROWS rows, without a pass over more memory than needed."""
    result = np.empty_like(x)
    for first in range(0, len(x), _ROWS):
        block = x[first : first + _ROWS]
        out = result[first : first + _ROWS]
        np.multiply(block, block, out=out)
        scale = 1 / np.sqrt(
            np.add.reduce(out, axis=1, keepdims=True) / np.float32(x.shape[1]) + np.float32(1e-5)
        )
        np.multiply(block, scale, out=out)
        np.multiply(out, weight, out=out)
    return result


def _softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax of rows in blocks of _ROWS rows, without a pass over more memory than needed."""
    result = np.empty_like(x)
    for first in range(0, len(x), _ROWS):
        block = x[first : first + _ROWS]
        out = result[first : first + _ROWS]
        np.subtract(block, np.maximum.reduce(block, axis=1, keepdims=True), out=out)
        np.exp(out, out=out)
        np.multiply(out, 1 / np.add.reduce(out, axis=1, keepdims=True), out=out)
    return result


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return causal attention of one head with the whole matrix of scores in memory."""
    scores = q @ k.T
    scores *= np.float32(q.shape[1] ** -0.5)
    scores[~np.tri(len(q), dtype=bool)] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores @ v
