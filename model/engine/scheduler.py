"""The scheduler: which requests compute which tokens in the next step, and in which pages and slots.

It is a function of what it was given: requests, pages, slots, and the tokens chosen so far. It knows neither a clock
nor a device, so a server, a prediction of traffic and a test make the same decisions.

Requests go by priority, then by arrival. A step has a budget of tokens. Requests that need one token (decoding) take
theirs first; then come prompts that have begun, in chunks, then drafts, then new prompts. Where pages or slots run out,
the last request in order gives back its own and waits; it computes its tokens again later (preemption by
recomputation). The first request in order can take every page and slot, and computes a token in every step in which
anything decodes; so it always ends, and no request waits for pages of one behind it of its own priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter, itemgetter

from model.engine.kv_cache import KVCache, PageCopies
from model.engine.request import Request
from model.errors import ModelError
from model.state import PagePool, SlotPool


@dataclass(frozen=True)
class SchedulerOptions:
    """The limits of a step, and what may be left out to compare.

    A request that decodes may verify up to `speculative_tokens` drafts, as far as budget and pages last.

    Without `chunked_prefill` a prompt is computed in one step, in which nothing decodes; after `max_num_seqs` of these
    in a row what runs decodes. Without `continuous` batching requests start only when no other is running,
    and all that run advance together (static batching). At most `prompts_at_once` start in a step, where that is not 0.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    prefix_caching: bool = True
    continuous: bool = True
    speculative_tokens: int = 0
    prompts_at_once: int = 0

    def of_windows(self, longest: int) -> SchedulerOptions:
        """For a model that encodes a window with each prompt, in sequences of at most `longest` tokens.

        One prompt starts in a step, whole: its window is encoded in the same step, which takes most of its time. No
        page is shared, as prompts are alike whatever is said.
        """
        tokens = max(self.max_num_batched_tokens, longest)
        return replace(
            self,
            max_num_batched_tokens=tokens,
            chunked_prefill=False,
            prefix_caching=False,
            prompts_at_once=1,
        )

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ModelError(f"max_num_seqs is {self.max_num_seqs}; at least 1 is needed")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ModelError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than the {self.max_num_seqs} sequences "
                "that decode in a step"
            )


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of a request that one step computes: `num_scheduled_tokens` after `num_computed_tokens`.

    A chunk that `samples` ends with the request's last token, so the step chooses the next one. There are pages for
    `draft_slots` more positions. `drafts` are tokens that may follow the request's: those in the chunk are verified in
    the step. A chunk that `scores` needs the logits after each of its tokens.

    A chunk is never changed. The class is not frozen, because that takes 0.7 us more for each of a step's requests.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    draft_slots: int = 0
    drafts: tuple[int, ...] = ()
    scores: bool = False

    @property
    def seq_len(self) -> int:
        """Tokens of the request that are computed after the step."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that are computed, drafts included."""
        start, end, known = self.num_computed_tokens, self.seq_len, len(self.request.tokens)
        tokens = self.request.tokens[start:end]
        return tokens if end <= known else [*tokens, *self.drafts[max(0, start - known) : end - known]]

    @property
    def num_draft_tokens(self) -> int:
        """Drafts after the chunk's first token; the step chooses a token after each of them, too."""
        return min(len(self.drafts), self.num_scheduled_tokens - 1)

    def with_drafts(self, drafts: Sequence[int]) -> Chunk:
        """Return the chunk with drafts to verify, no more than it has slots."""
        assert len(drafts) <= self.draft_slots, f"{len(drafts)} drafts for {self.draft_slots} slots"
        count = self.num_scheduled_tokens + len(drafts)
        return replace(self, num_scheduled_tokens=count, drafts=tuple(drafts))


@dataclass
class Batch:
    """What one step computes: a chunk of each of its requests, after pages were copied.

    `copies` are pages that get the contents of others. `preempted` requests gave back theirs. Where groups of ranks
    compute it, `of_groups` has the batch of each, with the copies of its own pages.
    """

    chunks: dict[Request, Chunk] = field(default_factory=dict)
    copies: PageCopies = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    group_batches: Sequence[Batch] = ()

    def split_groups(self, count: int) -> list[Batch]:
        """Return the batches of `count` data-parallel groups, with the current chunks of their requests."""
        if count == 1:
            return [self]
        batches = [Batch(copies=batch.copies) for batch in self.group_batches]
        batches = batches or [Batch() for _ in range(count)]
        for request, chunk in self.chunks.items():
            batches[request.group].chunks[request] = chunk
        return batches

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.num_scheduled_tokens for chunk in self.chunks.values())

    @property
    def only_decodes(self) -> bool:
        """Whether there are requests, and each computes one token and chooses the next."""
        return bool(self.chunks) and all(
            chunk.num_scheduled_tokens == 1 and chunk.samples for chunk in self.chunks.values()
        )


_order = attrgetter("priority", "arrival", "number")


class Scheduler:
    """Requests that wait and run, on one pool of pages, or one for each kind, and slots where layers are recurrent."""

    def __init__(
        self,
        pools: PagePool | Sequence[PagePool],
        options: SchedulerOptions | None = None,
        slots: SlotPool | None = None,
    ) -> None:
        self.options = options or SchedulerOptions()
        kinds = [pools] if isinstance(pools, PagePool) else pools
        self.cache = KVCache(kinds, self.options.prefix_caching, slots)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._numbers = count()
        self._prompt_steps = 0  # in a row, in which nothing decoded

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without pages, in order."""
        return self._waiting

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold pages, in order."""
        return self._running

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises ModelError for one that has no token, or that would never fit: in all pages of a kind, or, where prompts
        are not cut into chunks, in one step.
        """
        self._check(request, self.options.max_num_batched_tokens)
        request.number = next(self._numbers)
        insort(self._waiting, request, key=_order)

    def end(self, request: Request) -> None:
        """A request is done or cancelled: its pages are free from here on. One that has ended already is left alone."""
        if request in self._running:
            self._running.remove(request)
            self.cache.give_back(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def resume(self, request: Request) -> None:
        """Let a request that `end` has taken out wait again, in its old position in the order."""
        insort(self._waiting, request, key=_order)

    def fork(self, request: Request, id: str) -> Request:
        """A second request that has computed the same tokens in the same pages.

        The two share also the last page until one of them writes to it. Where no more requests may run, or the first
        one waits, the second one waits and computes its tokens again.
        """
        child = Request(
            id, request.tokens[:], request.max_new_tokens, request.priority, request.arrival, request.root
        )
        child.prompt_tokens, child.inputs = request.prompt_tokens, request.inputs
        child.number = next(self._numbers)
        if request not in self._running or len(self._running) >= self.options.max_num_seqs:
            insort(self._waiting, child, key=_order)
            return child
        self.cache.fork(request, child)
        insort(self._running, child, key=_order)
        return child

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget what pages hold, between two steps; says whether that was done.

        While requests hold pages it is not done, unless they are preempted by `reset_running_requests`.
        """
        while reset_running_requests and self._running:
            self._preempt(self._running[-1], Batch())
        if self._running:
            return False
        self.cache.forget()
        return True

    def adopt(self, request: Request) -> bool:
        """Run a request whose tokens were computed elsewhere and come to the pages that it takes here.

        It computes nothing until they have `arrived`. False, and nothing is taken, where it has to wait for pages or
        for other requests; static batches take none. Raises ModelError like `submit`.
        """
        self._check(request, len(request.tokens))
        if self._waiting or self._is_full:
            return False
        known = self.cache.known_blocks(request, comes=True)
        if not self.cache.start(request, known, len(request.tokens), None):
            return False
        request.computed, request.number = len(request.tokens), next(self._numbers)
        insort(self._running, request, key=_order)
        return True

    def arrived(self, request: Request, token: int) -> None:
        """The keys and values of an adopted request are in its pages, and `token` follows its own."""
        if not request.missing:  # one that was preempted meanwhile computes its tokens again
            self.cache.computed(request, request.computed)
        request.tokens.append(token)

    def schedule(self) -> Batch:
        """The next step. It computes at least one token if any request is there, and is empty if none is.

        It is empty as well where every request waits for the mask of its next token.
        """
        batch = Batch()
        if not self.options.chunked_prefill:
            waited = bool(self._running) and self._prompt_steps >= self.options.max_num_seqs
            if not waited and self._admit(batch, self.options.max_num_batched_tokens):
                self._prompt_steps += 1
                return batch
            self._prompt_steps = 0
        running = [each for each in self._running if not each.waits_for_mask or each.missing > 1]
        if not self.options.continuous and len(running) < len(self._running):
            return batch  # a static batch advances together
        decoding = [each for each in running if each.missing == 1]
        left = self._continue(batch, decoding, self.options.max_num_batched_tokens)
        left = self._continue(batch, [each for each in running if each not in batch.chunks], left)
        left = self._make_room_for_drafts(batch, decoding, left)
        if self.options.chunked_prefill and not batch.preempted:
            self._admit(batch, left)
        return batch

    def drafted(self, batch: Batch) -> None:
        """The chunks of a batch have their drafts: the states of those without any are not copied."""
        for request, chunk in batch.chunks.items():
            if chunk.draft_slots and not chunk.drafts:
                self.cache.no_drafts(request, batch.copies)

    def finish(self, batch: Batch, chosen: Mapping[Request, Sequence[int]]) -> None:
        """A step is done: its tokens are computed, and `chosen` follow those requests whose last token it was.

        All but the last of several chosen tokens are accepted drafts. Where a draft was rejected, recurrent layers
        return to the state before the drafts and compute the accepted ones again.
        """
        for request, chunk in batch.chunks.items():
            if request.is_running:  # one that was cancelled meanwhile is not
                tokens = chosen.get(request, ())
                wrong = len(chunk.drafts) - max(0, len(tokens) - 1) if chunk.drafts else 0
                request.tokens.extend(tokens)
                again = self.cache.settle_state(request, back=wrong > 0) and wrong > 0
                self.cache.computed(
                    request, chunk.num_computed_tokens + (0 if again else chunk.num_scheduled_tokens - wrong)
                )

    def steady_steps(self, batch: Batch) -> int:
        """How many steps in a row, this one included, decide alike while no request comes or is cancelled.

        More than one only where every running request decodes, no waiting one can start, and the free pages suffice.
        """
        everyone = batch.only_decodes and len(batch.chunks) == len(self._running)
        if not everyone or batch.preempted or (self._waiting and not self._is_full):
            return 1
        steps = min(each.prompt_tokens + each.max_new_tokens - len(each.tokens) for each in batch.chunks)
        snapshots = map(self.cache.steps_to_snapshot, batch.chunks)
        steps = min([steps, *(each for each in snapshots if each is not None)])
        while steps > 1 and not self.cache.suffices(
            (each, len(each.tokens) + steps - 1) for each in batch.chunks
        ):
            steps //= 2
        return steps

    def repeat(self, batch: Batch, steps: int, tokens: Sequence[int]) -> None:
        """Finish a batch that decodes `steps` times in a row, no more than `steady_steps`; each adds `tokens`."""
        size, fills = self.cache.block_size, list[tuple[int, int, Request]]()
        for number, request in enumerate(batch.chunks):
            done = request.computed
            reserved = self.cache.reserve(request, done + steps, batch.copies)
            assert reserved, "the free pages do not suffice"
            request.tokens.extend(tokens[:steps])
            fills += [(at, number, request) for at in range(size - done % size, steps, size)]
            fills.append((steps, number, request))
        # Pages are given back in the order of single steps, which decides who gets them next.
        computed = [request.computed for request in batch.chunks]
        for step, number, request in sorted(fills, key=itemgetter(0, 1)):
            self.cache.computed(request, computed[number] + step)

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self.options.max_num_seqs or not self.options.continuous

    def _check(self, request: Request, together: int) -> None:
        """ModelError for a request that has no token, or that never fits where a step computes so many tokens."""
        positions = request.most_positions
        if not request.prompt_tokens or request.max_new_tokens < 1:
            raise ModelError(f"request {request.id} needs at least one token of a prompt and one new token")
        refusal = self.cache.refusal(request, together)
        if refusal is not None:
            raise ModelError(refusal)
        if not self.options.chunked_prefill and positions > self.options.max_num_batched_tokens:
            raise ModelError(
                f"request {request.id} computes up to {positions} tokens at once without chunked prefill; a step takes "
                f"{self.options.max_num_batched_tokens}"
            )

    def _continue(self, batch: Batch, requests: Sequence[Request], budget: int) -> int:
        """Give running requests their tokens, in order, and preempt from the last one on; returns what is left."""
        for request in requests:
            wanted = self._chunk(request, request.computed, min(request.missing, budget))
            if not wanted or not request.is_running:  # else it was preempted in this loop
                continue
            while not self.cache.reserve(request, request.computed + wanted, batch.copies):
                victim = self._running[-1]
                budget += self._preempt(victim, batch)
                if victim is request:
                    break
            else:
                self._add(batch, request, wanted)
                budget -= wanted
        return budget

    def _make_room_for_drafts(self, batch: Batch, decoding: Sequence[Request], budget: int) -> int:
        """Give what decodes pages for drafts, in order; returns what is left of the budget.

        The last token of a prompt gets none: other continuations may follow the same one.
        """
        for request in decoding if self.options.speculative_tokens else ():
            slots = min(self.options.speculative_tokens, budget, request.most_positions - len(request.tokens))
            fits = slots > 0 and request in batch.chunks and len(request.tokens) > request.prompt_tokens
            if (
                fits
                and self.cache.reserve(request, len(request.tokens) + slots, batch.copies)
                and self.cache.keep_state(request, batch.copies)
            ):
                batch.chunks[request] = replace(batch.chunks[request], draft_slots=slots)
                budget -= slots
        return budget

    def _admit(self, batch: Batch, budget: int) -> int:
        """Start waiting requests in order while pages, sequences and budget last; returns how many."""
        options, admitted = self.options, 0
        if not options.continuous and self._running:
            return 0
        while self._waiting and budget and not 0 < options.prompts_at_once <= admitted:
            request = self._waiting[0]
            while len(self._running) >= options.max_num_seqs and self._outranks(request):
                budget += self._preempt(self._running[-1], batch)
            if len(self._running) >= options.max_num_seqs:
                break
            known = self.cache.known_blocks(request)
            first = known * self.cache.block_size
            wanted = len(request.tokens) - first
            if wanted > budget:
                if not options.chunked_prefill:
                    break
                wanted = budget
            wanted = self._chunk(request, first, wanted)
            while not (
                started := self.cache.start(request, known, first + wanted, batch.copies)
            ) and self._outranks(request):
                budget += self._preempt(self._running[-1], batch)
            if not started:
                break
            self._waiting.remove(request)
            insort(self._running, request, key=_order)
            self._add(batch, request, wanted)
            budget -= wanted
            admitted += 1
        return admitted

    def _chunk(self, request: Request, first: int, wanted: int) -> int:
        """How many of the wanted tokens from the first one on are a chunk: at a snapshot another one begins."""
        if not self.options.chunked_prefill or wanted < 2:
            return wanted
        return self.cache.chunk_end(request, first, first + wanted) - first

    def _outranks(self, request: Request) -> bool:
        """Whether the last running request has to give way to one that waits."""
        return bool(self._running) and request.priority < self._running[-1].priority

    def _add(self, batch: Batch, request: Request, wanted: int) -> None:
        batch.chunks[request] = Chunk(request, request.computed, wanted, wanted == request.missing)

    def _preempt(self, request: Request, batch: Batch) -> int:
        """A running request waits again, in its place in the order; returns the tokens that its step is spared."""
        spared = batch.chunks.pop(request, None)
        self._running.remove(request)
        self.cache.give_back(request, batch.copies)
        request.preemptions += 1
        batch.preempted.append(request)
        insort(self._waiting, request, key=_order)
        return 0 if spared is None else spared.num_scheduled_tokens
