"""The engine for many callers at once: a thread computes steps; coroutines submit, follow and cancel requests.

Only the thread touches the engine. Between two steps it carries out the callers' commands, so a cancelled
request gives back its pages before the next step.
"""

from __future__ import annotations

import asyncio
import time
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
from model.engine.pace import Pace
from model.engine.params import SamplingParams
from model.engine.sampler import Logprob
from model.errors import ModelError
from model.layers.launch import StepShape

Watch = Callable[[RequestOutput], None]
"""Called by the engine's thread for each request that got a token or ended."""


@dataclass
class EngineFull(Exception):
    """As many continuations are on their way as may be; `seconds` until enough have ended, as it went last."""

    seconds: float | None = None


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids to continue, their text where it is known, and the model's other inputs."""

    ids: Sequence[int]
    text: str | None = None
    inputs: ModelInputs | None = None


@dataclass(frozen=True)
class Update:
    """What one step added to continuation `index` of the prompt with number `prompt`; with a reason, the last one.

    `fault` is the exception that ended the prompt, where the fault is not in its arguments.
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
    """Requests and pages now, and what was computed so far.

    `steps` took `step_seconds`, and launched parts of these `shapes`, each so often. `tokens` were for requests,
    `padding` for nobody. `drafts` and `accepted_drafts` are counted by their place behind the last token.
    Where groups of ranks divide experts, `expert_choices` are the choices of tokens that each group computed.
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
    expert_choices: Sequence[int] = ()


class Stream:
    """The updates of some prompts, in the order of the steps; to leave it cancels what has not ended.

    `requests` are the outputs so far, one for each prompt; the engine's thread writes to them until the last update.
    """

    def __init__(self, places: int, cancel: Callable[[Stream], None]) -> None:
        self.requests: list[RequestOutput] = []
        self.places = places
        self._cancel = cancel
        self._queue: asyncio.Queue[Update | Exception | None] = asyncio.Queue()

    def put(self, each: Update | Exception | None) -> None:
        """The next update, an error, or None for the end. The event loop's thread calls it."""
        self._queue.put_nowait(each)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Update:
        found = await self._queue.get()
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, Exception):
            raise found
        return found

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel(self)


class AsyncEngine:
    """An engine and its thread, on the event loop that runs when `start` is called.

    At most `places` continuations wait or run; `watch` sees every request that got a token or ended.
    """

    def __init__(self, engine: Engine, places: int, watch: Watch = lambda output: None) -> None:
        self.limits = engine.limits
        self.places = places
        self._engine = engine
        self._watch = watch
        self._taken: dict[Stream, int] = {}
        self._occupied = 0
        self._pace = Pace(time.monotonic)
        self._steps, self._step_seconds = 0, 0.0
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
        """End the thread after its step; requests that have not ended get no further token."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether steps are computed: the thread runs and the engine has not failed."""
        return self._thread.is_alive() and self._engine.failure is None

    async def wait_until_failed(self) -> None:
        """Return once the engine has failed and every stream was told."""
        await self._failed.wait()

    @property
    def taken(self) -> int:
        """Number of continuations that wait or run, and of places taken by `occupy`."""
        return sum(self._taken.values()) + self._occupied

    def state(self) -> EngineState:
        """What the engine holds and has done."""
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
            shapes=dict(use.steps),  # copied at once, while the thread adds to them
            drafts=dict(acceptance.verified),
            accepted_drafts=dict(acceptance.accepted),
            expert_choices=() if use.experts is None else tuple(use.experts.choices),
        )

    def check_places(self, wanted: int) -> None:
        """EngineFull where so many places are lacking; ModelError for more than there are."""
        if wanted > self.places:
            raise ModelError(
                f"{wanted} continuations are asked for; {self.places} at most are computed at once"
            )
        lacking = self.taken + wanted - self.places
        if lacking > 0:
            raise EngineFull(self._pace.seconds(lacking))

    @contextmanager
    def occupy(self, places: int) -> Iterator[None]:
        """Take places for work beside the engine's steps, in a block. Raises EngineFull or ModelError for too many."""
        self.check_places(places)
        self._occupied += places
        try:
            yield
        finally:
            self._occupied -= places

    async def submit(
        self,
        id: str,
        prompts: Sequence[TokenPrompt],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> Stream:
        """Let prompts wait for their turn. `grammar` is the compiled form of `params`.

        Raises EngineFull where places are lacking, EngineFailed after the engine has failed, and ModelError for what
        `Engine.submit` refuses and for more continuations than there are places; no prompt is submitted then.
        """
        assert self._loop is not None, "start was not called"
        wanted = len(prompts) * params.n
        self.check_places(wanted)
        stream = Stream(wanted, self._leave)
        self._taken[stream] = wanted
        self._pace.take(wanted)
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(
            lambda: self._submit(stream, id, prompts, params, priority, cache_salt, grammar, accepted)
        )
        try:
            await accepted
        except BaseException:
            self._leave(stream, began=False)
            raise
        return stream

    def _leave(self, stream: Stream, began: bool = True) -> None:
        """Cancel a stream's requests between this step and the next."""
        if self._gave_back(stream, began):
            self._commands.put(lambda: self._cancel(stream))

    def _gave_back(self, stream: Stream, began: bool = True) -> bool:
        """Free the places of a stream, unless they are free already; one that never `began` tells no pace."""
        places = self._taken.pop(stream, None)
        if places is not None:
            self._pace.free(places, began)
        return places is not None

    def _run(self) -> None:
        """The thread: commands first, then a step; without requests it waits for a command."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.busy)
            except Empty:
                command = self._compute_step
            if command is None:
                return
            self._carry_out(command)

    def _carry_out(self, command: Callable[[], None]) -> None:
        """Run a step or a command; what it raises is a failure of the engine, and ends all streams."""
        try:
            command()
        except EngineFailed as failed:
            self._fail(failed)
        except BaseException as error:  # a panic of a library is no Exception, and must not end the thread
            self._fail(self._engine.fail(error))

    def _compute_step(self) -> None:
        """Compute a step, and tell the streams what it added."""
        begun = time.monotonic()
        touched = self._engine.step()
        self._steps += 1
        self._step_seconds += time.monotonic() - begun
        told: list[tuple[Stream, Update | None]] = []
        ended: dict[Stream, None] = {}
        for output in touched:
            self._watch(output)
            followed = self._followed[output.request_id]
            told += [(followed.stream, update) for update in followed.news()]
            if output.finished:
                del self._followed[output.request_id]
                if all(each.finished for each in followed.stream.requests):
                    ended[followed.stream] = None  # several of its prompts may end in one step
        self._call(self._tell, [*told, *((stream, None) for stream in ended)])

    def _submit(
        self,
        stream: Stream,
        id: str,
        prompts: Sequence[TokenPrompt],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        grammar: CompiledGrammar | None,
        accepted: asyncio.Future[None],
    ) -> None:
        try:
            for number, prompt in enumerate(prompts):
                own = f"{id}-{number}"
                output = self._engine.submit(
                    *(own, prompt.ids, params, prompt.text, priority, cache_salt, prompt.inputs, grammar)
                )
                stream.requests.append(output)
                self._followed[own] = _Followed(stream, number, output)
        except BaseException as error:
            self._cancel(stream)
            self._call(_answer, accepted, error if isinstance(error, Exception) else _as_exception(error))
        else:
            self._call(_answer, accepted, None)

    def _cancel(self, stream: Stream) -> None:
        for output in stream.requests:
            if self._followed.pop(output.request_id, None) is not None:
                self._engine.cancel(output.request_id)
                self._watch(output)

    def _fail(self, failed: EngineFailed) -> None:
        """End all streams with an exception: the engine computes nothing more."""
        for followed in self._followed.values():
            with suppress(Exception):  # it may have made the engine fail
                self._watch(followed.output)
        self._followed.clear()
        self._call(self._end_streams, failed)

    def _end_streams(self, failed: EngineFailed) -> None:
        self._tell([(stream, failed) for stream in self._taken])
        self._failed.set()

    def _tell(self, told: Sequence[tuple[Stream, Update | Exception | None]]) -> None:
        for stream, each in told:
            if not isinstance(each, Update):
                self._gave_back(stream)
            stream.put(each)

    def _call(self, action: Callable[..., None], *arguments: object) -> None:
        """Have the event loop do something; a loop that was closed meanwhile has no callers left."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


@dataclass
class _Followed:
    """A request, and how much of its continuations was told."""

    stream: Stream
    prompt: int
    output: RequestOutput
    told: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def news(self) -> list[Update]:
        """What came since the last call."""
        updates = []
        for each in self.output.outputs:
            text, tokens = self.told.get(each.index, (0, 0))
            if each.index in self.ended or (len(each.token_ids) == tokens and not each.finished):
                continue
            self.told[each.index] = len(each.text), len(each.token_ids)
            if each.finished:
                self.ended.add(each.index)
            updates.append(
                Update(
                    self.prompt,
                    each.index,
                    each.text[text:],
                    each.token_ids[tokens:],
                    (each.logprobs or [])[tokens:],
                    each.finish_reason,
                    each.stop_reason,
                    self.output.fault,
                )
            )
        return updates


def _as_exception(error: BaseException) -> RuntimeError:
    """Return an exception for a panic of a library, which a coroutine cannot raise."""
    failed = RuntimeError("the request could not be submitted")
    failed.__cause__ = error
    return failed


def _answer(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.done():  # whoever waited for it has left
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
