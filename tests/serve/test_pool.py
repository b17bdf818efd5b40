"""The pool of job processes: limits, the queue, cancellation, long jobs beside short ones, killed processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.errors import ModelError
from model.serve.errors import ApiError
from model.serve.pool import WorkerPool
from model.workers.launch import JobLimits, SingleWorker, TaskSource

SOURCE = TaskSource("tests.serve.pool_tasks:OddTasks", ("a fact",))
LIMITS = JobLimits(1, 2**28, "the job", ": do less")
ENDLESS = JobLimits(1000, 2**28, "the job")


def in_pool(body: Callable[[WorkerPool], Awaitable[None]], **options: int) -> None:
    """Run a test on an event loop with a pool, which has no job at the end."""

    async def run() -> None:
        pool = WorkerPool(SOURCE, **options)
        try:
            await body(pool)
            await until(lambda: pool.running == pool.waiting == 0)
        finally:
            pool.stop()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not holds():
        await asyncio.sleep(0.005)


def task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a coroutine."""
    return asyncio.get_running_loop().create_task(work)


def started(path: Path) -> int:
    """Count the jobs `wait` that have started to wait for a path."""
    return len(list(path.parent.glob(f"{path.name}.*")))


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return False


def test_a_job_runs_in_a_process_of_its_own_and_facts_are_told() -> None:
    async def body(pool: WorkerPool) -> None:
        assert await pool.wait_for_facts() == {"fact": "a fact"}
        answers = [await pool.run("echo", "ä\ud800", limits=LIMITS) for _ in range(2)]
        assert [text for text, _ in answers] == ["ä\ud800"] * 2
        assert len({pid for _, pid in answers} | {os.getpid()}) == 3

    in_pool(body)


FAILURES: list[tuple[tuple[Any, ...], str]] = [
    (("refuse",), "no"),
    (("unprepared",), "cannot be prepared"),
    (("burn",), "the job takes more than 1 seconds of CPU time: do less"),
    (("grow", 2**29), "the job takes more than 256 MiB of memory: do less"),
    (("crash", "SIGABRT"), "the job takes more than 256 MiB of memory: do less"),
    (("crash", "SIGSEGV"), "the job ends its process (SIGSEGV): do less"),
]


@pytest.mark.slow
def test_a_job_that_fails_is_one_error_and_the_next_job_runs() -> None:
    async def body(pool: WorkerPool) -> None:
        for job, message in FAILURES:
            with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
                await pool.run(*job, limits=LIMITS)
            assert await pool.run("grow", 2**20, limits=LIMITS) == 2**20

    in_pool(body)
    single = SingleWorker(SOURCE)
    for (name, *arguments), message in FAILURES:
        with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
            single.run(name, arguments, LIMITS)
        assert single.run("grow", [2**20], LIMITS) == 2**20
    single.stop()


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_the_queue_takes_as_many_jobs_as_it_may_and_no_more(tmp_path: Path, waiting: int) -> None:
    async def body(pool: WorkerPool) -> None:
        path = tmp_path / "go"
        jobs = [task(pool.run("wait", str(path), limits=ENDLESS)) for _ in range(2 + waiting)]
        await until(lambda: started(path) == 2)
        assert (pool.running, pool.waiting) == (2, waiting)
        with pytest.raises(ApiError, match="queue_full"):
            await pool.run("echo", limits=LIMITS)
        path.touch()
        assert len(await asyncio.gather(*jobs)) == 2 + waiting
        assert started(path) == 2 + waiting
        await pool.run("echo", limits=LIMITS)

    in_pool(body, waiting=waiting)


def test_cancelled_jobs_free_their_processes() -> None:
    async def body(pool: WorkerPool) -> None:
        for _ in range(60):
            jobs = [task(pool.run("burn", limits=ENDLESS)) for _ in range(3)]
            await asyncio.sleep(0)
            for job in jobs:
                job.cancel()
            assert await asyncio.gather(*jobs, return_exceptions=True)
            assert pool.waiting == 0
        await pool.run("echo", limits=LIMITS)

    in_pool(body, waiting=1)


@pytest.mark.slow
def test_short_jobs_are_answered_while_long_ones_compute_for_ever() -> None:
    """Long jobs are found out by their CPU time, or said to be long; one process is left for short ones."""

    async def body(pool: WorkerPool) -> None:
        jobs = [task(pool.run("burn", limits=ENDLESS, is_long=index == 0)) for index in range(6)]
        for number in range(10):
            assert (await pool.run("echo", number, limits=LIMITS))[0] == number
        assert not any(job.done() for job in jobs)
        await until(lambda: pool.running == 1 and pool.waiting == 5)
        for job in jobs:
            job.cancel()

    in_pool(body)


def test_long_jobs_take_turns_with_short_ones(tmp_path: Path) -> None:
    """A long job that waits gets the next free process, however many short ones come."""

    async def body(pool: WorkerPool) -> None:
        path, order = tmp_path / "go", []

        async def run(name: str, is_long: bool) -> None:
            await pool.run("echo", limits=LIMITS, is_long=is_long)
            order.append(name)

        blocked = [task(pool.run("wait", str(path), limits=ENDLESS)) for _ in range(2)]
        await until(lambda: started(path) == 2)
        jobs = [task(run(f"short {index}", False)) for index in range(8)] + [task(run("long", True))]
        await asyncio.sleep(0)
        path.touch()
        await asyncio.gather(*blocked, *jobs)
        assert order.index("long") < 8

    in_pool(body)


def test_a_worker_that_is_killed_fails_its_jobs_and_another_one_takes_the_next(tmp_path: Path) -> None:
    async def body(pool: WorkerPool) -> None:
        path = tmp_path / "go"
        jobs = [task(pool.run("wait", str(path), limits=ENDLESS)) for _ in range(3)]
        await until(lambda: started(path) == 2)
        pids = [int(go_file.suffix[1:]) for go_file in tmp_path.glob("go.*")]
        assert pool._connection is not None
        os.kill(pool._connection._process.pid, signal.SIGKILL)
        await until(lambda: jobs[0].done() and jobs[1].done())
        assert [job.exception().code for job in jobs[:2]] == ["worker_ended"] * 2
        path.touch()
        await jobs[2]  # it waited, so it runs in the next worker
        await until(lambda: not any(map(is_alive, pids)))

    in_pool(body)


def test_jobs_of_a_task_can_be_cancelled_and_others_stay(tmp_path: Path) -> None:
    async def body(pool: WorkerPool) -> None:
        path = tmp_path / "go"
        kept = task(pool.run("wait", str(path), limits=ENDLESS))
        jobs = [task(pool.run("burn", limits=ENDLESS)) for _ in range(3)]
        await until(lambda: pool.running == 2)
        pool.cancel("burn")
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [result.code for result in results] == ["stopping"] * 3
        path.touch()
        await kept

    in_pool(body)


def test_a_pool_that_is_stopped_ends_its_jobs_and_takes_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        pool = WorkerPool(SOURCE)
        jobs = [task(pool.run("burn", limits=ENDLESS)) for _ in range(3)]
        await pool.wait_for_facts()
        assert pool._connection is not None
        pid = pool._connection._process.pid
        pool.stop()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [result.code for result in results] == ["worker_ended"] * 3
        with pytest.raises(ApiError, match="worker_ended"):
            await pool.run("echo", limits=LIMITS)
        assert not is_alive(pid)

    asyncio.run(run())
