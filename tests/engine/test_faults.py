"""A fault of one request ends that request alone; the others get the tokens and draws that they get without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from model.engine import (
    Batch,
    Engine,
    EngineLimits,
    Request,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerOptions,
)
from model.engine.faults import EngineFailed
from model.engine.speculation import NO_ROWS, Rows
from model.errors import ModelError
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer
from model.sampling import RowSampling, StepOutput
from model.state import PagePool, SlotPool
from tests.engine.paged_text import VOCABULARY, check_pages
from tests.engine.text_engine import END, LONGEST, OPTIONS, Always, TextSteps, tokens_of

Fault = Callable[[Batch], bool]


class Broken(Exception):
    """What a step raises."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(PRETRAINED, 4096)


class FaultySteps(TextSteps):
    """A model whose step raises where `fault` says so, after it has written pages and states or before."""

    def __init__(self, scheduler: Scheduler, fault: Fault, writes: bool, error: BaseException | None) -> None:
        super().__init__(scheduler.cache)
        self.fault, self.writes, self.error = fault, writes, error or Broken("what the model says")
        self.batches: list[list[str]] = []

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> dict[Request, list[StepOutput]]:
        self.batches.append([request.id for request in batch.chunks])
        fails = self.fault(batch)
        if fails and not self.writes:
            raise self.error
        answers = super().step(batch, rows)
        if fails:
            raise self.error
        return answers


def is_marked(batch: Batch) -> bool:
    return any(request.id.startswith("bad") for request in batch.chunks)


def is_marked_and_long(batch: Batch) -> bool:
    """Return whether a batch computes a marked request behind position 11, which decoding reaches."""
    return any(request.id.startswith("bad") and chunk.seq_len > 11 for request, chunk in batch.chunks.items())


def never(batch: Batch) -> bool:
    return False


KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "without prefix caching": {"options": replace(OPTIONS, prefix_caching=False)},
    "without chunks": {"options": replace(OPTIONS, chunked_prefill=False, max_num_batched_tokens=64)},
    "static batches": {"options": replace(OPTIONS, continuous=False)},
    "few pages": {"pages": 12},
    "windows": {"windows": (None, 5)},
    "recurrent": {"slots": 8},
    "recurrent with few slots": {"slots": 3, "windows": (None, 5)},
    "drafts": {"options": replace(OPTIONS, speculative_tokens=3), "proposer": Always(7, 7, 8)},
    "recurrent with drafts": {
        "options": replace(OPTIONS, speculative_tokens=2),
        "proposer": Always(7, 7),
        "slots": 12,
    },
}


def engine_of(
    fault: Fault = never,
    writes: bool = False,
    error: BaseException | None = None,
    options: SchedulerOptions = OPTIONS,
    pages: int = 40,
    windows: Sequence[int | None] = (None,),
    slots: int = 0,
    proposer: Any = None,
    isolates: bool = True,
) -> tuple[Engine, FaultySteps]:
    pools = [PagePool(pages, 4, window) for window in windows]
    scheduler = Scheduler(pools, options, SlotPool(slots, 4, 8) if slots else None)
    steps, limits = FaultySteps(scheduler, fault, writes, error), EngineLimits((END,), VOCABULARY, LONGEST)
    return Engine(steps, scheduler, tokenizer(), limits, lambda: 0.0, proposer, isolates=isolates), steps


PARAMS = (
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, n=2, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, max_tokens=8, top_k=9, presence_penalty=1.0),
    SamplingParams(temperature=0.8, max_tokens=10, logprobs=2, top_p=0.9, ignore_eos=True),
)
PROMPTS = ([1, 2, 3], [1, 2, 3, 4, 5, 9], [*range(20)], [7] * 9)


def submit(engine: Engine, names: Sequence[str]) -> dict[str, RequestOutput]:
    """Submit requests whose numbers and seeds do not depend on marked requests; return their outputs."""
    return {
        name: engine.submit(name, PROMPTS[number % 4], PARAMS[number % 4])
        for number, name in enumerate(names)
    }


def run(engine: Engine) -> None:
    """Step until all requests have ended; references are exact after each step."""
    for _ in range(2000):
        if not engine.busy:
            assert engine.scheduler.cache.free == engine.scheduler.cache.count
            return
        engine.step()
        check_pages(engine.scheduler)  # type: ignore[arg-type]
    raise AssertionError("the engine does not end")


@cache
def wanted(names: tuple[str, ...], engine_kind: str = "attention") -> dict[str, list[list[int]]]:
    """Return the tokens that requests get without a fault."""
    engine, _ = engine_of(**KINDS[engine_kind])
    outputs = submit(engine, names)
    run(engine)
    return {name: tokens_of(output) for name, output in outputs.items()}


def check_answers(outputs: dict[str, RequestOutput], expected: dict[str, list[list[int]]]) -> None:
    """Check that marked requests have their error and other requests their tokens."""
    for name, output in outputs.items():
        reasons = {output.finish_reason for output in output.outputs}
        if name.startswith("bad"):
            assert "error" in reasons and isinstance(output.fault, Broken), name
            assert "what the model says" in str(output.outputs[-1].stop_reason)
        else:
            assert (tokens_of(output), output.fault) == (expected[name], None), name
            assert reasons <= {"stop", "length"}


NAMES = ("a", "b", "bad", "c", "d", "e")


@pytest.mark.parametrize("writes", [False, True], ids=["before writes", "after writes"])
@pytest.mark.parametrize("fault", [is_marked, is_marked_and_long])
@pytest.mark.parametrize("engine_kind", KINDS)
def test_the_others_get_what_they_get_without_the_faulty_request(
    engine_kind: str, fault: Fault, writes: bool
) -> None:
    engine, _ = engine_of(fault, writes, **KINDS[engine_kind])
    outputs = submit(engine, NAMES)
    run(engine)
    check_answers(outputs, wanted(NAMES, engine_kind))
    assert engine.failure is None


@pytest.mark.parametrize("first_bad", range(6))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_faulty_requests_at_any_place(first_bad: int, count: int) -> None:
    names = tuple(f"bad{n}" if first_bad <= n < first_bad + count else f"good{n}" for n in range(6))
    engine, _ = engine_of(is_marked, writes=True)
    outputs = submit(engine, names)
    run(engine)
    check_answers(outputs, wanted(names))


def test_every_request_faulty_leaves_an_engine_that_computes() -> None:
    """A request of the engine tells that the device is well."""
    engine, steps = engine_of(is_marked)
    outputs = submit(engine, ("bad0", "bad1", "bad2"))
    run(engine)
    check_answers(outputs, {})
    assert steps.batches[-1] == ["probe"]
    after = submit(engine, ("a", "b"))
    run(engine)
    assert tokens_of(after["a"])[0] == wanted(("a", "b"))["a"][0]


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_a_step_that_always_raises_fails_the_engine(names: Sequence[str]) -> None:
    engine, _ = engine_of(lambda batch: True)
    submit(engine, names)
    with pytest.raises(EngineFailed, match="Broken: what the model says; start a new one") as failed:
        run(engine)
    assert isinstance(failed.value.__cause__, Broken)
    check_failed(engine)


def check_failed(engine: Engine) -> None:
    """Check that a failed engine holds nothing, is not busy, and takes nothing."""
    assert engine.failure is not None
    assert engine.scheduler.cache.free == engine.scheduler.cache.count
    assert not (engine.busy or engine.scheduler.running or engine.scheduler.waiting)
    with pytest.raises(EngineFailed):
        engine.submit("later", [1], PARAMS[0])
    with pytest.raises(EngineFailed):
        engine.step()


class BrokenProposer:
    """A draft model that fails."""

    def propose(self, batch: Batch) -> Any:
        raise Broken


@pytest.mark.parametrize(
    "arguments",
    [
        {"fault": is_marked, "error": MemoryError()},
        {"fault": is_marked, "isolates": False},
        {"options": replace(OPTIONS, speculative_tokens=2), "proposer": BrokenProposer()},
    ],
    ids=["memory", "ranks in other processes", "draft model"],
)
def test_a_fault_of_no_request_fails_the_engine(arguments: dict[str, Any]) -> None:
    engine, _ = engine_of(**arguments)
    submit(engine, NAMES)
    with pytest.raises(EngineFailed):
        run(engine)
    check_failed(engine)


def test_a_fault_that_does_not_come_again_changes_no_token() -> None:
    left = [3]

    def fails(batch: Batch) -> bool:
        left[0] -= 1
        return left[0] == 0

    names = ("a", "b", "c", "d")
    engine, _ = engine_of(fails, writes=True)
    outputs = submit(engine, names)
    run(engine)
    check_answers(outputs, wanted(names))
    assert sum(output.metrics.num_preemptions > 0 for output in outputs.values()) > 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda batch: {"a", "c"} <= {request.id for request in batch.chunks},
        lambda batch: len(batch.chunks) > 2,
        lambda batch: len({request.id[0] for request in batch.chunks}) > 1,
    ],
    ids=["two certain requests", "more than two requests", "any two requests"],
)
@pytest.mark.parametrize("engine_kind", ["attention", "without prefix caching", "recurrent", "few pages"])
def test_a_fault_of_no_single_request_ends_none(fault: Fault, engine_kind: str) -> None:
    """Requests that fail together only run apart, to their ends."""
    names = ("a", "b", "c", "d")
    engine, _ = engine_of(fault, writes=True, **KINDS[engine_kind])
    outputs = submit(engine, names)
    run(engine)
    check_answers(outputs, wanted(names, engine_kind))


def test_halves_run_until_one_request_is_alone() -> None:
    engine, steps = engine_of(is_marked, options=SchedulerOptions(8, 64))
    for name in ("a", "b", "c", "bad", "d", "e", "f", "g"):
        engine.submit(name, [1, 2], PARAMS[0])
    for _ in range(7):
        engine.step()
    assert steps.batches[:6] == [
        ["a", "b", "c", "bad", "d", "e", "f", "g"],
        ["a", "b", "c", "bad"],
        ["a", "b"],
        ["c", "bad"],
        ["c"],
        ["bad"],
    ]
    assert sorted(steps.batches[6]) == ["d", "e", "f", "g"]


def test_requests_that_come_and_go_during_the_search() -> None:
    names = ("a", "b", "bad", "c")
    engine, steps = engine_of(is_marked, options=SchedulerOptions(8, 64))
    outputs = submit(engine, names)
    engine.step()
    new = engine.submit("new", PROMPTS[0], PARAMS[0])
    engine.cancel("b")
    assert engine.waiting == 4
    while outputs["bad"].fault is None:
        engine.step()
        assert "new" not in steps.batches[-1]
    run(engine)
    expected = wanted(names)
    check_answers({name: outputs[name] for name in ("a", "bad", "c")}, expected)
    assert outputs["b"].outputs[0].finish_reason == "abort"
    assert tokens_of(new) == expected["a"]


def test_a_search_whose_suspects_are_cancelled_ends() -> None:
    engine, _ = engine_of(is_marked)
    submit(engine, ("a", "bad", "b"))
    engine.step()
    other = engine.submit("other", PROMPTS[0], PARAMS[0])
    for name in ("a", "bad", "b"):
        engine.cancel(name)
    run(engine)
    assert tokens_of(other) == wanted(("a",))["a"]


def raising(*_: Any, **__: Any) -> Any:
    raise Broken("what the model says")


def draws_that_raise(rows: Callable[..., list[RowSampling]]) -> Callable[..., list[RowSampling]]:
    def changed(*arguments: Any) -> list[RowSampling]:
        return [replace(row, by_logits=raising) for row in rows(*arguments)]

    return changed


HOST_WORK = {
    "masks": ("sampler", "rows"),
    "draws": ("sampler", "draws"),
    "choices": ("sampler", "take"),
    "detokenizing": ("stream", "push"),
    "the end of a text": ("stream", "finish"),
    "stop strings": ("stops", "push"),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("work", HOST_WORK)
@pytest.mark.parametrize("engine_kind", ["attention", "recurrent with drafts"])
def test_host_work_that_raises_ends_its_request_only(engine_kind: str, work: str, steps: int, n: int) -> None:
    """Before the first step, or in the middle of decoding; of several continuations the last one raises."""
    owner, name = HOST_WORK[work]
    engine, _ = engine_of(**KINDS[engine_kind])
    outputs = submit(engine, ("a", "b"))
    params = SamplingParams(temperature=0.7, max_tokens=9, seed=1, n=n, ignore_eos=True, stop="qqqq")
    outputs["bad"] = engine.submit("bad", [5, 6, 7], params)
    outputs |= {"c": engine.submit("c", PROMPTS[3], PARAMS[3])}
    for _ in range(steps):
        engine.step()
    request = [request for request in engine._sequences if request.id.startswith("bad")][-1]
    target = getattr(engine._sequences[request], owner)
    if name == "draws":
        target.rows = draws_that_raise(target.rows)
    else:
        setattr(target, name, raising)
    run(engine)
    names = ("a", "b", "bad", "c")
    check_answers({key: outputs[key] for key in ("a", "b", "bad")}, wanted(names, engine_kind))
    assert outputs["c"].fault is None and outputs["c"].outputs[0].finish_reason == "length"


def test_memory_that_is_short_in_host_work_fails_the_engine() -> None:
    def out_of_memory(token: int) -> str:
        raise MemoryError

    engine, _ = engine_of()
    submit(engine, ("a", "b"))
    sequence = next(iter(engine._sequences.values()))
    sequence.stream.push = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(EngineFailed):
        run(engine)
    check_failed(engine)


def test_an_interrupt_is_no_fault_of_a_request() -> None:
    engine, _ = engine_of(is_marked, error=KeyboardInterrupt())
    submit(engine, ("a", "bad"))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    for name in ("a", "bad"):
        engine.cancel(name)
    assert engine.failure is None
    assert engine.scheduler.cache.free == engine.scheduler.cache.count


def test_what_a_request_asks_for_and_cannot_have_is_no_fault() -> None:
    engine, _ = engine_of()
    params = SamplingParams(min_tokens=1, stop_token_ids=range(VOCABULARY))
    output = engine.submit("a", [1, 2], params)
    run(engine)
    assert output.fault is None
    assert "leave no token to choose" in str(output.outputs[0].stop_reason)


@pytest.mark.parametrize("engine_kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_random_requests_with_faults_get_what_each_gets_alone(engine_kind: str, seed: int) -> None:
    """Submits, cancels, faulty requests, and steps that raise once."""
    draw = random.Random(seed)
    once = [False]

    def fails(batch: Batch) -> bool:
        prompts = {request.id.split()[0] for request in batch.chunks}
        raises = once[0] and len(prompts) > 1  # a request that is alone would be at fault
        once[0] &= not raises
        return raises or is_marked(batch)

    engine, steps = engine_of(fails, **KINDS[engine_kind])
    outputs: dict[str, tuple[RequestOutput, list[int], SamplingParams]] = {}
    cancelled: set[str] = set()
    for number in range(250):
        choice = draw.random()
        steps.writes = draw.random() < 0.5
        if choice < 0.2 and engine.waiting < 8:
            name = f"bad{number}" if draw.random() < 0.25 else f"good{number}"
            prompt = [draw.randrange(3) for _ in range(draw.randint(1, 14))]
            params = SamplingParams(
                temperature=draw.choice((0, 0.9)),
                seed=number,
                n=draw.choice((1, 1, 2)),
                max_tokens=draw.randint(1, 9),
                ignore_eos=True,
            )
            outputs[name] = (
                engine.submit(name, prompt, params, priority=draw.choice((0, 0, 1))),
                prompt,
                params,
            )
        elif choice < 0.23 and outputs:
            name = draw.choice([*outputs])
            if not outputs[name][0].finished:
                cancelled.add(name)
            engine.cancel(name)
        elif choice < 0.26:
            once[0] = True
        elif engine.busy:
            engine.step()
            check_pages(engine.scheduler)  # type: ignore[arg-type]
    run(engine)
    alone, _ = engine_of(**KINDS[engine_kind])
    compared = 0
    for name, (output, prompt, params) in outputs.items():
        if name in cancelled:
            continue
        if name.startswith("bad"):
            assert isinstance(output.fault, Broken), name
            continue
        expected = alone.submit(name, prompt, params)
        run(alone)
        assert tokens_of(output) == tokens_of(expected), name
        compared += 1
    assert compared > 15 and engine.failure is None


def test_a_model_error_of_a_step_is_a_fault_of_the_server() -> None:
    """Its sentence is about kernels, not about what the client has sent."""
    engine, _ = engine_of(is_marked, error=ModelError("[NKW-OOB] an index"))
    output = submit(engine, ("bad", "a"))["bad"]
    run(engine)
    assert isinstance(output.fault, ModelError)
