"""State that the engine keeps for each unfinished prompt and for each of its continuations.

A continuation is one generated text for a prompt; a prompt has `SamplingParams.n` of them.
"""

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
    """Continuations of one prompt, with what they share.

    `failure` is the message about the first fault of the prompt, or None. `forked` tells whether all continuations have
    started; until the prompt is computed, only the first one has.
    """

    output: RequestOutput
    params: SamplingParams
    seed: tuple[int, ...]
    inputs: ModelInputs | None = None
    forked: bool = False
    failure: str | None = None
    grammar: CompiledGrammar | None = None

    def blame(self, error: BaseException) -> None:
        """Record an exception that work on the host for this prompt raised; the first one becomes `failure`.

        Raises:
            BaseException: The exception itself, if no request is at fault, because memory is short or the process ends.
        """
        contain(error)
        if self.failure is None and isinstance(error, ModelError):
            self.failure = error.message
        elif self.failure is None:
            self.failure, self.output.fault = f"the request failed: {describe_fault(error)}", error


@dataclass
class Continuation:
    """One unfinished continuation of a prompt: its output, sampler, detokenizer and search for stop strings."""

    group: PromptGroup
    output: CompletionOutput
    sampler: TokenSampler
    stream: TokenStream
    stops: StopStrings

    def is_ready(self, now: float) -> bool:
        """Return whether the next token can be sampled without waiting for its grammar mask.

        Also True if the check raises; the exception becomes the failure of the prompt.
        """
        try:
            return self.sampler.is_ready(now)
        except BaseException as error:
            self.group.blame(error)
            return True

    @property
    def suspect(self) -> PromptGroup:
        """Prompt of the continuation, which `Isolation` may find at fault."""
        return self.group
