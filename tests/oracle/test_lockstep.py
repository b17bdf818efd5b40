"""The simulator against the oracle, instruction by instruction, and the comparison itself against wrong oracles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from simulate.isa import INSTRUCTIONS as BOOK
from tests.deep import deep_except
from tests.oracle.instructions import INSTRUCTIONS, NOT_IN_THE_BOOK, WITHOUT_ORACLE
from tests.oracle.lockstep import TARGETS, Difference, Tally, run, stream
from tests.oracle.machine import Core, Operand, Unwritten
from tests.oracle.streams import DRAWS, indirect

PARTS = 8
"""The streams are tried in parts, of which `make test` takes the first; `make deep` tries a million instructions."""


@cache
def run_share(seed: int) -> Tally:
    """Compare the random instructions of one part."""
    return run(20_000 // PARTS, seed)


def test_every_instruction_of_the_book_has_an_oracle_or_a_reason() -> None:
    assert set(BOOK) == (set(INSTRUCTIONS) - set(NOT_IN_THE_BOOK)) | set(WITHOUT_ORACLE)
    assert not set(INSTRUCTIONS) & set(WITHOUT_ORACLE)
    assert set(DRAWS) == set(INSTRUCTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", deep_except(range(PARTS), PARTS))
def test_random_instructions_agree(seed: int) -> None:
    run_share(seed)


@pytest.mark.slow
def test_draws_reach_every_instruction_of_the_oracle() -> None:
    assert set(run_share(0).compared) == set(INSTRUCTIONS) | {"fori_loop", "while_loop"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*indirect.GATHERED, "dma_copy"])
def test_draws_gather_and_scatter_by_indirect(name: str) -> None:
    tally = run(180, 3, ("trn3",), only=frozenset({name}))
    assert tally.scattered[name] > 0
    assert (tally.gathered[name] > 0) == (name != "nc_matmul_mx")


@pytest.mark.slow
def test_few_drawn_instructions_are_refused() -> None:
    """Refusals are drawn on purpose, by unwritten operands and indices out of range, and must stay the exception."""
    assert 0 < sum(run_share(0).refused.values()) < run_share(0).instructions / 10


# -- wrong oracles -------------------------------------------------------------------------------------------------


def _one_more(core: Core, dst: Operand, data: Operand) -> None:
    INSTRUCTIONS["reciprocal"](core, dst, data)
    core.write_bits(dst, core.bits(dst) ^ 1)


def _one_element_more(core: Core, dst: Operand, src: Operand, engine: str = "unknown") -> None:
    INSTRUCTIONS["tensor_copy"](core, dst, src)
    dst.memory.bytes[-1] ^= 1


def _reads_anything(core: Core, dst: Operand, src: Operand, engine: str = "unknown") -> None:
    with contextlib.suppress(Unwritten):
        INSTRUCTIONS["tensor_copy"](core, dst, src)


def _not_recorded(core: Core, dst: Operand, **operands: Any) -> None:
    INSTRUCTIONS["nc_matmul"](core, dst, **operands)
    dst.memory.state[dst.memory.state == 3] = 1


def _truncated(core: Core, dst: Operand, src: Operand, engine: str = "unknown") -> None:
    """Round towards zero where the simulator rounds to nearest."""
    if dst.format is src.format or not dst.format.is_integer:
        INSTRUCTIONS["tensor_copy"](core, dst, src)
    else:
        core.write(dst, np.trunc(core.matrix(src)))


def _forgets_the_sum(core: Core, dst: Operand, **operands: Any) -> None:
    before = core.scalar.values.copy()
    INSTRUCTIONS["activation"](core, dst, **operands)
    core.scalar.values[:] = before


def _off_by_one(core: Core, dst: str, src: str | int) -> None:
    INSTRUCTIONS["register_move"](core, dst, src)
    core.registers[dst] += 1


@pytest.mark.parametrize(
    ("name", "wrong", "difference"),
    [
        ("reciprocal", _one_more, "is"),
        ("tensor_copy", _one_element_more, "byte"),
        ("tensor_copy", _reads_anything, "it answered [NKW-UNWRITTEN]"),
        ("tensor_copy", _truncated, "byte"),
        ("nc_matmul", _not_recorded, "has state 3, not 1"),
        ("activation", _forgets_the_sum, "scalar accumulator"),
        ("register_move", _off_by_one, "register"),
    ],
)
def test_a_wrong_oracle_is_caught(name: str, wrong: Callable[..., None], difference: str) -> None:
    with pytest.raises(Difference) as caught:
        run(2_000, seed=0, oracle={**INSTRUCTIONS, name: wrong}, only=frozenset({name}))
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{name} on ") and difference in first


def test_a_difference_names_instruction_operands_seed_and_step() -> None:
    with pytest.raises(Difference) as caught:
        stream("trn2", 5, {**INSTRUCTIONS, "tensor_copy": _one_element_more}, only=frozenset({"tensor_copy"}))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("tensor_copy on trn2, stream 5, step ")
    assert [line.split(" = ")[0] for line in lines[1:]][:2] == ["  dst", "  src"]


def test_refuses_to_look_for_an_instruction_that_no_target_has() -> None:
    with pytest.raises(ValueError, match="trn1 can draw none of activate2"):
        run(10, 0, ("trn1",), only=frozenset({"activate2"}))
    assert run(10, 0, ("trn1", "trn3"), only=frozenset({"activate2"})).instructions >= 10


@pytest.mark.parametrize("target", TARGETS)
def test_streams_repeat(target: str) -> None:
    assert stream(target, 3).compared == stream(target, 3).compared
