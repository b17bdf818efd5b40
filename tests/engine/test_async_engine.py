"""Many callers on one engine: who leaves frees pages before the next step, and no request ends another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Semaphore
from typing import Any

import numpy as np
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
from model.engine.async_engine import AsyncEngine, EngineFull, Stream, TokenPrompt, Update, Watch
from model.engine.faults import EngineFailed
from model.engine.padded_batch import BucketUse
from model.engine.speculation import NO_ROWS, Rows
from model.errors import ModelError
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer
from model.sampling import StepOutput
from model.state import PagePool

VOCABULARY = 4096
PROMPT = TokenPrompt([1, 2, 3])
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
IMPOSSIBLE = SamplingParams(min_tokens=1, stop_token_ids=range(VOCABULARY))


class Stepper:
    """A model whose every step waits to be allowed; it chooses the number of tokens before."""

    def __init__(self, allowed: int) -> None:
        self.use = BucketUse()
        self.begun = Semaphore(0)
        self.allowed = Semaphore(allowed)
        self.batches: list[list[str]] = []
        self.fails: Callable[[list[str]], bool] = lambda ids: False

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> dict[Request, list[StepOutput]]:
        self.batches.append([request.id for request in batch.chunks])
        self.begun.release()
        self.allowed.acquire()
        if self.fails(self.batches[-1]):
            raise ZeroDivisionError
        return {
            request: [StepOutput(np.eye(VOCABULARY, dtype=np.float32)[len(request.tokens)])]
            for request, chunk in batch.chunks.items()
            if chunk.samples
        }


def engine_of(
    stepper: Stepper, capacity: int = 4, watch: Watch = lambda output: None
) -> tuple[AsyncEngine, PagePool]:
    pool = PagePool(16, 4)
    limits = EngineLimits((0,), VOCABULARY, 32)
    scheduler = Scheduler(pool, SchedulerOptions(4, 32))
    tokenizer = Tokenizer(PRETRAINED, VOCABULARY)
    engine = Engine(stepper, scheduler, tokenizer, limits, lambda: 0.0)
    return AsyncEngine(engine, capacity, watch), pool


async def tokens(stream: Stream) -> list[int]:
    async with stream:
        return [token async for update in stream for token in update.token_ids]


async def updates_of(stream: Stream) -> list[Update]:
    async with stream:
        return [update async for update in stream]


@pytest.mark.slow
def test_request_that_is_left_during_a_step_is_not_in_the_next_one_and_holds_no_page() -> None:
    stepper = Stepper(allowed=0)

    async def run() -> Any:
        engine, pool = engine_of(stepper)
        engine.start()
        stays = await engine.submit("stays", [PROMPT], GREEDY)
        await asyncio.to_thread(stepper.begun.acquire)
        going = asyncio.ensure_future(engine.submit("goes", [PROMPT, PROMPT], GREEDY))
        await asyncio.sleep(0)  # it is asked for during the first step
        stepper.allowed.release()
        async with await going:
            await asyncio.to_thread(stepper.begun.acquire)
            both = pool.count - pool.free
        stepper.allowed.release()
        await asyncio.to_thread(stepper.begun.acquire)
        one = pool.count - pool.free
        stepper.allowed.release()
        answer = await tokens(stays)
        await engine.stop()
        return both, one, answer, pool.free, engine.taken

    assert asyncio.run(run()) == (3, 2, [3, 4, 5], 16, 0)
    assert stepper.batches == [["stays-0"], ["stays-0", "goes-0", "goes-1"], ["stays-0"]]


def test_step_that_fails_ends_the_request_at_fault_and_the_others_go_on() -> None:
    stepper = Stepper(allowed=100)
    stepper.fails = lambda ids: any(id.startswith("bad") for id in ids)

    async def run() -> None:
        engine, pool = engine_of(stepper)
        engine.start()
        streams = [await engine.submit(name, [PROMPT], GREEDY) for name in ("first", "bad", "second")]
        updates = [await updates_of(stream) for stream in streams]
        assert [len(batch) for batch in updates] == [3, 1, 3]
        (bad,) = updates[1]
        assert (bad.finish_reason, type(bad.fault)) == ("error", ZeroDivisionError)
        assert [[update.token_ids for update in batch] for batch in updates[::2]] == [[[3], [4], [5]]] * 2
        assert (pool.free, engine.taken, engine.alive) == (pool.count, 0, True)
        assert await tokens(await engine.submit("third", [PROMPT], GREEDY)) == [3, 4, 5]
        await engine.stop()

    asyncio.run(run())


def test_engine_whose_every_step_fails_ends_all_streams_and_takes_no_request() -> None:
    stepper = Stepper(allowed=100)
    stepper.fails = lambda ids: True

    async def run() -> None:
        engine, pool = engine_of(stepper)
        engine.start()
        stream = await engine.submit("first", [PROMPT, PROMPT], GREEDY)
        update = await anext(stream)
        assert isinstance(update.fault, ZeroDivisionError)  # one prompt has failed alone, and then the other
        with pytest.raises(EngineFailed) as failed:
            await anext(stream)
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        await asyncio.wait_for(engine.wait_until_failed(), 60)
        with pytest.raises(EngineFailed):
            await engine.submit("third", [PROMPT], GREEDY)
        assert (pool.free, engine.taken, engine.alive) == (pool.count, 0, False)
        await engine.stop()

    asyncio.run(run())


def test_watch_that_raises_ends_the_streams_and_not_the_thread_alone() -> None:
    def watch(output: RequestOutput) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        engine, pool = engine_of(Stepper(allowed=100), watch=watch)
        engine.start()
        with pytest.raises(EngineFailed):
            await tokens(await engine.submit("first", [PROMPT], GREEDY))
        assert (pool.free, engine.alive) == (pool.count, False)
        await engine.stop()

    asyncio.run(run())


def test_request_that_can_choose_no_token_ends_alone() -> None:
    async def run() -> None:
        engine, pool = engine_of(Stepper(allowed=100))
        engine.start()
        good = await engine.submit("good", [PROMPT], GREEDY)
        bad = await engine.submit("bad", [PROMPT], IMPOSSIBLE)
        updates = [update async for update in bad]
        assert [(update.finish_reason, update.stop_reason) for update in updates] == [
            (
                "error",
                "allowed_token_ids, min_tokens and structured_outputs leave no token to choose: relax one of them",
            )
        ]
        assert await tokens(good) == [3, 4, 5]
        assert pool.free == pool.count
        await engine.stop()

    asyncio.run(run())


def test_prompts_that_end_in_one_step_have_all_their_tokens() -> None:
    async def run() -> list[int]:
        engine, _ = engine_of(Stepper(allowed=100))
        engine.start()
        answer_tokens = await tokens(await engine.submit("two", [PROMPT, PROMPT], GREEDY))
        await engine.stop()
        return answer_tokens

    assert asyncio.run(run()) == [3, 3, 4, 4, 5, 5]


def test_places_are_taken_until_a_stream_ends() -> None:
    async def run() -> None:
        engine, _ = engine_of(Stepper(allowed=100), capacity=2)
        engine.start()
        twice = SamplingParams(n=2, temperature=0, max_tokens=1)
        stream = await engine.submit("two", [PROMPT], twice)
        with pytest.raises(EngineFull):
            await engine.submit("third", [PROMPT], GREEDY)
        assert await tokens(stream) == [3, 3]
        assert await tokens(await engine.submit("third", [PROMPT], GREEDY)) == [3, 4, 5]
        with pytest.raises(ModelError, match="4 continuations are asked for; 2 at most are computed at once"):
            await engine.submit("four", [PROMPT, PROMPT], twice)
        with pytest.raises(ModelError, match="the prompt has no tokens"):
            await engine.submit("none", [PROMPT, TokenPrompt([])], GREEDY)
        assert engine.taken == 0
        await engine.stop()

    asyncio.run(run())
