"""The engine: requests in, text out, step by step.

Each step asks the scheduler what to compute, has the model compute it, chooses a token for every request whose last
token was computed, and says what became of each. It has no thread and no clock of its own: whoever calls `step` has.

A fault of one request ends that request alone. Host work is caught for its request; where the model's step raises,
`Isolation` finds the request at fault. The engine itself fails where no request is to blame.
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
from model.engine.sampler import Choice, TokenSampler, choose, logprobs, require_logits
from model.engine.scheduler import Batch, Chunk
from model.engine.speculation import Acceptance, Proposer, Rows, Steps
from model.engine.stop_strings import StopStrings
from model.errors import ModelError
from model.loading.tokenizer import Tokenizer
from model.sampling import RowSampling, StepOutput
from model.state import root_key

_MASK_SECONDS = 0.01
"""How long a step waits for new masks; most take less than a millisecond."""
_IDLE_SECONDS = 0.05
"""How long a step waits where all requests wait for masks, before commands of clients are heard again."""


@dataclass(frozen=True)
class EngineLimits:
    """The model's end tokens, its vocabulary, the longest sequence, and the seed of requests that have none.

    `check_inputs` is the check of the model's runner for what a prompt brings beside its tokens.
    """

    end_tokens: Sequence[int]
    vocab_size: int
    max_model_len: int
    seed: int = 0
    check_inputs: InputCheck = refuse_inputs


class Observer(Protocol):
    """Something that is told every choice of a token, such as a comparison with another model."""

    def chosen(
        self, request: Request, tokens: Sequence[int], row: RowSampling, output: StepOutput, token: int
    ) -> None:
        """A request chose `token` behind its `tokens`, from the output of a step, with the parameters of `row`.

        It is told before the constraints of the request accept the token, so that the row can be drawn again.
        """


class Engine:
    """Requests on one model; `clock` gives seconds. The `observer` is told every token that is chosen.

    Where a step raises, the engine isolates the request at fault if it `isolates`, and fails otherwise: it cannot where
    other processes compute ranks of the model. `failure` is what made the engine fail, or None.
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
        """What the model's steps launched."""
        return self._model.use

    @property
    def busy(self) -> bool:
        """Whether a request has not ended, and the engine has not failed."""
        return bool(self._groups) and self.failure is None

    @property
    def waiting(self) -> int:
        """Number of requests that hold no pages."""
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
        """Let a request wait for its turn; its output fills up from step to step.

        It shares pages with requests of the same `cache_salt` only. `inputs` are encoded with its
        prompt. `grammar` is the compiled form of `params`; without it the form is compiled here.

        Raises ModelError for an empty salt, an id in use, inputs that the model does not take, a
        prompt without tokens or without room for a new one, token ids outside the vocabulary, a form that cannot be,
        and a request that never fits into the pages; EngineFailed after the engine has failed.
        """
        self._check_alive()
        limits = self.limits
        if id in self._groups:
            raise ModelError(f"request {id} is there already")
        room = limits.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise ModelError("the prompt has no tokens")
        if room < 1:
            raise ModelError(
                f"the prompt has {len(prompt_ids)} tokens; sequences of at most {limits.max_model_len} leave no room "
                "for a new one"
            )
        check_vocabulary("the prompt", prompt_ids, limits.vocab_size)
        limits.check_inputs(inputs)
        if cache_salt == "":
            raise ModelError("cache_salt is empty; leave it out to share pages with all requests without one")
        params.check_vocabulary(limits.vocab_size)
        number, now = next(self._numbers), self._clock()
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        root = b"" if cache_salt is None else root_key(cache_salt)
        request = Request(id, list(prompt_ids), most, priority, now, root, inputs=inputs)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(id, prompt, list(prompt_ids), outputs, RequestMetrics(now))
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
            # Logits follow from what is computed, not from shared pages.
            request.root = number.to_bytes(8, "big")
        seed = (limits.seed, number) if params.seed is None else (params.seed,)
        if params.structured_outputs is not None and grammar is None:
            grammar = self.grammars.compile(params.structured_outputs)
        group = PromptGroup(output, params, seed, inputs=inputs, grammar=grammar)
        sequence = self._sequence(group, 0)
        self.scheduler.submit(request)
        self._groups[id], self._sequences[request] = group, sequence
        self._isolation.hold_back(request)
        return output

    def cancel(self, id: str) -> None:
        """End a request; its pages are free from here on. One that has ended is left alone."""
        group = self._groups.get(id)
        if group is not None:
            self._end_all(group, "abort", None)
            self._settle(group)

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Returns:
            The outputs of the requests that got a token in it, or that ended with an error.

        Raises:
            EngineFailed: no request is to blame for a fault; all have ended.
        """
        self._check_alive()
        try:
            return self._step()
        except EngineFailed:
            raise
        except Exception as error:
            raise self.fail(error) from error

    def fail(self, error: BaseException) -> EngineFailed:
        """End all requests and refuse further ones; returns the exception that says so."""
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
        self._score(batch)
        rows = self._rows(batch)
        try:
            answers = self._model.step(batch, self._alone(batch, rows))
        except Exception as error:
            return self._isolate(batch, error)
        self._keep_scores(batch, answers)
        choices = self._choose(batch, rows, answers)
        groups = dict.fromkeys(
            group
            for request, chunk in batch.chunks.items()
            if (group := self._sequences[request].group).failure is not None
            or (chunk.samples and request in answers)
        )
        now = self._clock()
        self.scheduler.complete_step(
            batch, {request: [choice.token for choice in own] for request, own in choices.items()}
        )
        self._isolation.note_success(batch)
        self._end_failed(groups)
        for request, own in choices.items():
            if request not in self._sequences:
                continue
            group = self._sequences[request].group
            try:
                if not group.forked:
                    self._fork(request, group, answers[request][-1])
                for choice in own:
                    if request in self._sequences:
                        self._take(request, choice, now, choice is own[-1])
            except BaseException as error:
                group.blame(error)
        self._end_failed(groups)
        for group in groups:
            self._settle(group)
        return [group.output for group in groups]

    def _wait_for_masks(self) -> None:
        """Wait a moment for the masks of the next tokens, and leave requests without theirs out of the next step."""
        clock, masks = self.grammars.clock, self.grammars.masks
        now = clock()
        pending = [request for request, own in self._sequences.items() if not own.is_ready(now)]

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
        """Preempt all requests after a failed step; the one at fault, if it was alone, ends with the error.

        Where every request failed, a request of the engine tells whether the model computes anything.
        """
        if isinstance(error, MemoryError) or not self._isolates:
            raise self.fail(error) from error
        group = self._isolation.divide(batch)
        if group is None:
            return []
        assert isinstance(group, PromptGroup)
        group.failure, group.output.fault = f"a step of the request failed: {describe_fault(error)}", error
        self._end_failed([group])
        self._settle(group)
        if not self._isolation.is_active and not self._isolation.succeeded:
            self._probe()
        return [group.output]

    def _probe(self) -> None:
        """Compute one token of no client, while all requests are withdrawn. Raises what the model raises."""
        request = Request("probe", [0], 1, root=b"probe")
        self.scheduler.submit(request)
        try:
            self._model.step(self.scheduler.schedule())
        finally:
            self.scheduler.end(request)

    def _end_failed(self, groups: Iterable[PromptGroup]) -> None:
        """End the requests that have failed."""
        for group in groups:
            if group.failure is not None:
                self._end_all(group, "error", group.failure)

    def _rows(self, batch: Batch) -> Rows:
        """The draws of the requests that choose; where one has no token to choose from, its group fails."""
        rows = {}
        for request, chunk in batch.chunks.items():
            if chunk.samples:
                sequence = self._sequences[request]
                try:
                    rows[request] = sequence.sampler.rows(chunk.drafts)
                except BaseException as error:
                    sequence.group.blame(error)
        return rows

    def _score(self, batch: Batch) -> None:
        """Ask for the logits of the chunks of prompts whose log-probabilities are wanted and not known."""
        for request, chunk in batch.chunks.items():
            output = self._sequences[request].group.output
            known = output.prompt_logprobs
            if known is not None and len(known) < min(chunk.seq_len + 1, request.prompt_tokens):
                batch.chunks[request] = replace(chunk, scores=True)

    def _keep_scores(self, batch: Batch, answers: Mapping[Request, Sequence[StepOutput]]) -> None:
        """The log-probabilities of the tokens of prompts that a step has scored."""
        for request, chunk in batch.chunks.items():
            group = self._sequences[request].group
            known, count = group.output.prompt_logprobs, group.params.prompt_logprobs
            if not chunk.scores or known is None or count is None:
                continue
            try:
                for answer in answers[request][len(known) - 1 - chunk.num_computed_tokens :]:
                    if len(known) < request.prompt_tokens and np.isfinite(answer.largest):
                        token = request.tokens[len(known)]
                        known.append(
                            logprobs(require_logits(answer.logits), token, count, self._tokenizer.decode)
                        )
            except BaseException as error:
                group.blame(error)

    def _alone(self, batch: Batch, rows: Rows) -> Rows:
        """The rows that the model may draw: several continuations choose their first tokens from the same logits."""
        return {
            request: own
            for request, own in rows.items()
            if not batch.chunks[request].scores
            and ((group := self._sequences[request].group).forked or group.params.n == 1)
        }

    def _choose(
        self,
        batch: Batch,
        rows: Rows,
        answers: Mapping[Request, Sequence[StepOutput]],
    ) -> dict[Request, list[Choice]]:
        """The tokens that follow each chunk: its drafts up to the first wrong one, and one more token."""
        flat: list[tuple[RowSampling, StepOutput]] = []
        for request, own in rows.items():
            chunk = batch.chunks[request]
            flat += zip(own, answers[request][-1:] if chunk.scores else answers[request])
        found = iter(choose(flat, self._tokenizer.decode))
        choices = {}
        for request, own in rows.items():
            drawn = [next(found) for _ in own]
            try:
                choices[request] = self._taken(batch.chunks[request], drawn, own, answers[request])
            except BaseException as error:
                self._sequences[request].group.blame(error)
        return choices

    def _taken(
        self,
        chunk: Chunk,
        drawn: Sequence[Choice | BaseException],
        rows: Sequence[RowSampling],
        outputs: Sequence[StepOutput],
    ) -> list[Choice]:
        """The choices that follow one another; raises the error of one that they need."""
        request, chosen = chunk.request, list[Choice]()
        sampler = self._sequences[request].sampler
        outputs = outputs[-len(rows) :] if chunk.scores else outputs
        for choice, draft, row, output in zip(drawn, (*chunk.drafts, None), rows, outputs):
            if isinstance(choice, BaseException):
                raise choice
            if self._observer is not None:
                tokens = [*request.tokens, *(earlier.token for earlier in chosen)]
                self._observer.chosen(request, tokens, row, output, choice.token)
            chosen.append(choice)
            sampler.take(choice.token)
            if choice.token != draft:
                break
        if chunk.drafts:
            self.acceptance.add(len(chunk.drafts), len(chosen) - 1)
        return chosen

    def _sequence(self, group: PromptGroup, index: int) -> Continuation:
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
                rule if group.grammar is None else self.grammars.constraint(group.grammar),
            ),
            self._tokenizer.stream(prompt),
            StopStrings(params.stops),
        )

    def _fork(self, request: Request, group: PromptGroup, answer: StepOutput) -> None:
        """The other continuations of a prompt, each with its own first token."""
        group.forked = True
        for index in range(1, group.params.n):
            sequence = self._sequence(group, index)
            child = self.scheduler.fork(request, f"{request.id} {index}")
            self._sequences[child] = sequence
            (row,) = sequence.sampler.rows()
            (choice,) = choose([(row, answer)], self._tokenizer.decode)
            if isinstance(choice, BaseException):
                raise choice
            if self._observer is not None:
                self._observer.chosen(child, child.tokens[:-1], row, answer, choice.token)
            sequence.sampler.take(choice.token)
            child.tokens[-1] = choice.token
            self._take(child, choice, self._clock(), last=True)

    def _take(self, request: Request, choice: Choice, now: float, last: bool) -> None:
        """A continuation gets a token, and may end with it; the `last` one of a step may complete its form."""
        sequence, limits = self._sequences[request], self.limits
        output, params = sequence.output, sequence.group.params
        metrics = sequence.group.output.metrics
        metrics.first_token_time = metrics.first_token_time or now
        metrics.last_token_time = now
        output.token_ids.append(choice.token)
        if choice.logprobs is not None:
            own = choice.logprobs[choice.token].logprob
            output.logprobs = output.logprobs or []
            output.logprobs.append(choice.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + own
        if choice.token in limits.end_tokens and not params.ignore_eos:
            self._end(request, "stop", None)
        elif choice.token in (params.stop_token_ids or ()):
            self._end(request, "stop", choice.token)
        else:
            text = sequence.stream.push(choice.token)
            early = len(output.token_ids) < params.min_tokens
            output.text += text if early else sequence.stops.push(text)
            if sequence.stops.found is not None:
                if params.include_stop_str_in_output:
                    output.text += sequence.stops.found
                self._end(request, "stop", sequence.stops.found)
            elif last and sequence.sampler.complete:
                self._end(request, "stop", None)
            elif len(output.token_ids) == request.max_new_tokens:
                self._end(request, "length", None)

    def _end(self, request: Request, reason: FinishReason, stopped_by: str | int | None) -> None:
        sequence = self._sequences.pop(request)
        self.scheduler.end(request)
        output = sequence.output
        try:
            if sequence.stops.found is None:
                output.text += sequence.stops.push(sequence.stream.finish()) + sequence.stops.finish()
        except BaseException as error:
            sequence.group.blame(error)
            reason, stopped_by = "error", sequence.group.failure
        output.finish_reason, output.stop_reason = reason, stopped_by
        sequence.group.output.metrics.num_preemptions += request.preemptions

    def _end_all(self, group: PromptGroup, reason: FinishReason, stopped_by: str | None) -> None:
        """End all continuations of a prompt; some may have no token yet."""
        for request, sequence in list(self._sequences.items()):
            if sequence.group is group:
                self._end(request, reason, stopped_by)
        for output in group.output.outputs:
            if not output.finished:
                output.finish_reason, output.stop_reason = reason, stopped_by

    def _settle(self, group: PromptGroup) -> None:
        """Forget a request all of whose continuations have ended."""
        if group.output.finished:
            group.output.metrics.finished_time = self._clock()
            del self._groups[group.output.request_id]
