"""The scheduler, which decides for each step which requests compute which tokens in which pages and slots.

Decisions depend on requests, pages, slots and sampled tokens only, not on a clock or a device. So a server, a
prediction of traffic and a test make the same decisions.

Requests are ordered by priority, then by arrival. A step has a token budget. It is spent on requests that decode, then
on running prompts in chunks, then on draft tokens, then on waiting prompts. If pages or slots run out, the last running
request is preempted: it releases its pages, waits, and computes its tokens again later. The first request can take
every page and slot, and computes a token in every step in which any request decodes. So it always ends, and no request
waits for pages of a later request of its own priority.
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
    """Limits of a step, and options that switch features off.

    Attributes:
        max_num_seqs: The largest number of running requests.
        max_num_batched_tokens: The token budget of a step.
        chunked_prefill: Whether prompts are divided into chunks. Otherwise a step computes whole prompts and decodes
            nothing, and after `max_num_seqs` such steps in a row the running requests decode.
        prefix_caching: Whether requests share pages of equal prefixes.
        continuous: Whether requests start while others run. Otherwise all running requests advance together (static
            batching).
        speculative_tokens: The largest number of draft tokens of a request in a step, if budget and pages suffice.
        prompts_at_once: The largest number of requests that start in a step, or 0 for no limit.
        whole_pages: Whether each chunk but the last one of a request's tokens ends with a page, so that chunks of
            several tokens begin with one.

    Raises:
        ModelError: `max_num_seqs` is below 1, or above `max_num_batched_tokens`.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    prefix_caching: bool = True
    continuous: bool = True
    speculative_tokens: int = 0
    prompts_at_once: int = 0
    whole_pages: bool = False

    def for_windows(self, max_model_len: int) -> SchedulerOptions:
        """Return the options for a model that encodes a window of speech with each prompt.

        One whole prompt starts in a step, because encoding its window takes most of the step's time. Pages are not
        shared, because the prompts of different recordings are equal.
        """
        return replace(
            self,
            max_num_batched_tokens=max(self.max_num_batched_tokens, max_model_len),
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
                "that decode in a step: raise it or lower max_num_seqs"
            )


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of a request that one step computes: `num_scheduled_tokens` after `num_computed_tokens`.

    A chunk is never changed. The class is not frozen, because that takes 0.7 us more for each of a step's requests.

    Attributes:
        samples: Whether the chunk ends with the request's last token, so that the step samples the next one.
        draft_slots: Number of further positions that have pages, for draft tokens.
        drafts: Draft tokens after the request's tokens; the step verifies the draft tokens inside the chunk.
        scores: Whether the logits after each token of the chunk are needed.
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
        """Number of the request's tokens, draft tokens included, that are computed after the step."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids of the chunk, draft tokens included."""
        start, end, known = self.num_computed_tokens, self.seq_len, len(self.request.tokens)
        tokens = self.request.tokens[start:end]
        return tokens if end <= known else [*tokens, *self.drafts[max(0, start - known) : end - known]]

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens in the chunk; the step also samples a token after each of them."""
        return min(len(self.drafts), self.num_scheduled_tokens - 1)

    def with_drafts(self, drafts: Sequence[int]) -> Chunk:
        """Return the chunk extended by draft tokens to verify, at most `draft_slots`."""
        assert len(drafts) <= self.draft_slots, f"{len(drafts)} drafts for {self.draft_slots} slots"
        count = self.num_scheduled_tokens + len(drafts)
        return replace(self, num_scheduled_tokens=count, drafts=tuple(drafts))


@dataclass
class Batch:
    """Chunks that one step computes, by request, and the copies of pages and slots that the step makes before.

    `preempted` has the requests that released their pages. With several data-parallel groups `group_batches` has the
    batch of each group, with the copies of its pages.
    """

    chunks: dict[Request, Chunk] = field(default_factory=dict)
    copies: PageCopies = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    group_batches: Sequence[Batch] = ()

    def split_groups(self, count: int) -> list[Batch]:
        """Return one batch for each of `count` data-parallel groups, with the current chunks of its requests."""
        if count == 1:
            return [self]
        batches = [Batch(copies=batch.copies) for batch in self.group_batches]
        batches = batches or [Batch() for _ in range(count)]
        for request, chunk in self.chunks.items():
            batches[request.group].chunks[request] = chunk
        return batches

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(chunk.num_scheduled_tokens for chunk in self.chunks.values())


_order = attrgetter("priority", "arrival", "number")


class Scheduler:
    """Scheduler of one model: its waiting and running requests, in order, and its KV cache.

    Running requests have pages or a slot; waiting requests have none.
    """

    def __init__(
        self,
        pools: PagePool | Sequence[PagePool],
        options: SchedulerOptions | None = None,
        slots: SlotPool | None = None,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            pools: The page pool of each cache group: layers without a window, and layers of each window.
            options: The limits of a step.
            slots: The slots of states, if layers are recurrent or attend to encoded speech.
        """
        self.options = options or SchedulerOptions()
        cache_groups = [pools] if isinstance(pools, PagePool) else pools
        self.cache = KVCache(cache_groups, self.options.prefix_caching, slots)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._numbers = count()
        self._prompt_steps = 0  # in a row, in which nothing decoded

    def submit(self, request: Request) -> None:
        """Add a request to the waiting ones.

        Raises:
            ModelError: The request has no token, or never fits into the pages of a cache group, or, without chunked
                prefill, into one step.
        """
        self._check(request, self.options.max_num_batched_tokens)
        request.number = next(self._numbers)
        self.resume(request)

    def end(self, request: Request) -> None:
        """Remove a finished or cancelled request and release its pages; does nothing for a request that has ended."""
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def resume(self, request: Request) -> None:
        """Let a request that `end` has removed wait again, in its former position in the order."""
        insort(self.waiting, request, key=_order)

    def fork(self, request: Request, id: str) -> Request:
        """Return a new request that shares the computed tokens and pages of a request.

        A shared last page is copied when one of both requests writes to it. If no more requests may run, or if
        `request` waits, the new request waits and computes its tokens again.
        """
        child = Request(
            id, request.tokens[:], request.max_new_tokens, request.priority, request.arrival, request.root
        )
        child.prompt_tokens, child.inputs = request.prompt_tokens, request.inputs
        child.number = next(self._numbers)
        if request not in self.running or len(self.running) >= self.options.max_num_seqs:
            self.resume(child)
        else:
            self.cache.fork(request, child)
            insort(self.running, child, key=_order)
        return child

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Remove all contents from the prefix cache between two steps.

        Args:
            reset_running_requests: Whether running requests are preempted.

        Returns:
            Whether the cache was reset; it is not while requests run.
        """
        while reset_running_requests and self.running:
            self._preempt(self.running[-1], Batch())
        if self.running:
            return False
        self.cache.forget()
        return True

    def adopt(self, request: Request) -> bool:
        """Run a request whose tokens were computed elsewhere and whose keys and values are transferred to its pages.

        The request computes nothing until `complete_transfer` is called.

        Returns:
            Whether the request runs. It does not if pages are too few, if requests wait, or in static batches.

        Raises:
            ModelError: The request has no token, or never fits into the pages or a step.
        """
        self._check(request, len(request.tokens))
        if self.waiting or self._is_full:
            return False
        cached = self.cache.count_cached_blocks(request, has_state=True)
        if not self.cache.start(request, cached, len(request.tokens), None):
            return False
        request.computed, request.number = len(request.tokens), next(self._numbers)
        insort(self.running, request, key=_order)
        return True

    def complete_transfer(self, request: Request, token: int) -> None:
        """Record that the keys and values of an adopted request are in its pages, and append its next token."""
        if not request.missing:  # a request that was preempted meanwhile computes its tokens again
            self.cache.mark_computed(request, request.computed)
        request.tokens.append(token)

    def schedule(self) -> Batch:
        """Return the batch of the next step, and give its requests pages and slots.

        Starts waiting requests, and preempts running ones if pages or slots run out.

        Returns:
            The batch, with at least one token. It is empty if there are no requests, or if every request waits for the
            mask of its next token.
        """
        batch = Batch()
        if not self.options.chunked_prefill:
            waited = bool(self.running) and self._prompt_steps >= self.options.max_num_seqs
            if not waited and self._admit(batch, self.options.max_num_batched_tokens):
                self._prompt_steps += 1
                return batch
            self._prompt_steps = 0
        running = [request for request in self.running if not request.waits_for_mask or request.missing > 1]
        if not self.options.continuous and len(running) < len(self.running):
            return batch  # a static batch advances together
        decoding = [request for request in running if request.missing == 1]
        budget = self._continue(batch, decoding, self.options.max_num_batched_tokens)
        budget = self._continue(
            batch, [request for request in running if request not in batch.chunks], budget
        )
        budget = self._reserve_draft_slots(batch, decoding, budget)
        if self.options.chunked_prefill and not batch.preempted:
            self._admit(batch, budget)
        return batch

    def discard_unused_slots(self, batch: Batch) -> None:
        """Cancel copies of recurrent states that were made for draft tokens, for requests that got no draft tokens."""
        for request, chunk in batch.chunks.items():
            if chunk.draft_slots and not chunk.drafts:
                self.cache.discard_kept_state(request, batch.copies)

    def complete_step(self, batch: Batch, sampled_tokens: Mapping[Request, Sequence[int]]) -> None:
        """Record a finished step: append sampled tokens, and mark the chunks as computed.

        If draft tokens were rejected, recurrent layers return to the state before the draft tokens and compute the
        accepted ones again.

        Args:
            batch: The batch of the step.
            sampled_tokens: The tokens of the requests that sample; all but the last are accepted draft tokens.
        """
        for request, chunk in batch.chunks.items():
            if request.is_running:  # a request that was cancelled meanwhile is not
                tokens = sampled_tokens.get(request, ())
                rejected = len(chunk.drafts) - max(0, len(tokens) - 1) if chunk.drafts else 0
                request.tokens.extend(tokens)
                rolled_back = self.cache.settle_state(request, back=rejected > 0) and rejected > 0
                computed = 0 if rolled_back else chunk.num_scheduled_tokens - rejected
                self.cache.mark_computed(request, chunk.num_computed_tokens + computed)

    def count_steady_steps(self, batch: Batch) -> int:
        """Return how many steps in a row, this one included, have the same decisions if no request comes or ends.

        It is more than 1 only if every running request decodes, no waiting request can start, and enough pages are
        free.
        """
        decodes_all = len(batch.chunks) == len(self.running) > 0 and all(
            chunk.num_scheduled_tokens == 1 and chunk.samples for chunk in batch.chunks.values()
        )
        if not decodes_all or batch.preempted or (self.waiting and not self._is_full):
            return 1
        steps = min(
            request.prompt_tokens + request.max_new_tokens - len(request.tokens) for request in batch.chunks
        )
        distances = [
            self.cache.count_tokens_to_snapshot(request, request.computed) for request in batch.chunks
        ]
        steps = min([steps, *(distance for distance in distances if distance is not None)])
        while steps > 1 and not self.cache.has_room(
            (request, len(request.tokens) + steps - 1) for request in batch.chunks
        ):
            steps //= 2
        return steps

    def repeat(self, batch: Batch, steps: int, tokens: Sequence[int]) -> None:
        """Complete `steps` equal steps of a batch that only decodes: append tokens and fill pages.

        Pages are used and released in the same order as by single steps.

        Args:
            batch: The batch of each step.
            steps: Number of steps, at most `count_steady_steps`.
            tokens: The tokens of the steps, the same for all requests.
        """
        size, fills = self.cache.block_size, list[tuple[int, int, Request]]()
        for index, request in enumerate(batch.chunks):
            computed = request.computed
            reserved = self.cache.reserve(request, computed + steps, batch.copies)
            assert reserved, "the free pages do not suffice"
            request.tokens.extend(tokens[:steps])
            fills += [(step, index, request) for step in (*range(size - computed % size, steps, size), steps)]
        # Pages are released in the order of single steps, which determines the requests that get them next.
        first_computed = [request.computed for request in batch.chunks]
        for step, index, request in sorted(fills, key=itemgetter(0, 1)):
            self.cache.mark_computed(request, first_computed[index] + step)

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self.options.max_num_seqs or not self.options.continuous

    def _check(self, request: Request, max_chunk: int) -> None:
        """Check that a request can ever be computed.

        Args:
            request: The request.
            max_chunk: Most tokens of the request that a step computes.

        Raises:
            ModelError: The request has no token of a prompt or no new token, or never fits into the pages or a step.
        """
        positions = request.max_positions
        if not request.prompt_tokens or request.max_new_tokens < 1:
            raise ModelError(f"request {request.id} needs at least one token of a prompt and one new token")
        self.cache.check_room(request, max_chunk)
        if not self.options.chunked_prefill and positions > self.options.max_num_batched_tokens:
            raise ModelError(
                f"request {request.id} computes up to {positions} tokens at once without chunked prefill; a step takes "
                f"{self.options.max_num_batched_tokens}: raise max_num_batched_tokens or allow chunked prefill"
            )

    def _continue(self, batch: Batch, requests: Sequence[Request], budget: int) -> int:
        """Add chunks of running requests to the batch, in order, and return the remaining token budget.

        Preempts running requests, from the last one on, while pages or slots are too few.
        """
        for request in requests:
            tokens = self._limit_chunk(request, request.computed, min(request.missing, budget))
            if not tokens or not request.is_running:  # else it was preempted in this loop
                continue
            while not self.cache.reserve(request, request.computed + tokens, batch.copies):
                victim = self.running[-1]
                budget += self._preempt(victim, batch)
                if victim is request:
                    break
            else:
                batch.chunks[request] = Chunk(request, request.computed, tokens, tokens == request.missing)
                budget -= tokens
        return budget

    def _reserve_draft_slots(self, batch: Batch, decoding: Sequence[Request], budget: int) -> int:
        """Give decoding requests pages for draft tokens, in order, and return the remaining token budget.

        A request that has not sampled a token yet gets none, because other continuations of its prompt may follow.
        """
        for request in decoding if self.options.speculative_tokens else ():
            slots = min(self.options.speculative_tokens, budget, request.max_positions - len(request.tokens))
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
        """Start waiting requests in order while pages, sequences and budget suffice, and return how many started.

        A waiting request of higher priority preempts running ones.

        Args:
            batch: Receives the chunks.
            budget: Remaining token budget of the step.
        """
        options, admitted = self.options, 0
        if not options.continuous and self.running:
            return 0
        while self.waiting and budget and not 0 < options.prompts_at_once <= admitted:
            request = self.waiting[0]
            while len(self.running) >= options.max_num_seqs and self._outranks(request):
                budget += self._preempt(self.running[-1], batch)
            if len(self.running) >= options.max_num_seqs:
                break
            cached = self.cache.count_cached_blocks(request)
            first = cached * self.cache.block_size
            tokens = len(request.tokens) - first
            if tokens > budget and not options.chunked_prefill:
                break
            tokens = self._limit_chunk(request, first, min(tokens, budget))
            if not tokens:
                break
            while not (
                started := self.cache.start(request, cached, first + tokens, batch.copies)
            ) and self._outranks(request):
                budget += self._preempt(self.running[-1], batch)
            if not started:
                break
            self.waiting.remove(request)
            insort(self.running, request, key=_order)
            batch.chunks[request] = Chunk(request, request.computed, tokens, tokens == request.missing)
            budget -= tokens
            admitted += 1
        return admitted

    def _limit_chunk(self, request: Request, first: int, tokens: int) -> int:
        """Return how many tokens from position `first` on, at most `tokens`, form a chunk.

        With recurrent layers and prefix caching, a chunk ends at the next position at which the state is kept. With
        `whole_pages` it ends with a page, or has no token if the budget is less than a page.
        """
        if self.options.whole_pages and first + tokens < len(request.tokens):
            return max(0, (first + tokens) // self.cache.block_size * self.cache.block_size - first)
        if not self.options.chunked_prefill or tokens < 2:
            return tokens
        distance = self.cache.count_tokens_to_snapshot(request, first)
        return tokens if distance is None else min(tokens, distance)

    def _outranks(self, request: Request) -> bool:
        """Return whether a waiting request has a higher priority than the last running request."""
        return bool(self.running) and request.priority < self.running[-1].priority

    def _preempt(self, request: Request, batch: Batch) -> int:
        """Preempt a running request: remove its chunk, release its pages and let it wait in its former position.

        Returns the number of tokens of the removed chunk, 0 without one.
        """
        removed = batch.chunks.pop(request, None)
        self.running.remove(request)
        self.cache.release(request, batch.copies)
        request.preemptions += 1
        batch.preempted.append(request)
        self.resume(request)
        return 0 if removed is None else removed.num_scheduled_tokens
