"""Bodies of device loops: no finding where all iterations are equal, also nested or by condition."""

from __future__ import annotations

from collections.abc import Callable

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from simulate.check import examine
from tests.faults.data import copied_out


def codes(kernel: Callable[..., object]) -> list[str]:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    return [finding.code for finding in examine(lambda: nki.jit(kernel)(x, np.full((1, 1), 3, np.int32)))]


@pytest.mark.parametrize("counted", [False, True])
def test_nested_loops_with_tiles_of_their_own(counted: bool) -> None:
    def kernel(x, n):
        tile, count = nl.load(x), nl.load(n)
        rows = {"done": 0}
        bound = nisa.register_alloc()
        nisa.register_load(bound, count)

        def inner(j):
            one = nl.ndarray((8, 4), dtype=nl.float32)
            nisa.memset(dst=one, value=1.0)
            width = 1 + (rows["done"] > 4) if counted else 4
            nisa.tensor_tensor(dst=tile[:, 0:width], data1=tile[:, 0:width], data2=one[:, 0:width], op=nl.add)
            rows["done"] += 1

        def outer(i):
            nl.fori_loop(0, bound, inner)

        nl.fori_loop(0, 2, outer)
        return copied_out(tile)

    assert codes(kernel) == (["NKW-LOOP-CARRIED"] if counted else [])


@pytest.mark.parametrize("carries", [False, True])
def test_a_while_loop_whose_body_allocates_its_register(carries: bool) -> None:
    def kernel(x, n):
        tile, count = nl.load(x), nl.load(n)
        start = nisa.register_alloc()
        nisa.register_load(start, count)
        before = {}

        def body(reg):
            more = nl.ndarray((8, 4), dtype=nl.float32)
            nisa.tensor_copy(dst=more, src=tile)
            nisa.tensor_tensor(dst=tile, data1=tile, data2=before.get("tile", more), op=nl.add)
            if carries:
                before["tile"] = more
            nisa.tensor_scalar(dst=count, data=count, op0=nl.subtract, operand0=1)
            next_one = nisa.register_alloc()
            nisa.register_load(next_one, count)
            return next_one

        nl.while_loop(start, body)
        return copied_out(tile)

    assert set(codes(kernel)) == ({"NKW-LOOP-TILE", "NKW-LOOP-CARRIED"} if carries else set())


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_an_iteration_with_an_instruction_less_or_more_is_blamed(iterations: int) -> None:
    def kernel(x, n):
        tile, count = nl.load(x), nl.load(n)
        first = {"is": True}

        def body(i):
            if first["is"]:
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
            first["is"] = False

        nl.fori_loop(0, iterations, body)
        nisa.tensor_tensor(dst=count, data1=count, data2=count, op=nl.add)
        return copied_out(tile), copied_out(count)

    assert codes(kernel) == (["NKW-LOOP-CARRIED"] if iterations > 1 else [])
