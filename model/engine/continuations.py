"""The unfinished continuations of prompts, with the engine's state of each."""

from __future__ import annotations

from dataclasses import dataclass

from model.engine.faults import contain, describe_fault
from model.engine.grammars import CompiledGrammar
from model.engine.inputs import ModelInputs
from model.engine.isolation import Suspect
from model.engine.outputs import CompletionOutput, RequestOutput
from model.engine.params import SamplingParams
from model.engine.sampler import TokenSampler
from model.engine.stop_strings import StopStrings
from model.errors import ModelError
from model.loading.tokenizer import TokenStream


@dataclass(eq=False)
class PromptGroup(Suspect):
    """The continuations of one prompt.

    `failure` is the message about the first fault of the prompt, or None. `forked` tells whether all continuations have
    started.
    """

    output: RequestOutput
    params: SamplingParams
    seed: tuple[int, ...]
    inputs: ModelInputs | None = None
    forked: bool = False
    failure: str | None = None
    grammar: CompiledGrammar | None = None

    def blame(self, error: BaseException) -> None:
        """Record the first exception of the request's host work; raise an exception of which no request is at fault."""
        contain(error)
        if self.failure is None and isinstance(error, ModelError):
            self.failure = error.message
        elif self.failure is None:
            self.failure, self.output.fault = f"the request failed: {describe_fault(error)}", error


@dataclass
class Continuation:
    """One unfinished continuation of a prompt."""

    group: PromptGroup
    output: CompletionOutput
    sampler: TokenSampler
    stream: TokenStream
    stops: StopStrings

    def is_ready(self, now: float) -> bool:
        """Return whether the next token can be sampled without waiting, or sampling raises."""
        try:
            return self.sampler.is_ready(now)
        except BaseException as error:
            self.group.blame(error)
            return True

    @property
    def suspect(self) -> PromptGroup:
        """The prompt of the continuation."""
        return self.group
