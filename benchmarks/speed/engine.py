"""Speed of the engine with many requests: tokens per second, and the time of a step of the scheduler alone."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.speed.measure import Row, seconds
from model.engine import Request, SamplingParams, Scheduler, SchedulerOptions
from model.llm.llm import LLM
from model.state import PagePool

_STEPS = 40
_RUNNING = 256
_PROMPT = (5, 7, 9, 11, 13, 17, 19, 23)


def rows() -> Iterator[Row]:
    """Yield tokens per second of 1, 4 and 16 requests, and microseconds of a scheduler's step."""
    alone = _tokens_per_second(1)
    yield Row("engine, default model: 1 request decodes", "", alone, "tokens/s")
    for count in (4, 16):
        together = _tokens_per_second(count)
        work = f"engine, default model: {count} requests decode together"
        yield Row(work, "as many one after another", together, "tokens/s", together / alone)
    yield Row(f"scheduler: a step of {_RUNNING} requests that decode", "500 us", *_scheduled())


def _tokens_per_second(count: int) -> float:
    """Return the new tokens per second of `count` requests that decode together, once every launch is replayed.

    Prompts are not timed.
    """
    engine = LLM(max_num_seqs=count, max_model_len=128).engine
    params = SamplingParams(max_tokens=_STEPS, temperature=0, ignore_eos=True)
    for _ in range(2):
        for number in range(count):
            engine.submit(str(number), [number + 3, *_PROMPT], params)
        engine.step()
        steps = []
        while engine.busy:
            steps.append(seconds(engine.step))
    return count / median(steps)


def _scheduled() -> tuple[float, str, float]:
    """Return the median time in us of scheduling and completing a step, its unit, and its ratio to 500 us."""
    scheduler = Scheduler([PagePool(_RUNNING * 8, 16)], SchedulerOptions(_RUNNING, 4096))
    for number in range(_RUNNING):
        scheduler.submit(Request(str(number), [number % 50, *_PROMPT], 10 * _STEPS))

    def step() -> None:
        batch = scheduler.schedule()
        scheduler.complete_step(
            batch, {request_id: (1,) for request_id, chunk in batch.chunks.items() if chunk.samples}
        )

    step()
    taken = 1e6 * median(seconds(step) for _ in range(_STEPS))
    return taken, "us", taken / 500
