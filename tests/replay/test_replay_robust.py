"""Replay where something else happens at the same time: an interruption at any line, or other threads."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import simulate
import simulate.replay
from simulate.replay import ReplayOptions
from simulate.world import process_replays

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

RUN = str(Path(simulate.replay.__file__).parent)


def kernel(x, w, rows):
    """Compute a product, a sum in place, rows taken by number, and a result."""
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    data, weights, row_numbers = nl.load(x), nl.load(w), nl.load(rows)
    product = nl.ndarray((x.shape[1], w.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=data, moving=weights)
    result = nl.ndarray(product.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=product)
    nisa.tensor_tensor(dst=data, data1=data, data2=data, op=nl.add)
    taken = nl.ndarray(x.shape, dtype=nl.float32)
    width = x.shape[1]
    nisa.dma_copy(dst=taken, src=x.ap([[width, x.shape[0]], [1, width]], vector_offset=row_numbers))
    nisa.tensor_tensor(dst=taken, data1=taken, data2=result, op=nl.add)
    nisa.dma_copy(dst=out, src=taken)
    nisa.dma_copy(dst=x, src=data)
    return out


WEIGHTS = [np.random.default_rng(n).integers(-4, 5, (8, 8)).astype(np.float32) for n in range(2)]
"""Of two models, which the launches of each have in common."""


def arguments(seed: int) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(seed)
    x = draw.integers(-4, 5, (8, 8)).astype(np.float32)
    return x, WEIGHTS[seed >= 5], draw.permutation(8)[:, None].astype(np.int32)


def expected(seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, w, rows = arguments(seed)
    return x[rows[:, 0]] + x.T @ w, 2 * x


def replayed(seed: int, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    inputs = arguments(seed)
    world = simulate.World("trn2", replay=ReplayOptions(exact=exact), replays=process_replays())
    out = world.launch(kernel, [(inputs, {})], mode=simulate.Mode.replay).outputs[0]
    return out, inputs[0]


def check(seed: int, exact: bool) -> None:
    for output, wanted in zip(replayed(seed, exact), expected(seed)):
        assert np.array_equal(output, wanted)


def interrupted_at(number: int, run: Callable[[], Any]) -> bool:
    """Run with a KeyboardInterrupt at the n-th line of the package; returns whether that line was reached."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(RUN):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_an_interruption_at_any_line_leaves_no_broken_program(cache, exact) -> None:
    """In recording, in making the program, in rewriting and in replaying: the launches after it are right."""
    for launches_before in (0, 1, 3):
        reached, number = True, 1
        while reached:
            cache.clear()
            for seed in range(launches_before):
                check(seed, exact)
            reached = interrupted_at(number, lambda: replayed(9, exact))
            for seed in range(5, 8):
                check(seed, exact)
            number += (
                1 if launches_before == 3 else 1 + number // 8
            )  # a step of recording is an instruction's
    assert cache.report.hits > 100


@pytest.mark.parametrize("exact", [False, True])
def test_threads_that_launch_the_same_kernel_get_their_own_results(cache, exact) -> None:
    failures: list[BaseException] = []

    def launch_often(first: int) -> None:
        try:
            for seed in range(first, first + 40):
                check(seed, exact)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=launch_often, args=(1000 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert cache.report.hits + cache.report.recorded == 160


@pytest.mark.parametrize("exact", [False, True])
def test_arrays_of_earlier_launches_are_let_go_on_request(cache, exact) -> None:
    world = simulate.World("trn2", replay=ReplayOptions(exact=exact), replays=process_replays())
    for _ in range(2):
        inputs = arguments(1)
        references = [weakref.ref(array) for array in inputs[::2]]
        out = world.launch(kernel, [(inputs, {})], mode=simulate.Mode.replay).outputs[0]
        references.append(weakref.ref(out.base))
        del inputs, out
    assert all(reference() is not None for reference in references)
    cache.release()
    assert [reference() for reference in references] == [None, None, None]
    for seed in (1, 7, 1):
        check(seed, exact)
    assert cache.report.hits == 4


@pytest.mark.parametrize("exact", [False, True])
def test_letting_go_in_the_middle_of_a_replay_waits_for_its_end(cache, exact, monkeypatch) -> None:
    """As the finalizer of an earlier model does, which Python may run at any time."""
    check(1, exact)
    check(2, exact)
    program, *_ = cache.programs
    steps = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(RUN):
            return None
        if event == "line":
            cache.release()
            steps.append(program._external[0].storage.uncounted_host is None)
        return trace

    sys.settrace(trace)
    try:
        outputs = replayed(3, exact)
    finally:
        sys.settrace(None)
    assert len(steps) > 20 and all(np.array_equal(*pair) for pair in zip(outputs, expected(3)))
    assert program._external[0].storage.uncounted_host is None
    check(4, exact)


def test_letting_go_in_a_session_waits_for_the_end_of_the_outermost(cache) -> None:
    check(1, exact=False)
    check(2, exact=False)
    program, *_ = cache.programs
    storage = program._external[0].storage
    with cache.session():
        with cache.session():
            pass
        cache.release()
        assert storage.uncounted_host is not None
    assert storage.uncounted_host is None
