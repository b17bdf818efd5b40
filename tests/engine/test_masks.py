"""Masks beside the steps: a slow one holds its own request only, and ends it when it takes too long."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from model.engine import Engine, RequestOutput, SamplingParams, StructuredOutputsParams
from model.engine.grammars import CompiledGrammar, GrammarLimits, Grammars, GrammarsFull
from model.errors import ModelError
from model.workers.launch import TaskSource
from tests.engine.paged_text import VOCABULARY
from tests.engine.text_engine import END, OPTIONS, Always, run, text_engine

LIMIT = 8.0
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FORM = replace(PARAMS, structured_outputs=StructuredOutputsParams(regex="x"))


@dataclass
class Matcher:
    """A matcher that allows all tokens, and whose masks wait for a gate from a number of tokens on.

    As llguidance's, it must be left alone while its mask is computed.
    """

    gate: threading.Event
    slow_from: int
    taken: list[int] = field(default_factory=list)
    borrowed: threading.Event = field(default_factory=threading.Event)

    def deep_copy(self) -> Matcher:
        assert not self.borrowed.is_set(), "Already borrowed"
        return Matcher(self.gate, self.slow_from, [*self.taken])

    def consume_token(self, token: int) -> bool:
        assert not self.borrowed.is_set(), "Already borrowed"
        self.taken.append(token)
        return True

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False


class Compiler:
    """A compiler of texts such as "3", the number of tokens behind which masks wait for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def compile(self, text: str) -> Matcher:
        return Matcher(self.gate, int(text))

    def mask(self, matcher: Matcher) -> np.ndarray:
        matcher.borrowed.set()
        if len(matcher.taken) >= matcher.slow_from:
            assert matcher.gate.wait(60), "the gate stayed closed"
        matcher.borrowed.clear()
        return np.ones(VOCABULARY, bool)


class Clocked:
    """An engine with such a compiler, and a clock that the test sets."""

    def __init__(self, limits: GrammarLimits, proposer: Always | None = None) -> None:
        self.now = 0.0
        self.compiler = Compiler()
        options = OPTIONS if proposer is None else replace(OPTIONS, speculative_tokens=2)
        self.engine: Engine = text_engine(options, proposer=proposer)
        source = TaskSource("no:tasks", ())
        self.grammars = Grammars(str, VOCABULARY, (END,), limits, source, lambda: self.now)
        self.grammars._compiler = self.compiler  # type: ignore[assignment]
        self.engine.grammars = self.grammars

    def grammar(
        self, text: str, params: StructuredOutputsParams | None = None, size: int = 0
    ) -> CompiledGrammar:
        """Compile a grammar in the helper thread."""
        call = self.grammars.submit(params or StructuredOutputsParams(regex=text), text, size)
        call.exception(60)
        grammar: CompiledGrammar = call.result()
        return grammar

    def submit(self, id: str, slow_from: int | None) -> RequestOutput:
        """Submit a request with such a form, or without one."""
        if slow_from is None:
            return self.engine.submit(id, [5, 6, 7], PARAMS)
        return self.engine.submit(id, [5, 6, 7], FORM, grammar=self.grammar(str(slow_from)))

    def steps(self, count: int) -> None:
        """Compute some steps."""
        for _ in range(count):
            self.engine.step()


def count(output: RequestOutput) -> int:
    """Count the tokens of a request."""
    return len(output.outputs[0].token_ids)


@pytest.fixture
def clocked() -> Clocked:
    """Return an engine whose masks may take 8 seconds."""
    return Clocked(GrammarLimits(mask_seconds=LIMIT))


def test_a_slow_mask_leaves_other_requests_their_steps(clocked: Clocked) -> None:
    slow, plain = clocked.submit("slow", 2), clocked.submit("plain", None)
    clocked.steps(8)
    assert (count(slow), count(plain)) == (2, 8)
    clocked.compiler.gate.set()
    run(clocked.engine)
    assert count(slow) == count(plain) == 12
    assert slow.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(("seconds", "ends"), [(LIMIT - 1, False), (LIMIT, False), (LIMIT + 1, True)])
def test_a_mask_over_its_limit_ends_its_own_request(clocked: Clocked, seconds: float, ends: bool) -> None:
    slow, plain = clocked.submit("slow", 2), clocked.submit("plain", None)
    clocked.steps(4)
    clocked.now += seconds
    clocked.steps(2)
    assert slow.finished is ends
    assert count(plain) == 6
    if ends:
        assert slow.outputs[0].finish_reason == "error"
        assert "a mask takes more than 8 seconds" in str(slow.outputs[0].stop_reason)
    other = clocked.submit("other", 99)  # a thread is left for its masks
    clocked.steps(3)
    assert count(other) == 3
    clocked.compiler.gate.set()
    run(clocked.engine)
    assert (count(slow), count(plain), count(other)) == (2 if ends else 12, 12, 12)
    assert clocked.engine.scheduler.cache.free == clocked.engine.scheduler.cache.count


def test_a_step_without_a_ready_request_computes_nothing(clocked: Clocked) -> None:
    slow = clocked.submit("slow", 1)
    clocked.steps(1)
    assert clocked.engine.step() == [] and clocked.engine.busy
    clocked.engine.cancel("slow")
    assert slow.finished and not clocked.engine.busy
    clocked.compiler.gate.set()


@pytest.mark.slow
def test_drafts_behind_slow_masks_are_not_verified_and_change_no_token() -> None:
    outputs = []
    for slow_from in (99, 4):
        clocked = Clocked(GrammarLimits(mask_seconds=LIMIT), Always(3, 4))
        output = clocked.submit("drafts", slow_from)
        clocked.steps(5)
        clocked.compiler.gate.set()
        run(clocked.engine)
        outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 12


@pytest.mark.parametrize("method", ["accept", "for_drafts"])
def test_a_matcher_is_left_alone_while_its_mask_is_computed(clocked: Clocked, method: str) -> None:
    """Several tokens of one step are accepted one behind another, and a mask takes longer than the time between."""
    constraint = clocked.grammars.create_constraint(clocked.grammar("1"))
    constraint.accept(3)
    assert constraint._matcher.borrowed.wait(60)
    threading.Timer(0.05, clocked.compiler.gate.set).start()
    if method == "accept":
        assert constraint.accept(4) and constraint._matcher.taken == [3, 4]
    else:
        assert constraint.for_drafts()._matcher.taken == [3]


def test_masks_that_take_too_long_leave_threads_for_others() -> None:
    """There are two threads for masks."""
    clocked = Clocked(GrammarLimits(mask_seconds=0.05))
    for _ in range(2):
        slow = clocked.grammars.create_constraint(clocked.grammar("1"))
        assert slow.accept(3)
        with pytest.raises(ModelError, match=r"a mask takes more than 0\.05 seconds"):
            slow.allowed()
    clocked.grammars.limits = GrammarLimits(mask_seconds=60)
    other = clocked.grammars.create_constraint(clocked.grammar("99"))
    assert other.accept(3) and other.allowed().all()
    clocked.compiler.gate.set()


def forms(count: int) -> list[StructuredOutputsParams]:
    """Return parameters of different structured outputs."""
    return [StructuredOutputsParams(regex=str(number)) for number in range(count)]


@pytest.mark.parametrize(("compiled", "forgotten"), [(1, 0), (2, 0), (3, 1)])
def test_the_cache_keeps_as_many_grammars_as_it_may(compiled: int, forgotten: int) -> None:
    clocked = Clocked(GrammarLimits(cached=2))
    requested_forms = forms(compiled)
    for form in requested_forms:
        clocked.grammar("99", form)
    assert [clocked.grammars.find(form) is None for form in requested_forms] == [True] * forgotten + [
        False
    ] * (compiled - forgotten)


def test_the_cache_forgets_what_was_not_used_for_longest_and_knows_content() -> None:
    clocked = Clocked(GrammarLimits(cached=2))
    first, second, third = forms(3)
    kept = clocked.grammar("99", first)
    clocked.grammar("99", second)
    assert clocked.grammars.find(StructuredOutputsParams(regex="0")) is kept
    clocked.grammar("99", third)
    assert clocked.grammars.find(first) is kept and clocked.grammars.find(second) is None
    assert clocked.grammars.find(StructuredOutputsParams(grammar="0")) is None


@pytest.mark.parametrize(("mib", "is_kept"), [(3, True), (4, True), (5, False)])
def test_the_cache_keeps_no_more_memory_than_it_may(mib: int, is_kept: bool) -> None:
    clocked = Clocked(GrammarLimits(cached_mib=4))
    (form,) = forms(1)
    clocked.grammar("99", form, mib << 20)
    assert (clocked.grammars.find(form) is not None) is is_kept


def test_grammars_in_use_take_no_more_memory_than_they_may() -> None:
    clocked = Clocked(GrammarLimits(cached_mib=8, total_mib=8))
    first, second, third = forms(3)
    in_use = clocked.grammar("99", first, 5 << 20)
    clocked.grammar("99", second, 3 << 20)
    with pytest.raises(GrammarsFull, match="the grammars in use take 5 of 8 MiB"):
        clocked.grammar("99", third, 4 << 20)
    clocked.grammar("99", third, 3 << 20)  # those that are only kept make room
    assert clocked.grammars.find(second) is None
    del in_use
    clocked.grammar("99", first, 8 << 20)


@pytest.mark.parametrize("field", ["grammar_cpu_seconds", "grammar_memory_mib", "mask_seconds"])
def test_limits_are_numbers_above_0(field: str) -> None:
    assert getattr(GrammarLimits(**{field: 1}), field) == 1
    for value in (0, -1, True, "2", None, float("nan")):
        with pytest.raises(ModelError, match=f"^{field} is "):
            GrammarLimits(**{field: value})
