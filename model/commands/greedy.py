"""Greedy generation step by step, for commands that look at each step."""

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
    """Yield the output of each step of a greedy generation, until an end token, `max_tokens`, or a full context.

    Args:
        before_step: called with the index of each step before it is computed.
    """
    ids = list(prompt_ids)
    for index in range(max_tokens):
        before_step(index)
        (step,) = model.decode([ids[-1]], [len(ids) - 1]) if index else model.prefill([ids])
        ids.append(step.likeliest)
        yield step
        if ids[-1] in config.eos_token_ids or len(ids) >= config.context:
            return
