"""Variants of a prediction: the same requests on deployments that each differ from the base in one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from model.errors import ModelError
from model.plan.service_level import ServiceLevel
from model.plan.sizes import ModelSizes
from model.traffic.deployment import Deployment, Setup
from model.traffic.report import Summary, summarize
from model.traffic.workload import Workload

HALF_THE_BUCKETS = "half the buckets"
"""Name of the variant whose steps round up to every second size."""


@dataclass(frozen=True)
class Variant:
    """Run of the same workload on another deployment.

    Without a `summary` there is no such deployment, for the reason in `refusal`.
    """

    name: str
    summary: Summary | None = None
    refusal: str = ""


def predict_variants(
    model: ModelSizes,
    base: Deployment,
    workload: Workload,
    level: ServiceLevel,
    prompts_share: float,
    report_progress: Callable[[str], None],
) -> Iterator[Variant]:
    """Yield a variant for each change of the base deployment, with the summary of its run.

    A variant that the model or the instance does not allow has a refusal instead.

    Args:
        model: The model.
        base: Deployment without a change.
        workload: Requests of every run.
        level: Service level that requests should keep.
        prompts_share: Share of the steps' time that prompts take on `base`; in the variant with separate prefill, this
        share of the replicas computes prompts only.
        report_progress: Called with the name of each variant before its run.
    """
    for name, setup in _list_changes(base, prompts_share).items():
        report_progress(name)
        try:
            deployment = Deployment(model, setup, base)
            records = deployment.serve(workload)
        except ModelError as error:
            yield Variant(name, refusal=error.message)
        else:
            yield Variant(name, summarize(records, level, deployment.pages, setup.prefill_replicas))


def _list_changes(base: Deployment, prompts_share: float) -> dict[str, Setup]:
    """Return the setups of the variants, by the names that reports print."""
    setup, options, replicas = base.setup, base.setup.options, base.replicas
    changes = {"static batching": replace(setup, options=replace(options, continuous=False))}
    if not base.clock.takes_speech:  # a window's prompt is never cut, and windows share no prefix
        changes["whole prompts"] = setup.with_whole_prompts()
        changes["no prefix cache"] = replace(setup, options=replace(options, prefix_caching=False))
    changes[HALF_THE_BUCKETS] = replace(setup, few_buckets=True)
    if setup.speculation is not None:
        changes["no drafts"] = setup.without_drafts()
    if setup.prefill_replicas:
        changes["prompts anywhere"] = replace(setup, prefill_replicas=0)
    elif replicas > 1:
        prefill_replicas = min(replicas - 1, max(1, round(prompts_share * replicas)))
        changes[f"{prefill_replicas} of {replicas} prefill"] = replace(
            setup, prefill_replicas=prefill_replicas
        )
    for tp in (base.tp // 2, base.tp * 2):
        copies = replicas * base.tp // max(1, tp)  # on the same cores
        if tp and copies:
            changes[f"tp {tp}, replicas {copies}"] = replace(
                setup, tp=tp, replicas=copies, prefill_replicas=setup.prefill_replicas * copies // replicas
            )
    return changes
