"""The asynchronous engine: a thread computes steps, and coroutines submit, follow and cancel requests.

The HTTP server uses it. A continuation is one generated text for a prompt; a request may ask for several. Only the
thread uses the `Engine`. It runs the callers' commands between two steps, so a cancelled request releases its pages
before the next step.
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
    """Error raised if a request has to wait because too many continuations wait or run.

    `seconds` is the estimated time until enough continuations have ended, or None if no estimate is known.
    """

    seconds: float | None = None


@dataclass(frozen=True)
class TokenPrompt:
    """Prompt as token ids, with its text if known and other inputs such as encoded speech."""

    ids: Sequence[int]
    text: str | None = None
    inputs: ModelInputs | None = None


@dataclass(frozen=True)
class Update:
    """Text and tokens that one step added to one continuation of a prompt.

    `prompt` is the index of the prompt among those submitted together, and `index` that of the continuation. The last
    update of a continuation has a `finish_reason`. `fault` is the exception that ended the prompt; None if the user's
    arguments were wrong.
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
    """Numbers of requests and pages at one time, and counts since the start of the engine.

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
    """Asynchronous iterator over the updates of prompts that were submitted together, in the order of the steps.

    It ends after the last update, and raises EngineFailed if the engine fails. As a context manager, it cancels
    unfinished prompts on exit. `requests` has the output of each prompt so far; the engine's thread extends these
    outputs until the last update.
    """

    def __init__(self, cancel: Callable[[Stream], None]) -> None:
        self.requests: list[RequestOutput] = []
        self._cancel = cancel
        self._queue: asyncio.Queue[Update | Exception | None] = asyncio.Queue()

    def put(self, update: Update | Exception | None) -> None:
        """Append an update, an error to raise, or None for the end; call it only in the thread of the event loop."""
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
    """Engine with a thread that computes its steps, for callers on the event loop that calls `start`.

    `limits` are those of the engine, and `capacity` is the largest number of continuations that wait or run.
    """

    def __init__(self, engine: Engine, capacity: int, watch: Watch = lambda output: None) -> None:
        """Create the thread without starting it.

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
        """Start the thread and bind it to the running event loop; call it once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step and wait for it.

        Streams of unfinished requests get no further update and no end.
        """
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and the engine has not failed."""
        return self._thread.is_alive() and self._engine.failure is None

    async def wait_until_failed(self) -> None:
        """Wait until the engine has failed and every stream has received the error."""
        await self._failed.wait()

    @property
    def taken(self) -> int:
        """Number of continuations that wait or run, plus those that `occupy` reserves."""
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
        """Check that `continuations` further continuations can be submitted now.

        Raises:
            EngineFull: Other requests have to end first.
            ModelError: There are more than `capacity`.
        """
        if continuations > self.capacity:
            raise ModelError(
                f"{continuations} continuations are asked for; {self.capacity} at most are computed at once: ask for "
                "fewer prompts or a smaller n"
            )
        lacking = self.taken + continuations - self.capacity
        if lacking > 0:
            raise EngineFull(self._pace.estimate_seconds(lacking))

    @contextmanager
    def occupy(self, count: int) -> Iterator[None]:
        """Hold the capacity of `count` continuations for work outside of the engine, until the context exits.

        Raises:
            EngineFull: Other requests have to end first.
            ModelError: `count` is larger than `capacity`.
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
        """Submit prompts to the engine and wait until it has accepted them.

        Args:
            id: A name that no unfinished request has.
            prompts: The prompts.
            params: The sampling parameters of all prompts.
            priority: Lower numbers are scheduled first.
            cache_salt: The prompts share pages only with requests of the same salt.
            grammar: The compiled structured outputs of `params`; by default the thread compiles them.

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
                self._call(_complete_submission, accepted, error)
            else:
                self._call(_complete_submission, accepted, None)

        self._commands.put(submit_prompts)
        try:
            await accepted
        except BaseException:
            self._leave(stream, has_begun=False)
            raise
        return stream

    def _leave(self, stream: Stream, has_begun: bool = True) -> None:
        """Free a stream's capacity now, and let the thread cancel its requests before the next step.

        Does nothing if the stream has ended.

        Args:
            stream: The stream that its caller leaves.
            has_begun: Whether its prompts were accepted; otherwise they do not count in the release rate.
        """
        if self._free_capacity(stream, has_begun):
            self._commands.put(lambda: self._cancel(stream))

    def _free_capacity(self, stream: Stream, has_begun: bool = True) -> bool:
        """Free the capacity of a stream, and return whether it was still taken.

        Args:
            stream: The stream.
            has_begun: Whether its prompts were accepted; otherwise they do not count in the release rate.
        """
        continuations = self._taken.pop(stream, None)
        if continuations is not None:
            self._pace.free(continuations, has_begun)
        return continuations is not None

    def _run(self) -> None:
        """Run commands and steps in the thread until `stop`; commands come first.

        Waits for a command if there are no requests. An exception is a failure of the engine and ends all streams with
        it.
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
        """Compute one step, call `watch` for its outputs, and send updates and ends to the streams."""
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
        """Call `watch` for all unfinished requests, forget them, and end all streams with the exception `failed`.

        Exceptions of `watch` are ignored.
        """
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
        """Let the event loop call a function soon, in its thread; do nothing if the loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


@dataclass
class _Followed:
    """Request of a stream, with how much of its output the stream has received.

    `sent` has, by continuation, the numbers of sent characters and tokens, and whether the last update was sent.
    """

    stream: Stream
    prompt: int
    output: RequestOutput
    sent: dict[int, tuple[int, int, bool]] = field(default_factory=dict)

    def collect_updates(self) -> list[Update]:
        """Return an update for each continuation with new tokens or a new end since the last call.

        Marks them as sent.
        """
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


def _complete_submission(accepted: asyncio.Future[None], error: BaseException | None) -> None:
    """Complete the future of a submission with an error or with success, unless its caller has left.

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
