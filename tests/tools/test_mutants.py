"""The campaign on a sample, and that it can tell a fault from an equivalent and a rule from a number."""

from __future__ import annotations

import ast
import json
import mmap
import sys
import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from nkw.errors import Unsupported
from tests.kernels.test_latent_attention import batch, expansion
from tools.mutants.__main__ import CAUGHT, MORTALITY, sampled
from tools.mutants.calls import Call, View
from tools.mutants.campaign import Result, run
from tools.mutants.cases import cases
from tools.mutants.cases.case import by_reference
from tools.mutants.equivalents import EQUIVALENTS, matches, reason
from tools.mutants.judge import Fate, Verdict, launched
from tools.mutants.log import same_calls
from tools.mutants.operators import mutants
from tools.mutants.source import FOLDER, MODULES, apply_mutant, file_of, guards, kernels, tree
from tools.mutants.table import as_json, caught_without_numbers, column, equivalent, mortality, table

every_mutant = cache(mutants)


def fates(*words: str) -> dict[str, Verdict]:
    """Run the mutants whose keys contain some words; the verdict of each by its key."""
    chosen = [mutant for mutant in every_mutant() if any(word in mutant.key for word in words)]
    assert len(chosen) >= len(words)
    return {result.mutant.key: result.verdict for result in run(chosen)}


def test_every_mutant_is_named_once_and_compiles() -> None:
    assert len({mutant.key for mutant in every_mutant()}) == len(every_mutant()) > 2000
    for mutant in sampled(every_mutant(), 40, seed=1):
        compile(apply_mutant(mutant), mutant.module, "exec")


@pytest.mark.slow
def test_the_sources_themselves_stay_as_they_are() -> None:
    before = {module: ast.dump(tree(module)) for module in MODULES}
    for mutant in sampled(every_mutant(), 40, seed=2):
        assert ast.dump(apply_mutant(mutant)) != before[mutant.module], mutant.key
    assert before == {module: ast.dump(tree(module)) for module in MODULES}


def test_references_and_guards_are_left_alone() -> None:
    touched = {mutant.function for mutant in every_mutant()}
    assert not [name for name in touched if name.endswith("_reference")]
    assert guards() >= {"check_arguments", "check_penalties", "check_tables", "expect_dims"}
    assert touched.isdisjoint(guards())
    assert "check_rope_positions" in touched  # returns a table's rows: only its name looks like a guard's
    assert {"load_keys", "store_prompt", "compute_piece_addresses"} < touched  # methods of caches
    assert touched.isdisjoint({"check", "check_prompts"})


@pytest.mark.deep
def test_a_sample_dies_and_what_breaks_a_rule_is_caught_without_numbers() -> None:
    results = run(sampled(every_mutant(), 40, seed=0))
    died, alive = mortality(results)
    caught, breaking = caught_without_numbers(results)
    assert died >= MORTALITY * alive, [r.mutant.key for r in results if column(r) == "survived"]
    assert breaking > 20
    assert caught >= CAUGHT * breaking
    assert [row["mutant"] for row in json.loads(as_json(results))] == [
        result.mutant.key for result in results
    ]
    assert "| all | 40 |" in table(results)


@pytest.mark.deep
def test_each_fate_has_its_mutant() -> None:
    known = fates(
        "embedding.embedding bound: range(0, tokens, PARTITIONS): tokens - 1",
        "top_k.gather_ranks group: all_gather replica_group: the order reversed",
        "top_k.gather_ranks rank: not on rank 0",
        "all_reduce.all_reduce drop: nisa.dma_copy(dst=total",
        "all_reduce.all_reduce duplicate: nisa.dma_copy(dst=total",
        "rope.rotate operator: op=nl.subtract -> nl.add",
    )
    assert {(v.fate, v.how) for k, v in known.items() if "tokens - 1" in k} == {
        (Fate.reported, "NKW-OUTPUT-PARTIAL")
    }
    assert {v.fate for k, v in known.items() if "not on rank 0" in k} == {Fate.refused}
    assert {v.fate for k, v in known.items() if "reversed" in k or "rope.rotate" in k} == {Fate.numbers}
    assert {(v.fate, v.how) for k, v in known.items() if "total" in k and "duplicate" in k} == {
        (Fate.equal, "repeated")
    }


@pytest.mark.deep
def test_the_cases_run_every_line_of_the_kernels() -> None:
    seen: set[tuple[str, int]] = set()

    def line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: Any, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(str(FOLDER)) else None

    before = sys.gettrace()
    threading.settrace(call)
    sys.settrace(call)
    try:
        for case in cases():
            if case.judge is not None:
                try:
                    launched(replace(case, judge=None))  # which lines run does not depend on values
                except Unsupported:  # but in loops over registers
                    launched(case)
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]
    missing = [
        f"{module}.py:{statement.lineno}"
        for module in MODULES
        for function, _ in kernels(module)
        for statement in _statements(function)
        if (str(file_of(module)), statement.lineno) not in seen
    ]
    assert missing == []


def _statements(function: Any) -> list[Any]:
    inner = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    return [
        node for node in inner if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def test_an_input_that_sizes_have_no_use_for_is_no_finding_and_another_one_is() -> None:
    """A prompt without a prefix reads no page; its tables of angles are as long as it."""
    inputs = expansion(batch([0], (3, 24, 8, 16, 12), 32, 20, block=16), 3)
    case = by_reference("latent_keys_values", "trn2", *inputs)

    def unused(*unread: str) -> list[str]:
        return [finding.message.split()[1] for finding in launched(replace(case, unread=unread))[1]]

    assert (unused(), unused("positions")) == (["block_tables", "positions"], ["block_tables"])
    assert (unused("block"), unused("block_tables", "positions")) == (["block_tables", "positions"], [])


def test_a_dtype_is_never_exchanged_for_itself() -> None:
    changes = [mutant.change.rsplit(" -> nl.", 1) for mutant in every_mutant() if mutant.operator == "dtype"]
    assert any(old.endswith("nl.bfloat16") for old, _ in changes)
    assert [old for old, new in changes if old.endswith(f"nl.{new}")] == []


@pytest.mark.deep
def test_every_pattern_of_an_equivalent_speaks_of_a_mutant() -> None:
    for patterns in EQUIVALENTS.values():
        for pattern in patterns:
            matching = [mutant.key for mutant in every_mutant() if matches(mutant.key, pattern)]
            assert 1 <= len(matching) <= 8, (pattern, matching)
    assert reason("rmsnorm.rmsnorm drop: nothing of the kind") is None


def test_an_equivalent_is_shown_or_argued_and_nothing_else() -> None:
    argued = next(
        m
        for m in every_mutant()
        if m.key == "embedding.gather_table_rows pattern: [[width, rows], [1, width]]: width + 1"
    )
    swap = next(m for m in every_mutant() if m.operator == "swap")
    bound = next(
        m
        for m in every_mutant()
        if m.key.startswith("matmul.multiply bound: range(0, total_rows, resident): total_rows + 1")
    )
    assert equivalent(Result(argued, Verdict(Fate.same)))
    assert equivalent(Result(argued, Verdict(Fate.numbers))) is None
    assert equivalent(Result(swap, Verdict(Fate.equal, "identical"))) == "identical"
    assert equivalent(Result(bound, Verdict(Fate.equal, "identical"))) is None
    assert equivalent(Result(bound, Verdict(Fate.equal, "reordered"))) == "reordered"


A, B, C = (("kernel", 1, 1), ("kernel", 2, 1), ("kernel", 3, 1))
S, T = (("kernel", 4, 1), ("kernel", 5, 1))
"""S and T lie in SBUF, the others in HBM, where results stay."""


def view(tile: Any, first: int = 0, columns: int = 4) -> View:
    steps = ((0, 1, 2), (1, 1, columns))
    return View(tile, (0, first), steps, "float32", tile in (A, B, C), is_dynamic=False)


def instruction(name: str, reads: tuple[Any, ...], writes: tuple[View, ...], memory: str = "sbuf") -> Call:
    stored = tuple(write.allocation for write in writes)
    arguments = tuple(
        ("tile", operand.allocation, (operand.steps, operand.starts, 0, operand.dtype), memory)
        for operand in (*map(view, reads), *writes)
    )
    accumulates = name == "nc_matmul"
    return Call(name, arguments, reads, stored, accumulates, tuple(map(view, reads)), writes)


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ("ab", "ab", "identical"),
        ("aab", "ab", "repeated"),
        ("uu", "u", None),  # reads what it writes
        ("mm", "m", None),  # accumulates
        ("cb", "bc", "reordered"),
        ("ac", "ca", None),  # a writes what c reads
        ("p", "a", "memory"),
        ("ab", "a", None),
        ("stst", "st", "values"),  # all done again
        ("sxt", "st", "values"),  # what x computes is not used
        ("xy", "st", "values"),  # by way of another tile
        ("slt", "lst", None),  # l and s overlap
        ("srt", "rst", "values"),  # r writes other columns of S
        ("svt", "st", None),  # one that t reads is overwritten by another value
        ("ost", "st", None),  # draws random numbers, before others that do
    ],
)
def test_calls_are_equal_only_where_the_data_cannot_tell(ours: str, theirs: str, word: str | None) -> None:
    book = {
        "a": instruction("tensor_copy", (B,), (view(A),)),
        "b": instruction("activation", (A,), (view(C),)),
        "c": instruction("reciprocal", (A,), (view(B),)),
        "u": instruction("tensor_scalar", (A,), (view(A),)),
        "m": instruction("nc_matmul", (B,), (view(A),)),
        "p": instruction("tensor_copy", (B,), (view(A),), memory="psum"),
        "s": instruction("tensor_copy", (B,), (view(S),)),
        "t": instruction("activation", (S,), (view(C),)),
        "x": instruction("tensor_copy", (B,), (view(T),)),
        "y": instruction("activation", (T,), (view(C),)),
        "l": instruction("memset", (), (view(S, 2),)),
        "r": instruction("memset", (), (view(S, 4),)),
        "v": instruction("memset", (), (view(S),)),
        "o": replace(instruction("rng", (), (view(A),)), is_ordered=True),
    }
    assert same_calls({0: [book[x] for x in ours]}, {0: [book[x] for x in theirs]}) == word


@pytest.mark.deep
def test_a_process_that_holds_much_address_space_still_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of memory counts from what the process has: test workers that have loaded torch map gigabytes."""
    reserved = mmap.mmap(-1, 4 << 30)  # mapped, never touched
    try:
        results = run(sampled([m for m in every_mutant() if "all_reduce" in m.key], 2, seed=0))
        assert all(result.verdict.fate is not Fate.limit for result in results)
    finally:
        reserved.close()
