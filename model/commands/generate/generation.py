"""Generation of texts by the engine with a static batch: all prompts start together, and none is added later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from model.config import ModelConfig
from model.engine import CompletionOutput, RequestOutput, SamplingParams
from model.engine.faults import EngineFailed
from model.engine.inputs import ModelInputs
from model.engine.sampler import Logprob
from model.errors import ModelError
from model.loading.tokenizer import Tokenizer
from model.runners.comparison import Compared, Comparison, Difference
from model.runners.reference import ReferenceModel
from model.runners.static_batch import Backend, StaticBatch, create_static_engine


class StopReason(Enum):
    """Reason for the end of a generation."""

    end_token = "end token"
    stop_string = "stop string"
    complete = "complete"
    length = "length"
    context = "context"

    @property
    def finish_reason(self) -> str:
        """Reason in OpenAI's and vLLM's words: "length" for a limit of tokens or a full context, else "stop"."""
        return "length" if self in (StopReason.length, StopReason.context) else "stop"


@dataclass(frozen=True)
class Generation:
    """Continuation of a prompt, with the result of its comparison with the reference.

    `text` has no end token, no stop string and nothing after a stop string. `tokens_compared` is 0, and `differences`
    is empty, if nothing was compared. `logprobs` has the log-probabilities of each new token by token id, or is None.
    """

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    text: str
    stopped_by: StopReason
    tokens_compared: int = 0
    differences: tuple[Difference, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None

    @property
    def tokens_equal(self) -> int:
        """Number of compared tokens that the backend and the reference chose alike."""
        return self.tokens_compared - len(self.differences)

    @property
    def last_position(self) -> int:
        """Position of the token that the last decode step computes; a single new token counts as two."""
        return len(self.prompt_ids) + max(1, len(self.generated_ids) - 1) - 1


def generate(
    backend: Backend,
    tokenizer: Tokenizer,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    reference: ReferenceModel | None = None,
    emit: Callable[[int, str], None] = lambda number, text: None,
    prompts_done: Callable[[], None] = lambda: None,
    inputs: ModelInputs | None = None,
) -> list[Generation]:
    """Return `params.n` continuations of each prompt, all computed in one batch.

    Args:
        backend: The backend, with a sequence for each continuation.
        tokenizer: The model's tokenizer.
        config: The model.
        prompts: Token ids of the prompts.
        params: Sampling parameters; `max_tokens` is set.
        reference: The model in plain numpy, with which every choice is compared; None for no comparison.
        emit: Called with the number of a continuation and each piece of its text, once its characters are complete and
        no stop string can begin in it.
        prompts_done: Called when the backend has processed the prompts.
        inputs: Arrays that are encoded before each prompt.

    Raises:
        ModelError: A prompt or a parameter is invalid. Errors of backend and reference are raised too.
    """
    assert params.max_tokens is not None
    comparison = None if reference is None else Comparison(reference, tokenizer.decode)
    lengths = [len(prompt) for prompt in prompts]
    model = StaticBatch(backend, params.n, prompts_done)
    engine = create_static_engine(model, tokenizer, config, lengths, params.max_tokens, params.n, comparison)
    requests = [
        engine.submit(str(number), prompt, params, inputs=inputs) for number, prompt in enumerate(prompts)
    ]
    continuations = [(request, completion) for request in requests for completion in request.outputs]
    emitted = [0] * len(continuations)
    try:
        while engine.busy:
            engine.step()
            for number, (_, completion) in enumerate(continuations):
                if len(completion.text) > emitted[number]:
                    emit(number, completion.text[emitted[number] :])
                    emitted[number] = len(completion.text)
    except EngineFailed as failure:
        raise (failure.__cause__ or failure) from None
    compared = {} if comparison is None else comparison.compared
    return [
        _finish_generation(request, completion, params, config, compared)
        for request, completion in continuations
    ]


def _finish_generation(
    request: RequestOutput,
    completion: CompletionOutput,
    params: SamplingParams,
    config: ModelConfig,
    compared: dict[str, Compared],
) -> Generation:
    """Return a finished continuation with its comparison.

    Args:
        request: The request of the continuation.
        completion: The continuation as the engine returns it.
        params: Sampling parameters.
        config: The model.
        compared: Comparisons by the engine's id of a continuation.

    Raises:
        ModelError: The continuation could not be computed.
    """
    if completion.finish_reason == "error":
        raise ModelError(str(completion.stop_reason)) from request.fault
    id = f"{request.request_id} {completion.index}" if completion.index else request.request_id
    checks = compared.get(id, Compared())
    return Generation(
        tuple(request.prompt_token_ids),
        tuple(completion.token_ids),
        completion.text,
        _find_stop_reason(completion, params, config),
        checks.tokens,
        tuple(checks.differences),
        None if completion.logprobs is None else tuple(completion.logprobs),
    )


def _find_stop_reason(
    completion: CompletionOutput, params: SamplingParams, config: ModelConfig
) -> StopReason:
    """Return why a finished continuation ended."""
    if completion.finish_reason == "length":
        is_full = len(completion.token_ids) == params.max_tokens
        return StopReason.length if is_full else StopReason.context
    if completion.stop_reason is not None:
        return StopReason.stop_string
    is_end = completion.token_ids[-1] in config.eos_token_ids
    return StopReason.end_token if is_end else StopReason.complete
