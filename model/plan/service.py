"""What a user of a plan's serving stack sees: device and engine time, throughput, and published values over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.plan.origin import Origin
from model.plan.plan import Plan
from model.plan.stacks import METRICS, Fact, HostTime, Ratios, Served, Stack

_TERMS = {
    "step_engine": "engine, a step",
    "prompt_engine": "engine, prompts",
    "decode_scale": "device, a step",
    "prompt_scale": "device, prompts without attention",
    "attention_scale": "device, attention of prompts",
    "prompt_share": "share of the peaks that prompts reach",
    "prompt_padding": "padding of prompts",
    "cache_padding": "padding of caches",
    "sampling": "sampling",
    "experts": "experts",
}
"""The terms of a record in words, in the order of reports."""


@dataclass(frozen=True)
class Service:
    """The times that a user sees at the batch of a plan, and the throughput of a copy, prompts included.

    `ratios` are the lowest and highest published over predicted value by metric, and how many of these runs have sizes
    within a factor of `MOST_RATIO`; None without a published run on chips of this generation.
    """

    first_token: Served
    step: Served
    tokens_per_s: float
    ratios: dict[str, Ratios | None]


def describe_service(plan: Plan) -> Service | None:
    """Return what a user of the serving stack sees; None for an accelerator, or if the batch does not fit."""
    instance, batch, rate = plan.placement.instance, plan.request.batch, plan.rate
    if instance is None or rate.request_tokens_per_s is None:
        return None
    sizes = instance.target, plan.model.total / 1e9, batch, plan.prompt
    return Service(
        plan.first_tokens.served,
        rate.step.served,
        rate.request_tokens_per_s / plan.placement.mesh.copies,
        {metric: plan.stack.find_ratios(metric, *sizes) for metric in METRICS},
    )


def describe_terms(stack: Stack) -> Iterator[tuple[str, str, Origin]]:
    """Yield the name, the value in words and the origin of each term of a record that the stack has."""
    terms = dict(stack.list_terms())
    for name, words in _TERMS.items():
        term = terms[name]
        if isinstance(term, HostTime):
            yield words, f"{term.base_ms:g} ms + {term.slot_ms:g} ms a sequence", term.origin
        elif isinstance(term, Fact):
            yield words, term.text, term.origin
        elif term.value is not None:
            yield (
                words,
                f"{term.value:g}"
                if name == "prompt_share"
                else f"{term.value:g} x the kernels of this project",
                term.origin,
            )
