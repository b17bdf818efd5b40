"""Core schedules drawn from seeds: correct kernels keep their bytes, and the others are reported."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from simulate.check import examine
from tests.faults.data import ramp

SEEDS = 64


def halves_swapped(x: Any, barrier: bool) -> Any:
    """Write each core's half to scratch space, and one half of the output from there."""
    core = nl.program_id(0)
    mine, peer_rows = nl.ds(core * 4, 4), nl.ds((1 - core) * 4, 4)
    scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.memset(clear := nl.ndarray((4, 4), dtype=nl.float32), value=1)
    nisa.dma_copy(dst=out[mine], src=clear)
    nisa.dma_copy(dst=scratch[mine], src=nl.load(x[mine]))
    if barrier:
        nisa.core_barrier(data=scratch, cores=(0, 1))
        nisa.dma_copy(dst=out[mine], src=nl.load(scratch[peer_rows]))
    else:
        nisa.dma_copy(dst=out[peer_rows], src=nl.load(scratch[mine]))
    return out


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_sixty_four_interleavings_of_a_right_kernel_agree(target: str) -> None:
    world = simulate.World(target, 1, 2)
    assert examine(lambda: world.launch(halves_swapped, [((ramp(8, 4), True), {})]), seeds=SEEDS) == []


def test_the_swapped_pair_is_named_and_the_report_repeats() -> None:
    world = simulate.World("trn2", 1, 2)

    def examine_orders() -> list[Any]:
        every = examine(lambda: world.launch(halves_swapped, [((ramp(8, 4), False), {})]), seeds=8)
        return [finding for finding in every if finding.code == "NKW-CORE-SCHEDULE"]

    findings = examine_orders()
    assert findings
    for finding in findings:
        assert {touch.core for touch in finding.touches} == {0, 1}
        assert {touch.tensor for touch in finding.touches} == {"out"}
    assert examine_orders() == findings


def test_ranks_that_share_python_state_are_found_and_others_not() -> None:
    taken: list[int] = []

    def numbered(x: Any, number: int | None) -> Any:
        index = len(taken) % 3 if number is None else number
        taken.append(index)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.tensor_scalar(dst=(tile := nl.load(x)), data=tile, op0=nl.add, operand0=float(index))
        nisa.dma_copy(dst=out, src=tile)
        return out

    world = simulate.World("trn1", 3)

    def codes(numbers: list[int | None]) -> set[str]:
        arguments = [((ramp(2, 2), number), {}) for number in numbers]
        return {finding.code for finding in examine(lambda: world.launch(numbered, arguments), seeds=4)}

    assert codes([None, None, None]) == {"NKW-CORE-SCHEDULE"}
    assert codes([0, 1, 2]) == set()


def test_a_launch_on_one_core_is_not_repeated() -> None:
    runs = []

    def kernel(x: Any) -> Any:
        runs.append(1)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=nl.load(x))
        return out

    assert examine(lambda: simulate.launch(kernel, [((ramp(2, 2),), {})]), seeds=4) == []
    assert len(runs) == 1


def test_repeated_launches_are_not_recorded_and_keep_the_arguments() -> None:
    def kernel(x: Any) -> Any:
        if nl.program_id(0) == 0:
            nisa.tensor_scalar(dst=(tile := nl.load(x)), data=tile, op0=nl.add, operand0=1.0)
            nisa.dma_copy(dst=x, src=tile)
        return x

    x = ramp(4, 4)
    with simulate.recorded() as launches:
        assert examine(lambda: simulate.launch(kernel, [((x,), {})], logical_core_size=2), seeds=4) == []
    assert len(launches) == 1
    assert np.array_equal(x, ramp(4, 4) + 1)


def test_an_argument_that_cannot_be_copied_is_refused_in_a_sentence() -> None:
    def kernel(x: Any, module: Any) -> Any:
        return x

    x = ramp(4, 4)
    world = simulate.World("trn2", 1, 2)
    (finding,) = examine(lambda: world.launch(kernel, [((x, np), {})]), seeds=1)
    assert finding.code == "NKW-CHECK-ARGUMENTS"
    assert finding.message == (
        "a launch cannot be repeated under other schedules, because an argument cannot be copied: cannot pickle "
        "'module' object; pass arrays and plain values, or 0 seeds"
    )
