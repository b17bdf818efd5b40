"""The engine, which computes the texts of requests step by step.

A step schedules a batch, computes it with the model, samples a token for every request whose last token was computed,
and updates the outputs of these requests. The engine has no thread and no clock of its own: `LLM` or `AsyncEngine`
calls `step` and provides the clock.

A request continues one prompt with one or several continuations (generated texts). A fault of one request ends only
that request. Exceptions of work on the host are attributed to their request. If the model's step raises, `Isolation`
finds the request at fault. The engine fails if no request is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np

from model.engine.checks import check_vocabulary
from model.engine.continuations import Continuation, PromptGroup
from model.engine.faults import EngineFailed, describe_fault
from model.engine.grammars import CompiledGrammar, Grammars
from model.engine.groups import Schedulers
from model.engine.inputs import InputCheck, ModelInputs, TokenRule, refuse_inputs
from model.engine.isolation import Isolation
from model.engine.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from model.engine.padded_batch import BucketUse
from model.engine.params import SamplingParams
from model.engine.request import Request
from model.engine.sampler import Choice, TokenSampler, choose, compute_logprobs, require_logits
from model.engine.scheduler import Batch, Chunk
from model.engine.speculation import Acceptance, Proposer, Rows, Steps
from model.engine.stop_strings import StopStrings
from model.errors import ContextFull, ModelError
from model.loading.tokenizer import Tokenizer
from model.sampling import RowSampling, StepOutput
from model.state import compute_root_key

_MASK_SECONDS = 0.01
"""The longest wait of a step for new masks; most take less than a millisecond."""
_IDLE_SECONDS = 0.05
"""The longest wait of a step if all requests wait for masks; commands of clients run between steps."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the model that requests are checked against, and the default seed.

    | field | meaning |
    |---|---|
    | `end_tokens` | token ids that end a text unless `ignore_eos` is set |
    | `vocab_size` | number of tokens of the vocabulary |
    | `max_model_len` | most tokens of a sequence, prompt included |
    | `seed` | seed of requests without a seed |
    | `check_inputs` | raises ModelError for inputs of a prompt that the model's runner does not take |
    """

    end_tokens: Sequence[int]
    vocab_size: int
    max_model_len: int
    seed: int = 0
    check_inputs: InputCheck = refuse_inputs


class Observer(Protocol):
    """Observer of every sampled token, such as a comparison with another model."""

    def observe_choice(
        self, request: Request, tokens: Sequence[int], row: RowSampling, output: StepOutput, token: int
    ) -> None:
        """Observe a sampled token, before the sampler and the grammar of its request have advanced to it.

        Args:
            request: The request.
            tokens: The tokens before the sampled one.
            row: The sampling parameters; they give the same token again.
            output: The output of the step from which the token was sampled.
            token: The sampled token.
        """


class Engine:
    """Engine for the requests of one model.

    Attributes:
        scheduler: The scheduler of one or of several data-parallel groups.
        limits: The model's limits.
        grammars: The compiled grammars of structured outputs.
        acceptance: Counts of verified and accepted draft tokens.
        failure: The exception that made the engine fail, or None.
    """

    def __init__(
        self,
        model: Steps,
        scheduler: Schedulers,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        clock: Callable[[], float],
        proposer: Proposer | None = None,
        grammars: Grammars | None = None,
        isolates: bool = True,
        observer: Observer | None = None,
    ) -> None:
        """Create an engine without requests.

        Args:
            model: The model runner.
            scheduler: The scheduler of one or of several data-parallel groups.
            tokenizer: The model's tokenizer.
            limits: The model's limits.
            clock: Returns the time in seconds.
            proposer: Proposes draft tokens for speculative decoding.
            grammars: The compiled grammars; by default those of `tokenizer` with the default limits.
            isolates: Whether the engine isolates the request at fault if a step raises. Otherwise the engine fails,
                as it must if other processes compute ranks of the model.
            observer: Observes every sampled token.
        """
        self._observer = observer
        self.acceptance = Acceptance()
        self._proposer = proposer
        self.scheduler = scheduler
        self.limits = limits
        self._model = model
        self._tokenizer = tokenizer
        self._clock = clock
        self.grammars = grammars or Grammars.from_tokenizer(tokenizer, limits.vocab_size, limits.end_tokens)
        self._groups: dict[str, PromptGroup] = {}
        self._sequences: dict[Request, Continuation] = {}
        self._numbers = count()
        self._isolates = isolates
        self._isolation = Isolation(scheduler, self._sequences)
        self.failure: BaseException | None = None

    @property
    def use(self) -> BucketUse:
        """Counts of launched steps, tokens and padding, which the model runner updates."""
        return self._model.use

    @property
    def busy(self) -> bool:
        """Whether the engine has not failed and any request is unfinished."""
        return bool(self._groups) and self.failure is None

    @property
    def waiting(self) -> int:
        """Number of unfinished continuations without pages."""
        return max(0, len(self._sequences) - len(self.scheduler.running))

    def submit(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        inputs: ModelInputs | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> RequestOutput:
        """Add a request, which waits until `step` schedules it.

        Args:
            id: A name that no unfinished request has.
            prompt_ids: The token ids of the prompt.
            params: The sampling parameters.
            prompt: The text of the prompt, which the output repeats.
            priority: Lower numbers are scheduled first.
            cache_salt: Requests share pages only with requests of the same salt.
            inputs: What the model encodes with the prompt.
            grammar: The compiled structured outputs of `params`; by default they are compiled here.

        Returns:
            The output of the request, which `step` extends in place.

        Raises:
            ModelError: The salt is empty, the id is in use, the model does not take the inputs, the prompt has no
                tokens or leaves no room for a new token, a token id is outside the vocabulary, the structured outputs
                do not compile, or the request never fits into the pages.
            EngineFailed: The engine has failed.
        """
        self._check_alive()
        limits = self.limits
        if id in self._groups:
            raise ModelError(
                f"request {id} has not ended yet; an id is used by one request at a time: use another"
            )
        room = limits.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise ModelError("the prompt has no tokens; a request needs at least one: give a longer text")
        if room < 1:
            raise ContextFull(
                f"the prompt has {len(prompt_ids)} tokens; sequences of at most {limits.max_model_len} leave no room "
                "for a new one: shorten the prompt"
            )
        check_vocabulary("the prompt", prompt_ids, limits.vocab_size)
        limits.check_inputs(inputs)
        if cache_salt == "":
            raise ModelError("cache_salt is empty; leave it out to share pages with all requests without one")
        params.check_vocabulary(limits.vocab_size)
        number, now = next(self._numbers), self._clock()
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        root = b"" if cache_salt is None else compute_root_key(cache_salt)
        request = Request(id, list(prompt_ids), most, priority, now, root, inputs=inputs)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(id, prompt, list(prompt_ids), outputs, RequestMetrics(now))
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
            # Scoring needs the logits of all prompt tokens, so no page of the prompt is shared.
            request.root = number.to_bytes(8, "big")
        seed = (limits.seed, number) if params.seed is None else (params.seed,)
        if params.structured_outputs is not None and grammar is None:
            grammar = self.grammars.compile(params.structured_outputs)
        group = PromptGroup(output, params, seed, inputs=inputs, grammar=grammar)
        sequence = self._start_sequence(group, 0)
        self.scheduler.submit(request)
        self._groups[id], self._sequences[request] = group, sequence
        self._isolation.hold_back(request)
        return output

    def cancel(self, id: str) -> None:
        """End a request with finish reason "abort" and release its pages.

        Does nothing if no unfinished request has the id.
        """
        group = self._groups.get(id)
        if group is not None:
            self._end_all(group, "abort", None)
            self._forget_finished(group)

    def step(self) -> list[RequestOutput]:
        """Compute one step and update the outputs of its requests.

        Returns:
            The outputs of the requests that got a token in the step or ended with an error; empty if nothing is
            scheduled.

        Raises:
            EngineFailed: The engine had failed, or a fault that no request causes has now ended all requests.
        """
        self._check_alive()
        try:
            return self._step()
        except EngineFailed:
            raise
        except Exception as error:
            raise self.fail(error) from error

    def fail(self, error: BaseException) -> EngineFailed:
        """Record that the engine has failed, and end all requests with finish reason "abort".

        Returns the EngineFailed that later calls of the engine raise.
        """
        self.failure = error
        for id in list(self._groups):
            with suppress(MemoryError):  # the last piece of a text may find no memory
                self.cancel(id)
        return EngineFailed(error)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed(self.failure)

    def _step(self) -> list[RequestOutput]:
        self._isolation.advance()
        self._wait_for_masks()
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return []
        now = self._clock()
        for request in batch.chunks:
            metrics = self._sequences[request].group.output.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                metrics.num_cached_tokens = request.shared_tokens
        if self._proposer is not None:
            for request, drafts in self._proposer.propose(batch).items():
                batch.chunks[request] = batch.chunks[request].with_drafts(drafts)
            self.scheduler.discard_unused_slots(batch)
        self._request_scores(batch)
        rows = self._collect_sampling_rows(batch)
        try:
            outputs = self._model.step(batch, self._select_device_rows(batch, rows))
        except Exception as error:
            return self._isolate(batch, error)
        self._add_prompt_logprobs(batch, outputs)
        choices = self._choose(batch, rows, outputs)
        groups = dict.fromkeys(
            group
            for request, chunk in batch.chunks.items()
            if (group := self._sequences[request].group).failure is not None
            or (chunk.samples and request in outputs)
        )
        now = self._clock()
        self.scheduler.complete_step(
            batch, {request: [choice.token for choice in accepted] for request, accepted in choices.items()}
        )
        self._isolation.note_success(batch)
        self._end_failed(groups)
        for request, accepted in choices.items():
            if request not in self._sequences:
                continue
            group = self._sequences[request].group
            try:
                if not group.forked:
                    self._fork(request, group, outputs[request][-1])
                for choice in accepted:
                    if request in self._sequences:
                        self._append(request, choice, now, choice is accepted[-1])
            except BaseException as error:
                group.blame(error)
        self._end_failed(groups)
        for group in groups:
            self._forget_finished(group)
        return [group.output for group in groups]

    def _wait_for_masks(self) -> None:
        """Wait briefly for the grammar masks of next tokens, and exclude requests without a mask from the next step.

        Sets `waits_for_mask` of every request.
        """
        clock, masks = self.grammars.clock, self.grammars.masks
        now = clock()
        pending = [request for request, sequence in self._sequences.items() if not sequence.is_ready(now)]

        def are_ready(requests: Sequence[Request]) -> Iterator[bool]:
            return (self._sequences[request].is_ready(clock()) for request in requests)

        new = [request for request in pending if not request.waits_for_mask]
        if new:
            masks.wait_for(lambda: all(are_ready(new)), _MASK_SECONDS)
        if len(pending) == len(self._sequences) and pending:
            masks.wait_for(lambda: any(are_ready(pending)), _IDLE_SECONDS)
        for request in self._sequences:
            request.waits_for_mask = False
        for request, is_ready in zip(pending, are_ready(pending)):
            request.waits_for_mask = not is_ready

    def _isolate(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Preempt all requests after a failed step, and end the request at fault if it was alone in the step.

        If every request has failed, computes a probe, which shows whether the model computes anything.

        Returns:
            The output of the request that was ended; empty if the search for the request at fault continues.

        Raises:
            EngineFailed: Memory is short, or the engine does not isolate requests.
            Exception: The probe fails.
        """
        if isinstance(error, MemoryError) or not self._isolates:
            raise self.fail(error) from error
        group = self._isolation.divide(batch)
        if group is None:
            return []
        assert isinstance(group, PromptGroup)
        group.failure, group.output.fault = f"a step of the request failed: {describe_fault(error)}", error
        self._end_failed([group])
        self._forget_finished(group)
        if not self._isolation.is_active and not self._isolation.succeeded:
            self._probe()
        return [group.output]

    def _probe(self) -> None:
        """Compute one token of a request of the engine's own while all other requests are withdrawn.

        Raises:
            Exception: The model's step raises it.
        """
        request = Request("probe", [0], 1, root=b"probe")
        self.scheduler.submit(request)
        try:
            self._model.step(self.scheduler.schedule())
        finally:
            self.scheduler.end(request)

    def _end_failed(self, groups: Iterable[PromptGroup]) -> None:
        """End the requests among `groups` whose `failure` is set, with finish reason "error"."""
        for group in groups:
            if group.failure is not None:
                self._end_all(group, "error", group.failure)

    def _collect_sampling_rows(self, batch: Batch) -> Rows:
        """Return the sampling parameters of each request that samples a token in the batch.

        A request without any allowed token is left out, and its failure is recorded.
        """
        rows = {}
        for request, chunk in batch.chunks.items():
            if chunk.samples:
                sequence = self._sequences[request]
                try:
                    rows[request] = sequence.sampler.rows(chunk.drafts)
                except BaseException as error:
                    sequence.group.blame(error)
        return rows

    def _request_scores(self, batch: Batch) -> None:
        """Set `scores` on the chunks of prompts whose log-probabilities are requested and not computed yet."""
        for request, chunk in batch.chunks.items():
            known = self._sequences[request].group.output.prompt_logprobs
            if known is not None and len(known) < min(chunk.seq_len + 1, request.prompt_tokens):
                batch.chunks[request] = replace(chunk, scores=True)

    def _add_prompt_logprobs(self, batch: Batch, outputs: Mapping[Request, Sequence[StepOutput]]) -> None:
        """Append the log-probabilities of the prompt tokens that a step has scored to the outputs of their requests."""
        for request, chunk in batch.chunks.items():
            group = self._sequences[request].group
            known, count = group.output.prompt_logprobs, group.params.prompt_logprobs
            if not chunk.scores or known is None or count is None:
                continue
            try:
                for output in outputs[request][len(known) - 1 - chunk.num_computed_tokens :]:
                    if len(known) < request.prompt_tokens and np.isfinite(output.largest):
                        token = request.tokens[len(known)]
                        known.append(
                            compute_logprobs(
                                require_logits(output.logits), token, count, self._tokenizer.decode
                            )
                        )
            except BaseException as error:
                group.blame(error)

    def _select_device_rows(self, batch: Batch, rows: Rows) -> Rows:
        """Return those of `rows` that the device may sample.

        The host samples if the chunk's logits are needed anyway, or if several continuations draw their first tokens
        from the same logits.
        """
        return {
            request: request_rows
            for request, request_rows in rows.items()
            if not batch.chunks[request].scores
            and ((group := self._sequences[request].group).forked or group.params.n == 1)
        }

    def _choose(
        self,
        batch: Batch,
        rows: Rows,
        outputs: Mapping[Request, Sequence[StepOutput]],
    ) -> dict[Request, list[Choice]]:
        """Return the tokens of each request that a step adds: accepted draft tokens and one more token.

        A request whose sampling raises is left out, and its failure is recorded.

        Args:
            batch: The batch of the step.
            rows: The sampling parameters of each request.
            outputs: The model's outputs of each request.
        """
        draws: list[tuple[RowSampling, StepOutput]] = []
        for request, request_rows in rows.items():
            is_scored = batch.chunks[request].scores
            draws += zip(request_rows, outputs[request][-1:] if is_scored else outputs[request])
        choices = iter(choose(draws, self._tokenizer.decode))
        accepted = {}
        for request, request_rows in rows.items():
            candidates = [next(choices) for _ in request_rows]
            try:
                accepted[request] = self._accept(
                    batch.chunks[request], candidates, request_rows, outputs[request]
                )
            except BaseException as error:
                self._sequences[request].group.blame(error)
        return accepted

    def _accept(
        self,
        chunk: Chunk,
        candidates: Sequence[Choice | BaseException],
        rows: Sequence[RowSampling],
        outputs: Sequence[StepOutput],
    ) -> list[Choice]:
        """Return the choices of a chunk up to the first one that differs from its draft token, this one included.

        Advances the request's sampler, calls the observer, and counts accepted draft tokens.

        Args:
            chunk: The computed chunk.
            candidates: A choice, or the exception of sampling it, for each row of the chunk.
            rows: The sampling parameters of each row.
            outputs: The model's output of each row.

        Raises:
            BaseException: A candidate before the end of the returned choices is an exception; this exception is raised.
        """
        request, accepted = chunk.request, list[Choice]()
        sampler = self._sequences[request].sampler
        outputs = outputs[-len(rows) :] if chunk.scores else outputs
        for choice, draft, row, output in zip(candidates, (*chunk.drafts, None), rows, outputs):
            if isinstance(choice, BaseException):
                raise choice
            if self._observer is not None:
                tokens = [*request.tokens, *(earlier.token for earlier in accepted)]
                self._observer.observe_choice(request, tokens, row, output, choice.token)
            accepted.append(choice)
            sampler.take(choice.token)
            if choice.token != draft:
                break
        if chunk.drafts:
            self.acceptance.add(len(chunk.drafts), len(accepted) - 1)
        return accepted

    def _start_sequence(self, group: PromptGroup, index: int) -> Continuation:
        params, prompt = group.params, group.output.prompt_token_ids
        rule: TokenRule | None = None
        if group.inputs is not None and group.inputs.rule is not None:
            rule = group.inputs.rule()
        ends = [*(() if params.ignore_eos else self.limits.end_tokens), *(params.stop_token_ids or ())]
        return Continuation(
            group,
            group.output.outputs[index],
            TokenSampler(
                *(params, prompt, ends, (*group.seed, index), self.limits.vocab_size),
                rule if group.grammar is None else self.grammars.create_constraint(group.grammar),
            ),
            self._tokenizer.stream(prompt),
            StopStrings(params.stops),
        )

    def _fork(self, request: Request, group: PromptGroup, output: StepOutput) -> None:
        """Start the second and further continuations of a prompt, and append their first tokens.

        Each samples its first token from `output`, the model's output after the prompt.
        """
        group.forked = True
        for index in range(1, group.params.n):
            sequence = self._start_sequence(group, index)
            child = self.scheduler.fork(request, f"{request.id} {index}")
            self._sequences[child] = sequence
            (row,) = sequence.sampler.rows()
            (choice,) = choose([(row, output)], self._tokenizer.decode)
            if isinstance(choice, BaseException):
                raise choice
            if self._observer is not None:
                self._observer.observe_choice(child, child.tokens[:-1], row, output, choice.token)
            sequence.sampler.take(choice.token)
            child.tokens[-1] = choice.token
            self._append(child, choice, self._clock(), is_last=True)

    def _append(self, request: Request, choice: Choice, now: float, is_last: bool) -> None:
        """Append a token to the output of a continuation, and end the continuation if the token does.

        Args:
            request: The request of the continuation.
            choice: The token with its log-probabilities.
            now: Time of the engine's clock in seconds.
            is_last: Whether it is the last token of the step; only then structured outputs can be complete.
        """
        sequence, limits = self._sequences[request], self.limits
        output, params = sequence.output, sequence.group.params
        metrics = sequence.group.output.metrics
        metrics.first_token_time = metrics.first_token_time or now
        metrics.last_token_time = now
        output.token_ids.append(choice.token)
        if choice.logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs.append(choice.logprobs)
            logprob = choice.logprobs[choice.token].logprob
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprob
        if choice.token in limits.end_tokens and not params.ignore_eos:
            self._end(request, "stop", None)
        elif choice.token in (params.stop_token_ids or ()):
            self._end(request, "stop", choice.token)
        else:
            text = sequence.stream.push(choice.token)
            is_early = len(output.token_ids) < params.min_tokens
            output.text += text if is_early else sequence.stops.push(text)
            if sequence.stops.matched is not None:
                if params.include_stop_str_in_output:
                    output.text += sequence.stops.matched
                self._end(request, "stop", sequence.stops.matched)
            elif is_last and sequence.sampler.complete:
                self._end(request, "stop", None)
            elif len(output.token_ids) == request.max_new_tokens:
                self._end(request, "length", None)

    def _end(self, request: Request, reason: FinishReason, stopped_by: str | int | None) -> None:
        """End a continuation: release its pages, append the text that was kept back, and set its finish reason.

        Args:
            request: The request of the continuation.
            reason: The finish reason; "error" replaces it if completing the text raises.
            stopped_by: The stop string, the stop token or the error message.
        """
        sequence = self._sequences.pop(request)
        self.scheduler.end(request)
        output = sequence.output
        try:
            if sequence.stops.matched is None:
                output.text += sequence.stops.push(sequence.stream.finish()) + sequence.stops.finish()
        except BaseException as error:
            sequence.group.blame(error)
            reason, stopped_by = "error", sequence.group.failure
        output.finish_reason, output.stop_reason = reason, stopped_by
        sequence.group.output.metrics.num_preemptions += request.preemptions

    def _end_all(self, group: PromptGroup, reason: FinishReason, stopped_by: str | None) -> None:
        """End all unfinished continuations of a prompt, including those that have not started."""
        for request, sequence in list(self._sequences.items()):
            if sequence.group is group:
                self._end(request, reason, stopped_by)
        for output in group.output.outputs:
            if not output.finished:
                output.finish_reason, output.stop_reason = reason, stopped_by

    def _forget_finished(self, group: PromptGroup) -> None:
        """Remove a prompt from the engine, and set its finish time, if all of its continuations have ended."""
        if group.output.finished:
            group.output.metrics.finished_time = self._clock()
            del self._groups[group.output.request_id]
