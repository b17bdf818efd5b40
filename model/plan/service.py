"""Latency and throughput that a user of a plan's serving stack sees, and the terms of that stack's record.

The latency is the time of the device plus the engine's time on the host. The reports of `nkw plan` (`text`, `document`)
call this module.
"""

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
    """Latency and throughput that a user sees at the batch of a plan.

    `first_token` is the time until a batch of prompts, computed together, has its first tokens. `step` is the time of a
    decode step, which adds one token to every sequence. `tokens_per_s` counts the generated tokens per second of one
    copy of the model; the time of prompts is included.

    `ratios` maps each name in `METRICS` to the published over predicted values of the stack's published runs. It maps
    to None if no run used chips of this generation.
    """

    first_token: Served
    step: Served
    tokens_per_s: float
    ratios: dict[str, Ratios | None]


def describe_service(plan: Plan) -> Service | None:
    """Return the latency and throughput that a user of the plan's serving stack sees.

    Returns None if the plan is for an accelerator, which has no engine time, or if its batch does not fit.
    """
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
    """Yield (name, value, origin) for each term of a stack's record, in the order of reports; name and value are words.

    Leaves out scales and shares whose value is None: there, the stack takes the times of this project's kernels
    unchanged.
    """
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
