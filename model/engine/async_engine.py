"""The asynchronous engine: a thread computes steps, and coroutines submit, follow and cancel requests.

Only the thread uses the engine. It runs the callers' commands between two steps, so a cancelled request releases its
pages before the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType

from model.engine.engine import Engine
from model.engine.faults import EngineFailed
from model.engine.grammars import CompiledGrammar
from model.engine.inputs import ModelInputs
from model.engine.outputs import FinishReason, RequestOutput
from model.engine.params import SamplingParams
from model.engine.release_rate import ReleaseRate
from model.engine.sampler import Logprob
from model.errors import ModelError
from model.layers.launch import StepShape

Watch = Callable[[RequestOutput], None]
"""Called by the engine's thread for each request that got a token or ended."""


@dataclass
class EngineFull(Exception):
    """The error of a request for which too little capacity is free.

    `seconds` is the estimated time until enough continuations have ended, or None if no estimate is known.
    """

    seconds: float | None = None


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt: its token ids, its text if known, and the model's other inputs."""

    ids: Sequence[int]
    text: str | None = None
    inputs: ModelInputs | None = None


@dataclass(frozen=True)
class Update:
    """The text and tokens that one step added to continuation `index` of the prompt with number `prompt`.

    The last update has a `finish_reason`. `fault` is the exception that ended the prompt, unless its arguments are at
    fault.
    """

    prompt: int
    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    fault: BaseException | None = None


@dataclass(frozen=True)
class EngineState:
    """The current numbers of requests and pages, and counts since the start.

    Attributes:
        running: Requests with pages.
        waiting: Requests without pages.
        pages: Pages and slots of all pools.
        block_size: Positions of a page.
        free_pages: Free pages and slots.
        tokens: Computed tokens of requests.
        padding: Computed padding tokens.
        steps: Computed steps.
        step_seconds: Total time of the steps.
        shapes: Number of launched padded batches by shape.
        drafts: Verified draft tokens by draft position.
        accepted_drafts: Accepted draft tokens by draft position.
        step_sizes: Number of steps by their number of tokens.
        expert_choices: Expert selections computed by each group under expert parallelism.
    """

    running: int
    waiting: int
    pages: int
    block_size: int
    free_pages: int
    tokens: int
    padding: int
    steps: int
    step_seconds: float
    shapes: Mapping[StepShape, int]
    drafts: Mapping[int, int]
    accepted_drafts: Mapping[int, int]
    step_sizes: Mapping[int, int]
    expert_choices: Sequence[int] = ()


class Stream:
    """The updates of some prompts in the order of the steps; leaving the context cancels unfinished prompts.

    `requests` has the output of each prompt so far. The engine's thread writes to them until the last update.
    """

    def __init__(self, cancel: Callable[[Stream], None]) -> None:
        self.requests: list[RequestOutput] = []
        self._cancel = cancel
        self._queue: asyncio.Queue[Update | Exception | None] = asyncio.Queue()

    def put(self, update: Update | Exception | None) -> None:
        """Append an update, an error, or None for the end, in the thread of the event loop."""
        self._queue.put_nowait(update)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Update:
        update = await self._queue.get()
        if update is None:
            raise StopAsyncIteration
        if isinstance(update, Exception):
            raise update
        return update

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel(self)


class AsyncEngine:
    """An engine and its thread, on the event loop that runs when `start` is called."""

    def __init__(self, engine: Engine, capacity: int, watch: Watch = lambda output: None) -> None:
        """Create the thread.

        Args:
            engine: The engine, which only the thread uses from now on.
            capacity: The largest number of continuations that wait or run.
            watch: Called by the thread for each request that got a token or ended.
        """
        self.limits = engine.limits
        self.capacity = capacity
        self._engine = engine
        self._watch = watch
        self._taken: dict[Stream, int] = {}
        self._occupied = 0
        self._pace = ReleaseRate(time.monotonic)
        self._steps, self._step_seconds = 0, 0.0
        self._step_sizes: Counter[int] = Counter()
        self._followed: dict[str, _Followed] = {}
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed = asyncio.Event()

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; unfinished requests get no further token."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and the engine has not failed."""
        return self._thread.is_alive() and self._engine.failure is None

    async def wait_until_failed(self) -> None:
        """Wait until the engine has failed and every stream has the error."""
        await self._failed.wait()

    @property
    def taken(self) -> int:
        """Number of continuations that wait or run, plus the capacity taken by `occupy`."""
        return sum(self._taken.values()) + self._occupied

    def state(self) -> EngineState:
        """Return the current numbers of requests and pages, and counts since the start."""
        scheduler, use, acceptance = self._engine.scheduler, self._engine.use, self._engine.acceptance
        return EngineState(
            running=len(scheduler.running),
            waiting=self._engine.waiting,
            pages=scheduler.cache.count,
            block_size=scheduler.cache.block_size,
            free_pages=scheduler.cache.free,
            tokens=use.tokens,
            padding=use.padding,
            steps=self._steps,
            step_seconds=self._step_seconds,
            shapes=dict(use.steps),  # a copy, because the thread adds to it
            drafts=dict(acceptance.verified),
            accepted_drafts=dict(acceptance.accepted),
            step_sizes=dict(self._step_sizes),
            expert_choices=() if use.experts is None else tuple(use.experts.choices),
        )

    def check_capacity(self, continuations: int) -> None:
        """Check that further continuations can be submitted.

        Raises:
            EngineFull: Other requests have to end first.
            ModelError: There are more than the engine takes at all.
        """
        if continuations > self.capacity:
            raise ModelError(
                f"{continuations} continuations are asked for; {self.capacity} at most are computed at once"
            )
        lacking = self.taken + continuations - self.capacity
        if lacking > 0:
            raise EngineFull(self._pace.estimate_seconds(lacking))

    @contextmanager
    def occupy(self, count: int) -> Iterator[None]:
        """Take the capacity of `count` continuations for other work in a context.

        Raises:
            EngineFull: As `check_capacity`.
            ModelError: As `check_capacity`.
        """
        self.check_capacity(count)
        self._occupied += count
        try:
            yield
        finally:
            self._occupied -= count

    async def submit(
        self,
        id: str,
        prompts: Sequence[TokenPrompt],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> Stream:
        """Let prompts wait for their turn.

        Args:
            id: A name that no unfinished request has.
            prompts: The prompts.
            params: The sampling parameters of all prompts.
            priority: Lower numbers are scheduled first.
            cache_salt: The prompts share pages only with requests of the same salt.
            grammar: The compiled structured outputs of `params`.

        Returns:
            The stream of updates.

        Raises:
            EngineFull: Other requests have to end first.
            EngineFailed: The engine has failed.
            ModelError: There are more continuations than the engine takes, or `Engine.submit` refuses a prompt. No
                prompt is submitted then.
        """
        assert self._loop is not None, "start was not called"
        self.check_capacity(len(prompts) * params.n)
        stream = Stream(self._leave)
        self._taken[stream] = len(prompts) * params.n
        self._pace.take(self._taken[stream])
        accepted: asyncio.Future[None] = self._loop.create_future()

        def submit_prompts() -> None:
            try:
                for index, prompt in enumerate(prompts):
                    name = f"{id}-{index}"
                    output = self._engine.submit(
                        *(name, prompt.ids, params, prompt.text, priority, cache_salt, prompt.inputs, grammar)
                    )
                    stream.requests.append(output)
                    self._followed[name] = _Followed(stream, index, output)
            except BaseException as error:
                self._cancel(stream)
                self._call(_settle, accepted, error)
            else:
                self._call(_settle, accepted, None)

        self._commands.put(submit_prompts)
        try:
            await accepted
        except BaseException:
            self._leave(stream, has_begun=False)
            raise
        return stream

    def _leave(self, stream: Stream, has_begun: bool = True) -> None:
        """Cancel a stream's requests between this step and the next."""
        if self._free_capacity(stream, has_begun):
            self._commands.put(lambda: self._cancel(stream))

    def _free_capacity(self, stream: Stream, has_begun: bool = True) -> bool:
        """Free the capacity of a stream, and return whether it was taken.

        A stream that has not begun is not counted in the pace.
        """
        continuations = self._taken.pop(stream, None)
        if continuations is not None:
            self._pace.free(continuations, has_begun)
        return continuations is not None

    def _run(self) -> None:
        """Run commands and steps in the thread, commands first; wait for a command if there are no requests.

        An exception is a failure of the engine and ends all streams.
        """
        while True:
            try:
                command = self._commands.get(block=not self._engine.busy)
            except Empty:
                command = self._compute_step
            if command is None:
                return
            try:
                command()
            except EngineFailed as failed:
                self._fail(failed)
            except (
                BaseException
            ) as error:  # a panic of a library is no Exception, and must not end the thread
                self._fail(self._engine.fail(error))

    def _compute_step(self) -> None:
        """Compute a step and send its updates to the streams."""
        start, tokens = time.monotonic(), self._engine.use.tokens
        outputs = self._engine.step()
        self._steps += 1
        self._step_seconds += time.monotonic() - start
        self._step_sizes[self._engine.use.tokens - tokens] += 1
        updates: list[tuple[Stream, Update | None]] = []
        ended: dict[Stream, None] = {}
        for output in outputs:
            self._watch(output)
            followed = self._followed[output.request_id]
            updates += [(followed.stream, update) for update in followed.collect_updates()]
            if output.finished:
                del self._followed[output.request_id]
                if all(request.finished for request in followed.stream.requests):
                    ended[followed.stream] = None  # several of its prompts may end in one step
        self._call(self._send, [*updates, *((stream, None) for stream in ended)])

    def _cancel(self, stream: Stream) -> None:
        for output in stream.requests:
            if self._followed.pop(output.request_id, None) is not None:
                self._engine.cancel(output.request_id)
                self._watch(output)

    def _fail(self, failed: EngineFailed) -> None:
        """End all streams with an exception, because the engine has failed."""
        for followed in self._followed.values():
            with suppress(Exception):  # the callback may have made the engine fail
                self._watch(followed.output)
        self._followed.clear()
        self._call(self._end_streams, failed)

    def _end_streams(self, failed: EngineFailed) -> None:
        self._send([(stream, failed) for stream in self._taken])
        self._failed.set()

    def _send(self, updates: Sequence[tuple[Stream, Update | Exception | None]]) -> None:
        for stream, update in updates:
            if not isinstance(update, Update):
                self._free_capacity(stream)
            stream.put(update)

    def _call(self, action: Callable[..., None], *arguments: object) -> None:
        """Call a function in the event loop, unless the loop is closed and so has no callers."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


@dataclass
class _Followed:
    """A request, and the lengths of its continuations that its updates contain.

    `sent` has the numbers of sent characters and tokens of each continuation, and whether the last update was sent.
    """

    stream: Stream
    prompt: int
    output: RequestOutput
    sent: dict[int, tuple[int, int, bool]] = field(default_factory=dict)

    def collect_updates(self) -> list[Update]:
        """Return the updates since the last call."""
        updates = []
        for output in self.output.outputs:
            characters, tokens, has_ended = self.sent.get(output.index, (0, 0, False))
            if has_ended or (len(output.token_ids) == tokens and not output.finished):
                continue
            self.sent[output.index] = len(output.text), len(output.token_ids), output.finished
            updates.append(
                Update(
                    self.prompt,
                    output.index,
                    output.text[characters:],
                    output.token_ids[tokens:],
                    (output.logprobs or [])[tokens:],
                    output.finish_reason,
                    output.stop_reason,
                    self.output.fault,
                )
            )
        return updates


def _settle(accepted: asyncio.Future[None], error: BaseException | None) -> None:
    """Complete a submission, unless its caller has left.

    A panic of a library, which a coroutine cannot raise, becomes the cause of a RuntimeError.
    """
    if accepted.done():
        return
    if error is None:
        accepted.set_result(None)
    elif isinstance(error, Exception):
        accepted.set_exception(error)
    else:
        failed = RuntimeError("the request could not be submitted")
        failed.__cause__ = error
        accepted.set_exception(failed)
