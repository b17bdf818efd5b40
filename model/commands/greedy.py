"""Greedy generation step by step, for `nkw bundle` and `nkw peer`, which look at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from model.config import ModelConfig
from model.runners.contiguous import KernelModel
from model.sampling import StepOutput


def generate_greedily(
    model: KernelModel,
    config: ModelConfig,
    prompt_ids: Sequence[int],
    max_tokens: int,
    before_step: Callable[[int], None] = lambda index: None,
) -> Iterator[StepOutput]:
    """Yield the output of each step of a greedy generation, the first of which computes the prompt.

    The generation ends after an end token, after `max_tokens` steps, or when the context is full.

    Args:
        model: The model, whose cache this generation fills.
        config: The model's config.
        prompt_ids: Token ids of the prompt.
        max_tokens: Most new tokens.
        before_step: Called with the index of each step, from 0, before it is computed.
    """
    ids = list(prompt_ids)
    for index in range(max_tokens):
        before_step(index)
        (step,) = model.decode([ids[-1]], [len(ids) - 1]) if index else model.prefill([ids])
        ids.append(step.likeliest)
        yield step
        if ids[-1] in config.eos_token_ids or len(ids) >= config.context:
            return
